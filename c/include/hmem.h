/* The C interface of hmem: memory registration for RDMA (docs/c.md).
 *
 * - A function that can fail returns NULL, or an error object for hmem_error_free.
 * - A function that fails stores NULL in place of the object or string.
 * - A structure with a field `size` may grow in later versions. Clear it and set `size` to its
 *   sizeof. A field that is zero has its default.
 * - Each function lists the promises of its caller.
 *
 * Generated from c/src: cargo run --manifest-path c/header/Cargo.toml >c/include/hmem.h
 */

#ifndef HMEM_H
#define HMEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The region may be the destination of reads that this process posts.
 */
#define HMEM_READ (1 << 8)

/**
 * The region may be the source of writes that this process posts.
 */
#define HMEM_WRITE (1 << 9)

/**
 * Messages may be received in the region.
 */
#define HMEM_RECV (1 << 10)

/**
 * Messages may be sent from the region.
 */
#define HMEM_SEND (1 << 11)

/**
 * Peers may read the region.
 */
#define HMEM_REMOTE_READ (1 << 12)

/**
 * Peers may write the region and apply atomics to it.
 */
#define HMEM_REMOTE_WRITE (1 << 13)

/**
 * Memory windows may be bound to the region.
 */
#define HMEM_MW_BIND (1 << 14)

/**
 * Peers may apply atomics to the region, but not write it.
 */
#define HMEM_REMOTE_ATOMIC (1 << 15)

/**
 * Gives the domain a registration cache (`hmem_cache_get`).
 */
#define HMEM_DOMAIN_CACHE 1

/**
 * Merges cached registrations that overlap or touch.
 */
#define HMEM_DOMAIN_CACHE_MERGE 2

/**
 * Uses direct access to device memory if possible, and staged copies otherwise.
 */
#define HMEM_P2P_ENABLED 0

/**
 * Uses direct access to device memory, or fails.
 */
#define HMEM_P2P_REQUIRED 1

/**
 * Always uses staged copies for device memory.
 */
#define HMEM_P2P_DISABLED 2

/**
 * Adds simulated devices and loopback NICs for tests. These are software in this process. A
 * program gets a loopback NIC only if it names that NIC.
 */
#define HMEM_OPEN_SOFTWARE 1

/**
 * Ignores the environment variables of hmem and of libfabric (`HMEM_*`, `FI_*`).
 */
#define HMEM_OPEN_WITHOUT_ENVIRONMENT 2

/**
 * Loads no vendor's library. Only host memory can be registered.
 */
#define HMEM_OPEN_HOST_MEMORY_ONLY 4

/**
 * Opens no NIC. For programs that call `hmem_domain_open_pd` and `hmem_domain_open_fabric` alone.
 * Without this flag, `hmem_open` calls `ibv_fork_init` on a kernel older than Linux 5.12. That
 * call changes the whole process.
 */
#define HMEM_OPEN_WITHOUT_NICS 8

/**
 * Makes `hmem_check` finish sooner, as `hmem check --quick` does.
 */
#define HMEM_REPORT_QUICK 1

/**
 * The kind of an error. The numbers never change. Later versions may add kinds.
 */
