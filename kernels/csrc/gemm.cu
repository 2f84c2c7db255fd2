// gptqkit_gemm: checks, and the choice of kernel by the number of tokens. The kernels' contracts are in gemm_small_m.cuh
// (up to 16 tokens) and gemm_large_m.cuh (more).
#include "api.h"
#include "checks.h"
#include "gemm_small_m.cuh"
#include "gemm_large_m.cuh"

namespace {

constexpr int kMaxSplit = 64;
// What the least of the architectures lets one block have, less a part for static variables.
constexpr int kSharedLimit = 98 * 1024;

// A kernel and what its launch takes.
struct Kernel {
    int (*start)(dim3, int, int, void *, const GemmArguments &);
    int (*resident)(int, int, int *);
    int (*add)(dim3, int, int, void *, const GemmArguments &); // adds the blocks' parts; null: the last block does
    int tokens, columns;                                       // of the part of y that one block makes
    int sharing;                                               // warps of a block that share its inputs
    int warps, shared;
};

template <class T, int BITS, int TOKENS, bool FINE, bool FREE> Kernel small_m() {
    constexpr int warps = kSmallMWarps<BITS, TOKENS>, shared = kSmallMRingBytes<BITS, TOKENS>;
    constexpr auto kernel = gemm_small_m<T, BITS, TOKENS, FINE, FREE>;
    static_assert(shared <= kSharedLimit);
    return {launch<kernel, GemmArguments>, resident_blocks<kernel>, nullptr, TOKENS, kTile, warps, warps, shared};
}

template <class T, int BITS, int TOKENS, bool FREE> Kernel large_m() {
    constexpr int shared = kLargeMRingBytes<BITS, TOKENS>;
    constexpr auto kernel = gemm_large_m<T, BITS, TOKENS, FREE>;
    static_assert(shared <= kSharedLimit);
    return {launch<kernel, GemmArguments>, resident_blocks<kernel>, launch<add_large_m<T, TOKENS>, GemmArguments>,
            TOKENS, kLargeMColumns, 1, kLargeMWarps, shared};
}

template <class T, int BITS, bool FINE, bool FREE> Kernel kernel_for(int m) {
    if (m <= 8) return small_m<T, BITS, 8, FINE, FREE>();
    if (m <= 16) return small_m<T, BITS, 16, FINE, FREE>();
    return m <= 32 ? large_m<T, BITS, 32, FREE>() : large_m<T, BITS, 64, FREE>();
}

template <class T, int BITS> Kernel kernel_for(const gptqkit_layer &layer, int m) {
    const bool fine = layer.group < layer.k && layer.group % kTile != 0; // groups end within units
    if (layer.free) return kernel_for<T, BITS, true, true>(m);           // as those of most such files do
    return fine ? kernel_for<T, BITS, true, false>(m) : kernel_for<T, BITS, false, false>(m);
}

template <class T> Kernel kernel_for(const gptqkit_layer &layer, int m) {
    switch (layer.bits) {
    case 2: return kernel_for<T, 2>(layer, m);
    case 3: return kernel_for<T, 3>(layer, m);
    case 4: return kernel_for<T, 4>(layer, m);
    default: return kernel_for<T, 8>(layer, m);
    }
}

Kernel kernel_for(const gptqkit_layer &layer, int m) {
    return layer.dtype == 0 ? kernel_for<Float16>(layer, m) : kernel_for<BFloat16>(layer, m);
}

} // namespace

GPTQKIT_API int gptqkit_kernel(const gptqkit_layer *layer, int m, int32_t *numbers) {
    if (int error = check_layer(*layer)) return error;
    const Kernel kernel = kernel_for(*layer, m);
    const int threads = kernel.warps * kLanes;
    const int known[] = {kernel.tokens, kernel.columns, kernel.sharing, kernel.add ? 0 : 1, threads, kernel.shared};
    for (int number : known) *numbers++ = number;
    return kernel.resident(threads, kernel.shared, numbers);
}

GPTQKIT_API int gptqkit_gemm(const gptqkit_layer *layer, const void *x, int64_t ldx, void *y, float *workspace,
                             int32_t *locks, int m, int split, void *stream) {
    if (int error = check_layer(*layer)) return error;
    const int n = layer->n, k = layer->k;
    if (m < 0 || k == 0) return GPTQKIT_BAD_SHAPE;
    if (split < 1 || split > kMaxSplit) return GPTQKIT_BAD_SPLIT;
    if (misaligned(x, 16) || (m > 1 && ldx % 8) || misaligned(y, 16) || misaligned(workspace, 16))
        return GPTQKIT_BAD_ALIGNMENT;
    if (m == 0 || n == 0) return GPTQKIT_OK;
    const Kernel kernel = kernel_for(*layer, m);
    if (split > 1 && (!workspace || (!kernel.add && !locks))) return GPTQKIT_BAD_SPLIT;
    const int units = tiles(k);
    const GemmArguments arguments{static_cast<const uint16_t *>(x),
                                  ldx,
                                  reinterpret_cast<const uint4 *>(layer->weight),
                                  layer->scale,
                                  layer->zero,
                                  static_cast<const uint16_t *>(layer->bias),
                                  static_cast<uint4 *>(y),
                                  reinterpret_cast<float4 *>(workspace),
                                  locks,
                                  m,
                                  n,
                                  k,
                                  layer->group < k ? layer->group : units * kTile, // one group: whole units
                                  units,
                                  tiles(n),
                                  split};
    const dim3 grid(unsigned((int64_t(m) + kernel.tokens - 1) / kernel.tokens), unsigned(split),
                    unsigned((n + kernel.columns - 1) / kernel.columns));
    const int threads = kernel.warps * kLanes;
    if (int error = kernel.start(grid, threads, kernel.shared, stream, arguments)) return error;
    if (split == 1 || !kernel.add) return GPTQKIT_OK;
    return kernel.add(dim3(grid.x, unsigned(kernel.tokens / 4), grid.z), threads, 0, stream, arguments);
}
