/* Wrong arguments from C: each call returns a typed error, and frees what it took. */
#define _GNU_SOURCE

#include <hmem.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

static int failures;

/* Expects an error of a kind, and frees it. HMEM_KIND_NONE expects success. */
#define EXPECT(kind, call) expect(kind, call, #call, __LINE__)
#define HOLDS(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            printf("line %d: %s does not hold\n", __LINE__, #condition);                          \
            failures++;                                                                           \
        }                                                                                         \
    } while (0)

static void expect(hmem_kind kind, hmem_error *error, const char *call, int line)
{
    hmem_kind found = hmem_error_kind(error);
    int complete = !error || (hmem_error_message(error) && hmem_error_json(error) &&
                              hmem_error_remedy(error) && hmem_error_errno(error) > 0);
    if (found != kind || !complete) {
        printf("line %d: %s: kind %d instead of %d: %s\n", line, call, (int)found, (int)kind,
               error ? hmem_error_message(error) : "success");
        failures++;
    }
    hmem_error_free(error);
}

static int released;

static void release(void *context)
{
    *(int *)context += 1;
}

static hmem_library *open_software(void)
{
    hmem_open_attr attr = {sizeof attr, HMEM_OPEN_SOFTWARE};
    hmem_library *library = NULL;
    EXPECT(HMEM_KIND_NONE, hmem_open(&attr, &library));
    return library;
}

static uint64_t number(const void *pointer)
{
    return (uint64_t)(uintptr_t)pointer;
}

static void null_arguments(hmem_library *library, hmem_domain *domain, hmem_region *region)
{
    char *json;
    uint64_t key;
    size_t length = 0;
    hmem_domain *none = (hmem_domain *)&key;
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_open(NULL, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_info(NULL, NULL, &json));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_info(library, NULL, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_explain(NULL, NULL, &json, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_check(NULL, NULL, &json, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_domain_open(NULL, NULL, NULL, &none));
    HOLDS(none == NULL);
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_domain_open(library, "loopback/hardware", NULL, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_domain_explain(NULL, NULL, &json, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_register(NULL, 0, 0, 0, NULL, &region));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_register(domain, 4096, 1, 0, NULL, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_region_decision(NULL, &json));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_region_local_key(NULL, &key));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_region_remote_key(NULL, &key, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_region_key_bytes(NULL, NULL, &length));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_region_raw_key(NULL, NULL, &length, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_region_verbs_key(NULL, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_region_fabric_key(NULL, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_cache_get(NULL, 0, 0, 0, &region));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_cache_statistics(NULL, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_window_alloc(NULL, NULL));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_window_bind(NULL, NULL, 0, 0, 0));
    /* Closing nothing is allowed, as for free. */
    EXPECT(HMEM_KIND_NONE, hmem_close(NULL));
    EXPECT(HMEM_KIND_NONE, hmem_domain_close(NULL));
    EXPECT(HMEM_KIND_NONE, hmem_region_close(NULL));
    EXPECT(HMEM_KIND_NONE, hmem_window_close(NULL));
    hmem_error_free(NULL);
    hmem_string_free(NULL);
    HOLDS(hmem_error_kind(NULL) == HMEM_KIND_NONE && hmem_error_message(NULL) == NULL);
    HOLDS(hmem_nic_name(NULL, 0) == NULL && hmem_nic_name(library, 1000) == NULL);
}

static void wrong_handles(hmem_library *library, hmem_domain *domain)
{
    hmem_region *region;
    EXPECT(HMEM_KIND_INVALID_ARGUMENT,
           hmem_register((hmem_domain *)library, 4096, 1, 0, NULL, &region));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_region_close((hmem_region *)domain));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_close((hmem_library *)domain));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_domain_close((hmem_domain *)library));
}

