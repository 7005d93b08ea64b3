/* The sizes, offsets and numbers of the ABI. A line here never changes and is never removed. A new
 * field comes after the others, and changes the size alone. `hmem.map` lists the functions.
 */
#include <hmem.h>

#include <assert.h>

static_assert(sizeof(hmem_domain_attr) == 56, "size");
static_assert(offsetof(hmem_domain_attr, size) == 0, "offset");
static_assert(offsetof(hmem_domain_attr, flags) == 8, "offset");
static_assert(offsetof(hmem_domain_attr, p2p) == 16, "offset");
static_assert(offsetof(hmem_domain_attr, cache_max_count) == 24, "offset");
static_assert(offsetof(hmem_domain_attr, cache_max_bytes) == 32, "offset");
static_assert(offsetof(hmem_domain_attr, release) == 40, "offset");
static_assert(offsetof(hmem_domain_attr, context) == 48, "offset");

static_assert(sizeof(hmem_selection) == 40, "size");
static_assert(offsetof(hmem_selection, size) == 0, "offset");
static_assert(offsetof(hmem_selection, memory) == 8, "offset");
static_assert(offsetof(hmem_selection, nic) == 16, "offset");
static_assert(offsetof(hmem_selection, bytes) == 24, "offset");
static_assert(offsetof(hmem_selection, flags) == 32, "offset");

static_assert(sizeof(hmem_cache_counts) == 64, "size");
static_assert(offsetof(hmem_cache_counts, size) == 0, "offset");
static_assert(offsetof(hmem_cache_counts, hits) == 8, "offset");
static_assert(offsetof(hmem_cache_counts, misses) == 16, "offset");
static_assert(offsetof(hmem_cache_counts, uncached) == 24, "offset");
static_assert(offsetof(hmem_cache_counts, evictions) == 32, "offset");
static_assert(offsetof(hmem_cache_counts, entries) == 40, "offset");
static_assert(offsetof(hmem_cache_counts, bytes) == 48, "offset");
static_assert(offsetof(hmem_cache_counts, in_use) == 56, "offset");

static_assert(sizeof(hmem_open_attr) == 16, "size");
static_assert(offsetof(hmem_open_attr, size) == 0, "offset");
static_assert(offsetof(hmem_open_attr, flags) == 8, "offset");

static_assert(sizeof(hmem_register_attr) == 32, "size");
static_assert(offsetof(hmem_register_attr, size) == 0, "offset");
static_assert(offsetof(hmem_register_attr, memory) == 8, "offset");
static_assert(offsetof(hmem_register_attr, release) == 16, "offset");
static_assert(offsetof(hmem_register_attr, context) == 24, "offset");

static_assert(sizeof(hmem_verbs_key) == 48, "size");
static_assert(offsetof(hmem_verbs_key, size) == 0, "offset");
static_assert(offsetof(hmem_verbs_key, address) == 8, "offset");
static_assert(offsetof(hmem_verbs_key, length) == 16, "offset");
static_assert(offsetof(hmem_verbs_key, base) == 24, "offset");
static_assert(offsetof(hmem_verbs_key, lkey) == 32, "offset");
static_assert(offsetof(hmem_verbs_key, rkey) == 36, "offset");
static_assert(offsetof(hmem_verbs_key, mr) == 40, "offset");

static_assert(sizeof(hmem_fabric_key) == 56, "size");
static_assert(offsetof(hmem_fabric_key, size) == 0, "offset");
static_assert(offsetof(hmem_fabric_key, address) == 8, "offset");
static_assert(offsetof(hmem_fabric_key, length) == 16, "offset");
static_assert(offsetof(hmem_fabric_key, base) == 24, "offset");
static_assert(offsetof(hmem_fabric_key, key) == 32, "offset");
static_assert(offsetof(hmem_fabric_key, descriptor) == 40, "offset");
static_assert(offsetof(hmem_fabric_key, mr) == 48, "offset");