typedef enum hmem_kind {
    /**
     * No error.
     */
    HMEM_KIND_NONE = 0,
    /**
     * A Rust panic inside the library, which is a defect of the library. The objects of the call
     * may be unusable.
     */
    HMEM_KIND_PANIC = 1,
    /**
     * A kind that this version of the header does not know.
     */
    HMEM_KIND_OTHER = 2,
    /**
     * An argument is wrong, and no other kind describes the mistake.
     */
    HMEM_KIND_INVALID_ARGUMENT = 3,
    /**
     * A range has no bytes.
     */
    HMEM_KIND_ZERO_LENGTH = 4,
    /**
     * Start plus length passes the end of the address space.
     */
    HMEM_KIND_ADDRESS_WRAPS = 5,
    /**
     * The reserved attribute `offset` is set.
     */
    HMEM_KIND_RESERVED_OFFSET = 6,
    /**
     * The reserved attribute `hmem_data` is set.
     */
    HMEM_KIND_RESERVED_HMEM_DATA = 7,
    /**
     * An unknown or disallowed access right.
     */
    HMEM_KIND_BAD_ACCESS = 8,
    /**
     * An unknown or unsupported flag.
     */
    HMEM_KIND_BAD_FLAGS = 9,
    /**
     * More ranges than the NIC can register as one region.
     */
    HMEM_KIND_TOO_MANY_RANGES = 10,
    /**
     * More bytes than the NIC can register as one region.
     */
    HMEM_KIND_TOO_LONG = 11,
    /**
     * A page size that the operating system does not have.
     */
    HMEM_KIND_BAD_PAGE_SIZE = 12,
    /**
     * A range that reaches outside its region or allocation.
     */
    HMEM_KIND_OUT_OF_BOUNDS = 13,
    /**
     * mr_mode bits that the NIC needs and this interface does not offer.
     */
    HMEM_KIND_MODE_MISMATCH = 14,
    /**
     * Addresses that cannot be reached: unmapped or protected.
     */
    HMEM_KIND_BAD_ADDRESS = 15,
    /**
     * A right that the key or region does not grant.
     */
    HMEM_KIND_ACCESS_DENIED = 16,
    /**
     * The requested key is in use.
     */
    HMEM_KIND_NO_KEY = 17,
    /**
     * The NIC cannot use the requested key.
     */
    HMEM_KIND_KEY_REJECTED = 18,
    /**
     * The region has no key of the requested sort.
     */
    HMEM_KIND_KEY_NOT_AVAILABLE = 19,
    /**
     * A key that belongs to no region.
     */
    HMEM_KIND_INVALID_KEY = 20,
    /**
     * A local segment without a valid descriptor.
     */
    HMEM_KIND_NO_REGION = 21,
    /**
     * Bytes that are truncated, altered or of an unknown version.
     */
    HMEM_KIND_MALFORMED = 22,
    /**
     * A buffer is too small.
     */
    HMEM_KIND_TOO_SMALL = 23,
    /**
     * The object is still in use.
     */
    HMEM_KIND_BUSY = 24,
    /**
     * The object is in a state that does not allow the call.
     */
    HMEM_KIND_BAD_STATE = 25,
    /**
     * The operation was cancelled.
     */
    HMEM_KIND_CANCELED = 26,
    /**
     * The operation cannot run now, but may succeed later.
     */
    HMEM_KIND_AGAIN = 27,
    /**
     * A received message was longer than the buffer.
     */
    HMEM_KIND_TRUNCATED = 28,
    /**
     * A message is longer than the NIC's limit.
     */
    HMEM_KIND_MESSAGE_TOO_LONG = 29,
    /**
     * Memory, lockable memory or another limited resource is used up.
     */
    HMEM_KIND_OUT_OF_RESOURCES = 30,
    /**
     * The driver, the device or this build does not support the operation.
     */
    HMEM_KIND_UNSUPPORTED = 31,
    /**
     * The provider does not implement the operation.
     */
    HMEM_KIND_NO_SYS = 32,
    /**
     * A library, driver or device is missing.
     */
    HMEM_KIND_UNAVAILABLE = 33,
    /**
     * The process lacks a privilege.
     */
    HMEM_KIND_PERMISSION_DENIED = 34,
    /**
     * The peer does not answer, or the NIC cannot reach the device.
     */
    HMEM_KIND_UNREACHABLE = 35,
    /**
     * A call of a driver or of the operating system failed.
     */
    HMEM_KIND_DRIVER = 36,
} hmem_kind;

/**
 * The description of a NIC by libfabric: `struct fi_info` of `rdma/fabric.h`.
 */
typedef struct fi_info fi_info;

/**
 * A domain of libfabric: `struct fid_domain` of `rdma/fi_domain.h`.
 */
typedef struct fid_domain fid_domain;

