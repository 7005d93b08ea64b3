// SPDX-License-Identifier: GPL-2.0
/*
 * dma-buf memory regions for rdma_rxe, for tests in a virtual machine. Built into the
 * distribution's rdma_rxe by ./build.
 *
 * rxe copies through the kernel's mapping of pages, so only buffers made of ordinary memory
 * (udmabuf, the system heap) can work: the pages are taken from the exporter's scatter list. That
 * list is meant for a device's DMA, and a real driver must not read pages from it. This code is for
 * tests only.
 *
 * Writing a device's name to the module's parameter revoke_dma_bufs revokes all dma-bufs that the
 * device has imported, in the place of their exporters: udmabuf and the system heap revoke none.
 */

#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/moduleparam.h>
#include <linux/version.h>

#include "rxe.h"
#include "rxe_loc.h"

#define ACCESS_ALLOWED \
	(IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_WRITE | \
	 IB_ACCESS_REMOTE_ATOMIC | IB_ACCESS_RELAXED_ORDERING)

void rxe_dmabuf_setup(struct ib_device *device);
bool rxe_window_holds(struct rxe_mw *mw, u64 va, u64 length);

/*
 * Returns true if an access through a window lies in the window. The distribution's rxe checks the
 * window's region only.
 */
bool rxe_window_holds(struct rxe_mw *mw, u64 va, u64 length)
{
	u64 first = (mw->access & IB_ZERO_BASED) ? 0 : mw->addr;

	return va >= first && length <= mw->length && va - first <= mw->length - length;
}

#ifdef INVALIDATE_MAPPINGS
#define revoke_op invalidate_mappings
#define revoke_dma_buf dma_buf_invalidate_mappings
#else
#define revoke_op move_notify
#define revoke_dma_buf dma_buf_move_notify
#endif

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS("DMA_BUF");
#else
MODULE_IMPORT_NS(DMA_BUF);
#endif

/* The exporter's notification: the keys of the region fail from now on. */
static void revoked(struct dma_buf_attachment *attachment)
{
	struct ib_umem_dmabuf *buffer = attachment->importer_priv;
	struct rxe_mr *mr = buffer->private;

	mr->state = RXE_MR_STATE_INVALID;
}

static const struct dma_buf_attach_ops revocable_ops = {
	.allow_peer2peer = true,
	.revoke_op = revoked,
};

static int revoke_all(const char *value, const struct kernel_param *parameter)
{
	char name[IB_DEVICE_NAME_MAX];
	struct ib_device *device;
	struct rxe_pool_elem *element;
	unsigned long index;

	strscpy(name, value, sizeof(name));
	device = ib_device_get_by_name(strim(name), RDMA_DRIVER_RXE);
	if (!device)
		return -ENODEV;
	xa_for_each(&to_rdev(device)->mr_pool.xa, index, element) {
		struct rxe_mr *mr = rxe_pool_get_index(&to_rdev(device)->mr_pool, index);

		if (!mr)
			continue;
		if (mr->umem && mr->umem->is_dmabuf) {
			struct dma_buf *exported = to_ib_umem_dmabuf(mr->umem)->attach->dmabuf;

			dma_resv_lock(exported->resv, NULL);
			revoke_dma_buf(exported);
			dma_resv_unlock(exported->resv);
		}
		rxe_put(mr);
	}
	ib_device_put(device);
	return 0;
}

static const struct kernel_param_ops revoke_ops = { .set = revoke_all };
module_param_cb(revoke_dma_bufs, &revoke_ops, NULL, 0200);

