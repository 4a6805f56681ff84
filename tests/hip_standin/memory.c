// SPDX-License-Identifier: Apache-2.0
// Stand-in for libamdhip64.so: memory, copies, sharing between processes, virtual memory.
//
// Device memory is a memfd each, named with a random token, mapped shared. An IPC handle says (process, descriptor,
// token); opening one goes through /proc/<process>/fd/<descriptor> and compares the token in the file's name, so that
// memory that was freed, or a process that is gone, is noticed. No file is left behind.
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { POISON = 0xa5 }; // what new memory holds: never zeros, so that reading it uninitialised shows
#define FILE_NAME "hip-stand-in-"

typedef struct {
    unsigned long long word[2];
} token;

typedef struct {
    node node;
    uintptr_t base;
    size_t bytes; // as requested
    int kind, device, fd;
    unsigned flags;
    token token;       // device memory and opened IPC handles
    unsigned opened;   // how often an IPC handle was opened
    uint64_t physical; // mapped: handle of the memory behind it
    unsigned access;   // mapped: bit per device
} memory;

typedef struct {
    node node;
    size_t bytes;
    int device, fd, handle_type;
    bool held; // the handle is not released
    unsigned maps;
} physical;

typedef struct {
    node node;
    uintptr_t base;
    size_t bytes;
} reservation;

static node *memories, *physicals, *reservations;
static uint64_t ranges_version;
static size_t used[MAX_DEVICES];

static size_t page_up(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

static void *pointer(uintptr_t address) { return (void *)address; }

// ---------------------------------------------------------------------------------------------- ranges

static memory *memory_at(const void *address)
{
    for EACH (memory, m, memories)
        if ((uintptr_t)address - m->base < m->bytes)
            return m;
    return NULL;
}

static memory *memory_from(const void *base)
{
    memory *m = memory_at(base);
    return m != NULL && m->base == (uintptr_t)base ? m : NULL;
}

// Whether [address, address + bytes) is one allocation's, or mapped without a gap, and may be accessed.
static int check_range(const void *address, size_t bytes)
{
    for (uintptr_t at = (uintptr_t)address;;) {
        const memory *m = memory_at(pointer(at));
        if (m == NULL)
            return hipErrorInvalidValue;
        if (m->kind == STANDIN_MAPPED && m->access == 0)
            return hipErrorUnknown; // clr's answer
        size_t here = m->base + m->bytes - at;
        if (bytes <= here)
            return hipSuccess;
        if (m->kind != STANDIN_MAPPED)
            return hipErrorInvalidValue;
        bytes -= here;
        at += here;
    }
}

size_t standin_ranges(standin_range *out, size_t max)
{
    size_t count = 0;
    lock();
    for EACH (memory, m, memories)
        if (m->kind != STANDIN_MAPPED || m->access != 0) {
            if (count < max)
                out[count] = (standin_range){m->base, m->bytes, m->kind};
            count++;
        }
    unlock();
    return count;
}

uint64_t standin_ranges_version(void)
{
    lock();
    uint64_t version = ranges_version;
    unlock();
    return version;
}

static memory *memory_new(uintptr_t base, size_t bytes, int kind, int device)
{
    memory *m = node_new(&memories, sizeof *m, MEMORY);
    if (m == NULL)
        return NULL;
    m->base = base;
    m->bytes = bytes;
    m->kind = kind;
    m->device = device;
    m->fd = -1;
    ranges_version++;
    return m;
}

static void memory_forget(memory *m)
{
    node_free(&memories, m);
    ranges_version++;
}

static void memory_release(memory *m)
{
    if (m->kind != STANDIN_REGISTERED)
        munmap(pointer(m->base), page_up(m->bytes));
    if (m->fd >= 0)
        close(m->fd);
    if (m->kind == STANDIN_DEVICE)
        used[m->device] -= page_up(m->bytes);
    memory_forget(m);
}

// ---------------------------------------------------------------------------------------------- allocation

// A file of this size, mapped at `base`; its descriptor or -1.
static int file_new(size_t bytes, token *mark, void **base)
{
    char name[64];
    if (getrandom(mark, sizeof *mark, 0) != sizeof *mark)
        return -1;
    snprintf(name, sizeof name, FILE_NAME "%016llx%016llx", mark->word[0], mark->word[1]);
    int fd = memfd_create(name, MFD_CLOEXEC);
    // fallocate, not ftruncate: too little memory has to be an error here, not a bus error later.
    if (fd >= 0 && fallocate(fd, 0, 0, (off_t)bytes) == 0)
        *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || *base != MAP_FAILED)
        return fd;
    close(fd);
    return -1;
}