/**
 * An open domain, which registers memory with one NIC. Any number of threads may use it at once.
 */
typedef struct hmem_domain hmem_domain;

/**
 * The reason why a call failed. Free it with `hmem_error_free`.
 */
typedef struct hmem_error hmem_error;

/**
 * The open library: the kinds of memory and the NICs of this machine. Any number of threads may
 * use it at once. A program opens it once.
 */
typedef struct hmem_library hmem_library;

/**
 * Registered memory, or a lease of a cached region. Any number of threads may use it at once.
 */
typedef struct hmem_region hmem_region;

/**
 * A memory window: a second key for a part of a region, with rights of its own. The part and the
 * rights can change without a new registration. Any number of threads may use a window at once.
 */
typedef struct hmem_window hmem_window;

/**
 * A protection domain of libibverbs: `struct ibv_pd` of `infiniband/verbs.h`.
 */
typedef struct ibv_pd ibv_pd;

/**
 * A function of the program that the library calls once, when the library no longer uses an object
 * of the program. The argument is the `context` that the program gave. Any thread may call the
 * function. The function must not throw, and must not call this library. Null means no function.
 */
typedef void (*hmem_release)(void *context);

/**
 * Settings of a domain.
 */
typedef struct hmem_domain_attr {
    /**
     * The size of this structure in bytes: `sizeof(hmem_domain_attr)`.
     */
    size_t size;
    /**
     * HMEM_DOMAIN_ flags.
     */
    uint64_t flags;
    /**
     * One of the HMEM_P2P_ policies.
     */
    uint64_t p2p;
    /**
     * The largest number of cached regions. 0 means the setting of the environment.
     */
    uint64_t cache_max_count;
    /**
     * The largest total size of cached regions in bytes. 0 means the setting of the environment.
     */
    uint64_t cache_max_bytes;
    /**
     * The function that the library calls when neither the domain nor a region uses the program's
     * protection domain or libfabric domain any more. If the domain fails to open, the library
     * does not call the function. Must be null for `hmem_domain_open`.
     */
    hmem_release release;
    /**
     * The argument of `release`.
     */
    void *context;
} hmem_domain_attr;

/**
 * The selection of a report. Null strings and zeros select everything.
 */
typedef struct hmem_selection {
    /**
     * The size of this structure in bytes: `sizeof(hmem_selection)`.
     */
    size_t size;
    /**
     * The memory: `system`, `cuda`, or a device such as `cuda:0`.
     */
    const char *memory;
    /**
     * The provider or the NIC: `verbs`, or `verbs/mlx5_0`.
     */
    const char *nic;
    /**
     * The size of the registration (`hmem_explain`) or the transfer (`hmem_check`) in bytes.
     */
    uint64_t bytes;
    /**
     * HMEM_REPORT_ flags.
     */
    uint64_t flags;
} hmem_selection;

/**
 * Counts of a domain's registration cache.
 */
typedef struct hmem_cache_counts {
    /**
     * The size of this structure in bytes: `sizeof(hmem_cache_counts)`.
     */
    size_t size;
    /**
     * The number of lookups that found a region.
     */
    uint64_t hits;
    /**
     * The number of lookups that registered memory, or failed.
     */
    uint64_t misses;
    /**
     * The number of misses whose region the cache did not keep.
     */
    uint64_t uncached;
    /**
     * The number of regions that were removed to make room.
     */
    uint64_t evictions;
    /**
     * The number of regions in the cache.
     */
    uint64_t entries;
    /**
     * The total size of the regions in the cache, in bytes.
     */
    uint64_t bytes;
    /**
     * The number of cached regions that are in use.
     */
    uint64_t in_use;
} hmem_cache_counts;

/**
 * Settings of `hmem_open`.
 */
typedef struct hmem_open_attr {
    /**
     * The size of this structure in bytes: `sizeof(hmem_open_attr)`.
     */
    size_t size;
    /**
     * HMEM_OPEN_ flags.
     */
    uint64_t flags;
} hmem_open_attr;

