// SPDX-License-Identifier: Apache-2.0
// A stand-in for AMD's HIP runtime, for tests on machines without ROCm. It is not AMD's library and no GPU is
// behind it: memory is the host's, and kernels go to an interpreter (standin.h).
//
// This file: state that all files share, errors, devices. memory.c, streams.c and modules.c hold the rest.
// Devices come from the environment variable BLOCKPICK_STANDIN_DEVICES, a comma list of `gfx942` or `gfx942:4`
// (compute units), read at every call. Error numbers follow the public sources of ROCm's clr (hipamd).
#include "internal.h"

#include <stdio.h>

standin_interpreter interpreter;
bool device_failed[MAX_DEVICES];
_Thread_local bool in_callback;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t baton = PTHREAD_COND_INITIALIZER;
static uint64_t tickets, serving, last_id;
static unsigned peers[MAX_DEVICES]; // bit p of peers[d]: d may access p
static _Thread_local int current_device, last_error;

void lock(void) { pthread_mutex_lock(&mutex); }

void unlock(void) { pthread_mutex_unlock(&mutex); }

// In order of arrival, so that a thread that waits for a long kernel cannot shut the others out.
void baton_take(void)
{
    uint64_t mine = tickets++;
    while (serving != mine)
        pthread_cond_wait(&baton, &mutex);
}

void baton_drop(void)
{
    serving++;
    pthread_cond_broadcast(&baton);
}

// ---------------------------------------------------------------------------------------------- handles

// Appended, so that a list is in order of creation.
void *node_new(node **list, size_t bytes, int kind)
{
    node *item = calloc(1, bytes);
    if (item == NULL)
        return NULL;
    item->id = (uint64_t)kind << 48 | ++last_id;
    while (*list != NULL)
        list = &(*list)->next;
    *list = item;
    return item;
}

void *node_find(node *list, const void *handle)
{
    while (list != NULL && list->id != (uintptr_t)handle)
        list = list->next;
    return list;
}

void node_free(node **list, void *object)
{
    while (*list != object)
        list = &(*list)->next;
    *list = ((node *)object)->next;
    free(object);
}

// ---------------------------------------------------------------------------------------------- errors

int api_enter(int *device)
{
    device_info info[MAX_DEVICES];
    lock();
    int count = devices_read(info);
    *device = current_device;
    if (count <= 0)
        return count < 0 ? hipErrorNotInitialized : hipErrorNoDevice;
    if (current_device >= count) // the list became shorter
        return hipErrorInvalidDevice;
    return device_failed[current_device] ? hipErrorIllegalAddress : hipSuccess;
}

int api_leave(int error)
{
    unlock();
    if (error != hipSuccess && error != hipErrorNotReady)
        last_error = error;
    return error;
}

API hipGetLastError(void)
{
    int device, state = api_enter(&device);
    int error = state == hipErrorIllegalAddress ? state : last_error;
    unlock();
    last_error = hipSuccess;
    return error;
}

API hipPeekAtLastError(void)
{
    int device, state = api_enter(&device);
    unlock();
    return state == hipErrorIllegalAddress ? state : last_error;
}

