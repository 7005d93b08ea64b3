// SPDX-License-Identifier: GPL-2.0
/*
 * libibverbs calls its driver to register a dma-buf, and the driver for rxe refuses without calling
 * the kernel. This library, preloaded into a program (LD_PRELOAD), makes ibv_reg_dmabuf_mr call the
 * kernel.
 *
 * Programs look the function up in libibverbs by name, past any preloaded function of that name, so
 * its first instruction is replaced by a jump to the function in this library.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

/* The beginnings of libibverbs' structures (infiniband/verbs.h, driver.h). */
struct context { void *device; char operations[32 * 8]; int cmd_fd; };
struct domain { struct context *context; uint32_t handle; };
struct region {
	struct context *context; struct domain *domain; void *addr; size_t length; uint32_t handle, lkey, rkey;
	int type; /* of struct verbs_mr, where 3 is a dma-buf's */
	int access;
	uint64_t spare[8];
};

static struct region *reg_dmabuf_mr(struct domain *domain, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	struct region *region = calloc(1, sizeof(*region));
	if (!region)
		return NULL;

	struct { struct ib_uverbs_ioctl_hdr header; struct ib_uverbs_attr attribute[9]; } call = {
		.header = { .length = sizeof(call), .object_id = UVERBS_OBJECT_MR, .method_id = UVERBS_METHOD_REG_DMABUF_MR,
			    .num_attrs = 9, .driver_id = RDMA_DRIVER_RXE },
		.attribute = {
			{ UVERBS_ATTR_REG_DMABUF_MR_HANDLE },
			{ UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE, .data = domain->handle },
			{ UVERBS_ATTR_REG_DMABUF_MR_OFFSET, 8, .data = offset },
			{ UVERBS_ATTR_REG_DMABUF_MR_LENGTH, 8, .data = length },
			{ UVERBS_ATTR_REG_DMABUF_MR_IOVA, 8, .data = iova },
			{ UVERBS_ATTR_REG_DMABUF_MR_FD, 4, .data = (uint32_t)fd },
			{ UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS, 4, .data = (uint32_t)access },
			{ UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, 4, .data = (uintptr_t)&region->lkey },
			{ UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, 4, .data = (uintptr_t)&region->rkey },
		},
	};

	for (int index = 0; index < 9; index++)
		call.attribute[index].flags = UVERBS_ATTR_F_MANDATORY;
	if (ioctl(domain->context->cmd_fd, RDMA_VERBS_IOCTL, &call)) {
		int error = errno;
		free(region);
		errno = error;
		return NULL;
	}
	region->context = domain->context;
	region->domain = domain;
	region->addr = (void *)(uintptr_t)offset;
	region->length = length;
	region->handle = call.attribute[0].data;
	region->type = 3;
	return region;
}

__attribute__((constructor)) static void replace(void)
{
	void *library = dlopen("libibverbs.so.1", RTLD_NOW);
	unsigned char *entry = library ? dlsym(library, "ibv_reg_dmabuf_mr") : NULL;
	/* movabs $reg_dmabuf_mr, %rax; jmp *%rax */
	unsigned char jump[12] = { 0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0 };
	uintptr_t target = (uintptr_t)reg_dmabuf_mr, first = (uintptr_t)entry & -4096;
	size_t pages = (((uintptr_t)entry + sizeof(jump) + 4095) & -4096) - first;

	if (!entry)
		return;
	memcpy(jump + 2, &target, sizeof(target));
	if (mprotect((void *)first, pages, PROT_READ | PROT_WRITE | PROT_EXEC))
		abort();
	memcpy(entry, jump, sizeof(jump));
	mprotect((void *)first, pages, PROT_READ | PROT_EXEC);
}