/**
 * Settings of a registration.
 */
typedef struct hmem_register_attr {
    /**
     * The size of this structure in bytes: `sizeof(hmem_register_attr)`.
     */
    size_t size;
    /**
     * The owner of the memory, such as `cuda:0`. The registration fails if another iface or device
     * owns the memory. If this is null, the library finds the owner. For a dma-buf, null means
     * host memory.
     */
    const char *memory;
    /**
     * The function that the library calls when the memory is no longer registered. If the
     * registration fails, the library does not call the function.
     */
    hmem_release release;
    /**
     * The argument of `release`.
     */
    void *context;
} hmem_register_attr;

/**
 * The keys of a region in a protection domain.
 */
typedef struct hmem_verbs_key {
    /**
     * The size of this structure in bytes: `sizeof(hmem_verbs_key)`.
     */
    size_t size;
    /**
     * The address of the first registered byte in this process.
     */
    uint64_t address;
    /**
     * The length of the registration in bytes.
     */
    uint64_t length;
    /**
     * The address that work requests use for the first byte.
     */
    uint64_t base;
    /**
     * The key for the local segments of work requests.
     */
    uint32_t lkey;
    /**
     * The key for requests of peers.
     */
    uint32_t rkey;
    /**
     * The `struct ibv_mr`. The program must not deregister it.
     */
    void *mr;
} hmem_verbs_key;

/**
 * The keys of a region in a libfabric domain.
 */
typedef struct hmem_fabric_key {
    /**
     * The size of this structure in bytes: `sizeof(hmem_fabric_key)`.
     */
    size_t size;
    /**
     * The address of the first registered byte in this process.
     */
    uint64_t address;
    /**
     * The length of the registration in bytes.
     */
    uint64_t length;
    /**
     * The address that peers use for the first byte.
     */
    uint64_t base;
    /**
     * The key for requests of peers, or `FI_KEY_NOTAVAIL` if the region has no remote rights.
     */
    uint64_t key;
    /**
     * The descriptor for the local segments of requests.
     */
    void *descriptor;
    /**
     * The `struct fid_mr`. The program must not close it.
     */
    void *mr;
} hmem_fabric_key;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Opens a domain on the NIC with the name `nic` (see `hmem_nic_name`). Null means the first
 * hardware NIC, and never a software NIC.
 *
 * The caller promises:
 * `library` is null, or a library that is not closed during the call. `nic` is null or a string.
 * `attr` is null, or a structure as large as its field `size` says. `domain` is null or writable.
 */
struct hmem_error *hmem_domain_open(const struct hmem_library *library,
                                    const char *nic,
                                    const struct hmem_domain_attr *attr,
                                    struct hmem_domain **domain);

/**
 * Opens a domain in a protection domain of the program. The keys of its regions
 * (`hmem_region_verbs_key`) work in the program's own work requests.
 *
 * This function does not call `ibv_fork_init`. `hmem_open` may call it, unless the flag
 * HMEM_OPEN_WITHOUT_NICS is set.
 *
 * The caller promises:
 * - `library` is null, or a library that is not closed during the call.
 * - `pd` is null, or a protection domain of the `libibverbs.so.1` of this process. The protection
 *   domain stays allocated until `attr->release` is called. Without this function, it stays
 *   allocated until the process ends.
 * - `attr` is null, or a structure as large as its field `size` says. `domain` is null or
 *   writable.
 */
struct hmem_error *hmem_domain_open_pd(const struct hmem_library *library,
                                       struct ibv_pd *pd,
                                       const struct hmem_domain_attr *attr,
                                       struct hmem_domain **domain);