static int fill_pages(struct rxe_mr *mr, struct ib_umem_dmabuf *buffer)
{
	struct sg_table *table = &buffer->umem.sgt_append.sgt;
	size_t capacity = ib_umem_num_pages(&buffer->umem);
	/* The first entry's DMA address and length are trimmed to the range, but its page is not. */
	size_t skip = buffer->first_sg_offset;
	struct scatterlist *entry;
	int index;

	mr->page_info = kcalloc(capacity, sizeof(*mr->page_info), GFP_KERNEL);
	if (!mr->page_info)
		return -ENOMEM;
	mr->num_buf = capacity;
	mr->max_allowed_buf = capacity;

	for_each_sgtable_dma_sg(table, entry, index) {
		/* An entry may begin inside a huge page, so the pages are counted from the entry's own page. */
		size_t at = entry->offset + skip;
		size_t end = at + sg_dma_len(entry);

		/* If an IOMMU joined entries, the DMA lengths would not match the pages. */
		if (!sg_page(entry) || !PAGE_ALIGNED(at) || !PAGE_ALIGNED(end) || end > entry->offset + entry->length)
			return -EOPNOTSUPP;
		for (; at < end; at += PAGE_SIZE) {
			if (mr->nbuf == capacity)
				return -ERANGE;
			mr->page_info[mr->nbuf++].page = pfn_to_page(page_to_pfn(sg_page(entry)) + PHYS_PFN(at));
		}
		skip = 0;
	}
	return mr->nbuf == capacity ? 0 : -ERANGE;
}

static int pin(struct rxe_dev *rxe, struct rxe_mr *mr, u64 offset, u64 length, u64 iova, int fd, int access)
{
	struct ib_umem_dmabuf *buffer;

	/* rxe has no DMA device of its own, so the verbs device is used instead. */
	buffer = ib_umem_dmabuf_get_pinned_with_dma_device(&rxe->ib_dev, &rxe->ib_dev.dev, offset, length, fd, access);
	if (IS_ERR(buffer))
		return PTR_ERR(buffer);
	/* Released with the region. */
	mr->umem = &buffer->umem;
	/* The kernel's own interface for revocable imports needs a DMA device. */
	dma_resv_lock(buffer->attach->dmabuf->resv, NULL);
	buffer->private = mr;
	buffer->attach->importer_ops = &revocable_ops;
	dma_resv_unlock(buffer->attach->dmabuf->resv);
	/* The page list begins at this address. */
	mr->umem->iova = iova;
	return fill_pages(mr, buffer);
}

static struct ib_mr *reg_user_mr_dmabuf(struct ib_pd *pd, u64 offset, u64 length, u64 iova, int fd, int access,
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 17, 0)
					struct ib_dmah *dmah,
#endif
					struct uverbs_attr_bundle *attrs)
{
	struct rxe_dev *rxe = to_rdev(pd->device);
	struct rxe_mr *mr;
	int err;

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 17, 0)
	if (dmah)
		return ERR_PTR(-EOPNOTSUPP);
#endif
	if ((access & ~ACCESS_ALLOWED) || !length || offset_in_page(offset) != offset_in_page(iova))
		return ERR_PTR(-EINVAL);

	mr = kzalloc(sizeof(*mr), GFP_KERNEL);
	if (!mr)
		return ERR_PTR(-ENOMEM);
	err = rxe_add_to_pool(&rxe->mr_pool, mr);
	if (err) {
		kfree(mr);
		return ERR_PTR(err);
	}

	/* From here on the pool's cleanup releases the domain, the pin and the page list. */
	rxe_get(to_rpd(pd));
	mr->ibmr.pd = pd;
	mr->ibmr.device = pd->device;
	rxe_mr_init(access, mr);
	mr->ibmr.type = IB_MR_TYPE_USER;
	err = pin(rxe, mr, offset, length, iova, fd, access);
	if (err) {
		rxe_cleanup(mr);
		kfree(mr);
		return ERR_PTR(err);
	}
	mr->ibmr.iova = iova;
	mr->ibmr.length = length;
	mr->state = RXE_MR_STATE_VALID;
	rxe_finalize(mr);
	return &mr->ibmr;
}

static const struct ib_device_ops dmabuf_ops = {
	.reg_user_mr_dmabuf = reg_user_mr_dmabuf,
};

/* Called once for each device, before it is registered. */
void rxe_dmabuf_setup(struct ib_device *device)
{
	ib_set_device_ops(device, &dmabuf_ops);
	WARN_ON(dma_coerce_mask_and_coherent(&device->dev, DMA_BIT_MASK(64)));
}
