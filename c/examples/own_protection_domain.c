/* Registers memory in a protection domain of the program, and writes it with a work request.
 *
 *   cc -std=c11 own_protection_domain.c $(pkg-config --cflags --libs hmem) -libverbs -o verbs
 *   ./verbs rxe0
 *
 * A virtual device is enough: rdma link add rxe0 type rxe netdev eth0
 */
#include <hmem.h>

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LENGTH = 1 << 16, SECONDS = 20, PORT = 1, GID = 1 };

static void check(hmem_error *error)
{
    if (!error)
        return;
    fprintf(stderr, "%s\n%s\n", hmem_error_message(error), hmem_error_json(error));
    hmem_error_free(error);
    exit(1);
}

static void verbs_check(const char *call, int failed)
{
    if (!failed)
        return;
    fprintf(stderr, "%s: %s\n", call, strerror(errno));
    exit(1);
}

/* The program's own verbs objects, with a queue pair that is connected to itself. */
struct program {
    struct ibv_context *device;
    struct ibv_pd *pd;
    struct ibv_cq *queue;
    struct ibv_qp *pair;
};

static void connect_to_self(struct program *program)
{
    struct ibv_port_attr port;
    union ibv_gid gid;
    verbs_check("ibv_query_port", ibv_query_port(program->device, PORT, &port));
    verbs_check("ibv_query_gid", ibv_query_gid(program->device, PORT, GID, &gid));
    struct ibv_qp_attr attr = {0};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = PORT;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    verbs_check("ibv_modify_qp to INIT", ibv_modify_qp(program->pair, &attr, mask));
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = program->pair->qp_num;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = 12;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = gid;
    attr.ah_attr.grh.sgid_index = GID;
    attr.ah_attr.grh.hop_limit = 64;
    attr.ah_attr.dlid = port.lid;
    attr.ah_attr.port_num = PORT;
    mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    verbs_check("ibv_modify_qp to RTR", ibv_modify_qp(program->pair, &attr, mask));
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = 1;
    mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
           IBV_QP_MAX_QP_RD_ATOMIC;
    verbs_check("ibv_modify_qp to RTS", ibv_modify_qp(program->pair, &attr, mask));
}

static void open_program(struct program *program, const char *name)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    verbs_check("ibv_get_device_list", !devices);
    for (int at = 0; devices[at] && !program->device; at++)
        if (!name || strcmp(ibv_get_device_name(devices[at]), name) == 0)
            program->device = ibv_open_device(devices[at]);
    ibv_free_device_list(devices);
    verbs_check("ibv_open_device", !program->device);
    program->pd = ibv_alloc_pd(program->device);
    verbs_check("ibv_alloc_pd", !program->pd);
    program->queue = ibv_create_cq(program->device, 16, NULL, NULL, 0);
    verbs_check("ibv_create_cq", !program->queue);
    struct ibv_qp_init_attr attr = {0};
    attr.send_cq = attr.recv_cq = program->queue;
    attr.cap.max_send_wr = attr.cap.max_recv_wr = 4;
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 1;
    attr.qp_type = IBV_QPT_RC;
    program->pair = ibv_create_qp(program->pd, &attr);
    verbs_check("ibv_create_qp", !program->pair);
    connect_to_self(program);
}

/* The library calls this when no region needs the protection domain any more. */
static void close_program(void *context)
{
    struct program *program = context;
    verbs_check("ibv_destroy_qp", ibv_destroy_qp(program->pair));
    verbs_check("ibv_destroy_cq", ibv_destroy_cq(program->queue));
    verbs_check("ibv_dealloc_pd", ibv_dealloc_pd(program->pd));
    verbs_check("ibv_close_device", ibv_close_device(program->device));
    printf("closed the program's protection domain\n");
}

static void write_to_self(struct program *program, const hmem_verbs_key *source,
                          const hmem_verbs_key *target)
{
    struct ibv_sge segment = {source->base, (uint32_t)source->length, source->lkey};
    struct ibv_send_wr request = {0}, *refused;
    request.sg_list = &segment;
    request.num_sge = 1;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    request.wr.rdma.remote_addr = target->base;
    request.wr.rdma.rkey = target->rkey;
    verbs_check("ibv_post_send", ibv_post_send(program->pair, &request, &refused));
    time_t end = time(NULL) + SECONDS;
    struct ibv_wc done;
    int found = 0;
    while (found == 0 && time(NULL) < end)
        found = ibv_poll_cq(program->queue, 1, &done);
    if (found == 1 && done.status == IBV_WC_SUCCESS)
        return;
    fprintf(stderr, "write: %s\n", found == 1 ? ibv_wc_status_str(done.status) : "no completion");
    exit(1);
}

static uint64_t address_of(const void *memory)
{
    return (uint64_t)(uintptr_t)memory;
}

int main(int count, char **arguments)
{
    static struct program program;
    open_program(&program, count > 1 ? arguments[1] : NULL);

    /* The program opens its NIC itself. */
    hmem_open_attr open_attr = {sizeof open_attr, HMEM_OPEN_WITHOUT_NICS};
    hmem_library *library;
    check(hmem_open(&open_attr, &library));
    const char *nic = hmem_nic_name(library, 0);
    printf("NICs of the library: %s\n", nic ? nic : "none");
    hmem_domain_attr attr = {0};
    attr.size = sizeof attr;
    attr.release = close_program;
    attr.context = &program;
    hmem_domain *domain;
    check(hmem_domain_open_pd(library, program.pd, &attr, &domain));

    static unsigned char sent[LENGTH], arrived[LENGTH];
    for (size_t at = 0; at < LENGTH; at++)
        sent[at] = (unsigned char)(at * 7 % 251);
    hmem_region *source, *target;
    check(hmem_register(domain, address_of(sent), LENGTH, HMEM_WRITE, NULL, &source));
    check(hmem_register(domain, address_of(arrived), LENGTH, HMEM_REMOTE_WRITE, NULL, &target));
    hmem_verbs_key from = {0}, to = {0};
    from.size = to.size = sizeof from;
    check(hmem_region_verbs_key(source, &from));
    check(hmem_region_verbs_key(target, &to));
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
