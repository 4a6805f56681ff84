// SPDX-License-Identifier: Apache-2.0
// Shared by the files of the stand-in for libamdhip64.so; not part of its interface.
//
// One mutex guards all state. Exported functions take it in api_enter and give it back in api_leave; everything
// else expects it held. It is released around every callback into the interpreter. Who runs callbacks, or takes
// operations off a stream, also holds the baton (baton_take): there is one, given out in order of arrival.
#ifndef STANDIN_INTERNAL_H
#define STANDIN_INTERNAL_H

#define _GNU_SOURCE
#include "standin.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

// Numbers of hipError_t, with this library's own words for them.
#define HIP_ERRORS(X)                                                                                                  \
    X(hipSuccess, 0, "no error")                                                                                       \
    X(hipErrorInvalidValue, 1, "an argument is out of range")                                                          \
    X(hipErrorOutOfMemory, 2, "not enough memory")                                                                     \
    X(hipErrorNotInitialized, 3, "BLOCKPICK_STANDIN_DEVICES cannot be read")                                           \
    X(hipErrorInvalidConfiguration, 9, "bad launch configuration")                                                     \
    X(hipErrorInvalidDevicePointer, 17, "not a device pointer")                                                        \
    X(hipErrorInvalidMemcpyDirection, 21, "no such direction of copy")                                                 \
    X(hipErrorInvalidDeviceFunction, 98, "not a kernel of this device")                                                \
    X(hipErrorNoDevice, 100, "no device; BLOCKPICK_STANDIN_DEVICES names none")                                        \
    X(hipErrorInvalidDevice, 101, "no such device, or the wrong one")                                                  \
    X(hipErrorInvalidImage, 200, "not an AMD GPU code object")                                                         \
    X(hipErrorInvalidContext, 201, "not allowed in this process")                                                      \
    X(hipErrorNoBinaryForGpu, 209, "the code object is for another architecture")                                      \
    X(hipErrorFileNotFound, 301, "no such file")                                                                       \
    X(hipErrorInvalidHandle, 400, "stale or foreign handle")                                                           \
    X(hipErrorIllegalState, 401, "a callback of the interpreter may not wait for work")                                \
    X(hipErrorNotFound, 500, "not found")                                                                              \
    X(hipErrorNotReady, 600, "work is still queued")                                                                   \
    X(hipErrorIllegalAddress, 700, "memory outside every allocation was touched")                                      \
    X(hipErrorLaunchOutOfResources, 701, "the launch needs more than the device has")                                  \
    X(hipErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")                                         \
    X(hipErrorPeerAccessNotEnabled, 705, "peer access is not enabled")                                                 \
    X(hipErrorContextIsDestroyed, 709, "the stream or event is gone")                                                  \
    X(hipErrorHostMemoryAlreadyRegistered, 712, "the host range is already registered")                                \
    X(hipErrorHostMemoryNotRegistered, 713, "the host range is not registered")                                        \
    X(hipErrorLaunchFailure, 719, "more threads in a block than the kernel was compiled for")                          \
    X(hipErrorNotSupported, 801, "not supported here")                                                                 \
    X(hipErrorUnknown, 999, "unknown failure")

#define HIP_ERROR_NUMBER(name, number, text) name = number,
enum { HIP_ERRORS(HIP_ERROR_NUMBER) };

#define API __attribute__((visibility("default"))) int

enum { MAX_DEVICES = 16, MAX_THREADS = 1024, MAX_GRID_YZ = 65536, WAVE_THREADS = 64 };
#define DEVICE_BYTES ((size_t)16 << 30)
#define GRANULARITY ((size_t)2 << 20)

// Objects behind handles. A handle is a number that is never given out twice, so that a stale one is refused and
// nothing is ever dereferenced; its kind is in the top bits, which no address has.
enum { STREAM = 0x51, EVENT, MODULE, FUNCTION, PHYSICAL, MEMORY, RESERVATION };

typedef struct node {
    struct node *next;
    uint64_t id;
} node;

void *node_new(node **list, size_t bytes, int kind);
void *node_find(node *list, const void *handle);
void node_free(node **list, void *object);
#define HANDLE(object) ((void *)(uintptr_t)(object)->node.id)
#define EACH(type, item, list) (type *item = (type *)(list); item != NULL; item = (type *)item->node.next)

// What a callback that gives an id answered: without an id, or with a number that is no error, it is unknown.
int callback_error(int error, uint64_t id);

typedef struct {
    char arch[8];
    int units;
    size_t shared_bytes;
} device_info;

extern standin_interpreter interpreter; // all NULL when none is installed
extern bool device_failed[MAX_DEVICES];
extern _Thread_local bool in_callback;
extern uint64_t last_seq; // number of the operation enqueued last

// Takes the mutex; the current device, or why it cannot be used. api_leave notes the error for hipGetLastError.
int api_enter(int *device);
int api_leave(int error);
#define ENTER(device)                                                                                                  \
    int device, entered = api_enter(&device);                                                                          \
    REFUSE(entered != hipSuccess, entered)
#define REFUSE(condition, error)                                                                                       \
    do {                                                                                                               \
        if (condition)                                                                                                 \
            return api_leave(error);                                                                                   \
    } while (0)
#define TRY(expression)                                                                                                \
    do {                                                                                                               \
        int failed = (expression);                                                                                     \
        REFUSE(failed != hipSuccess, failed);                                                                          \
    } while (0)
int devices_read(device_info out[MAX_DEVICES]); // how many, or -1
void lock(void);
void unlock(void);
void baton_take(void);
void baton_drop(void);
// A callback, without the mutex. The caller holds the baton, so only enqueuing and destroying go on meanwhile.
#define CALL(expression)                                                                                               \
    do {                                                                                                               \
        unlock();                                                                                                      \
        in_callback = true;                                                                                            \
        expression;                                                                                                    \
        in_callback = false;                                                                                           \
        lock();                                                                                                        \
    } while (0)

typedef struct {
    void *dst;
    const void *src;
    void *staged; // the bytes of an unregistered source, taken at the call
    size_t bytes;
    bool dst_known, src_known; // tracked when enqueued, so it must be tracked when it runs
} copy_work;

typedef struct {
    void *dst;
    size_t width, count;
    unsigned value;
} fill_work;

enum { LAUNCH, COPY, FILL, RECORD, WAIT };

typedef struct operation {
    struct operation *next;
    uint64_t seq;
    int kind;
    union {
        uint64_t launch; // the interpreter's id
        copy_work copy;
        fill_work fill;
        uint64_t event;
        struct {
            uint64_t stream, seq;
        } wait;
    };
} operation;

// streams.c
enum { ANY_DEVICE = -1 };
int stream_resolve(void *handle, int device, uint64_t *stream, int *stream_device);
int enqueue(uint64_t stream, const operation *work, uint64_t *seq);
bool device_pending(int device);
int drain_stream(uint64_t stream);
int drain_device(int device);
void discard_device(int device); // drop its work and its streams

// memory.c
bool copy_run(const copy_work *work);
bool fill_run(const fill_work *work);
void memory_discard(int device);

#endif