// The token in the name of the file behind a descriptor of this process.
static bool file_token(int fd, token *mark)
{
    char path[64], name[128] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return readlink(path, name, sizeof name - 1) > 0 &&
           sscanf(name, "/memfd:" FILE_NAME "%16llx%16llx", &mark->word[0], &mark->word[1]) == 2;
}

static int allocate(void **out, size_t bytes, int kind, int device, unsigned flags)
{
    if (out == NULL)
        return hipErrorInvalidValue;
    *out = NULL;
    if (bytes == 0)
        return hipSuccess;
    bool on_device = kind == STANDIN_DEVICE;
    size_t whole = page_up(bytes);
    if (bytes > DEVICE_BYTES || (on_device && whole > DEVICE_BYTES - used[device]))
        return hipErrorOutOfMemory;
    memory *m = memory_new(0, bytes, kind, device);
    if (m == NULL)
        return hipErrorOutOfMemory;
    void *base = MAP_FAILED;
    if (on_device)
        m->fd = file_new(whole, &m->token, &base);
    else
        base = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        memory_forget(m);
        return hipErrorOutOfMemory;
    }
    memset(base, POISON, whole);
    m->base = (uintptr_t)base;
    m->flags = flags;
    if (on_device)
        used[device] += whole;
    *out = base;
    return hipSuccess;
}

API hipMalloc(void **out, size_t bytes)
{
    ENTER(device);
    return api_leave(allocate(out, bytes, STANDIN_DEVICE, device, 0));
}

// Fine-grained (1) and uncached (3) memory are ordinary memory here; signal memory (2) and the rest are refused.
API hipExtMallocWithFlags(void **out, size_t bytes, unsigned flags)
{
    ENTER(device);
    REFUSE(flags != 0 && flags != 1 && flags != 3, hipErrorInvalidValue);
    return api_leave(allocate(out, bytes, STANDIN_DEVICE, device, flags));
}

API hipHostMalloc(void **out, size_t bytes, unsigned flags)
{
    ENTER(device);
    REFUSE(flags >> 30 == 3, hipErrorInvalidValue); // coherent, and not
    return api_leave(allocate(out, bytes, STANDIN_HOST, device, flags));
}

static bool host_memory(const memory *m) { return m->kind == STANDIN_HOST || m->kind == STANDIN_REGISTERED; }

// Gives back what starts at `base` if its kind is in the set `kinds`. Waits first: for the owner's work, and for
// every device's when it is the host's memory.
static int memory_end(void *base, unsigned kinds, int otherwise)
{
    memory *m = memory_from(base);
    if (m == NULL || !(kinds >> m->kind & 1))
        return otherwise;
    uint64_t id = m->node.id;
    int error = drain_device(host_memory(m) ? ANY_DEVICE : m->device);
    if (error != hipSuccess)
        return error;
    m = node_find(memories, pointer(id)); // another thread may have been faster
    if (m == NULL)
        return otherwise;
    if (m->opened > 1)
        m->opened--;
    else
        memory_release(m);
    return hipSuccess;
}

API hipFree(void *base)
{
    ENTER(device);
    REFUSE(base == NULL, hipSuccess);
    return api_leave(memory_end(base, 1u << STANDIN_DEVICE | 1u << STANDIN_HOST, hipErrorInvalidValue));
}

API hipHostFree(void *base) { return hipFree(base); }

// Whether the process has mapped all pages of a range.
static bool mapped_in_process(uintptr_t first, size_t bytes)
{
    enum { PAGES = 4096 };
    unsigned char resident[PAGES];
    size_t page = (size_t)sysconf(_SC_PAGESIZE), here;
    for (uintptr_t at = first / page * page, end = first + bytes; at < end; at += here) {
        here = end - at < PAGES * page ? end - at : PAGES * page;
        if (mincore(pointer(at), here, resident) != 0)
            return false;
    }
    return true;
}