#define HIP_ERROR_CASE(name, number, text)                                                                             \
    case number:                                                                                                       \
        return NAME_OR_TEXT(#name, "stand-in: " text);

const char *hipGetErrorName(int error)
{
    switch (error) {
#define NAME_OR_TEXT(name, text) name
        HIP_ERRORS(HIP_ERROR_CASE)
#undef NAME_OR_TEXT
    }
    return "hipErrorUnknown";
}

const char *hipGetErrorString(int error)
{
    switch (error) {
#define NAME_OR_TEXT(name, text) text
        HIP_ERRORS(HIP_ERROR_CASE)
#undef NAME_OR_TEXT
    }
    return "stand-in: unknown error";
}

int callback_error(int error, uint64_t id)
{
    bool unknown = strcmp(hipGetErrorName(error), "hipErrorUnknown") == 0;
    return unknown || (error == hipSuccess && id == 0) ? hipErrorUnknown : error;
}

// ---------------------------------------------------------------------------------------------- interpreter

void standin_install(const standin_interpreter *callbacks)
{
    lock();
    if (!in_callback)
        baton_take();
    interpreter = callbacks != NULL ? *callbacks : (standin_interpreter){0};
    if (!in_callback)
        baton_drop();
    unlock();
}

void standin_reset(void)
{
    if (in_callback)
        return;
    lock();
    discard_device(ANY_DEVICE);
    memset(device_failed, 0, sizeof device_failed);
    last_error = hipSuccess;
    unlock();
}

// ---------------------------------------------------------------------------------------------- devices

int devices_read(device_info out[MAX_DEVICES])
{
    const char *text = getenv("BLOCKPICK_STANDIN_DEVICES");
    if (text == NULL || *text == '\0')
        return 0;
    for (int count = 0; count < MAX_DEVICES; text++) {
        device_info *info = &out[count++];
        bool small = strncmp(text, "gfx942", 6) == 0;
        if (!small && strncmp(text, "gfx950", 6) != 0)
            return -1;
        memcpy(info->arch, text, 6);
        info->arch[6] = '\0';
        info->shared_bytes = small ? 64 << 10 : 160 << 10;
        info->units = 4;
        text += 6;
        if (*text == ':') {
            char *end;
            long units = strtol(text + 1, &end, 10);
            if (end == text + 1 || units < 1 || units > 1024)
                return -1;
            info->units = (int)units;
            text = end;
        }
        if (*text == '\0')
            return count;
        if (*text != ',')
            return -1;
    }
    return -1;
}

// hipDeviceProp_tR0600 as hip-python reads it; what this library leaves at zero is lumped together.
typedef struct {
    char name[256];
    char uuid[16], luid[8];
    unsigned luid_mask;
    size_t total_bytes, shared_bytes;
    int registers, wave_threads;
    size_t pitch;
    int block_threads, block_size[3], grid_size[3], clock;
    size_t constant_bytes;
    int major, minor;
    size_t texture_alignment[2];
    int overlap, units, timeout, integrated, can_map_host, compute_mode;
    int textures[26], surfaces[14];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, copy_engines, unified_addressing;
    int memory_clock, bus_width, cache_bytes, persisting_bytes, unit_threads, priorities, global_l1, local_l1;
    size_t unit_shared_bytes;
    int unit_registers, managed, boards[2], host_atomics, double_ratio;
    int pageable_access, concurrent_managed, preemption, registered_host_pointer, cooperative[2];
    size_t shared_bytes_optin;
    int host_page_tables, direct_managed, unit_blocks, policy_window;
    size_t reserved_shared_bytes;
    int can_register_host, sparse_arrays, read_only_register, semaphores, memory_pools, rdma, rdma_flags[2];
    unsigned pool_handles;
    int deferred_arrays, ipc_events, clusters, function_pointers, reserved[63 + 32];
    char arch[256];
    size_t max_unit_shared_bytes;
    int instruction_clock;
    unsigned features;
    void *flush_registers[2];
    int cooperative_unmatched[4], large_bar, revision;
} properties;

_Static_assert(sizeof(properties) == 1472, "hipDeviceProp_tR0600 has 1472 bytes");
_Static_assert(offsetof(properties, arch) == 1160, "gcnArchName is elsewhere");

static void describe(properties *p, int index, const device_info *info)
{
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "LLVM-IR interpreter, not a GPU (%s)", info->arch);
    snprintf(p->arch, sizeof p->arch, "%s:sramecc+:xnack-", info->arch);
    snprintf(p->uuid, sizeof p->uuid, "stand-in-%d", index);
    p->total_bytes = DEVICE_BYTES;
    p->shared_bytes = p->shared_bytes_optin = p->max_unit_shared_bytes = info->shared_bytes;
    p->unit_shared_bytes = info->shared_bytes * (size_t)info->units; // as clr computes it
    p->registers = p->unit_registers = 65536;
    p->wave_threads = WAVE_THREADS;
    p->block_threads = MAX_THREADS;
    for (int i = 0; i < 3; i++)
        p->block_size[i] = MAX_THREADS;
    p->grid_size[0] = 2147483647;
    p->grid_size[1] = p->grid_size[2] = MAX_GRID_YZ;
    p->major = 9;
    p->minor = info->arch[4] - '0';
    p->units = info->units;
    p->unit_threads = 2048;
    p->can_map_host = p->concurrent_kernels = p->unified_addressing = p->registered_host_pointer = 1;
    p->can_register_host = p->large_bar = 1;
    p->pci_bus = index + 1;
}

enum { VERSION = 71500000 }; // HIP 7.15, the one that hip-python 10.0 was generated from

static int version(int *out)
{
    if (out == NULL)
        return hipErrorInvalidValue;
    *out = VERSION;
    return hipSuccess;
}

API hipInit(unsigned flags)
{
    ENTER(device);
    return api_leave(flags != 0 ? hipErrorInvalidValue : hipSuccess);
}

API hipDriverGetVersion(int *out) { return version(out); }

API hipRuntimeGetVersion(int *out) { return version(out); }

API hipGetDeviceCount(int *count)
{
    device_info info[MAX_DEVICES];
    lock();
    int found = devices_read(info);
    REFUSE(count == NULL, hipErrorInvalidValue);
    *count = found > 0 ? found : 0;
    return api_leave(found > 0 ? hipSuccess : found == 0 ? hipErrorNoDevice : hipErrorNotInitialized);
}