static_assert(HMEM_READ == 256, "number");
static_assert(HMEM_WRITE == 512, "number");
static_assert(HMEM_RECV == 1024, "number");
static_assert(HMEM_SEND == 2048, "number");
static_assert(HMEM_REMOTE_READ == 4096, "number");
static_assert(HMEM_REMOTE_WRITE == 8192, "number");
static_assert(HMEM_MW_BIND == 16384, "number");
static_assert(HMEM_REMOTE_ATOMIC == 32768, "number");
static_assert(HMEM_DOMAIN_CACHE == 1, "number");
static_assert(HMEM_DOMAIN_CACHE_MERGE == 2, "number");
static_assert(HMEM_P2P_ENABLED == 0, "number");
static_assert(HMEM_P2P_REQUIRED == 1, "number");
static_assert(HMEM_P2P_DISABLED == 2, "number");
static_assert(HMEM_OPEN_SOFTWARE == 1, "number");
static_assert(HMEM_OPEN_WITHOUT_ENVIRONMENT == 2, "number");
static_assert(HMEM_OPEN_HOST_MEMORY_ONLY == 4, "number");
static_assert(HMEM_OPEN_WITHOUT_NICS == 8, "number");
static_assert(HMEM_REPORT_QUICK == 1, "number");

static_assert(HMEM_KIND_NONE == 0, "number");
static_assert(HMEM_KIND_PANIC == 1, "number");
static_assert(HMEM_KIND_OTHER == 2, "number");
static_assert(HMEM_KIND_INVALID_ARGUMENT == 3, "number");
static_assert(HMEM_KIND_ZERO_LENGTH == 4, "number");
static_assert(HMEM_KIND_ADDRESS_WRAPS == 5, "number");
static_assert(HMEM_KIND_RESERVED_OFFSET == 6, "number");
static_assert(HMEM_KIND_RESERVED_HMEM_DATA == 7, "number");
static_assert(HMEM_KIND_BAD_ACCESS == 8, "number");
static_assert(HMEM_KIND_BAD_FLAGS == 9, "number");
static_assert(HMEM_KIND_TOO_MANY_RANGES == 10, "number");
static_assert(HMEM_KIND_TOO_LONG == 11, "number");
static_assert(HMEM_KIND_BAD_PAGE_SIZE == 12, "number");
static_assert(HMEM_KIND_OUT_OF_BOUNDS == 13, "number");
static_assert(HMEM_KIND_MODE_MISMATCH == 14, "number");
static_assert(HMEM_KIND_BAD_ADDRESS == 15, "number");
static_assert(HMEM_KIND_ACCESS_DENIED == 16, "number");
static_assert(HMEM_KIND_NO_KEY == 17, "number");
static_assert(HMEM_KIND_KEY_REJECTED == 18, "number");
static_assert(HMEM_KIND_KEY_NOT_AVAILABLE == 19, "number");
static_assert(HMEM_KIND_INVALID_KEY == 20, "number");
static_assert(HMEM_KIND_NO_REGION == 21, "number");
static_assert(HMEM_KIND_MALFORMED == 22, "number");
static_assert(HMEM_KIND_TOO_SMALL == 23, "number");
static_assert(HMEM_KIND_BUSY == 24, "number");
static_assert(HMEM_KIND_BAD_STATE == 25, "number");
static_assert(HMEM_KIND_CANCELED == 26, "number");
static_assert(HMEM_KIND_AGAIN == 27, "number");
static_assert(HMEM_KIND_TRUNCATED == 28, "number");
static_assert(HMEM_KIND_MESSAGE_TOO_LONG == 29, "number");
static_assert(HMEM_KIND_OUT_OF_RESOURCES == 30, "number");
static_assert(HMEM_KIND_UNSUPPORTED == 31, "number");
static_assert(HMEM_KIND_NO_SYS == 32, "number");
static_assert(HMEM_KIND_UNAVAILABLE == 33, "number");
static_assert(HMEM_KIND_PERMISSION_DENIED == 34, "number");
static_assert(HMEM_KIND_UNREACHABLE == 35, "number");
static_assert(HMEM_KIND_DRIVER == 36, "number");

int main(void)
{
    return 0;
}
