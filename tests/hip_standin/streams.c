// SPDX-License-Identifier: Apache-2.0
// Stand-in for libamdhip64.so: streams, events, and the turns in which queued work progresses.
//
// Nothing runs when it is enqueued. Every operation has a number (seq) that grows with the order of the calls, and
// every stream is a queue of operations. Whoever waits or queries makes turns: in one turn each stream finishes what
// it can of copies, fills, records and waits, and steps at most one kernel once, so kernels on different streams
// that wait for one another both progress. What an operation waits for always has a smaller seq: no cycles.
#include "internal.h"

#include <sched.h>
#include <time.h>

typedef struct {
    node node;
    int device;
    bool null, blocking; // the null stream blocks too
    operation *head, **tail;
} stream;

typedef struct {
    node node;
    int device;
    unsigned flags;
    uint64_t stream, seq; // of the latest record; seq 0: never recorded
    double time;          // of that record, in milliseconds
} event;

uint64_t last_seq;
static node *streams, *events;

enum { EVENT_DISABLE_TIMING = 2, EVENT_INTERPROCESS = 4, EVENT_OTHERS = 7 };
#define EVENT_RELEASE 0xe0000000u // how caches are released: at most one of these bits

// Whether work up to `seq` is still queued: on one stream, or on a device's (blocking) streams when `id` is 0.
static bool pending(uint64_t id, int device, bool blocking_only, uint64_t seq)
{
    for EACH (stream, s, streams)
        if (s->head != NULL && s->head->seq <= seq && (id == 0 || s->node.id == id) &&
            (device == ANY_DEVICE || s->device == device) && (!blocking_only || s->blocking))
            return true;
    return false;
}

// The null stream waits for all earlier work of the device's blocking streams, and the reverse.
static bool runnable(const stream *s, const operation *op)
{
    if (op->kind == WAIT && pending(op->wait.stream, ANY_DEVICE, false, op->wait.seq))
        return false;
    if (s->null)
        return !pending(0, s->device, true, op->seq - 1);
    if (s->blocking)
        for EACH (stream, other, streams)
            if (other->null && other->device == s->device && pending(other->node.id, ANY_DEVICE, false, op->seq - 1))
                return false;
    return true;
}

static void operation_free(operation *op)
{
    if (op->kind == COPY)
        free(op->copy.staged);
    free(op);
}

static void pop(stream *s)
{
    operation *op = s->head;
    s->head = op->next;
    if (s->head == NULL)
        s->tail = &s->head;
    operation_free(op);
}

// Baton held. Drops everything queued on a device's streams, also what other threads add during the callbacks.
static void drop_work(int device)
{
    for (stream *s = (stream *)streams; s != NULL;) {
        operation *op = device == ANY_DEVICE || s->device == device ? s->head : NULL;
        if (op == NULL) {
            s = (stream *)s->node.next;
            continue;
        }
        uint64_t launch = op->kind == LAUNCH ? op->launch : 0;
        pop(s);
        if (launch != 0 && interpreter.launch_drop != NULL) {
            CALL(interpreter.launch_drop(launch));
            s = (stream *)streams;
        }
    }
}

static void fail_device(int device)
{
    device_failed[device] = true;
    drop_work(device);
}

static bool run_now(const operation *op)
{
    if (op->kind == COPY)
        return copy_run(&op->copy);
    if (op->kind == FILL)
        return fill_run(&op->fill);
    event *e = op->kind == RECORD ? node_find(events, (void *)(uintptr_t)op->event) : NULL;
    if (e != NULL && e->seq == op->seq) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        e->time = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
    }
    return true;
}

// Baton held: nobody else pops operations or removes streams that have some.
static void advance(stream *s)
{
    while (s->head != NULL && runnable(s, s->head)) {
        operation *op = s->head;
        int result = 1;
        if (op->kind != LAUNCH) {
            result = run_now(op) ? 1 : 2;
        } else if (interpreter.launch_step == NULL) {
            result = 2; // uninstalled with work queued
        } else {
            CALL(result = interpreter.launch_step(op->launch));
            if (result == 0)
                return;
        }
        bool stepped = op->kind == LAUNCH;
        int device = s->device;
        pop(s);
        if (result != 1)
            fail_device(device); // runs callbacks, and the stream has nothing left to keep it alive
        if (stepped || result != 1)
            return;
    }
}

static void turn(void)
{
    baton_take();
    // A stream may vanish or appear while a callback runs, so go by handle, in order.
    for (uint64_t last = 0;;) {
        stream *s = (stream *)streams;
        while (s != NULL && (s->node.id <= last || s->head == NULL))
            s = (stream *)s->node.next;
        if (s == NULL)
            break;
        last = s->node.id;
        advance(s);
    }
    baton_drop();
}

