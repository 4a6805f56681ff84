// SPDX-License-Identifier: Apache-2.0
// Stand-in for libamdhip64.so: code objects, their functions, and launches.
//
// Everything here calls the interpreter, so it holds the baton: modules, functions and failures do not change then.
#include "internal.h"

#include <elf.h>
#include <stdio.h>

typedef struct {
    node node;
    int device;
    uint64_t id; // the interpreter's
} module;

typedef struct {
    node node;
    int device;
    uint64_t module; // handle
    standin_function facts;
} function;

static node *modules, *functions;

enum { MACHINE_AMDGPU = 224, MACH_GFX942 = 0x4c, MACH_GFX950 = 0x4f };
#define MAX_IMAGE_BYTES ((size_t)1 << 30)

// `expression` under the baton, for functions that a callback of the interpreter may not call.
#define WITH_BATON(error, expression)                                                                                  \
    REFUSE(in_callback, hipErrorIllegalState);                                                                         \
    baton_take();                                                                                                      \
    int error = expression;                                                                                            \
    baton_drop()

// The bytes of a code object: an image comes without its size, so that the end of the section headers, which
// linkers write last, stands for it. 0 if it is none.
static size_t image_bytes(const char *image)
{
    if (strncmp(image, ELFMAG, SELFMAG) != 0) // stops at the first difference: the buffer may be short
        return 0;
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB ||
        header.e_machine != MACHINE_AMDGPU || header.e_shnum == 0 || header.e_shentsize != sizeof(Elf64_Shdr) ||
        header.e_shoff < sizeof header || header.e_shoff > MAX_IMAGE_BYTES)
        return 0;
    return header.e_shoff + (size_t)header.e_shentsize * header.e_shnum;
}

// `have` is how many bytes are there, 0 if that is not known.
static int load(void **out, const char *image, size_t have, int device)
{
    device_info info[MAX_DEVICES];
    size_t bytes = have != 0 && have < sizeof(Elf64_Ehdr) ? 0 : image_bytes(image);
    if (bytes == 0 || (have != 0 && have < bytes))
        return hipErrorInvalidImage;
    Elf64_Word flags;
    memcpy(&flags, image + offsetof(Elf64_Ehdr, e_flags), sizeof flags);
    const char *arch = (flags & 0xff) == MACH_GFX942 ? "gfx942" : (flags & 0xff) == MACH_GFX950 ? "gfx950" : "";
    if (devices_read(info) <= device || strcmp(arch, info[device].arch) != 0)
        return hipErrorNoBinaryForGpu;
    if (interpreter.module_load == NULL)
        return hipErrorNotSupported;
    uint64_t id = 0;
    int error;
    CALL(error = interpreter.module_load(image, bytes, device, &id));
    if ((error = callback_error(error, id)) != hipSuccess)
        return error;
    module *m = node_new(&modules, sizeof *m, MODULE);
    if (m == NULL)
        return hipErrorOutOfMemory;
    m->device = device;
    m->id = id;
    *out = HANDLE(m);
    return hipSuccess;
}

API hipModuleLoadData(void **out, const void *image)
{
    ENTER(device);
    REFUSE(out == NULL || image == NULL, hipErrorInvalidValue);
    WITH_BATON(error, load(out, image, 0, device));
    return api_leave(error);
}

static int load_file(void **out, const char *path, int device)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return hipErrorFileNotFound;
    long bytes = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    rewind(file);
    char *image = bytes > 0 ? malloc((size_t)bytes) : NULL;
    bool whole = image != NULL && fread(image, 1, (size_t)bytes, file) == (size_t)bytes;
    fclose(file);
    int error = whole ? load(out, image, (size_t)bytes, device) : hipErrorInvalidValue;
    free(image);
    return error;
}

API hipModuleLoad(void **out, const char *path)
{
    ENTER(device);
    REFUSE(out == NULL || path == NULL || *path == '\0', hipErrorInvalidValue);
    WITH_BATON(error, load_file(out, path, device));
    return api_leave(error);
}

static int unload(void *handle)
{
    module *m = node_find(modules, handle);
    if (m == NULL)
        return handle == NULL ? hipErrorInvalidHandle : hipErrorNotFound;
    if (device_pending(m->device))
        return hipErrorNotReady;
    for (node *item = functions, *next; item != NULL; item = next) {
        next = item->next;
        if (((function *)item)->module == m->node.id)
            node_free(&functions, item);
    }
    uint64_t id = m->id;
    int error = hipSuccess;
    node_free(&modules, m);
    if (interpreter.module_unload != NULL)
        CALL(error = interpreter.module_unload(id));
    return callback_error(error, id);
}

