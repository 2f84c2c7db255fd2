// The functions of api.h that start no kernel.
#include "api.h"
#include "hardware.cuh"

GPTQKIT_API const char *gptqkit_sources(void) { return GPTQKIT_SOURCES; }

GPTQKIT_API const char *gptqkit_error(int code) {
    switch (code) {
    case GPTQKIT_OK: return "no error";
    case GPTQKIT_BAD_BITS: return "bits is none of 2, 3, 4 and 8";
    case GPTQKIT_BAD_DTYPE: return "dtype is neither 0 (float16) nor 1 (bfloat16)";
    case GPTQKIT_BAD_SHAPE:
        return "a size is negative, k is no multiple of 32, or n or k is above 2^22 - 64";
    case GPTQKIT_BAD_GROUP: return "the group size does not fit this kernel";
    case GPTQKIT_BAD_SPLIT: return "split is outside 1 ... 64, or above 1 without workspace and locks";
    case GPTQKIT_BAD_ALIGNMENT: return "a tensor is not aligned as api.h asks";
    default: return runtime_error(code);
    }
}

GPTQKIT_API int gptqkit_versions(int *driver, int *built) { return runtime_versions(driver, built); }

GPTQKIT_API int64_t gptqkit_user(void *stream) { return stream_user(stream); }