API hipHostRegister(void *base, size_t bytes, unsigned flags)
{
    uintptr_t first = (uintptr_t)base;
    ENTER(device);
    REFUSE(base == NULL || bytes == 0 || flags > 15 || first + bytes < first, hipErrorInvalidValue);
    for EACH (memory, m, memories)
        REFUSE(m->base < first + bytes && first < m->base + m->bytes, hipErrorHostMemoryAlreadyRegistered);
    REFUSE(!mapped_in_process(first, bytes), hipErrorInvalidValue);
    memory *m = memory_new(first, bytes, STANDIN_REGISTERED, device);
    REFUSE(m == NULL, hipErrorOutOfMemory);
    m->flags = flags;
    return api_leave(hipSuccess);
}

API hipHostUnregister(void *base)
{
    ENTER(device);
    REFUSE(base == NULL, hipErrorInvalidValue);
    return api_leave(memory_end(base, 1u << STANDIN_REGISTERED, hipErrorHostMemoryNotRegistered));
}

// hipDeviceReset: what the device owns, not what it maps or what is the host's.
void memory_discard(int device)
{
    for (node *item = memories, *next; item != NULL; item = next) {
        memory *m = (memory *)item;
        next = item->next;
        if (m->device == device && (m->kind == STANDIN_DEVICE || m->kind == STANDIN_IPC))
            memory_release(m);
    }
}

// ---------------------------------------------------------------------------------------------- queries

API hipHostGetDevicePointer(void **out, void *host, unsigned flags)
{
    ENTER(device);
    REFUSE(out == NULL || flags != 0 || memory_at(host) == NULL, hipErrorInvalidValue);
    *out = host;
    return api_leave(hipSuccess);
}

API hipMemGetAddressRange(void **base, size_t *bytes, void *address)
{
    ENTER(device);
    const memory *m = memory_at(address);
    REFUSE(m == NULL, hipErrorNotFound);
    if (base != NULL)
        *base = pointer(m->base);
    if (bytes != NULL)
        *bytes = m->bytes;
    return api_leave(hipSuccess);
}

API hipMemGetInfo(size_t *available, size_t *total)
{
    ENTER(device);
    if (available != NULL)
        *available = DEVICE_BYTES - used[device];
    if (total != NULL)
        *total = DEVICE_BYTES;
    return api_leave(hipSuccess);
}

typedef struct {
    int type, device;
    const void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
} pointer_attributes; // hipPointerAttribute_t

API hipPointerGetAttributes(pointer_attributes *out, const void *address)
{
    enum { UNREGISTERED = 0, HOST = 1, DEVICE = 2, NO_DEVICE = -2 };
    ENTER(device);
    REFUSE(out == NULL, hipErrorInvalidValue);
    *out = (pointer_attributes){UNREGISTERED, NO_DEVICE, NULL, NULL, 0, 0};
    const memory *m = memory_at(address);
    if (m != NULL && host_memory(m))
        *out = (pointer_attributes){HOST, m->device, address, address, 0, m->flags};
    else if (m != NULL)
        *out = (pointer_attributes){DEVICE, m->device, address, NULL, 0, m->flags};
    return api_leave(hipSuccess);
}

// ---------------------------------------------------------------------------------------------- copies and fills

// Memory may have gone since the call, from under another device's stream; touching it would end the process.
bool copy_run(const copy_work *work)
{
    if ((work->dst_known && check_range(work->dst, work->bytes) != hipSuccess) ||
        (work->src_known && check_range(work->src, work->bytes) != hipSuccess))
        return false;
    memmove(work->dst, work->staged != NULL ? work->staged : work->src, work->bytes);
    return true;
}

bool fill_run(const fill_work *work)
{
    if (check_range(work->dst, work->width * work->count) != hipSuccess)
        return false;
    for (size_t i = 0; i < work->count; i++)
        memcpy((char *)work->dst + i * work->width, &work->value, work->width);
    return true;
}

