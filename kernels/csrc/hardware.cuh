// Everything the kernels need from the GPU, as thin named functions. tests/emulator/emulator.h has the same names for g++,
// so that the kernels themselves are ordinary C++ and run on a machine without a GPU.
//
// 16-bit floats travel as raw bits (uint16_t, or two in a uint32_t with the first in the low half); the tags Float16
// and BFloat16 say how to read them.
#pragma once

#ifdef GPTQKIT_EMULATOR
#include "emulator.h"
#else

#include <atomic>
#include <cstdint>
#include <cuda_runtime.h>

#define DEVICE __device__ __forceinline__
// The head of a kernel: threads per block, and blocks whose registers must fit on one multiprocessor together.
#define KERNEL(...) __global__ void __launch_bounds__(__VA_ARGS__)
// Pointers to shared memory: to one variable of the block, and to the bytes that the launch asked for.
#define STATIC_SHARED(type, name)                                                                                      \
    __shared__ type name##_variable;                                                                                   \
    type *const name = &name##_variable
#define DYNAMIC_SHARED(type, name)                                                                                     \
    extern __shared__ __align__(16) unsigned char dynamic_shared[];                                                    \
    type *const name = reinterpret_cast<type *>(dynamic_shared)

struct Float16 {};
struct BFloat16 {};

// ---- conversions: float to 16 bits rounds to nearest, ties to even ----

template <class T> DEVICE float to_float(uint16_t bits);
template <> DEVICE float to_float<Float16>(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
template <> DEVICE float to_float<BFloat16>(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

// Both halves of a pair, in one instruction.
template <class T> DEVICE uint32_t pair_from_floats(float low, float high);
template <> DEVICE uint32_t pair_from_floats<Float16>(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <> DEVICE uint32_t pair_from_floats<BFloat16>(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ---- arithmetic on words and pairs ----

// a * b, rounded before anything is added to it.
DEVICE float product(float a, float b) { return __fmul_rn(a, b); }

// 1 / value, at most a unit in the last place off, for normal results.
DEVICE float reciprocal(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// (word & mask) | bits in one instruction.
DEVICE uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
    return result;
}

// Four bytes of a (numbers 0 to 3) and b (4 to 7), one per hex digit of `selector`, the lowest digit first.
DEVICE uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

// A float from its bits and back.
DEVICE float float_from_bits(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t bits_of_float(float value) { return __float_as_uint(value); }

// a * b + c of two pairs, rounded once; subnormals are kept.
template <class T> DEVICE uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c);
template <> DEVICE uint32_t pair_fma<Float16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}
template <> DEVICE uint32_t pair_fma<BFloat16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// ---- memory: the emulator watches what goes through these ----

template <class V> DEVICE V load_shared(const V *source) { return *source; }
template <class V> DEVICE void store_shared(V *target, V value) { *target = value; }

// Data that nobody writes while the kernel runs: may be cached beside the multiprocessor.
template <class V> DEVICE V load_constant(const V *source) { return __ldg(source); }
// Results, which nobody reads while the kernel runs.
template <class V> DEVICE void store_global(V *target, V value) { *target = value; }
// What blocks leave for each other: between the store and the load stand a fence, an addition to a lock and a fence. The
// load goes past the cache that only its multiprocessor sees.
DEVICE void store_for_blocks(float4 *target, const float4 &value) { *target = value; }
DEVICE float4 load_from_blocks(const float4 *source) { return __ldcg(source); }

// Sixteen bytes from global to shared memory, arriving at the matching wait. They bypass the first cache: what streams
// through is read once.
DEVICE void copy_async(void *target, const void *source) {
    const uint32_t address = uint32_t(__cvta_generic_to_shared(target));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
}
// Eight bytes likewise, by way of the first cache, where other warps may find them; zeros where `bytes` is 0 and not 8:
// then the source is not read.
DEVICE void copy_async_or_zero(void *target, const void *source, int bytes) {
    const uint32_t address = uint32_t(__cvta_generic_to_shared(target));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address), "l"(source), "r"(bytes) : "memory");
}
// Closes the thread's group of copies; groups arrive in order.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of the thread's groups are under way.
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- tensor cores ----

// d += a b for a 16 x 16 tile `a` (rows: columns of W), a 16 x 8 tile `b` (columns: tokens), float32 sums. Lane 4c + t
// has
//   a[r]: row c + 8(r & 1), elements 2t + 8(r >> 1) and the next        b[r]: elements 2t + 8r and the next of column c
//   d[e]: row c + 8(e >> 1), column 2t + (e & 1)
template <class T> DEVICE void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <> DEVICE void multiply_add<Float16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> DEVICE void multiply_add<BFloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- blocks and launches ----

DEVICE void block_barrier() { __syncthreads(); }
// Makes what the thread wrote, or saw written before a barrier, visible to the device before whatever it does next.
DEVICE void device_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE int fetch_add(int *target, int value) { return atomicAdd(target, value); }

// Dynamic and static shared memory of more than 48 KiB together has to be asked for, once per kernel and device:
// kStaticShared is left for the static variables, which nobody can count here. A kernel that wants more than 48 KiB must
// want as much at every call.
constexpr int kFreeShared = 48 * 1024, kStaticShared = 1024;
template <auto kernel> int allow_shared(int bytes) {
    static std::atomic<uint64_t> granted{0}; // devices, one bit each
    if (bytes <= kFreeShared - kStaticShared) return 0;
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
    if (granted.load(std::memory_order_relaxed) & bit) return 0;
    if (cudaError_t error =
            cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes > kFreeShared ? bytes : kFreeShared))
        return error;
    granted.fetch_or(bit, std::memory_order_relaxed);
    return 0;
}

// Starts `kernel` with one argument; 0 or an error code.
template <auto kernel, class Arguments>
int launch(dim3 grid, int threads, int shared_bytes, void *stream, const Arguments &arguments) {
    if (int error = allow_shared<kernel>(shared_bytes)) return error;
    void *pointers[] = {const_cast<Arguments *>(&arguments)};
    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, dim3(threads), pointers, shared_bytes,
                            static_cast<cudaStream_t>(stream));
}

// How many blocks one multiprocessor of the current device holds at a time; 0 or an error code.
template <auto kernel> int resident_blocks(int threads, int shared_bytes, int *blocks) {
    if (int error = allow_shared<kernel>(shared_bytes)) return error;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, reinterpret_cast<const void *>(kernel), threads,
                                                         shared_bytes);
}

// See gptqkit_user.
inline int64_t stream_user(void *stream) {
    cudaStreamCaptureStatus status;
    unsigned long long number = 0;
    const cudaStream_t handle = static_cast<cudaStream_t>(stream);
    if (cudaStreamGetCaptureInfo(handle, &status, &number)) return 0;
    if (status == cudaStreamCaptureStatusActive) return -int64_t(number) - 1;
    return cudaStreamGetId(handle, &number) ? 0 : int64_t(number) + 1;
}

inline const char *runtime_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
inline int runtime_versions(int *driver, int *built) {
    *built = CUDART_VERSION;
    return cudaDriverGetVersion(driver);
}

#endif
