/* Registers memory in a libfabric domain of the program, and writes it with fi_write.
 *
 *   cc -std=c11 own_fabric_domain.c $(pkg-config --cflags --libs hmem libfabric) -o fabric
 *   ./fabric "tcp;ofi_rxm"
 */
#define _POSIX_C_SOURCE 200809L

#include <hmem.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

enum { LENGTH = 1 << 16, SECONDS = 20 };

static const uint32_t version = FI_VERSION(1, 17);

static void check(hmem_error *error)
{
    if (!error)
        return;
    fprintf(stderr, "%s\n%s\n", hmem_error_message(error), hmem_error_json(error));
    hmem_error_free(error);
    exit(1);
}

static void fi_check(const char *call, long result)
{
    if (result == 0)
        return;
    fprintf(stderr, "%s: %s\n", call, fi_strerror((int)-result));
    exit(1);
}

/* The program's own libfabric objects. */
struct program {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_cq *queue;
    struct fid_av *addresses;
    struct fid_ep *endpoint;
    fi_addr_t self;
};

static void open_program(struct program *program, const char *provider)
{
    struct fi_info *hints = fi_allocinfo();
    hints->caps = FI_RMA;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    hints->fabric_attr->prov_name = strdup(provider);
    fi_check("fi_getinfo",
             fi_getinfo(version, "127.0.0.1", NULL, FI_SOURCE, hints, &program->info));
    fi_freeinfo(hints);
    fi_check("fi_fabric", fi_fabric(program->info->fabric_attr, &program->fabric, NULL));
    fi_check("fi_domain", fi_domain(program->fabric, program->info, &program->domain, NULL));

    struct fi_cq_attr queue = {0};
    queue.format = FI_CQ_FORMAT_CONTEXT;
    struct fi_av_attr addresses = {0};
    addresses.type = FI_AV_TABLE;
    fi_check("fi_cq_open", fi_cq_open(program->domain, &queue, &program->queue, NULL));
    fi_check("fi_av_open", fi_av_open(program->domain, &addresses, &program->addresses, NULL));
    fi_check("fi_endpoint",
             fi_endpoint(program->domain, program->info, &program->endpoint, NULL));
    fi_check("fi_ep_bind",
             fi_ep_bind(program->endpoint, &program->queue->fid, FI_TRANSMIT | FI_RECV));
    fi_check("fi_ep_bind", fi_ep_bind(program->endpoint, &program->addresses->fid, 0));
    fi_check("fi_enable", fi_enable(program->endpoint));
    char name[256];
    size_t length = sizeof name;
    fi_check("fi_getname", fi_getname(&program->endpoint->fid, name, &length));
    if (fi_av_insert(program->addresses, name, 1, &program->self, 0, NULL) != 1)
        fi_check("fi_av_insert", -FI_EOTHER);
}

/* The library calls this when no region needs the domain any more. */
static void close_program(void *context)
{
    struct program *program = context;
    fi_check("fi_close", fi_close(&program->endpoint->fid));
    fi_check("fi_close", fi_close(&program->addresses->fid));
    fi_check("fi_close", fi_close(&program->queue->fid));
    fi_check("fi_close", fi_close(&program->domain->fid));
    fi_check("fi_close", fi_close(&program->fabric->fid));
    fi_freeinfo(program->info);
    printf("closed the program's domain\n");
}

static void write_to_self(struct program *program, const hmem_fabric_key *source,
                          const hmem_fabric_key *target)
{
    time_t end = time(NULL) + SECONDS;
    int posted = 0;
    while (time(NULL) < end) {
        if (!posted) {
            ssize_t result =
                fi_write(program->endpoint, (const void *)(uintptr_t)source->address,
                         source->length, source->descriptor, program->self, target->base,
                         target->key, NULL);
            if (result != -FI_EAGAIN)
                fi_check("fi_write", (long)result);
            posted = result == 0;
        }
        struct fi_cq_entry entry;
        ssize_t result = fi_cq_read(program->queue, &entry, 1);
        if (result == 1)
            return;
        if (result != -FI_EAGAIN)
            fi_check("fi_cq_read", (long)result);
    }
    fi_check("fi_write", -FI_ETIMEDOUT);
}

static uint64_t address_of(const void *memory)
{
    return (uint64_t)(uintptr_t)memory;
}

int main(int count, char **arguments)
{
    static struct program program;
    open_program(&program, count > 1 ? arguments[1] : "tcp;ofi_rxm");

    /* The program opens its NIC itself. */
    hmem_open_attr open_attr = {sizeof open_attr, HMEM_OPEN_WITHOUT_NICS};
    hmem_library *library;
    check(hmem_open(&open_attr, &library));
    hmem_domain_attr attr = {0};
    attr.size = sizeof attr;
    attr.release = close_program;
    attr.context = &program;
    hmem_domain *domain;
    check(hmem_domain_open_fabric(library, program.domain, program.info, version, &attr, &domain));

    static unsigned char sent[LENGTH], arrived[LENGTH];
    for (size_t at = 0; at < LENGTH; at++)
        sent[at] = (unsigned char)(at * 7 % 251);
    hmem_region *source, *target;
    check(hmem_register(domain, address_of(sent), LENGTH, HMEM_WRITE, NULL, &source));
    check(hmem_register(domain, address_of(arrived), LENGTH, HMEM_REMOTE_WRITE, NULL, &target));
    hmem_fabric_key from = {0}, to = {0};
    from.size = to.size = sizeof from;
    check(hmem_region_fabric_key(source, &from));
    check(hmem_region_fabric_key(target, &to));
    write_to_self(&program, &from, &to);
    int same = memcmp(sent, arrived, LENGTH) == 0;
    printf("%s %d bytes\n", same ? "wrote" : "WRONG BYTES in", LENGTH);

    hmem_selection selection = {0};
    selection.size = sizeof selection;
    selection.memory = "system";
    char *json;
    bool passed;
    check(hmem_domain_explain(domain, &selection, &json, &passed));
    printf("%s\n", json);
    hmem_string_free(json);

    check(hmem_region_close(source));
    check(hmem_region_close(target));
    check(hmem_domain_close(domain));
    check(hmem_close(library));
    return same && passed ? 0 : 1;
}
