// gptqkit_gemm: checks, and the choice of kernel by the number of tokens. The kernels' contracts are in gemm_small_m.cuh
// (up to 16 tokens) and gemm_large_m.cuh (more).
#include "api.h"
#include "checks.h"
#include "gemm_small_m.cuh"
#include "gemm_large_m.cuh"

namespace {

constexpr int kMaxSplit = 64;

// The part of y that one block makes.
struct Tile {
    int tokens, columns;
};

Tile tile_for(int m) {
    if (m <= 8) return {8, kTile};
    if (m <= 16) return {16, kTile};
    if (m <= 32) return {32, kLargeMColumns};
    return {64, kLargeMColumns};
}

dim3 grid_for(int m, int n, int split) {
    const Tile tile = tile_for(m);
    return dim3(unsigned((int64_t(m) + tile.tokens - 1) / tile.tokens), unsigned(split),
                unsigned((n + tile.columns - 1) / tile.columns));
}

// What the least of the architectures lets one block have, less a part for static variables.
constexpr int kSharedLimit = 98 * 1024;

template <class T, int BITS, int TOKENS> int start_small_m(const GemmArguments &a, dim3 grid, void *stream) {
    constexpr int threads = kSmallMWarps<BITS, TOKENS> * kLanes;
    constexpr int bytes = kSmallMRingBytes<BITS, TOKENS>;
    static_assert(bytes <= kSharedLimit);
    return a.group % kTile ? launch<gemm_small_m<T, BITS, TOKENS, true>>(grid, threads, bytes, stream, a)
                           : launch<gemm_small_m<T, BITS, TOKENS, false>>(grid, threads, bytes, stream, a);
}

template <class T, int BITS, int TOKENS> int start_large_m(const GemmArguments &a, dim3 grid, void *stream) {
    constexpr int bytes = kLargeMRingBytes<BITS, TOKENS>;
    static_assert(bytes <= kSharedLimit);
    return launch<gemm_large_m<T, BITS, TOKENS>>(grid, kLargeMWarps * kLanes, bytes, stream, a);
}

template <class T, int BITS> int start(const GemmArguments &a, dim3 grid, void *stream) {
    switch (tile_for(a.m).tokens) {
    case 8: return start_small_m<T, BITS, 8>(a, grid, stream);
    case 16: return start_small_m<T, BITS, 16>(a, grid, stream);
    case 32: return start_large_m<T, BITS, 32>(a, grid, stream);
    default: return start_large_m<T, BITS, 64>(a, grid, stream);
    }
}

template <class T> int start(int bits, const GemmArguments &a, dim3 grid, void *stream) {
    switch (bits) {
    case 2: return start<T, 2>(a, grid, stream);
    case 3: return start<T, 3>(a, grid, stream);
    case 4: return start<T, 4>(a, grid, stream);
    default: return start<T, 8>(a, grid, stream);
    }
}

} // namespace

GPTQKIT_API int gptqkit_workspace(int m, int n, int k, int split, int64_t *floats, int64_t *locks) {
    if (int error = check_shape(4, n, k)) return error;
    if (m < 0) return GPTQKIT_BAD_SHAPE;
    if (split < 1 || split > kMaxSplit) return GPTQKIT_BAD_SPLIT;
    const Tile tile = tile_for(m);
    const dim3 grid = grid_for(m, n, split);
    *locks = split == 1 ? 0 : int64_t(grid.x) * grid.z;
    *floats = *locks * split * tile.tokens * tile.columns;
    return GPTQKIT_OK;
}

GPTQKIT_API int gptqkit_gemm(int bits, int dtype, const void *x, int64_t ldx, const uint32_t *weight, const void *scale,
                             const void *zero, const void *bias, void *y, float *workspace, int32_t *locks, int m,
                             int n, int k, int group, int split, void *stream) {
    if (int error = check_shape(bits, n, k)) return error;
    if (int error = check_dtype(dtype)) return error;
    if (m < 0 || k == 0) return GPTQKIT_BAD_SHAPE;
    if (group < 1 || (group < k && group % kStep)) return GPTQKIT_BAD_GROUP;
    if (split < 1 || split > kMaxSplit || (split > 1 && (!workspace || !locks))) return GPTQKIT_BAD_SPLIT;
    if (misaligned(x, 16) || (m > 1 && ldx % 8) || misaligned(weight, 16) || misaligned(scale, 16) ||
        misaligned(zero, 16) || misaligned(bias, 16) || misaligned(y, 16) || misaligned(workspace, 16))
        return GPTQKIT_BAD_ALIGNMENT;
    if (m == 0 || n == 0) return GPTQKIT_OK;
    GemmArguments arguments{static_cast<const uint16_t *>(x),
                            ldx,
                            reinterpret_cast<const uint4 *>(weight),
                            static_cast<const uint16_t *>(scale),
                            zero,
                            static_cast<const uint4 *>(bias),
                            static_cast<uint4 *>(y),
                            reinterpret_cast<float4 *>(workspace),
                            locks,
                            m,
                            n,
                            k,
                            group,
                            tiles(k),
                            tiles(n)};
    if (group >= k) arguments.group = arguments.units * kTile; // whole units: no groups to close within one
    const dim3 grid = grid_for(m, n, split);
    return dtype == 0 ? start<Float16>(bits, arguments, grid, stream) : start<BFloat16>(bits, arguments, grid, stream);
}
