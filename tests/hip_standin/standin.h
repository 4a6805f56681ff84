// SPDX-License-Identifier: Apache-2.0
// What an interpreter of kernels gives the stand-in for libamdhip64.so, and what it can ask of it.
//
// The stand-in is not a GPU runtime: it keeps devices, memory, streams and modules on the host and hands kernels to
// an interpreter through the callbacks below.
//
// Rules for the callbacks
// * The stand-in never holds its mutex while a callback runs, so a callback may wait for the GIL and may call
//   standin_ranges, standin_ranges_version and HIP functions. One that would have to wait for queued work or to call
//   the interpreter (a synchronisation, a synchronous copy, a free, a launch, anything on modules) gives
//   hipErrorIllegalState inside a callback: the launch being stepped could never finish.
// * One callback runs at a time in the whole process. The other threads queue for it, so whoever calls into this
//   library must have released the GIL: hip-python and ctypes.CDLL do, ctypes.PyDLL does not and can deadlock.
// * Ids (module, function, launch) belong to the interpreter and are not 0. A result of 0 without an id counts as
//   hipErrorUnknown (a ctypes callback that raised looks like that), and so does a result that is no hipError_t.
// * launch_step must not raise: ctypes turns an exception into 0, "not finished", and the wait would never end.
// * The table is copied, the functions are not: keep the ctypes callback objects as long as the library may call them.
// * The library does not survive fork: use spawn.
#ifndef STANDIN_H
#define STANDIN_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t id;          // the interpreter's
    unsigned parameters;  // how many the kernel takes
    unsigned max_threads; // of a block, as it was compiled
} standin_function;

typedef struct {
    // The image is valid during the call only. Returns a hipError_t.
    int (*module_load)(const void *image, size_t bytes, int device, uint64_t *module);
    // No launch of the module is queued any more.
    int (*module_unload)(uint64_t module);
    int (*module_function)(uint64_t module, const char *name, standin_function *function);
    // Copies the parameters now: the caller's array may die after the call. Returns a hipError_t.
    int (*launch_begin)(uint64_t function, const unsigned *grid, const unsigned *block, unsigned shared_bytes,
                        void **parameters, int device, uint64_t *launch);
    // One turn: 0 not finished, 1 finished, 2 failed. Not called again after 1 or 2.
    int (*launch_step)(uint64_t launch);
    // The launch will never run (again): its device failed or was reset. Not called for the launch that failed.
    void (*launch_drop)(uint64_t launch);
} standin_interpreter;

enum { STANDIN_DEVICE = 1, STANDIN_REGISTERED = 2, STANDIN_HOST = 3, STANDIN_IPC = 4, STANDIN_MAPPED = 5 };

typedef struct {
    uint64_t base, bytes;
    int kind; // STANDIN_*
} standin_range;

// Copies the callbacks; NULL uninstalls them. Without any, loading a module gives hipErrorNotSupported.
void standin_install(const standin_interpreter *callbacks);

// Writes up to `max` ranges that kernels may touch, with their exact sizes; returns how many there are.
size_t standin_ranges(standin_range *out, size_t max);

// A number that changes whenever the ranges do, so that an interpreter can keep its own copy of them.
uint64_t standin_ranges_version(void);

// Clears the failure of every device and drops all queued work (launch_drop). Nothing inside a callback.
void standin_reset(void);

#endif
