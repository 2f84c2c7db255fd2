// GPTQ's packed tensors -> the repacked form of layout.cuh, once per layer.
//
// Weight: code (k, n) is bits k * bits ... of the little-endian bit stream down column n of qweight, int32 [K*bits/32,
//   N]. Packed input p is source row rows[p], or p. One lane of a warp makes its 4 * bits words of one unit, so a
//   thread is (unit, lane) and gathers 128 codes; eight neighbouring columns share a 32-byte sector. Inputs and
//   columns beyond K and N get code 0.
// Grid: zero (g, n) is bits n * bits ... of the stream along row g of qzeros, plus zero_offset; scales only move. A
//   thread is one (group, pair of neighbouring places: columns 8 apart). Columns beyond N get scale 0 and zero 0.
// Both run once and are bound by the reads of single words; no arithmetic, so nothing is rounded. Sizes and pointers
// are checked by the C functions below.
#include "api.h"
#include "checks.h"
#include "layout.cuh"

namespace {

constexpr int kThreads = 256;

// Bits [position * bits, + bits) of a stream whose words lie `stride` apart.
template <int BITS> DEVICE uint32_t stream_code(const int32_t *words, int64_t stride, int64_t position) {
    const int64_t bit = position * BITS;
    const int shift = int(bit % 32);
    uint32_t code = uint32_t(load_constant(words + bit / 32 * stride)) >> shift;
    if (32 % BITS && shift + BITS > 32)
        code |= uint32_t(load_constant(words + (bit / 32 + 1) * stride)) << (32 - shift);
    return code & ((1u << BITS) - 1);
}

struct WeightArguments {
    const int32_t *qweight;
    const int32_t *rows;
    uint4 *weight;
    int n, k, units;
    int64_t threads;
};

template <int BITS> KERNEL(kThreads, 1) repack_weight(WeightArguments a) {
    const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (thread >= a.threads) return;
    const int lane = int(thread % kLanes), unit = int(thread / kLanes % a.units), tile = int(thread / kLanes / a.units);
    uint32_t word[kSteps * BITS];
#pragma unroll
    for (int j = 0; j < kSteps; j++) {
        uint32_t pair[4][4];
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < 4; i++) {
                const int n = tile * kTile + 16 * i + 8 * (r & 1) + lane / 4;
                pair[i][r] = 0;
                for (int half = 0; half < 2; half++) {
                    const int k = unit * kTile + kStep * j + 4 * (lane % 4) + 2 * (r >> 1) + half;
                    if (n >= a.n || k >= a.k) continue;
                    const int row = a.rows ? load_constant(a.rows + k) : k;
                    pair[i][r] |= stream_code<BITS>(a.qweight + n, a.n, row) << 16 * half;
                }
            }
        pack_step<BITS>(pair, word + j * BITS);
    }
    uint4 *const target = a.weight + (int64_t(tile) * a.units + unit) * BITS * kLanes + lane;
#pragma unroll
    for (int v = 0; v < BITS; v++)
        store_global(target + v * kLanes, uint4{word[4 * v], word[4 * v + 1], word[4 * v + 2], word[4 * v + 3]});
}

struct GridArguments {
    const uint16_t *scales;
    const int32_t *qzeros;
    uint16_t *scale;
    void *zero;
    int zero_offset, n, columns;
    int64_t threads;
};

template <int BITS> KERNEL(kThreads, 1) repack_grid(GridArguments a) {
    const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (thread >= a.threads) return;
    const int pair = int(thread % (a.columns / 2)), first = pair / 8 * 16 + pair % 8;
    const int64_t group = thread / (a.columns / 2), row_words = int64_t(a.n) * BITS / 32;
    const int64_t place = group * a.columns + first / kTile * kTile + grid_place(first % kTile);
    uint32_t zeros = 0;
    for (int h = 0; h < 2; h++) {
        const int n = first + 8 * h;
        const bool inside = n < a.n;
        store_global(a.scale + place + h, inside ? load_constant(a.scales + group * a.n + n) : uint16_t(0));
        if (inside)
            zeros |= (stream_code<BITS>(a.qzeros + group * row_words, 1, n) + a.zero_offset) << kZeroBits<BITS> * h;
    }
    store_global(static_cast<ZeroPair<BITS> *>(a.zero) + place / 2, ZeroPair<BITS>(zeros));
}

template <int BITS> int start_weight(const WeightArguments &arguments, void *stream) {
    return launch<repack_weight<BITS>>(dim3(unsigned((arguments.threads + kThreads - 1) / kThreads)), kThreads, 0,
                                       stream, arguments);
}

template <int BITS> int start_grid(const GridArguments &arguments, void *stream) {
    return launch<repack_grid<BITS>>(dim3(unsigned((arguments.threads + kThreads - 1) / kThreads)), kThreads, 0, stream,
                                     arguments);
}

} // namespace

GPTQKIT_API int gptqkit_repack_weight(int bits, const int32_t *qweight, const int32_t *rows, uint32_t *weight, int n,
                                      int k, void *stream) {
    if (int error = check_shape(bits, n, k)) return error;
    if (misaligned(weight, 16)) return GPTQKIT_BAD_ALIGNMENT;
    const int units = tiles(k);
    const int64_t threads = int64_t(tiles(n)) * units * kLanes;
    if (threads == 0) return GPTQKIT_OK;
    const WeightArguments arguments{qweight, rows, reinterpret_cast<uint4 *>(weight), n, k, units, threads};
    switch (bits) {
    case 2: return start_weight<2>(arguments, stream);
    case 3: return start_weight<3>(arguments, stream);
    case 4: return start_weight<4>(arguments, stream);
    default: return start_weight<8>(arguments, stream);
    }
}

GPTQKIT_API int gptqkit_repack_grid(int bits, const void *scales, const int32_t *qzeros, int zero_offset, void *scale,
                                    void *zero, int n, int groups, void *stream) {
    if (int error = check_shape(bits, n, 0)) return error;
    if (groups < 0 || int64_t(n) * bits % 32) return GPTQKIT_BAD_SHAPE;
    if (misaligned(scale, 16) || misaligned(zero, 16)) return GPTQKIT_BAD_ALIGNMENT;
    const int columns = tiles(n) * kTile;
    const int64_t threads = int64_t(groups) * (columns / 2);
    if (threads == 0) return GPTQKIT_OK;
    const GridArguments arguments{static_cast<const uint16_t *>(scales),
                                  qzeros,
                                  static_cast<uint16_t *>(scale),
                                  zero,
                                  zero_offset,
                                  n,
                                  columns,
                                  threads};
    switch (bits) {
    case 2: return start_grid<2>(arguments, stream);
    case 3: return start_grid<3>(arguments, stream);
    case 4: return start_grid<4>(arguments, stream);
    default: return start_grid<8>(arguments, stream);
    }
}