static int drain(uint64_t id, int device, bool blocking_only, uint64_t seq)
{
    while (pending(id, device, blocking_only, seq)) {
        if (in_callback)
            return hipErrorIllegalState;
        turn();
        unlock();
        sched_yield(); // the work may wait for another process
        lock();
    }
    return hipSuccess;
}

bool device_pending(int device) { return pending(0, device, false, last_seq); }

int drain_stream(uint64_t id) { return drain(id, ANY_DEVICE, false, last_seq); }

int drain_device(int device)
{
    int error = drain(0, device, false, last_seq);
    return error ? error : device != ANY_DEVICE && device_failed[device] ? hipErrorIllegalAddress : hipSuccess;
}

void discard_device(int device)
{
    baton_take();
    drop_work(device);
    for (node *item = streams, *next; device != ANY_DEVICE && item != NULL; item = next) {
        next = item->next;
        if (((stream *)item)->device == device)
            node_free(&streams, item);
    }
    baton_drop();
}

// ---------------------------------------------------------------------------------------------- streams

static int stream_new(stream **out, int device, bool null, bool blocking)
{
    stream *s = node_new(&streams, sizeof *s, STREAM);
    if (s == NULL)
        return hipErrorOutOfMemory;
    s->device = device;
    s->null = null;
    s->blocking = blocking;
    s->tail = &s->head;
    *out = s;
    return hipSuccess;
}

// 0 and hipStreamLegacy (1) are the current device's null stream; hipStreamPerThread (2) is not supported.
int stream_resolve(void *handle, int device, uint64_t *id, int *stream_device)
{
    stream *s = NULL;
    if ((uintptr_t)handle == 2)
        return hipErrorNotSupported;
    if ((uintptr_t)handle > 2) {
        s = node_find(streams, handle);
    } else {
        for EACH (stream, other, streams)
            if (other->null && other->device == device)
                s = other;
        int error = s == NULL ? stream_new(&s, device, true, true) : hipSuccess;
        if (error != hipSuccess)
            return error;
    }
    if (s == NULL)
        return hipErrorContextIsDestroyed;
    *id = s->node.id;
    *stream_device = s->device;
    return device_failed[s->device] ? hipErrorIllegalAddress : hipSuccess;
}

// Copies `work` to the end of a stream; its number goes to `seq` if that is wanted.
int enqueue(uint64_t id, const operation *work, uint64_t *seq)
{
    stream *s = node_find(streams, (void *)(uintptr_t)id);
    operation *op = malloc(sizeof *op);
    if (s == NULL || op == NULL) {
        free(op);
        return s == NULL ? hipErrorContextIsDestroyed : hipErrorOutOfMemory;
    }
    *op = *work;
    op->next = NULL;
    op->seq = ++last_seq;
    if (seq != NULL)
        *seq = op->seq;
    *s->tail = op;
    s->tail = &op->next;
    return hipSuccess;
}

API hipStreamCreateWithPriority(void **out, unsigned flags, int priority)
{
    (void)priority; // all streams make turns alike
    stream *s;
    ENTER(device);
    REFUSE(out == NULL || flags > 1, hipErrorInvalidValue);
    TRY(stream_new(&s, device, false, flags == 0));
    *out = HANDLE(s);
    return api_leave(hipSuccess);
}

API hipStreamCreateWithFlags(void **out, unsigned flags) { return hipStreamCreateWithPriority(out, flags, 0); }

API hipStreamCreate(void **out) { return hipStreamCreateWithPriority(out, 0, 0); }

API hipStreamDestroy(void *handle)
{
    uint64_t id;
    int on;
    ENTER(device);
    REFUSE((uintptr_t)handle <= 2, hipErrorInvalidHandle);
    TRY(stream_resolve(handle, device, &id, &on));
    TRY(drain_stream(id));
    stream *s = node_find(streams, handle);
    REFUSE(s == NULL || s->head != NULL, hipErrorContextIsDestroyed); // another thread used it during the wait
    node_free(&streams, s);
    return api_leave(hipSuccess);
}

// The null stream stands for all blocking streams of its device.
static int stream_wait(void *handle, int device, bool query)
{
    uint64_t id;
    int on, error = stream_resolve(handle, device, &id, &on);
    if (error != hipSuccess)
        return error;
    bool null = (uintptr_t)handle <= 2;
    if (query && !in_callback)
        turn();
    if (query)
        error = pending(null ? 0 : id, on, null, last_seq) ? hipErrorNotReady : hipSuccess;
    else
        error = drain(null ? 0 : id, on, null, last_seq);
    return device_failed[on] ? hipErrorIllegalAddress : error;
}

