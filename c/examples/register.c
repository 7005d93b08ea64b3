/* Registers a buffer and sends its key to a peer, over the software NIC, which every machine has.
 *
 *   cc -std=c11 register.c $(pkg-config --cflags --libs hmem) -o register
 *
 * A program for RDMA hardware leaves HMEM_OPEN_SOFTWARE out, and names a NIC such as verbs/mlx5_0.
 */
#include <hmem.h>

#include <stdio.h>
#include <stdlib.h>

/* Prints an error and ends the program, if there is an error. */
static void check(hmem_error *error)
{
    if (!error)
        return;
    const char *remedy = hmem_error_remedy(error);
    fprintf(stderr, "%s\n  remedy: %s\n", hmem_error_message(error), remedy ? remedy : "unknown");
    hmem_error_free(error);
    exit(1);
}

/* Frees the buffer when it is no longer registered. */
static void release(void *context)
{
    printf("released the buffer\n");
    free(context);
}

int main(void)
{
    hmem_open_attr open_attr = {sizeof open_attr, HMEM_OPEN_SOFTWARE};
    hmem_library *library;
    check(hmem_open(&open_attr, &library));
    printf("hmem %s\n", hmem_version());
    for (size_t at = 0; hmem_nic_name(library, at); at++)
        printf("NIC %s\n", hmem_nic_name(library, at));

    hmem_domain *domain;
    check(hmem_domain_open(library, "loopback/hardware", NULL, &domain));

    /* The library calls `release` when the region is closed. */
    size_t length = 1 << 20;
    hmem_register_attr attr = {sizeof attr, NULL, release, NULL};
    attr.context = calloc(1, length);
    uint64_t address = (uint64_t)(uintptr_t)attr.context;
    uint64_t access = HMEM_WRITE | HMEM_REMOTE_READ | HMEM_REMOTE_WRITE | HMEM_MW_BIND;
    hmem_region *region;
    check(hmem_register(domain, address, length, access, &attr, &region));

    /* The path to the memory, with the reason. */
    char *decision;
    check(hmem_region_decision(region, &decision));
    printf("%s\n", decision);
    hmem_string_free(decision);

    /* The key for a peer that uses hmem, and the numbers for one that does not. */
    uint8_t bytes[256];
    size_t count = sizeof bytes;
    check(hmem_region_key_bytes(region, bytes, &count));
    uint64_t key, base;
    check(hmem_region_remote_key(region, &key, &base));
    printf("key of %zu bytes: number %llx, base %llx\n", count, (unsigned long long)key,
           (unsigned long long)base);

    /* A window lends the first page to a peer, until it is unbound. */
    hmem_window *window;
    check(hmem_window_alloc(domain, &window));
    check(hmem_window_bind(window, region, 0, 4096, HMEM_REMOTE_READ));
    check(hmem_window_remote_key(window, &key, &base));
    printf("window: number %llx\n", (unsigned long long)key);
    check(hmem_window_unbind(window));
    check(hmem_window_close(window));

    check(hmem_region_close(region));
    check(hmem_domain_close(domain));
    check(hmem_close(library));
    return 0;
}
