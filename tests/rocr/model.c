/* A model GPU for AMD's own runtime: the library that HSA_MODEL_LIB names. The runtime itself
 * manages the memory of the GPU. This library executes copies: a thread for each queue executes the
 * linear copies of SDMA engines, and the kernels by which the runtime copies within one GPU. It
 * must not run other kernels, since it would take their arguments for those of a copy.
 *
 * HSA_MODEL_TOPOLOGY names the folder that describes the GPU, which tests/rocr/fetch writes. The
 * runtime asks for the table below, in version 0.4 of the interface. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void set_event_fn(void *data, unsigned event);

struct model {
    char *aperture; /* where address 0 of the GPU is */
    set_event_fn *set_event;
    void *set_event_data;
};

struct queue_info {
    uint64_t ring, write_pointer, read_pointer; /* addresses of the GPU */
    uint64_t *doorbell;
    uint32_t ring_bytes, type;
};

struct queue {
    struct model *model;
    struct queue_info info;
    pthread_t thread;
    atomic_bool stop;
};

enum { NOP = 0, COPY = 1, FENCE = 5, TRAP = 6, POLL = 8, ATOMIC = 10 };

static void *at(struct queue *queue, uint32_t low, uint32_t high) {
    return queue->model->aperture + ((uint64_t)high << 32 | low);
}

static void rest(void) {
    nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
}

/* Executes one SDMA packet. Returns its length in words. */
static unsigned execute(struct queue *queue, const uint32_t *word) {
    switch (word[0] & 0xff) {
    case NOP:
        return 1 + (word[0] >> 16 & 0x3fff);
    case COPY:
        if (word[0] >> 8 & 0xff)
            break;
        memcpy(at(queue, word[5], word[6]), at(queue, word[3], word[4]),
               (size_t)(word[1] & 0x3fffffff) + 1);
        return 7;
    case FENCE:
        atomic_store((_Atomic uint32_t *)at(queue, word[1], word[2]), word[3]);
        return 4;
    case TRAP:
        queue->model->set_event(queue->model->set_event_data, word[1] & 0x0fffffff);
        return 2;
    case POLL: /* bit 31: memory, and not a register */
        while (word[0] >> 31 && !atomic_load(&queue->stop) &&
               (atomic_load((_Atomic uint32_t *)at(queue, word[1], word[2])) & word[4]) != word[3])
            rest();
        return 6;
    case ATOMIC:
        atomic_fetch_add((_Atomic uint64_t *)at(queue, word[1], word[2]),
                         (uint64_t)word[4] << 32 | word[3]);
        return 8;
    }
    fprintf(stderr, "model: packet %08x is not modelled\n", word[0]);
    abort();
}

/* Completes a packet of a kernel queue: decrements its signal, and wakes the waiting threads. */
static void complete(struct queue *queue, uint64_t handle) {
    if (!handle)
        return;
    char *signal = queue->model->aperture + handle; /* amd_signal_t */
    atomic_fetch_sub((_Atomic int64_t *)(signal + 8), 1);
    if (*(uint64_t *)(signal + 16))
        queue->model->set_event(queue->model->set_event_data, *(uint32_t *)(signal + 24));
}

/* Executes one packet of a kernel queue. */
static void dispatch(struct queue *queue, const uint64_t *packet, unsigned type) {
    char *aperture = queue->model->aperture;
    if (type == 2) {
        const uint64_t *arguments = (uint64_t *)(aperture + packet[5]);
        uint64_t from = arguments[0], to = arguments[1];
        /* One kernel copies ranges that are equally aligned in a word, and another one all
         * others. */
        uint64_t end = (from & 3) == (to & 3) ? arguments[8] : arguments[4];
        memcpy(aperture + to, aperture + from, end - from);
    } else if (type == 3) {
        for (int i = 1; i <= 5; i++)
            while (packet[i] && !atomic_load(&queue->stop) &&
                   atomic_load((_Atomic int64_t *)(aperture + packet[i] + 8)))
                rest();
    } else {
        fprintf(stderr, "model: a packet of type %u is not modelled\n", type);
        abort();
    }
    complete(queue, packet[7]);
}