/**
 * Opens a domain in a libfabric domain of the program. The keys of its regions
 * (`hmem_region_fabric_key`) work in the program's own requests.
 *
 * `info` is the `fi_info` with which the program opened the domain, and `api_version` the version
 * that the program passed to `fi_getinfo`.
 *
 * The caller promises:
 * - `library` is null, or a library that is not closed during the call.
 * - `fabric` is null, or a domain of the `libfabric.so.1` of this process. The domain stays open
 *   until `attr->release` is called. Without this function, it stays open until the process ends.
 * - `info` is null, or the `fi_info` of the domain, and valid during the call.
 * - The domain was opened with FI_THREAD_SAFE, or no call of the program for the domain runs at
 *   the same time as a call of this library.
 * - No transfer uses a region when the region is closed.
 * - `attr` is null, or a structure as large as its field `size` says. `domain` is null or
 *   writable.
 */
struct hmem_error *hmem_domain_open_fabric(const struct hmem_library *library,
                                           struct fid_domain *fabric,
                                           const struct fi_info *info,
                                           uint32_t api_version,
                                           const struct hmem_domain_attr *attr,
                                           struct hmem_domain **domain);

/**
 * Returns the JSON document of `hmem explain --json` for the NIC of the domain. The call registers
 * memory and deregisters it. If the domain was opened in a protection domain or libfabric domain
 * of the program, the memory is registered there. The field `nic` of the selection is ignored.
 *
 * The caller promises:
 * `domain` is null, or a domain that is not closed during the call. `selection` is null, or a
 * structure as large as its field `size` says. `json` and `passed` are null or writable.
 */
struct hmem_error *hmem_domain_explain(const struct hmem_domain *domain,
                                       const struct hmem_selection *selection,
                                       char **json,
                                       bool *passed);

/**
 * Closes a domain. Does nothing for null. Fails with HMEM_KIND_BUSY while the domain has regions
 * or windows, and the domain then stays open.
 *
 * The caller promises:
 * `domain` is null, or a domain that no other call uses.
 */
struct hmem_error *hmem_domain_close(struct hmem_domain *domain);

/**
 * Stores the counts of the domain's registration cache in `*counts`, whose field `size` the
 * program has set.
 *
 * The caller promises:
 * `domain` is null, or a domain that is not closed during the call. `counts` is null, or a
 * structure as large as its field `size` says.
 */
struct hmem_error *hmem_cache_statistics(const struct hmem_domain *domain,
                                         struct hmem_cache_counts *counts);

/**
 * Removes the cached regions that overlap the memory. Call it after a change of the memory that no
 * monitor detects. Regions in use are deregistered when their last use ends.
 *
 * The caller promises:
 * `domain` is null, or a domain that is not closed during the call.
 */
struct hmem_error *hmem_cache_invalidate(const struct hmem_domain *domain,
                                         uint64_t address,
                                         uint64_t length);

/**
 * Deregisters all cached regions that are not in use.
 *
 * The caller promises:
 * `domain` is null, or a domain that is not closed during the call.
 */
struct hmem_error *hmem_cache_evict_idle(const struct hmem_domain *domain);

/**
 * Returns the kind of an error, or HMEM_KIND_NONE for null.
 *
 * The caller promises:
 * `error` is null or an error of this library that was not freed.
 */
enum hmem_kind hmem_error_kind(const struct hmem_error *error);

/**
 * Returns libfabric's errno for the kind as a positive number (EINVAL for an invalid argument,
 * say), or 0 for null.
 *
 * The caller promises:
 * `error` is null or an error of this library that was not freed.
 */
int hmem_error_errno(const struct hmem_error *error);

/**
 * Returns the failed operation and the reason on one line, or null for null. The text lives as
 * long as the error.
 *
 * The caller promises:
 * `error` is null or an error of this library that was not freed.
 */
const char *hmem_error_message(const struct hmem_error *error);

/**
 * Returns the step that solves the problem, or null if none is known. The text lives as long as
 * the error.
 *
 * The caller promises:
 * `error` is null or an error of this library that was not freed.
 */
const char *hmem_error_remedy(const struct hmem_error *error);

/**
 * Returns all facts of an error as a JSON object, or null for null. If a registration failed, the
 * member `attempts` is the decision: each path that was tried, its error, cause and remedy. The
 * text lives as long as the error.
 *
 * The caller promises:
 * `error` is null or an error of this library that was not freed.
 */
