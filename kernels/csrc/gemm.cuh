// What the kernels share: grids, and for the two gemm kernels their arguments and the way from sums to y.
#pragma once

#include "fragments.cuh"

struct GemmArguments {
    const uint16_t *x;
    int64_t ldx;
    const uint4 *weight;
    const uint16_t *scale; // float16
    const void *zero;
    const uint4 *bias; // may be null; eight columns each, as y
    uint4 *y;
    float4 *workspace; // [column tile][token tile][split][vector of a thread][thread]
    int *locks;        // [column tile][token tile]
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

// The grid of `group` for the lane that holds columns 8c to 8c + 7 of column tile `tile`; `a` has scale, zero and
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

// Stores the tile of y of which each of the first OWNERS threads has `row` r at token `token(r)`, all at eight columns
// from `column` on. Where several blocks (blockIdx.y) share the tile, each leaves its sums in the workspace, as vectors
// that the same thread of another block reads; whichever block arrives last adds all of them in their order, so the
// result does not depend on who that is. Only tokens below M move, and the vectors of eight columns that begin below N.
// All threads of the block must call this.
template <class T, int OWNERS, int ROWS, class Token>
DEVICE void store_tile(float (&row)[ROWS][8], const GemmArguments &a, int column, Token token) {
    constexpr int kTogether = ROWS < 4 ? ROWS : 4;             // rows whose parts are read at a time,
    constexpr int kBlocks = kTogether < 4 ? 4 / kTogether : 2; // from so many blocks: 8 or 16 loads under way
    STATIC_SHARED(bool, last);
    const int blocks = gridDim.y;
    const auto inside = [&](int r) { return token(r) < a.m && column < a.n; };
    const int64_t tile = int64_t(blockIdx.z) * gridDim.x + blockIdx.x;
    // A warp's vectors of one token lie side by side, so that few tokens fill whole sectors.
    const int lane = threadIdx.x % kLanes, place = threadIdx.x - lane + lane % 4 * 8 + lane / 4;
    const auto part = [&](int block, int r) {
        return a.workspace + ((tile * blocks + block) * ROWS + r) * (2 * OWNERS) + place;
    };
    if (blocks > 1) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (inside(r)) {
                float4 *const mine = part(blockIdx.y, r);
                store_for_blocks(mine, float4{row[r][0], row[r][1], row[r][2], row[r][3]});
                store_for_blocks(mine + OWNERS, float4{row[r][4], row[r][5], row[r][6], row[r][7]});
            }
        block_barrier();
        if (threadIdx.x == 0) {
            device_fence(); // for the whole block: the barriers pass it on
            const bool all_others_came = fetch_add(a.locks + tile, 1) == blocks - 1;
            device_fence();
            store_shared(last, all_others_came);
            if (all_others_came) store_global(a.locks + tile, 0);
        }
        block_barrier();
        if (!load_shared(last)) return;
    }
    const int64_t pitch = (a.n + 7) / 8 * 8;
    uint4 bias{};
    if (a.bias && column < a.n) bias = load_constant(a.bias + column / 8);
    const uint32_t bias_pair[4] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
    for (int first = 0; first < ROWS; first += kTogether) {
        if (blocks > 1) {
#pragma unroll
            for (int r = first; r < first + kTogether; r++)
#pragma unroll
                for (int e = 0; e < 8; e++) row[r][e] = 0;
#pragma unroll 1
            for (int block = 0; block < blocks; block += kBlocks) {
                float4 parts[kBlocks][kTogether][2] = {};
#pragma unroll
                for (int b = 0; b < kBlocks; b++)
#pragma unroll
                    for (int r = 0; r < kTogether; r++)
                        if (block + b < blocks && inside(first + r)) {
                            const float4 *const source = part(block + b, first + r);
                            parts[b][r][0] = load_from_blocks(source);
                            parts[b][r][1] = load_from_blocks(source + OWNERS);
                        }
#pragma unroll
                for (int b = 0; b < kBlocks; b++)
#pragma unroll
                    for (int r = 0; r < kTogether; r++) add(row[first + r], parts[b][r][0], parts[b][r][1]);
            }
        }
#pragma unroll
        for (int r = first; r < first + kTogether; r++) {
            if (!inside(r)) continue;
            uint32_t pair[4];
#pragma unroll
            for (int p = 0; p < 4; p++)
                pair[p] = pair_from_floats<T>(row[r][2 * p] + to_float<T>(uint16_t(bias_pair[p])),
                                              row[r][2 * p + 1] + to_float<T>(uint16_t(bias_pair[p] >> 16)));
            store_global(a.y + (token(r) * pitch + column) / 8, uint4{pair[0], pair[1], pair[2], pair[3]});
        }
    }
}
