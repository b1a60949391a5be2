/* Stands for libcuda.so.1. Each function has the type that cuda.h gives it, so a wrong argument arrives wrong.
   What arrives is written to the file that FAKE_LOG names. With FAKE_REFUSE_FLAGS batches with flags are refused. */
#define CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cudaTypedefs.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cuMemcpyAsync
#undef cuMemHostRegister
#undef cuGetProcAddress
#undef cuMemcpyBatchAsync

#define NOTE(...)                               \
    do {                                        \
        FILE *file = fopen(getenv("FAKE_LOG"), "a"); \
        fprintf(file, __VA_ARGS__);             \
        fclose(file);                           \
    } while (0)

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    NOTE("copy %zu on %p\n", size, (void *)stream);
    memcpy((void *)to, (void *)from, size);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *answer, CUdevice_attribute attribute, CUdevice device) {
    *answer = attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM && device == 3;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device) {
    snprintf(text, size, "0000:4E:00.%d", device);
    return CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    NOTE("stream %s %d\n", flags == CU_STREAM_NON_BLOCKING ? "non-blocking" : "other", priority);
    *stream = (CUstream)0x7f1234567890ULL;
    return CUDA_SUCCESS;
}
CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    const char *how = flags == (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) ? "portable mapped" : "other";
    NOTE("register %p %zu %s\n", address, size, how);
    return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void *address) {
    NOTE("unregister %p\n", address);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    NOTE("retain %d\n", device);
    *context = (CUcontext)0x7fabcdef0123ULL;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    NOTE("current %p\n", (void *)context);
    return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    NOTE("capture mode %s\n", *mode == CU_STREAM_CAPTURE_MODE_RELAXED ? "relaxed" : "other");
    *mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    return CUDA_SUCCESS;
}
static CUresult batch(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
                      size_t *firsts, size_t attributes_count, size_t *failed, CUstream stream) {
    const char *order = attributes->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ? "stream"
                        : attributes->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY  ? "any"
                                                                                       : "other";
    const char *overlap = attributes->flags == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE ? ", overlap"
                          : attributes->flags                                             ? ", other flags"
                                                                                          : "";
    NOTE("batch of %zu, order %s%s, hints %d %d %d %d, attributes %zu from %zu, on %p\n", count, order, overlap,
         attributes->srcLocHint.type, attributes->srcLocHint.id, attributes->dstLocHint.type,
         attributes->dstLocHint.id, attributes_count, firsts[0], (void *)stream);
    if (getenv("FAKE_REFUSE_FLAGS") && attributes->flags) return CUDA_ERROR_INVALID_VALUE;
    *failed = SIZE_MAX;
    for (size_t i = 0; i < count; i++) memcpy((void *)to[i], (void *)from[i], sizes[i]);
    return CUDA_SUCCESS;
}
static PFN_cuMemcpyBatchAsync_v12080 typed = batch; /* the compiler compares the types */
CUresult cuGetProcAddress_v2(const char *name, void **found, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    NOTE("find %s of %d, flags %llu\n", name, version, (unsigned long long)flags);
    *status = CU_GET_PROC_ADDRESS_SUCCESS;
    *found = (void *)typed;
    return CUDA_SUCCESS;
}

/* What the driver's Python has of cuda.h, by its names there. */
#define OFFSET(field) offsetof(CUmemcpyAttributes, field)
const long long LAYOUT[] = {sizeof(CUmemcpyAttributes), OFFSET(srcAccessOrder), OFFSET(srcLocHint), OFFSET(dstLocHint),
                            OFFSET(flags), sizeof(CUmemLocation), sizeof(CUdevice), sizeof(CUdeviceptr)};
const long long REFUSALS[] = {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
