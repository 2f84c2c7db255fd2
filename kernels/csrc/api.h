// The C interface of the kernel library. It needs the CUDA driver and neither torch nor Python.
//
// A layer has N outputs, K inputs and G = ceil(K / group) groups of `group` neighbouring inputs. Its weight is
//
//     W[n, k] = (code[k, n] - zero[k / group, n]) * scale[k / group, n]
//     y[m, n] = bias[n] + sum_k x[m, k] W[n, k]
//
// The caller packs codes and grids once into the form that gptqkit_gemm and gptqkit_dequantize read (kernels/cuda.py).
//
// Packed form. Columns go in tiles of 64, inputs in steps of 16, four of which make one unit of 64 x 64 codes.
//     weight  uint32 [ceil(N/64)][ceil(K/64)][bits][32][4]     what each lane of a warp reads, see layout.cuh
// The grid is a plain one:
//     scale   float16 [G][ceil(N/64) * 64]
//     zero    [G][ceil(N/64) * 64]                             nibbles at 2 and 3 bits (two per byte, the first low),
//                                                              uint8 at 4 bits, uint16 at 8 bits, so that every zero
//                                                              from 0 to 2^bits is exact
// or a free one, W[n, k] = code[k, n] * scale[k / group, n] + offset[k / group, n]:
//     scale   float32 [G][ceil(N/64)][2][8][4]                 of each eight columns first the first four
//     zero    float32 [G][ceil(N/64)][2][8][4]                 the offsets, likewise
// Padded codes, scales, zeros and offsets are 0.
//
// Every function that returns int returns 0 or an error code, whose text gptqkit_error gives: negative codes are ours,
// positive ones are cudaError_t. All tensors are device pointers and row-major; `stream` is a cudaStream_t of the
// current device; nothing synchronizes, allocates or reads the host's memory, so all calls can be captured in a graph.
// `dtype` is 0 for float16, 1 for bfloat16; x, bias, y and dense have it. Scales and offsets are never rounded to it. n,
// k and m may be any size for which the tensors fit the device: products of them are 64-bit.
#pragma once
#include <stdint.h>

#ifndef GPTQKIT_API
#define GPTQKIT_API extern "C" __attribute__((visibility("default")))
#endif

enum gptqkit_code {
    GPTQKIT_OK = 0,
    GPTQKIT_BAD_BITS = -1,      // bits is none of 2, 3, 4, 8; of a sweep not from 2 to 8
    GPTQKIT_BAD_DTYPE = -2,     // dtype is neither 0 nor 1
    GPTQKIT_BAD_SHAPE = -3,     // a negative size, k no multiple of 32, n or k above 2^22 - 64
    GPTQKIT_BAD_GROUP = -4,     // see each function
    GPTQKIT_BAD_SPLIT = -5,     // split outside 1 ... 64, or above 1 without workspace and locks
    GPTQKIT_BAD_ALIGNMENT = -6, // see each function
    GPTQKIT_FAULT = -7,         // emulator only: the kernel broke a rule of the hardware; the text says which
};

// The name of the sources that the library was built from (sources_hash of build.py). A library of others must not be
// called: this interface has no other number.
GPTQKIT_API const char *gptqkit_sources(void);

// A text for a code, valid until the thread's next call.
GPTQKIT_API const char *gptqkit_error(int code);

// CUDA versions as 1000 * major + 10 * minor: the newest that the driver serves (0: no driver) and the one this library
// was built with. It runs where driver / 1000 >= built / 1000. The emulator gives 0 and 0.
GPTQKIT_API int gptqkit_versions(int *driver, int *built);

// A number above 0 of the stream, which no other stream of the process gets even if it gets the handle; or one below 0
// of the capture under way on it, which streams that it forked have, too; 0: the stream is none.
GPTQKIT_API int64_t gptqkit_user(void *stream);

// A layer: its packed form, what its activations are, its sizes. weight, scale and zero are 16-byte aligned; group is a
// multiple of 16, or at least k (one group per row); free is 1 for a free grid, else 0.
struct gptqkit_layer {
    const uint32_t *weight;
    const void *scale, *zero, *bias; // bias may be NULL
    int32_t bits, dtype, n, k, group, free;
};

// The kernel for m tokens, as seven numbers: tokens and columns of the tile of y that a block makes; warps of a block
// that share its inputs; locks per tile; threads, bytes of dynamic shared memory; blocks that one multiprocessor of the
// current device holds at a time, which needs a device; the others are written without one.
GPTQKIT_API int gptqkit_kernel(const struct gptqkit_layer *layer, int m, int32_t *numbers);

// y = x WT + bias. x is [M, K] with rows ldx elements apart, a multiple of 8 (M = 1: any); y is [M, N rounded up to a
// multiple of 8], zeros beyond N. The inputs of each tile of y are shared by `split` blocks, whose float32 sums
// are added in a fixed order: equal calls give equal bits. If split is above 1 that takes, for each tile (tokens and
// columns rounded up to whole ones), split * tokens * columns floats of `workspace`, of any contents, and the locks, 0
// before the first call and after every one: calls of one stream may share them. All tensors are 16-byte aligned. m = 0
// does nothing.
GPTQKIT_API int gptqkit_gemm(const struct gptqkit_layer *layer, const void *x, int64_t ldx, void *y, float *workspace,
                             int32_t *locks, int m, int split, void *stream);

// Rows first ... first + count - 1 of W as dense [count, K], inputs in packed order: exact in float32, or on a free grid
// product and sum rounded to it, and then rounded once. dense is 8-byte aligned.
GPTQKIT_API int gptqkit_dequantize(const struct gptqkit_layer *layer, void *dense, int first, int count, void *stream);

// One block of GPTQ's column sweep, see sweep.cu: all tensors float32 but group (int32) and codes (uint8), row-major.
// block comes up to date and leaves as the weights when they were rounded; codes, values and scaled (w - q) / U are
// written; scale and zero are [any][rows]. shift may be NULL (GPTQ). columns: at most 384.
GPTQKIT_API int gptqkit_sweep(float *block /*[columns, rows]*/, const float *inverse /*[columns, columns]*/,
                              const float *shift /*[columns, columns] or NULL*/, const int32_t *group /*[columns]*/,
                              const float *scale, const float *zero, uint8_t *codes, float *values, float *scaled,
                              int columns, int rows, int bits, void *stream);