// A copy in a stream's order. Host memory that is not registered: as a source it is read now, as a destination the
// copy is finished now (hipMemcpyAsync says it is synchronous then).
static int copy(void *dst, const void *src, size_t bytes, int kind, void *handle, bool wait)
{
    enum { HOST_TO_HOST = 0, DEFAULT = 4, WITHOUT_UNITS = 1024 };
    operation op = {.kind = COPY, .copy = {.dst = dst, .src = src, .bytes = bytes}};
    uint64_t stream;
    int on;
    ENTER(device);
    REFUSE((unsigned)kind > DEFAULT && kind != WITHOUT_UNITS, hipErrorInvalidMemcpyDirection);
    TRY(stream_resolve(handle, device, &stream, &on));
    REFUSE(bytes == 0, hipSuccess);
    REFUSE(dst == NULL || src == NULL, hipErrorInvalidValue);
    op.copy.dst_known = memory_at(dst) != NULL;
    op.copy.src_known = memory_at(src) != NULL;
    if (op.copy.src_known)
        TRY(check_range(src, bytes));
    if (op.copy.dst_known)
        TRY(check_range(dst, bytes));
    else
        REFUSE(!op.copy.src_known && kind != HOST_TO_HOST && kind != DEFAULT, hipErrorInvalidValue);
    wait = wait || !op.copy.dst_known;
    REFUSE(wait && in_callback, hipErrorIllegalState);
    if (!wait && !op.copy.src_known) {
        op.copy.staged = malloc(bytes);
        REFUSE(op.copy.staged == NULL, hipErrorOutOfMemory);
        memcpy(op.copy.staged, src, bytes);
    }
    int error = enqueue(stream, &op, NULL);
    if (error != hipSuccess)
        free(op.copy.staged);
    else if (wait)
        error = drain_stream(stream);
    return api_leave(error == hipSuccess && device_failed[on] ? hipErrorIllegalAddress : error);
}

API hipMemcpy(void *dst, const void *src, size_t bytes, int kind) { return copy(dst, src, bytes, kind, NULL, true); }

API hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *stream)
{
    return copy(dst, src, bytes, kind, stream, false);
}

static int fill(void *dst, unsigned value, size_t width, size_t count, void *handle, bool wait)
{
    uint64_t stream;
    int on;
    ENTER(device);
    TRY(stream_resolve(handle, device, &stream, &on));
    REFUSE(count == 0, hipSuccess);
    REFUSE(dst == NULL || count > DEVICE_BYTES, hipErrorInvalidValue);
    TRY(check_range(dst, width * count));
    REFUSE(wait && in_callback, hipErrorIllegalState);
    TRY(enqueue(stream, &(operation){.kind = FILL, .fill = {dst, width, count, value}}, NULL));
    if (wait)
        TRY(drain_stream(stream));
    return api_leave(device_failed[on] ? hipErrorIllegalAddress : hipSuccess);
}

API hipMemset(void *dst, int value, size_t bytes) { return fill(dst, (unsigned)value, 1, bytes, NULL, true); }

API hipMemsetAsync(void *dst, int value, size_t bytes, void *stream)
{
    return fill(dst, (unsigned)value, 1, bytes, stream, false);
}

API hipMemsetD8(void *dst, unsigned char value, size_t count) { return fill(dst, value, 1, count, NULL, true); }

API hipMemsetD32(void *dst, int value, size_t count) { return fill(dst, (unsigned)value, 4, count, NULL, true); }

// ---------------------------------------------------------------------------------------------- IPC

#define IPC_MAGIC 0x6e69646e61747348ull

typedef struct {
    uint64_t magic;
    int32_t process, fd, device, zero;
    uint64_t bytes;
    token token;
    uint64_t spare, checksum;
} ipc_handle;

_Static_assert(sizeof(ipc_handle) == 64, "hipIpcMemHandle_t has 64 bytes");

// FNV-1a over everything before the checksum.
static uint64_t ipc_checksum(const ipc_handle *handle)
{
    const unsigned char *bytes = (const unsigned char *)handle;
    uint64_t sum = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < offsetof(ipc_handle, checksum); i++)
        sum = (sum ^ bytes[i]) * 0x100000001b3ull;
    return sum;
}

API hipIpcGetMemHandle(ipc_handle *out, void *base)
{
    ENTER(device);
    const memory *m = memory_from(base);
    REFUSE(out == NULL || m == NULL || m->kind != STANDIN_DEVICE, hipErrorInvalidValue);
    *out = (ipc_handle){IPC_MAGIC, getpid(), m->fd, m->device, 0, m->bytes, m->token, 0, 0};
    out->checksum = ipc_checksum(out);
    return api_leave(hipSuccess);
}

