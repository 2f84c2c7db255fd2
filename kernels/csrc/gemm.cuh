// What the kernels share: grids, and for the two gemm kernels their arguments and the way from sums to y.
//
// On that way move only tokens below M, and vectors of eight columns that begin below N.
#pragma once

#include "fragments.cuh"

struct GemmArguments {
    const uint16_t *x;
    int64_t ldx;
    const uint4 *weight;
    const void *scale, *zero;
    const uint16_t *bias; // may be null
    uint4 *y;             // eight columns each
    float4 *workspace; // see part_of
    int *locks;        // [column tile][token tile]
    int m, n, k, group, units, column_tiles, split;
};

// A lane's eight scales and zeros of one group, as they lie in memory: float16 and whole numbers.
template <int BITS, bool FREE> struct GridWords {
    uint32_t scale[4];
    uint32_t zero[kZeroBits<BITS> / 4];

    // Element 2i + h, for 0 <= i < 4 and 0 <= h < 2.
    DEVICE float scale_at(int i, int h) const { return to_float<Float16>(uint16_t(scale[i] >> 16 * h)); }
    DEVICE uint32_t zero_at(int i, int h) const {
        constexpr int pairs = 16 / kZeroBits<BITS>; // of a word
        return zero_of<BITS>(zero[i / pairs] >> 2 * kZeroBits<BITS> * (i % pairs), h);
    }
};

// On a free grid: float32 scales and offsets.
template <int BITS> struct GridWords<BITS, true> {
    float scale[8], offset[8];

    DEVICE float scale_at(int i, int h) const { return scale[2 * i + h]; }
    DEVICE float offset_at(int i, int h) const { return offset[2 * i + h]; }
};

// Those of columns 8c to 8c + 7 of the tile whose grid begins at `first`.
template <int BITS>
DEVICE void load(GridWords<BITS, false> &words, const void *scales, const void *zeros, int64_t first, int c) {
    const int64_t place = first + 8 * c;
    const uint4 scale = load_constant(reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(scales) + place));
    words.scale[0] = scale.x, words.scale[1] = scale.y, words.scale[2] = scale.z, words.scale[3] = scale.w;
    const ZeroPair<BITS> *const source = static_cast<const ZeroPair<BITS> *>(zeros) + place / 2;
    if constexpr (BITS == 8) {
        const uint4 zero = load_constant(reinterpret_cast<const uint4 *>(source));
        words.zero[0] = zero.x, words.zero[1] = zero.y, words.zero[2] = zero.z, words.zero[3] = zero.w;
    } else if constexpr (BITS == 4) {
        const uint2 zero = load_constant(reinterpret_cast<const uint2 *>(source));
        words.zero[0] = zero.x, words.zero[1] = zero.y;
    } else {
        words.zero[0] = load_constant(reinterpret_cast<const uint32_t *>(source));
    }
}
template <int BITS>
DEVICE void load(GridWords<BITS, true> &words, const void *scales, const void *offsets, int64_t first, int c) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t vector = first / 4 + half * (kTile / 8) + c; // so that a warp reads whole sectors
        const float4 scale = load_constant(static_cast<const float4 *>(scales) + vector);
        const float4 offset = load_constant(static_cast<const float4 *>(offsets) + vector);
        float *const s = words.scale + 4 * half, *const o = words.offset + 4 * half;
        s[0] = scale.x, s[1] = scale.y, s[2] = scale.z, s[3] = scale.w;
        o[0] = offset.x, o[1] = offset.y, o[2] = offset.z, o[3] = offset.w;
    }
}

// The grid of `group` for the lane that holds columns 8c to 8c + 7 of column tile `tile`; `a` has scale, zero and
// column_tiles.
template <int BITS, bool FREE, class Arguments>
DEVICE GridWords<BITS, FREE> load_grid(const Arguments &a, int group, int tile, int c) {
    GridWords<BITS, FREE> words;
    load(words, a.scale, a.zero, (int64_t(group) * a.column_tiles + tile) * kTile, c);
    return words;
}

// Rows of a fragment of sums: element (i, m, e) of a thread belongs to token 8m + 2t + (e & 1) and to column
// 8c + 2i + (e >> 1) of the warp's tile, so that a thread has eight neighbouring columns of each of its tokens.
template <int FRAGMENTS> DEVICE void rows_of(const float (&sum)[4][FRAGMENTS][4], float (&row)[2 * FRAGMENTS][8]) {
#pragma unroll
    for (int r = 0; r < 2 * FRAGMENTS; r++)
#pragma unroll
        for (int column = 0; column < 8; column++) row[r][column] = sum[column / 2][r / 2][2 * (column % 2) + r % 2];
}
DEVICE int token_of_row(int r, int t) { return 8 * (r / 2) + 2 * t + r % 2; }

DEVICE void add(float (&row)[8], const float4 &low, const float4 &high) {
    row[0] += low.x, row[1] += low.y, row[2] += low.z, row[3] += low.w;
    row[4] += high.x, row[5] += high.y, row[6] += high.z, row[7] += high.w;
}

// Sums that blocks leave for each other, [tile of y][split][row of a thread][half a row][thread], in the order that
// puts a warp's vectors of one token side by side: then few tokens fill whole sectors.
template <int ROWS, int THREADS> DEVICE float4 *part_of(const GemmArguments &a, int64_t tile, int block, int r) {
    const int lane = threadIdx.x % kLanes, place = threadIdx.x - lane + lane % 4 * 8 + lane / 4;
    return a.workspace + ((tile * a.split + block) * ROWS + r) * (2 * THREADS) + place;
}

// Adds all blocks' parts of a row in their order, eight loads under way. LOAD reads a vector.
template <int ROWS, int THREADS, class Load>
DEVICE void add_parts(float (&row)[8], const GemmArguments &a, int64_t tile, int r, Load load) {
    constexpr int kBlocks = 4;
#pragma unroll 1
    for (int block = 0; block < a.split; block += kBlocks) {
        float4 low[kBlocks] = {}, high[kBlocks] = {};
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
            if (block + b < a.split) {
                const float4 *const source = part_of<ROWS, THREADS>(a, tile, block + b, r);
                low[b] = load(source);
                high[b] = load(source + THREADS);
            }
#pragma unroll
        for (int b = 0; b < kBlocks; b++) add(row, low[b], high[b]);
    }
}

// The bias of eight columns, which may lie at any address.
template <class T> DEVICE void load_bias(const GemmArguments &a, int column, float (&bias)[8]) {
#pragma unroll
    for (int e = 0; e < 8; e++)
        bias[e] = a.bias && column + e < a.n ? to_float<T>(load_constant(a.bias + column + e)) : 0.f;
}

// Eight columns of y from `column` on, rounded once.
template <class T>
DEVICE void store_row(const float (&row)[8], const float (&bias)[8], const GemmArguments &a, int token, int column) {
    uint32_t pair[4];
#pragma unroll
    for (int p = 0; p < 4; p++)
        pair[p] = pair_from_floats<T>(row[2 * p] + bias[2 * p], row[2 * p + 1] + bias[2 * p + 1]);
    store_global(a.y + token * int64_t((a.n + 7) / 8) + column / 8, uint4{pair[0], pair[1], pair[2], pair[3]});
}

DEVICE float4 half_of(const float (&row)[8], int half) {
    return {row[4 * half], row[4 * half + 1], row[4 * half + 2], row[4 * half + 3]};
}
DEVICE int64_t tile_of_y() { return int64_t(blockIdx.z) * gridDim.x + blockIdx.x; }