static void *run_kernels(void *argument) {
    struct queue *queue = argument;
    struct queue_info *info = &queue->info;
    _Atomic uint64_t *read = at(queue, (uint32_t)info->read_pointer, info->read_pointer >> 32);
    char *ring = at(queue, (uint32_t)info->ring, info->ring >> 32);
    while (!atomic_load(&queue->stop)) {
        uint64_t done = atomic_load(read);
        char *packet = ring + done * 64 % info->ring_bytes;
        unsigned type = atomic_load((_Atomic uint16_t *)packet) & 0xff;
        if (type == 1) { /* not written yet */
            rest();
            continue;
        }
        dispatch(queue, (uint64_t *)packet, type);
        atomic_store((_Atomic uint16_t *)packet, 1);
        atomic_store(read, done + 1);
    }
    return NULL;
}

static void *run_copies(void *argument) {
    struct queue *queue = argument;
    struct queue_info *info = &queue->info;
    _Atomic uint64_t *written = at(queue, (uint32_t)info->write_pointer, info->write_pointer >> 32);
    _Atomic uint64_t *read = at(queue, (uint32_t)info->read_pointer, info->read_pointer >> 32);
    char *ring = at(queue, (uint32_t)info->ring, info->ring >> 32);
    uint64_t done = atomic_load(read);
    while (!atomic_load(&queue->stop)) {
        if (atomic_load(written) == done) {
            rest();
            continue;
        }
        /* A packet never crosses the end of the ring. */
        done += 4 * execute(queue, (uint32_t *)(ring + done % info->ring_bytes));
        atomic_store(read, done);
    }
    return NULL;
}

static struct model *create(void) {
    return calloc(1, sizeof(struct model));
}

static void destroy(struct model *model) {
    free(model);
}

static void set_aperture(struct model *model, void *base, uint64_t size) {
    (void)size;
    model->aperture = base;
}

static void allocated(struct model *model, void *base, uint64_t size, uint32_t flags) {
    (void)model, (void)base, (void)size, (void)flags;
}

static void freed(struct model *model, void *base, uint64_t size) {
    (void)model, (void)base, (void)size;
}

static void set_callback(struct model *model, void *callback, void *data) {
    (void)model, (void)callback, (void)data;
}

static void set_set_event(struct model *model, set_event_fn *set_event, void *data) {
    model->set_event = set_event;
    model->set_event_data = data;
}

static struct queue *register_queue(struct model *model, struct queue_info *info) {
    struct queue *queue = calloc(1, sizeof *queue);
    queue->model = model;
    queue->info = *info;
    if (pthread_create(&queue->thread, NULL, info->type == 1 ? run_copies : run_kernels, queue))
        abort();
    return queue;
}

static void destroy_queue(struct model *model, struct queue *queue) {
    (void)model;
    atomic_store(&queue->stop, 1);
    pthread_join(queue->thread, NULL);
    free(queue);
}

struct functions {
    uint32_t major, minor;
    struct model *(*create)(void);
    void (*destroy)(struct model *);
    void (*set_aperture)(struct model *, void *, uint64_t);
    void (*allocated)(struct model *, void *, uint64_t, uint32_t);
    void (*freed)(struct model *, void *, uint64_t);
    void (*set_notify_event)(struct model *, void *, void *);
    void (*set_wait_event)(struct model *, void *, void *);
    struct queue *(*register_queue)(struct model *, struct queue_info *);
    void (*set_set_event)(struct model *, set_event_fn *, void *);
    void (*destroy_queue)(struct model *, struct queue *);
};

const struct functions *get_hsakmt_model_functions(void) {
    static const struct functions functions = {
        0, 4, create, destroy, set_aperture, allocated, freed, set_callback, set_callback,
        register_queue, set_set_event, destroy_queue,
    };
    return &functions;
}