const char *hmem_error_json(const struct hmem_error *error);

/**
 * Frees an error. Does nothing for null.
 *
 * The caller promises:
 * `error` is null or an error of this library that was not freed.
 */
void hmem_error_free(struct hmem_error *error);

/**
 * Frees a string that a function of this library returned through a `char **`. Does nothing for
 * null.
 *
 * The caller promises:
 * `text` is null or such a string, and was not freed.
 */
void hmem_string_free(char *text);

/**
 * Returns the version of the library, such as `0.1.0`. The text is never freed.
 */
const char *hmem_version(void);

/**
 * Opens the library: starts libibverbs, and the ifaces of all vendors whose libraries are
 * installed. An absent vendor library or device is no error: `hmem_info` has the reason.
 *
 * Environment variables give the settings that are not in `attr`. A null `attr` means no flags.
 *
 * The caller promises:
 * `attr` is null, or a structure as large as its field `size` says. `library` is null or writable.
 */
struct hmem_error *hmem_open(const struct hmem_open_attr *attr, struct hmem_library **library);

/**
 * Closes the library. Open domains stay usable. Does nothing for null. Fails only if `library` is
 * not an open library.
 *
 * The caller promises:
 * `library` is null, or a library that no other call uses.
 */
struct hmem_error *hmem_close(struct hmem_library *library);

/**
 * Returns the name of a NIC, such as `verbs/mlx5_0`, or null if `index` is not less than the
 * number of NICs. Hardware comes after software. The text lives as long as the library is open.
 *
 * The caller promises:
 * `library` is null, or a library that is not closed during the call.
 */
const char *hmem_nic_name(const struct hmem_library *library, size_t index);

/**
 * Returns the JSON document of `hmem info --json`: the ifaces, devices and NICs, the paths between
 * them, and the reason for each iface or NIC that is unavailable. Without HMEM_OPEN_SOFTWARE, the
 * document has no simulated devices and no loopback NICs. The command prints these too.
 *
 * `nic` selects a provider or a NIC. Null means all.
 *
 * The caller promises:
 * `library` is null, or a library that is not closed during the call. `nic` is null or a string.
 * `json` is null or writable.
 */
struct hmem_error *hmem_info(const struct hmem_library *library, const char *nic, char **json);

/**
 * Returns the JSON document of `hmem explain --json`: the path of a registration for each pair of
 * memory and NIC, with each refusal and its remedy. The call registers memory and deregisters it.
 *
 * `passed` becomes true if each pair has a path. It may be null.
 *
 * The caller promises:
 * `library` is null, or a library that is not closed during the call. `selection` is null, or a
 * structure as large as its field `size` says. `json` and `passed` are null or writable.
 */
struct hmem_error *hmem_explain(const struct hmem_library *library,
                                const struct hmem_selection *selection,
                                char **json,
                                bool *passed);

/**
 * Returns the JSON document of `hmem check --json`: moves bytes over every selected pair of memory
 * and NIC, and compares them. The call takes seconds.
 *
 * `passed` becomes true if everything was verified. It may be null.
 *
 * The caller promises:
 * `library` is null, or a library that is not closed during the call. `selection` is null, or a
 * structure as large as its field `size` says. `json` and `passed` are null or writable.
 */
struct hmem_error *hmem_check(const struct hmem_library *library,
                              const struct hmem_selection *selection,
                              char **json,
                              bool *passed);

/**
 * Registers `length` bytes of host or device memory at `address`.
 *
 * `access` has HMEM_ rights. Null for `attr` means the default settings. The call returns when the
 * NIC may use the memory.
 *
 * The caller promises:
 * - `domain` is null, or a domain that is not closed during the call. `attr` is null, or a
 *   structure as large as its field `size` says. `region` is null or writable.
 * - The memory stays allocated until the region is closed. With `attr->release`, the memory stays
 *   allocated until that function is called.
 * - If `access` has a right to write, the memory is writable.
 */