API hipGetDevice(int *out)
{
    ENTER(device);
    REFUSE(out == NULL, hipErrorInvalidValue);
    *out = device;
    return api_leave(hipSuccess);
}

// Not refused by a failed device: the caller may be leaving it.
API hipSetDevice(int device)
{
    device_info info[MAX_DEVICES];
    lock();
    int count = devices_read(info);
    REFUSE(count <= 0, count < 0 ? hipErrorNotInitialized : hipErrorNoDevice);
    REFUSE(device < 0 || device >= count, hipErrorInvalidDevice);
    current_device = device;
    return api_leave(hipSuccess);
}

// The device with this index, for queries that name one.
static int named_device(int index, device_info *out)
{
    device_info info[MAX_DEVICES];
    if (index < 0 || index >= devices_read(info))
        return hipErrorInvalidDevice;
    *out = info[index];
    return device_failed[index] ? hipErrorIllegalAddress : hipSuccess;
}

API hipGetDevicePropertiesR0600(properties *out, int index)
{
    device_info info;
    ENTER(device);
    REFUSE(out == NULL, hipErrorInvalidValue);
    TRY(named_device(index, &info));
    describe(out, index, &info);
    return api_leave(hipSuccess);
}

API hipDeviceGetAttribute(int *out, int attribute, int index)
{
    device_info info;
    properties p;
    ENTER(device);
    REFUSE(out == NULL, hipErrorInvalidValue);
    TRY(named_device(index, &info));
    describe(&p, index, &info);
    switch (attribute) { // hipDeviceAttribute_t
    case 3: *out = p.can_map_host; break;
    case 4: *out = p.registered_host_pointer; break;
    case 8: *out = p.concurrent_kernels; break;
    case 16: *out = p.integrated; break;
    case 23: *out = p.major; break;
    case 24: *out = p.managed; break;
    case 26: case 27: case 28: *out = p.block_size[attribute - 26]; break;
    case 29: case 30: case 31: *out = p.grid_size[attribute - 29]; break;
    case 56: *out = p.block_threads; break;
    case 57: *out = p.unit_threads; break;
    case 61: *out = p.minor; break;
    case 63: *out = p.units; break;
    case 67: *out = p.pci_bus; break;
    case 68: *out = p.pci_device; break;
    case 69: *out = p.pci_domain; break;
    case 74: *out = (int)p.shared_bytes; break;
    case 75: *out = (int)p.shared_bytes_optin; break;
    case 76: *out = (int)p.unit_shared_bytes; break;
    case 85: *out = p.unified_addressing; break;
    case 87: *out = p.wave_threads; break;
    case 88: *out = p.memory_pools; break;
    case 89: *out = 1; break; // hipMemMap and its kind
    case 90: *out = p.can_register_host; break;
    case 10002: *out = (int)p.max_unit_shared_bytes; break;
    case 10011: *out = p.large_bar; break;
    case 10015: *out = p.units; break;
    case 10016: *out = 1; break; // fine-grained memory
    default: return api_leave(hipErrorInvalidValue);
    }
    return api_leave(hipSuccess);
}

static int can_access(int *out, int device, int peer)
{
    device_info info[MAX_DEVICES];
    int count = devices_read(info);
    if (out == NULL)
        return hipErrorInvalidValue;
    *out = 0;
    if (device == peer)
        return hipSuccess;
    if (device < 0 || device >= count || peer < 0 || peer >= count)
        return hipErrorInvalidDevice;
    *out = 1;
    return hipSuccess;
}

API hipDeviceCanAccessPeer(int *out, int index, int peer)
{
    ENTER(device);
    return api_leave(can_access(out, index, peer));
}

API hipDeviceEnablePeerAccess(int peer, unsigned flags)
{
    int possible = 0;
    ENTER(device);
    REFUSE(flags != 0, hipErrorInvalidValue);
    REFUSE(can_access(&possible, device, peer) != hipSuccess || !possible, hipErrorInvalidDevice);
    REFUSE(peers[device] >> peer & 1, hipErrorPeerAccessAlreadyEnabled);
    peers[device] |= 1u << peer;
    return api_leave(hipSuccess);
}

API hipDeviceDisablePeerAccess(int peer)
{
    int possible = 0;
    ENTER(device);
    REFUSE(can_access(&possible, device, peer) != hipSuccess || !possible, hipErrorInvalidDevice);
    REFUSE(!(peers[device] >> peer & 1), hipErrorPeerAccessNotEnabled);
    peers[device] &= ~(1u << peer);
    return api_leave(hipSuccess);
}

// Drops the device's work and gives its streams and memory back; modules and mappings stay.
API hipDeviceReset(void)
{
    ENTER(device);
    REFUSE(in_callback, hipErrorIllegalState);
    discard_device(device);
    memory_discard(device);
    peers[device] = 0;
    return api_leave(hipSuccess);
}