static void wrong_arguments(hmem_library *library, hmem_domain *domain)
{
    static char memory[8192];
    hmem_domain *other;
    hmem_region *region;
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_domain_open(library, "loopback/none", NULL, &other));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_domain_open(library, "\xff", NULL, &other));
    hmem_domain_attr policy = {sizeof policy, 0, 99, 0, 0, NULL, NULL};
    EXPECT(HMEM_KIND_INVALID_ARGUMENT,
           hmem_domain_open(library, "loopback/hardware", &policy, &other));
    hmem_domain_attr flags = {sizeof flags, 1u << 31, 0, 0, 0, NULL, NULL};
    EXPECT(HMEM_KIND_INVALID_ARGUMENT,
           hmem_domain_open(library, "loopback/hardware", &flags, &other));
    hmem_domain_attr owner = {sizeof owner, 0, 0, 0, 0, release, &released};
    EXPECT(HMEM_KIND_INVALID_ARGUMENT,
           hmem_domain_open(library, "loopback/hardware", &owner, &other));
    EXPECT(HMEM_KIND_ZERO_LENGTH, hmem_register(domain, number(memory), 0, 0, NULL, &region));
    EXPECT(HMEM_KIND_ADDRESS_WRAPS,
           hmem_register(domain, UINT64_MAX - 1, 4096, 0, NULL, &region));
    EXPECT(HMEM_KIND_BAD_ACCESS,
           hmem_register(domain, number(memory), 64, 1ull << 60, NULL, &region));
    HOLDS(region == NULL);
    EXPECT(HMEM_KIND_INVALID_ARGUMENT,
           hmem_register_dmabuf(domain, -1, 0, 4096, HMEM_READ, NULL, &region));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT,
           hmem_register_dmabuf(domain, 12345, 0, 4096, HMEM_READ, NULL, &region));
    EXPECT(HMEM_KIND_BAD_STATE, hmem_cache_get(domain, number(memory), 64, HMEM_READ, &region));
    hmem_selection selection = {sizeof selection, "simulated:x", NULL, 0, 0};
    char *json;
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_explain(library, &selection, &json, NULL));
    /* A registration that fails does not take the memory. */
    hmem_register_attr attr = {sizeof attr, "cuda:0:0", release, &released};
    EXPECT(HMEM_KIND_INVALID_ARGUMENT,
           hmem_register(domain, number(memory), 64, HMEM_READ, &attr, &region));
    attr.memory = "simulated:0";
    EXPECT(HMEM_KIND_INVALID_ARGUMENT,
           hmem_register(domain, number(memory), 64, HMEM_READ, &attr, &region));
    HOLDS(released == 0);
    /* A domain of the program that is null. No RDMA library need be installed. */
    hmem_domain_attr brought = {sizeof brought, 0, 0, 0, 0, release, &released};
    hmem_error *error = hmem_domain_open_pd(library, NULL, &brought, &other);
    HOLDS(hmem_error_kind(error) == HMEM_KIND_INVALID_ARGUMENT);
    HOLDS(strstr(hmem_error_remedy(error), "protection domain") != NULL);
    hmem_error_free(error);
    error = hmem_domain_open_fabric(library, NULL, NULL, 1 << 16 | 17, &brought, &other);
    HOLDS(hmem_error_kind(error) == HMEM_KIND_INVALID_ARGUMENT ||
          hmem_error_kind(error) == HMEM_KIND_UNAVAILABLE);
    hmem_error_free(error);
    HOLDS(released == 0 && other == NULL);
}

/* Structures of other versions of the header. */
static void sizes(hmem_library *library)
{
    hmem_domain *domain;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    HOLDS(pages != MAP_FAILED && mprotect(pages + page, page, PROT_NONE) == 0);
    /* An old program knows the size and the flags alone. Nothing after them may be read. */
    struct {
        size_t size;
        uint64_t flags;
    } old = {sizeof old, HMEM_DOMAIN_CACHE};
    void *at = pages + page - sizeof old;
    memcpy(at, &old, sizeof old);
    EXPECT(HMEM_KIND_NONE,
           hmem_domain_open(library, "loopback/hardware", (const hmem_domain_attr *)at, &domain));
    /* The same for results: nothing after them may be written. */
    struct {
        size_t size;
        uint64_t hits, misses;
    } counts = {sizeof counts, 77, 77};
    at = pages + page - sizeof counts;
    memcpy(at, &counts, sizeof counts);
    EXPECT(HMEM_KIND_NONE, hmem_cache_statistics(domain, (hmem_cache_counts *)at));
    memcpy(&counts, at, sizeof counts);
    HOLDS(counts.size == sizeof counts && counts.hits == 0 && counts.misses == 0);
    EXPECT(HMEM_KIND_NONE, hmem_domain_close(domain));
    munmap(pages, 2 * page);
    /* A new program sets a field that the library does not know. */
    struct {
        hmem_domain_attr known;
        uint64_t unknown;
    } newer = {{sizeof newer, 0, 0, 0, 0, NULL, NULL}, 0};
    EXPECT(HMEM_KIND_NONE, hmem_domain_open(library, "loopback/hardware", &newer.known, &domain));
    EXPECT(HMEM_KIND_NONE, hmem_domain_close(domain));
    newer.unknown = 1;
    EXPECT(HMEM_KIND_UNSUPPORTED,
           hmem_domain_open(library, "loopback/hardware", &newer.known, &domain));
    /* A structure that was not initialised. */
    hmem_domain_attr garbage;
    memset(&garbage, 0xaa, sizeof garbage);
    EXPECT(HMEM_KIND_INVALID_ARGUMENT,
           hmem_domain_open(library, "loopback/hardware", &garbage, &domain));
    garbage.size = 0;
    EXPECT(HMEM_KIND_INVALID_ARGUMENT,
           hmem_domain_open(library, "loopback/hardware", &garbage, &domain));
}