struct hmem_error *hmem_register(const struct hmem_domain *domain,
                                 uint64_t address,
                                 uint64_t length,
                                 uint64_t access,
                                 const struct hmem_register_attr *attr,
                                 struct hmem_region **region);

/**
 * Registers `length` bytes from `offset` of the dma-buf `fd`.
 *
 * The library duplicates the descriptor, so the program may close its own after the call. The call
 * fails if `fd` is not an open descriptor.
 *
 * The caller promises:
 * - `domain` is null, or a domain that is not closed during the call. `attr` is null, or a
 *   structure as large as its field `size` says. `region` is null or writable.
 * - The memory of the dma-buf is not used for another purpose until the region is closed.
 */
struct hmem_error *hmem_register_dmabuf(const struct hmem_domain *domain,
                                        int fd,
                                        uint64_t offset,
                                        uint64_t length,
                                        uint64_t access,
                                        const struct hmem_register_attr *attr,
                                        struct hmem_region **region);

/**
 * Returns a region that covers the memory from the domain's registration cache, and registers the
 * memory if no cached region covers it. The domain was opened with HMEM_DOMAIN_CACHE.
 *
 * `hmem_region_close` gives the region back to the cache. Until then the cache does not deregister
 * it.
 *
 * The caller promises:
 * - `domain` is null, or a domain that is not closed during the call. `region` is null or
 *   writable.
 * - The memory stays allocated until the region is closed. If the program frees the memory later
 *   without unmapping it, peers that have the key can access the memory until the region leaves
 *   the cache.
 */
struct hmem_error *hmem_cache_get(const struct hmem_domain *domain,
                                  uint64_t address,
                                  uint64_t length,
                                  uint64_t access,
                                  struct hmem_region **region);

/**
 * Deregisters a region, or gives a cached region back to the cache. Does nothing for null.
 *
 * Fails with HMEM_KIND_BUSY while a window is bound to the region, and the region then stays
 * registered. A cached region is given back all the same, and stays registered until the window is
 * unbound.
 *
 * The caller promises:
 * `region` is null, or a region that no other call uses. No transfer uses its keys.
 */
struct hmem_error *hmem_region_close(struct hmem_region *region);

/**
 * Returns the decision about the path from the NIC to the memory, as a JSON object: `path`,
 * `reason`, and the `attempts` with each refusal, its cause and remedy.
 *
 * The caller promises:
 * `region` is null, or a region that is not closed during the call. `json` is null or writable.
 */
struct hmem_error *hmem_region_decision(const struct hmem_region *region, char **json);

/**
 * Stores the local key of a region in `*key`: the lkey of verbs, or the descriptor of libfabric
 * as a number.
 *
 * The caller promises:
 * `region` is null, or a region that is not closed during the call. `key` is null or writable.
 */
struct hmem_error *hmem_region_local_key(const struct hmem_region *region, uint64_t *key);

/**
 * Stores the number of the remote key of a region in `*key`: the rkey of verbs, for example.
 * Stores the address that peers use for the first byte in `*base`. `base` may be null.
 *
 * Fails with HMEM_KIND_UNSUPPORTED for a region with several keys. `hmem_region_key_bytes` returns
 * all keys.
 *
 * The caller promises:
 * `region` is null, or a region that is not closed during the call. `key` and `base` are null or
 * writable.
 */
struct hmem_error *hmem_region_remote_key(const struct hmem_region *region,
                                          uint64_t *key,
                                          uint64_t *base);

/**
 * Copies the remote key of a region to `buffer`, for a peer that uses hmem. The copy includes the
 * address range and a checksum.
 *
 * `*length` is the size of the buffer, and becomes the number of bytes. With a null or short
 * buffer the call fails with HMEM_KIND_TOO_SMALL, and `*length` is the necessary size.
 *
 * The caller promises:
 * `region` is null, or a region that is not closed during the call. `length` is null or writable.
 * `buffer` is null, or has `*length` writable bytes.
 */