// Waits for the module's device, again if another thread queued something meanwhile.
API hipModuleUnload(void *handle)
{
    ENTER(device);
    for (;;) {
        WITH_BATON(error, unload(handle));
        const module *m = error == hipErrorNotReady ? node_find(modules, handle) : NULL;
        REFUSE(m == NULL, error);
        TRY(drain_device(m->device));
    }
}

static int find_function(void **out, void *handle, const char *name)
{
    module *m = node_find(modules, handle);
    if (m == NULL)
        return handle == NULL ? hipErrorInvalidHandle : hipErrorNotFound;
    if (interpreter.module_function == NULL)
        return hipErrorNotSupported;
    standin_function facts = {0};
    int error;
    CALL(error = interpreter.module_function(m->id, name, &facts));
    if ((error = callback_error(error, facts.id)) != hipSuccess)
        return error;
    function *f = NULL;
    for EACH (function, other, functions)
        if (other->module == m->node.id && other->facts.id == facts.id)
            f = other;
    if (f == NULL && (f = node_new(&functions, sizeof *f, FUNCTION)) == NULL)
        return hipErrorOutOfMemory;
    f->device = m->device;
    f->module = m->node.id;
    f->facts = facts;
    *out = HANDLE(f);
    return hipSuccess;
}

API hipModuleGetFunction(void **out, void *handle, const char *name)
{
    ENTER(device);
    REFUSE(out == NULL || name == NULL || *name == '\0', hipErrorInvalidValue);
    WITH_BATON(error, find_function(out, handle, name));
    return api_leave(error);
}

typedef struct {
    void *function, *stream;
    unsigned grid[3], block[3], shared_bytes;
    void **parameters, **extra;
} request;

// The checks come in the order in which clr makes them.
static int launch(const request *r, int device)
{
    static const unsigned most[3] = {INT32_MAX, MAX_GRID_YZ, MAX_GRID_YZ};
    device_info info[MAX_DEVICES];
    uint64_t stream, id = 0;
    int on, error = stream_resolve(r->stream, device, &stream, &on);
    if (error != hipSuccess)
        return error;
    uint64_t threads = 1;
    for (int i = 0; i < 3; i++) {
        threads *= r->block[i] <= MAX_THREADS ? r->block[i] : MAX_THREADS + 1;
        if (r->grid[i] == 0 || r->block[i] == 0 || r->grid[i] > most[i] ||
            (uint64_t)r->grid[i] * r->block[i] > UINT32_MAX)
            return hipErrorInvalidValue;
    }
    if (threads > MAX_THREADS || devices_read(info) <= on || r->shared_bytes > info[on].shared_bytes)
        return hipErrorInvalidValue;
    if (on != device || r->function == NULL)
        return hipErrorInvalidHandle;
    if (r->extra != NULL)
        return r->parameters != NULL ? hipErrorInvalidValue : hipErrorNotSupported;
    const function *f = node_find(functions, r->function);
    if (f == NULL)
        return hipErrorInvalidHandle;
    if (f->facts.parameters > 0 && r->parameters == NULL)
        return hipErrorInvalidValue;
    if (f->device != device)
        return hipErrorInvalidDevice;
    if (threads > f->facts.max_threads)
        return hipErrorLaunchFailure;
    if (interpreter.launch_begin == NULL || r->block[1] != 1 || r->block[2] != 1) // threads are numbered in x only
        return hipErrorNotSupported;
    CALL(error = interpreter.launch_begin(f->facts.id, r->grid, r->block, r->shared_bytes, r->parameters, device, &id));
    if ((error = callback_error(error, id)) != hipSuccess)
        return error;
    error = enqueue(stream, &(operation){.kind = LAUNCH, .launch = id}, NULL);
    if (error != hipSuccess && interpreter.launch_drop != NULL) // another thread destroyed the stream meanwhile
        CALL(interpreter.launch_drop(id));
    return error;
}

API hipModuleLaunchKernel(void *function_handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared_bytes, void *stream, void **parameters, void **extra)
{
    const request r = {function_handle, stream, {gx, gy, gz}, {bx, by, bz}, shared_bytes, parameters, extra};
    ENTER(device);
    WITH_BATON(error, launch(&r, device));
    return api_leave(error);
}