static void closing(hmem_domain *domain)
{
    char *memory = calloc(1, 8192);
    hmem_register_attr attr = {sizeof attr, "system", release, &released};
    hmem_region *region;
    uint64_t access = HMEM_REMOTE_READ | HMEM_MW_BIND, key, base;
    EXPECT(HMEM_KIND_NONE, hmem_register(domain, number(memory), 8192, access, &attr, &region));
    EXPECT(HMEM_KIND_BUSY, hmem_domain_close(domain));
    hmem_window *window;
    EXPECT(HMEM_KIND_NONE, hmem_window_alloc(domain, &window));
    EXPECT(HMEM_KIND_KEY_NOT_AVAILABLE, hmem_window_remote_key(window, &key, NULL));
    EXPECT(HMEM_KIND_OUT_OF_BOUNDS,
           hmem_window_bind(window, region, 8192, 1, HMEM_REMOTE_READ));
    EXPECT(HMEM_KIND_NONE, hmem_window_bind(window, region, 4096, 64, HMEM_REMOTE_READ));
    EXPECT(HMEM_KIND_NONE, hmem_window_remote_key(window, &key, &base));
    HOLDS(base == number(memory) + 4096);
    EXPECT(HMEM_KIND_BUSY, hmem_region_close(region));
    HOLDS(released == 0);
    /* After a refusal the region still works. */
    EXPECT(HMEM_KIND_NONE, hmem_region_remote_key(region, &key, &base));
    size_t length = 4;
    uint8_t bytes[256];
    EXPECT(HMEM_KIND_TOO_SMALL, hmem_region_key_bytes(region, bytes, &length));
    HOLDS(length > 4 && length <= sizeof bytes);
    EXPECT(HMEM_KIND_NONE, hmem_region_key_bytes(region, bytes, &length));
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_region_verbs_key(region, NULL));
    EXPECT(HMEM_KIND_NONE, hmem_window_close(window));
    EXPECT(HMEM_KIND_NONE, hmem_region_close(region));
    HOLDS(released == 1);
    free(memory);
}

/* A library without NICs is for the objects of the program. */
static void without_nics(void)
{
    hmem_open_attr attr = {sizeof attr, HMEM_OPEN_WITHOUT_NICS | HMEM_OPEN_SOFTWARE};
    hmem_library *library;
    hmem_domain *domain;
    EXPECT(HMEM_KIND_INVALID_ARGUMENT, hmem_open(&attr, &library));
    HOLDS(library == NULL);
    attr.flags = HMEM_OPEN_WITHOUT_NICS;
    EXPECT(HMEM_KIND_NONE, hmem_open(&attr, &library));
    HOLDS(hmem_nic_name(library, 0) == NULL);
    EXPECT(HMEM_KIND_UNAVAILABLE, hmem_domain_open(library, NULL, NULL, &domain));
    EXPECT(HMEM_KIND_NONE, hmem_close(library));
}

