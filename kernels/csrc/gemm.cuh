// What the kernels share: grids, and for the two gemm kernels their arguments and the way from a block's sums to y.
#pragma once

#include "fragments.cuh"

struct GemmArguments {
    const uint16_t *x;
    int64_t ldx;
    const uint4 *weight;
    const uint16_t *scale; // float16
    const void *zero;
    const uint16_t *bias; // may be null
    uint16_t *y;
    float *workspace; // [split][column tile][token tile][tokens of a tile][columns of a tile]
    int *locks;       // [column tile][token tile]
    int m, n, k, group, units, column_tiles;
};

// A lane's eight scales and zeros of one group, as they lie in memory.
template <int BITS> struct GridWords {
    uint32_t scale[4];
    uint32_t zero[kZeroBits<BITS> / 4];

    // Element 2i + h, for 0 <= i < 4 and 0 <= h < 2.
    DEVICE float scale_at(int i, int h) const { return to_float<Float16>(uint16_t(scale[i] >> 16 * h)); }
    DEVICE uint32_t zero_at(int i, int h) const {
        constexpr int pairs = 16 / kZeroBits<BITS>; // of a word
        return zero_of<BITS>(zero[i / pairs] >> 2 * kZeroBits<BITS> * (i % pairs), h);
    }
};

// The grid of `group` for the lane that holds columns c, c + 8 ... of column tile `tile`; `a` has scale, zero and
// column_tiles.
template <int BITS, class Arguments> DEVICE GridWords<BITS> load_grid(const Arguments &a, int group, int tile, int c) {
    const int64_t place = (int64_t(group) * a.column_tiles + tile) * kTile + 8 * c;
    GridWords<BITS> words;
    const uint4 scale = load_constant(reinterpret_cast<const uint4 *>(a.scale + place));
    words.scale[0] = scale.x, words.scale[1] = scale.y, words.scale[2] = scale.z, words.scale[3] = scale.w;
    const ZeroPair<BITS> *const source = static_cast<const ZeroPair<BITS> *>(a.zero) + place / 2;
    if constexpr (BITS == 8) {
        const uint4 zero = load_constant(reinterpret_cast<const uint4 *>(source));
        words.zero[0] = zero.x, words.zero[1] = zero.y, words.zero[2] = zero.z, words.zero[3] = zero.w;
    } else if constexpr (BITS == 4) {
        const uint2 zero = load_constant(reinterpret_cast<const uint2 *>(source));
        words.zero[0] = zero.x, words.zero[1] = zero.y;
    } else {
        words.zero[0] = load_constant(reinterpret_cast<const uint32_t *>(source));
    }
    return words;
}

// Where element (token, column) of part `part` of a block's sums lies in shared memory. Rows are four floats longer
// than they need to be: then the eight columns and four tokens that a warp writes at once fall into 32 different banks.
template <int TOKENS, int COLUMNS> DEVICE int sum_place(int part, int token, int column) {
    return (part * TOKENS + token) * (COLUMNS + 4) + column;
}
template <int PARTS, int TOKENS, int COLUMNS> constexpr int kSumBytes =
    PARTS * TOKENS * (COLUMNS + 4) * int(sizeof(float));

// Adds the block's PARTS partial tiles, then the tiles of all blocks (blockIdx.y) that share the tile of y, and stores
// it. Whichever block arrives last adds all of them in their order, so the result does not depend on who that is. All
// threads of the block must call this, with `sums` written and visible.
template <class T, int PARTS, int TOKENS, int COLUMNS, int THREADS>
DEVICE void store_tile(const float *sums, const GemmArguments &a) {
    STATIC_SHARED(bool, last);
    const int thread = threadIdx.x, blocks = gridDim.y;
    const int token0 = int(blockIdx.x) * TOKENS, column0 = int(blockIdx.z) * COLUMNS;
    const int64_t tile = int64_t(blockIdx.z) * gridDim.x + blockIdx.x;
    const int64_t plane = int64_t(gridDim.z) * gridDim.x * (TOKENS * COLUMNS);
    const int64_t mine = tile * (TOKENS * COLUMNS);
    auto store = [&](int token, int column, float value) {
        if (token0 + token >= a.m || column0 + column >= a.n) return;
        if (a.bias) value += to_float<T>(load_constant(a.bias + column0 + column));
        store_global(a.y + int64_t(token0 + token) * a.n + column0 + column, from_float<T>(value));
    };
    for (int element = thread; element < TOKENS * COLUMNS; element += THREADS) {
        const int token = element / COLUMNS, column = element % COLUMNS;
        float sum = load_shared(sums + sum_place<TOKENS, COLUMNS>(0, token, column));
        for (int part = 1; part < PARTS; part++)
            sum += load_shared(sums + sum_place<TOKENS, COLUMNS>(part, token, column));
        if (blocks == 1)
            store(token, column, sum);
        else
            store_for_blocks(a.workspace + plane * blockIdx.y + mine + element, sum);
    }
    if (blocks == 1) return;
    device_fence();
    block_barrier();
    if (thread == 0) {
        const bool all_others_came = fetch_add(a.locks + tile, 1) == blocks - 1;
        store_shared(last, all_others_came);
        if (all_others_came) store_global(a.locks + tile, 0);
    }
    block_barrier();
    if (!load_shared(last)) return;
    device_fence();
    for (int element = thread; element < TOKENS * COLUMNS; element += THREADS) {
        float sum = 0;
        for (int block = 0; block < blocks; block++)
            sum += load_from_blocks(a.workspace + plane * block + mine + element);
        store(element / COLUMNS, element % COLUMNS, sum);
    }
}