// Opens the exporter's descriptor again; -1 unless the file behind it is the one that was exported.
static int ipc_file(const ipc_handle *handle)
{
    char path[64];
    token mark;
    struct stat state;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->process, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); // a pipe or a terminal may have the number now
    if (fd < 0)
        return -1;
    if (file_token(fd, &mark) && memcmp(&mark, &handle->token, sizeof mark) == 0 && fstat(fd, &state) == 0 &&
        (size_t)state.st_size == page_up(handle->bytes))
        return fd;
    close(fd);
    return -1;
}

API hipIpcOpenMemHandle(void **out, ipc_handle handle, unsigned flags)
{
    enum { LAZY_PEER_ACCESS = 1 };
    device_info info[MAX_DEVICES];
    ENTER(device);
    REFUSE(out == NULL || flags != LAZY_PEER_ACCESS, hipErrorInvalidValue);
    REFUSE(handle.magic != IPC_MAGIC || handle.checksum != ipc_checksum(&handle), hipErrorInvalidValue);
    REFUSE(handle.process == getpid(), hipErrorInvalidContext);
    REFUSE(handle.device >= devices_read(info), hipErrorInvalidValue);
    for EACH (memory, m, memories)
        if (m->kind == STANDIN_IPC && memcmp(&m->token, &handle.token, sizeof m->token) == 0) {
            m->opened++;
            *out = pointer(m->base);
            return api_leave(hipSuccess);
        }
    int fd = ipc_file(&handle);
    REFUSE(fd < 0, hipErrorInvalidHandle);
    void *base = mmap(NULL, page_up(handle.bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    memory *m = base != MAP_FAILED ? memory_new((uintptr_t)base, handle.bytes, STANDIN_IPC, device) : NULL;
    REFUSE(m == NULL, hipErrorOutOfMemory);
    m->token = handle.token;
    m->opened = 1;
    *out = base;
    return api_leave(hipSuccess);
}

API hipIpcCloseMemHandle(void *base)
{
    ENTER(device);
    return api_leave(memory_end(base, 1u << STANDIN_IPC, hipErrorInvalidValue));
}

// ---------------------------------------------------------------------------------------------- virtual memory

typedef struct {
    int type, device;
} location;

typedef struct {
    int type, handle_type;
    location location;
    void *windows;
    unsigned char flags[8];
} allocation_properties; // hipMemAllocationProp

typedef struct {
    location location;
    int access;
} access_request; // hipMemAccessDesc

_Static_assert(sizeof(allocation_properties) == 32 && sizeof(access_request) == 12, "layouts of hip-python");

enum { PINNED = 1, ON_DEVICE = 1, NO_HANDLE = 0, FILE_HANDLE = 1, NO_ACCESS = 0, READ_ONLY = 1, READ_WRITE = 3 };

static bool device_known(const location *where)
{
    device_info info[MAX_DEVICES];
    return where->type == ON_DEVICE && where->device >= 0 && where->device < devices_read(info);
}

static physical *physical_find(void *handle)
{
    physical *p = node_find(physicals, handle);
    return p != NULL && p->held ? p : NULL; // a mapping keeps the memory, not the handle
}

static void physical_release(physical *p)
{
    if (p->held || p->maps > 0)
        return;
    close(p->fd);
    if (p->device >= 0)
        used[p->device] -= p->bytes;
    node_free(&physicals, p);
}

API hipMemGetAllocationGranularity(size_t *out, const allocation_properties *wanted, int option)
{
    ENTER(device);
    REFUSE(out == NULL || wanted == NULL || wanted->type != PINNED, hipErrorInvalidValue);
    REFUSE((unsigned)option > 1 || !device_known(&wanted->location), hipErrorInvalidValue);
    *out = GRANULARITY;
    return api_leave(hipSuccess);
}

API hipMemAddressReserve(void **out, size_t bytes, size_t alignment, void *address, unsigned long long flags)
{
    (void)address; // a wish only
    ENTER(device);
    REFUSE(out == NULL || flags != 0 || bytes == 0 || bytes % GRANULARITY != 0, hipErrorInvalidValue);
    REFUSE((alignment & (alignment - 1)) != 0, hipErrorInvalidValue);
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    REFUSE(bytes + alignment < bytes, hipErrorOutOfMemory);
    char *map = mmap(NULL, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    reservation *r = map != MAP_FAILED ? node_new(&reservations, sizeof *r, RESERVATION) : NULL;
    REFUSE(r == NULL, hipErrorOutOfMemory);
    r->base = ((uintptr_t)map + alignment - 1) & ~(uintptr_t)(alignment - 1);
    r->bytes = bytes;
    size_t before = r->base - (uintptr_t)map;
    if (before > 0)
        munmap(map, before);
    munmap(pointer(r->base + bytes), alignment - before);
    *out = pointer(r->base);
    return api_leave(hipSuccess);
}

static bool overlaps_mapping(uintptr_t base, size_t bytes)
{
    for EACH (memory, m, memories)
        if (m->kind == STANDIN_MAPPED && m->base < base + bytes && base < m->base + m->bytes)
            return true;
    return false;
}

static reservation *reservation_of(uintptr_t base, size_t bytes)
{
    for EACH (reservation, r, reservations)
        if (base - r->base < r->bytes && bytes <= r->bytes - (base - r->base))
            return r;
    return NULL;
}

API hipMemAddressFree(void *base, size_t bytes)
{
    ENTER(device);
    reservation *r = reservation_of((uintptr_t)base, bytes);
    REFUSE(r == NULL || r->base != (uintptr_t)base || r->bytes != bytes, hipErrorInvalidValue);
    REFUSE(overlaps_mapping(r->base, bytes), hipErrorInvalidValue);
    munmap(base, bytes);
    node_free(&reservations, r);
    return api_leave(hipSuccess);
}

static int physical_new(void **out, int fd, size_t bytes, int device, int handle_type)
{
    physical *p = fd >= 0 ? node_new(&physicals, sizeof *p, PHYSICAL) : NULL;
    if (p == NULL)
        return hipErrorOutOfMemory;
    *p = (physical){p->node, bytes, device, fd, handle_type, true, 0};
    *out = HANDLE(p);
    return hipSuccess;
}

API hipMemCreate(void **out, size_t bytes, const allocation_properties *wanted, unsigned long long flags)
{
    ENTER(device);
    REFUSE(out == NULL || bytes == 0 || bytes % GRANULARITY != 0 || flags != 0, hipErrorInvalidValue);
    REFUSE(wanted == NULL || wanted->type != PINNED || wanted->location.type != ON_DEVICE, hipErrorInvalidValue);
    REFUSE(!device_known(&wanted->location), hipErrorInvalidDevice);
    REFUSE(wanted->handle_type != NO_HANDLE && wanted->handle_type != FILE_HANDLE, hipErrorNotSupported);
    int on = wanted->location.device;
    REFUSE(bytes > DEVICE_BYTES - used[on], hipErrorOutOfMemory);
    token mark;
    void *map = MAP_FAILED;
    int fd = file_new(bytes, &mark, &map);
    REFUSE(fd < 0, hipErrorOutOfMemory);
    memset(map, POISON, bytes);
    munmap(map, bytes);
    TRY(physical_new(out, fd, bytes, on, wanted->handle_type));
    used[on] += bytes;
    return api_leave(hipSuccess);
}

API hipMemRelease(void *handle)
{
    ENTER(device);
    physical *p = physical_find(handle);
    REFUSE(p == NULL, hipErrorInvalidValue);
    p->held = false;
    physical_release(p);
    return api_leave(hipSuccess);
}

API hipMemMap(void *base, size_t bytes, size_t offset, void *handle, unsigned long long flags)
{
    ENTER(device);
    physical *p = physical_find(handle);
    REFUSE(p == NULL || offset != 0 || flags != 0, hipErrorInvalidValue);
    REFUSE(bytes == 0 || bytes % GRANULARITY != 0 || (uintptr_t)base % GRANULARITY != 0, hipErrorInvalidValue);
    REFUSE(bytes > p->bytes || reservation_of((uintptr_t)base, bytes) == NULL, hipErrorInvalidValue);
    REFUSE(overlaps_mapping((uintptr_t)base, bytes), hipErrorInvalidValue);
    memory *m = memory_new((uintptr_t)base, bytes, STANDIN_MAPPED, p->device >= 0 ? p->device : device);
    REFUSE(m == NULL, hipErrorOutOfMemory);
    if (mmap(base, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, p->fd, 0) == MAP_FAILED) {
        memory_forget(m);
        return api_leave(hipErrorOutOfMemory);
    }
    m->physical = p->node.id;
    p->maps++;
    return api_leave(hipSuccess);
}

// Whether whole mappings, without a gap, make up the range.
static bool whole_mappings(const void *base, size_t bytes)
{
    const memory *m;
    for (uintptr_t at = (uintptr_t)base, end = at + bytes; at < end; at += m->bytes) {
        m = memory_from(pointer(at));
        if (m == NULL || m->kind != STANDIN_MAPPED || m->bytes > end - at)
            return false;
    }
    return bytes > 0;
}

// Read-only access is not supported: an interpreter's stray write would end the process instead of the kernel.
API hipMemSetAccess(void *base, size_t bytes, const access_request *requests, size_t count)
{
    ENTER(device);
    REFUSE(requests == NULL || count == 0 || !whole_mappings(base, bytes), hipErrorInvalidValue);
    for (size_t i = 0; i < count; i++) {
        REFUSE(!device_known(&requests[i].location), hipErrorInvalidValue);
        REFUSE(requests[i].access == READ_ONLY, hipErrorNotSupported);
        REFUSE(requests[i].access != NO_ACCESS && requests[i].access != READ_WRITE, hipErrorInvalidValue);
    }
    for (uintptr_t at = (uintptr_t)base; at < (uintptr_t)base + bytes;) {
        memory *m = memory_from(pointer(at));
        for (size_t i = 0; i < count; i++) {
            unsigned bit = 1u << requests[i].location.device;
            m->access = requests[i].access == READ_WRITE ? m->access | bit : m->access & ~bit;
        }
        mprotect(pointer(at), m->bytes, m->access != 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
        at += m->bytes;
    }
    ranges_version++;
    return api_leave(hipSuccess);
}

API hipMemUnmap(void *base, size_t bytes)
{
    ENTER(device);
    REFUSE(!whole_mappings(base, bytes), hipErrorInvalidValue);
    TRY(drain_device(ANY_DEVICE)); // any device may have access
    REFUSE(!whole_mappings(base, bytes), hipErrorInvalidValue); // another thread was faster
    mmap(base, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (uintptr_t at = (uintptr_t)base, end = at + bytes; at < end;) {
        memory *m = memory_from(pointer(at));
        physical *p = node_find(physicals, pointer(m->physical));
        at += m->bytes;
        memory_forget(m);
        p->maps--;
        physical_release(p);
    }
    return api_leave(hipSuccess);
}

API hipMemExportToShareableHandle(int *out, void *handle, int handle_type, unsigned long long flags)
{
    ENTER(device);
    const physical *p = physical_find(handle);
    REFUSE(out == NULL || p == NULL || flags != 0, hipErrorInvalidValue);
    REFUSE(handle_type != FILE_HANDLE || p->handle_type != handle_type, hipErrorInvalidValue);
    int fd = fcntl(p->fd, F_DUPFD_CLOEXEC, 3);
    REFUSE(fd < 0, hipErrorInvalidValue);
    *out = fd;
    return api_leave(hipSuccess);
}

// The descriptor comes by value, as since HIP 7.1 (before, by address). It stays the caller's.
API hipMemImportFromShareableHandle(void **out, void *shared, int handle_type)
{
    token mark;
    struct stat state;
    ENTER(device);
    REFUSE(out == NULL || shared == NULL || handle_type != FILE_HANDLE, hipErrorInvalidValue);
    REFUSE((uintptr_t)shared > INT32_MAX, hipErrorInvalidValue);
    int fd = (int)(uintptr_t)shared;
    REFUSE(!file_token(fd, &mark) || fstat(fd, &state) != 0, hipErrorInvalidValue);
    REFUSE((size_t)state.st_size % GRANULARITY != 0, hipErrorInvalidValue); // an allocation of hipMalloc
    fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    // Another's memory: it does not count as this device's.
    return api_leave(physical_new(out, fd, (size_t)state.st_size, ANY_DEVICE, FILE_HANDLE));
}