API hipStreamSynchronize(void *handle)
{
    ENTER(device);
    return api_leave(stream_wait(handle, device, false));
}

API hipStreamQuery(void *handle)
{
    ENTER(device);
    return api_leave(stream_wait(handle, device, true));
}

API hipDeviceSynchronize(void)
{
    ENTER(device);
    return api_leave(drain_device(device));
}

// ---------------------------------------------------------------------------------------------- events

API hipEventCreateWithFlags(void **out, unsigned flags)
{
    unsigned release = flags & EVENT_RELEASE;
    ENTER(device);
    REFUSE(out == NULL || (flags & ~(EVENT_RELEASE | EVENT_OTHERS)) != 0 || (release & (release - 1)) != 0,
           hipErrorInvalidValue);
    REFUSE((flags & EVENT_INTERPROCESS) && !(flags & EVENT_DISABLE_TIMING), hipErrorInvalidValue);
    REFUSE(flags & EVENT_INTERPROCESS, hipErrorNotSupported);
    event *e = node_new(&events, sizeof *e, EVENT);
    REFUSE(e == NULL, hipErrorOutOfMemory);
    e->device = device;
    e->flags = flags;
    *out = HANDLE(e);
    return api_leave(hipSuccess);
}

API hipEventCreate(void **out) { return hipEventCreateWithFlags(out, 0); }

API hipEventDestroy(void *handle)
{
    ENTER(device);
    event *e = node_find(events, handle);
    REFUSE(e == NULL, handle == NULL ? hipErrorInvalidHandle : hipErrorContextIsDestroyed);
    node_free(&events, e);
    return api_leave(hipSuccess);
}

// The event behind a handle, if its device still works.
static int event_find(void *handle, event **out)
{
    *out = node_find(events, handle);
    if (*out == NULL)
        return hipErrorInvalidHandle;
    return device_failed[(*out)->device] ? hipErrorIllegalAddress : hipSuccess;
}

static bool event_pending(const event *e) { return e->seq != 0 && pending(e->stream, ANY_DEVICE, false, e->seq); }

API hipEventRecord(void *handle, void *stream_handle)
{
    event *e;
    uint64_t id;
    int on;
    ENTER(device);
    TRY(event_find(handle, &e));
    TRY(stream_resolve(stream_handle, device, &id, &on));
    REFUSE(on != e->device, hipErrorInvalidHandle);
    TRY(enqueue(id, &(operation){.kind = RECORD, .event = e->node.id}, &e->seq));
    e->stream = id;
    return api_leave(hipSuccess);
}

API hipStreamWaitEvent(void *stream_handle, void *handle, unsigned flags)
{
    event *e;
    uint64_t id;
    int on;
    ENTER(device);
    REFUSE(flags != 0, hipErrorInvalidValue);
    TRY(event_find(handle, &e));
    TRY(stream_resolve(stream_handle, device, &id, &on));
    if (e->seq != 0) // a later record does not move this wait
        TRY(enqueue(id, &(operation){.kind = WAIT, .wait = {e->stream, e->seq}}, NULL));
    return api_leave(hipSuccess);
}

API hipEventSynchronize(void *handle)
{
    event *e;
    ENTER(device);
    TRY(event_find(handle, &e));
    int on = e->device; // the event may be destroyed while this thread waits
    if (event_pending(e))
        TRY(drain(e->stream, ANY_DEVICE, false, e->seq));
    return api_leave(device_failed[on] ? hipErrorIllegalAddress : hipSuccess);
}

API hipEventQuery(void *handle)
{
    event *e;
    ENTER(device);
    TRY(event_find(handle, &e));
    if (!in_callback)
        turn();
    TRY(event_find(handle, &e));
    return api_leave(event_pending(e) ? hipErrorNotReady : hipSuccess);
}

API hipEventElapsedTime(float *out, void *start, void *stop)
{
    event *from, *to;
    ENTER(device);
    REFUSE(out == NULL, hipErrorInvalidValue);
    TRY(event_find(start, &from));
    TRY(event_find(stop, &to));
    REFUSE(from->device != to->device || from->seq == 0 || to->seq == 0, hipErrorInvalidHandle);
    REFUSE((from->flags | to->flags) & EVENT_DISABLE_TIMING, hipErrorInvalidHandle);
    REFUSE(event_pending(from) || event_pending(to), hipErrorNotReady);
    *out = (float)(to->time - from->time);
    return api_leave(hipSuccess);
}
