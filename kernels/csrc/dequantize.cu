// dense[row, k] = (code[k, n] - zero[g, n]) * scale[g, n] with n = first + row and g = k / group, for large batches; on a
// FREE grid code * scale + offset.
//
// Layouts: layout.cuh; dense is [count, K]. One warp per unit of 64 columns x 64 inputs, four to a block; a lane's four
// neighbouring inputs leave as one 8-byte store, those of four lanes fill a 32-byte sector.
// Preconditions, checked below: K a multiple of 32; group a multiple of 16 or at least K; dense 8-byte aligned.
// Bound by writing: 2 bytes per weight. Each weight is rounded once, to the dtype (weights.cuh).
#include "api.h"
#include "checks.h"
#include "weights.cuh"

namespace {

constexpr int kWarps = 4;

struct DequantizeArguments {
    const uint4 *weight;
    const void *scale, *zero;
    uint16_t *dense;
    int first, count, k, group, units, column_tiles;
    int64_t warps;
};

template <class T, int BITS, bool FREE> KERNEL(kWarps *kLanes, 1) dequantize(DequantizeArguments a) {
    const int64_t warp = int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes;
    if (warp >= a.warps) return;
    const int lane = threadIdx.x % kLanes, unit = int(warp % a.units), tile = a.first / kTile + int(warp / a.units);
    const uint4 *const source = a.weight + (int64_t(tile) * a.units + unit) * BITS * kLanes + lane;
    uint32_t word[4 * BITS];
#pragma unroll
    for (int v = 0; v < BITS; v++) {
        const uint4 vector = load_constant(source + v * kLanes);
        word[4 * v] = vector.x, word[4 * v + 1] = vector.y, word[4 * v + 2] = vector.z, word[4 * v + 3] = vector.w;
    }
    Weights<T, BITS, FREE> weights;
    int group = -1;
#pragma unroll
    for (int j = 0; j < kSteps; j++) {
        const int step = unit * kTile + kStep * j, k = step + 4 * (lane % 4);
        if (step >= a.k) return; // half a unit, the last one
        if (step / a.group != group) {
            group = step / a.group;
            weights.open(load_grid<BITS, FREE>(a, group, tile, lane / 4));
        }
        uint32_t w[4][4];
        weights.make(word + j * BITS, w);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = tile * kTile + 8 * (lane / 4) + 2 * i + h - a.first;
                if (row < 0 || row >= a.count) continue;
                store_global(reinterpret_cast<uint2 *>(a.dense + int64_t(row) * a.k + k), uint2{w[i][h], w[i][h + 2]});
            }
    }
}

template <class T, bool FREE> int start(int bits, const DequantizeArguments &a, void *stream) {
    const dim3 grid(unsigned((a.warps + kWarps - 1) / kWarps));
    switch (bits) {
    case 2: return launch<dequantize<T, 2, FREE>>(grid, kWarps * kLanes, 0, stream, a);
    case 3: return launch<dequantize<T, 3, FREE>>(grid, kWarps * kLanes, 0, stream, a);
    case 4: return launch<dequantize<T, 4, FREE>>(grid, kWarps * kLanes, 0, stream, a);
    default: return launch<dequantize<T, 8, FREE>>(grid, kWarps * kLanes, 0, stream, a);
    }
}

template <class T> int start(const gptqkit_layer &layer, const DequantizeArguments &a, void *stream) {
    return layer.free ? start<T, true>(layer.bits, a, stream) : start<T, false>(layer.bits, a, stream);
}

} // namespace

GPTQKIT_API int gptqkit_dequantize(const gptqkit_layer *layer, void *dense, int first, int count, void *stream) {
    if (int error = check_layer(*layer)) return error;
    if (first < 0 || count < 0 || int64_t(first) + count > layer->n) return GPTQKIT_BAD_SHAPE;
    if (misaligned(dense, 8)) return GPTQKIT_BAD_ALIGNMENT;
    if (count == 0 || layer->k == 0) return GPTQKIT_OK;
    const int units = tiles(layer->k), last_tile = (first + count - 1) / 64;
    const DequantizeArguments arguments{reinterpret_cast<const uint4 *>(layer->weight),
                                        layer->scale,
                                        layer->zero,
                                        static_cast<uint16_t *>(dense),
                                        first,
                                        count,
                                        layer->k,
                                        layer->group,
                                        units,
                                        tiles(layer->n),
                                        int64_t(last_tile - first / 64 + 1) * units};
    return layer->dtype == 0 ? start<Float16>(*layer, arguments, stream) : start<BFloat16>(*layer, arguments, stream);
}