/* The process cannot open a further file, which is not a mistake in the descriptor. */
static void too_many_files(hmem_domain *domain)
{
    hmem_region *region;
    struct rlimit limit, low;
    HOLDS(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    low = limit;
    int last = dup(0);
    low.rlim_cur = (rlim_t)last + 1;
    HOLDS(last > 0 && setrlimit(RLIMIT_NOFILE, &low) == 0);
    EXPECT(HMEM_KIND_OUT_OF_RESOURCES,
           hmem_register_dmabuf(domain, 0, 0, 4096, HMEM_READ, NULL, &region));
    HOLDS(setrlimit(RLIMIT_NOFILE, &limit) == 0 && close(last) == 0);
}

/* A lookup of a part of a cached region has the keys, and permits the windows, of the part. */
static void part_of_a_cached_region(hmem_library *library)
{
    hmem_domain_attr attr = {sizeof attr, HMEM_DOMAIN_CACHE, 0, 0, 0, NULL, NULL};
    hmem_domain *domain;
    EXPECT(HMEM_KIND_NONE, hmem_domain_open(library, "loopback/hardware", &attr, &domain));
    char *memory = calloc(1, 65536);
    uint64_t start = number(memory), access = HMEM_REMOTE_READ | HMEM_MW_BIND, key, base;
    hmem_region *whole, *part;
    EXPECT(HMEM_KIND_NONE, hmem_cache_get(domain, start, 65536, access, &whole));
    EXPECT(HMEM_KIND_NONE, hmem_cache_get(domain, start + 8192, 100, access, &part));
    EXPECT(HMEM_KIND_NONE, hmem_region_remote_key(part, &key, &base));
    HOLDS(base == start + 8192);
    uint8_t bytes[256];
    size_t length = sizeof bytes;
    base = 0;
    EXPECT(HMEM_KIND_NONE, hmem_region_raw_key(part, bytes, &length, &base));
    HOLDS(base == start + 8192);
    hmem_window *window;
    EXPECT(HMEM_KIND_NONE, hmem_window_alloc(domain, &window));
    EXPECT(HMEM_KIND_OUT_OF_BOUNDS, hmem_window_bind(window, part, 50, 51, HMEM_REMOTE_READ));
    EXPECT(HMEM_KIND_OUT_OF_BOUNDS,
           hmem_window_bind(window, part, UINT64_MAX, 2, HMEM_REMOTE_READ));
    EXPECT(HMEM_KIND_NONE, hmem_window_bind(window, part, 50, 50, HMEM_REMOTE_READ));
    EXPECT(HMEM_KIND_NONE, hmem_window_remote_key(window, &key, &base));
    HOLDS(base == start + 8192 + 50);
    EXPECT(HMEM_KIND_NONE, hmem_window_close(window));
    EXPECT(HMEM_KIND_NONE, hmem_region_close(part));
    EXPECT(HMEM_KIND_NONE, hmem_region_close(whole));
    EXPECT(HMEM_KIND_NONE, hmem_domain_close(domain));
    free(memory);
}

struct worker {
    hmem_domain *domain;
    pthread_t thread;
    char *memory;
};

static void *work(void *argument)
{
    struct worker *worker = argument;
    for (int round = 0; round < 200; round++) {
        hmem_region *region;
        uint64_t key;
        EXPECT(HMEM_KIND_NONE,
               hmem_cache_get(worker->domain, number(worker->memory), 65536, HMEM_SEND, &region));
        EXPECT(HMEM_KIND_NONE, hmem_region_local_key(region, &key));
        EXPECT(HMEM_KIND_NONE, hmem_region_close(region));
    }
    return NULL;
}

static void threads(hmem_library *library)
{
    hmem_domain_attr attr = {sizeof attr, HMEM_DOMAIN_CACHE, 0, 0, 0, NULL, NULL};
    hmem_domain *domain;
    EXPECT(HMEM_KIND_NONE, hmem_domain_open(library, "loopback/hardware", &attr, &domain));
    struct worker workers[4];
    char *memory = calloc(1, 65536);
    for (int at = 0; at < 4; at++) {
        workers[at].domain = domain;
        workers[at].memory = memory;
        pthread_create(&workers[at].thread, NULL, work, &workers[at]);
    }
    for (int at = 0; at < 4; at++)
        pthread_join(workers[at].thread, NULL);
    hmem_cache_counts counts = {sizeof counts, 0, 0, 0, 0, 0, 0, 0};
    EXPECT(HMEM_KIND_NONE, hmem_cache_statistics(domain, &counts));
    HOLDS(counts.hits + counts.misses == 800 && counts.in_use == 0);
    hmem_region *region;
    EXPECT(HMEM_KIND_NONE, hmem_cache_get(domain, number(memory), 65536, HMEM_SEND, &region));
    EXPECT(HMEM_KIND_BUSY, hmem_domain_close(domain));
    EXPECT(HMEM_KIND_NONE, hmem_region_close(region));
    EXPECT(HMEM_KIND_NONE, hmem_cache_invalidate(domain, number(memory), 65536));
    EXPECT(HMEM_KIND_NONE, hmem_cache_evict_idle(domain));
    EXPECT(HMEM_KIND_NONE, hmem_domain_close(domain));
    free(memory);
}

int main(void)
{
    hmem_library *library = open_software();
    hmem_domain *domain = NULL;
    EXPECT(HMEM_KIND_NONE, hmem_domain_open(library, "loopback/hardware", NULL, &domain));
    null_arguments(library, domain, NULL);
    wrong_handles(library, domain);
    wrong_arguments(library, domain);
    sizes(library);
    without_nics();
    too_many_files(domain);
    closing(domain);
    part_of_a_cached_region(library);
    threads(library);
    /* The domain keeps the library in use. */
    EXPECT(HMEM_KIND_NONE, hmem_close(library));
    static char memory[4096];
    hmem_region *region;
    EXPECT(HMEM_KIND_NONE, hmem_register(domain, number(memory), 4096, HMEM_READ, NULL, &region));
    EXPECT(HMEM_KIND_NONE, hmem_region_close(region));
    EXPECT(HMEM_KIND_NONE, hmem_domain_close(domain));
    printf("%d failures\n", failures);
    return failures != 0;
}