struct hmem_error *hmem_region_key_bytes(const struct hmem_region *region,
                                         uint8_t *buffer,
                                         size_t *length);

/**
 * Copies the raw key of a region to `buffer`, as `fi_mr_raw_attr` does. `buffer` and `length` have
 * the rules of `hmem_region_key_bytes`. Stores the address that peers use for the first byte in
 * `*base`. `base` may be null.
 *
 * The caller promises:
 * `region` is null, or a region that is not closed during the call. `length` and `base` are null
 * or writable. `buffer` is null, or has `*length` writable bytes.
 */
struct hmem_error *hmem_region_raw_key(const struct hmem_region *region,
                                       uint8_t *buffer,
                                       size_t *length,
                                       uint64_t *base);

/**
 * Stores the keys for work requests of the program in `*key`, whose field `size` the program has
 * set. The region belongs to a verbs domain. A cached region may be larger than the range that the
 * program asked for.
 *
 * Fails with HMEM_KIND_UNSUPPORTED for a region with several registrations, and for a staged
 * region, which has none.
 *
 * The caller promises:
 * `region` is null, or a region that is not closed during the call. `key` is null, or a structure
 * as large as its field `size` says.
 */
struct hmem_error *hmem_region_verbs_key(const struct hmem_region *region,
                                         struct hmem_verbs_key *key);

/**
 * Stores the keys for requests of the program in `*key`, whose field `size` the program has set.
 * The region belongs to a libfabric domain. A cached region may be larger than the range that the
 * program asked for.
 *
 * Fails with HMEM_KIND_UNSUPPORTED for a region with several registrations.
 *
 * The caller promises:
 * `region` is null, or a region that is not closed during the call. `key` is null, or a structure
 * as large as its field `size` says.
 */
struct hmem_error *hmem_region_fabric_key(const struct hmem_region *region,
                                          struct hmem_fabric_key *key);

/**
 * Allocates a memory window, which is not bound yet.
 *
 * The caller promises:
 * `domain` is null, or a domain that is not closed during the call. `window` is null or writable.
 */
struct hmem_error *hmem_window_alloc(const struct hmem_domain *domain, struct hmem_window **window);

/**
 * Binds a window to `length` bytes from `offset` of a region that has the right HMEM_MW_BIND. The
 * window gets a new key. Its old key becomes invalid.
 *
 * The caller promises:
 * `window` and `region` are null, or a window and a region that are not closed during the call.
 * The memory stays allocated until the window is unbound or closed.
 */
struct hmem_error *hmem_window_bind(const struct hmem_window *window,
                                    const struct hmem_region *region,
                                    uint64_t offset,
                                    uint64_t length,
                                    uint64_t access);

/**
 * Unbinds a window. Its key becomes invalid, and the window can be bound again.
 *
 * The caller promises:
 * `window` is null, or a window that is not closed during the call.
 */
struct hmem_error *hmem_window_unbind(const struct hmem_window *window);

/**
 * Stores the number of the key of a bound window in `*key`. Stores the address that peers use for
 * the first byte in `*base`. `base` may be null.
 *
 * The caller promises:
 * `window` is null, or a window that is not closed during the call. `key` and `base` are null or
 * writable.
 */
struct hmem_error *hmem_window_remote_key(const struct hmem_window *window,
                                          uint64_t *number,
                                          uint64_t *base);

/**
 * Copies the key of a bound window to `buffer`. `buffer` and `length` have the rules of
 * `hmem_region_key_bytes`.
 *
 * The caller promises:
 * `window` is null, or a window that is not closed during the call. `length` is null or writable.
 * `buffer` is null, or has `*length` writable bytes.
 */
struct hmem_error *hmem_window_key_bytes(const struct hmem_window *window,
                                         uint8_t *buffer,
                                         size_t *length);

/**
 * Unbinds and frees a window. Does nothing for null. After an error the window stays open.
 *
 * The caller promises:
 * `window` is null, or a window that no other call uses.
 */
struct hmem_error *hmem_window_close(struct hmem_window *window);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* HMEM_H */
