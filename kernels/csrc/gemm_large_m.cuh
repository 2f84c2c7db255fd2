// y = x WT + bias for more than 16 tokens: bound by reading the weight up to about 64, then by the tensor cores.
//
// Formula. Operands are dequantized in registers, (code - zero) * scale (or, on a FREE grid, code * scale + offset) rounded
//     once to the dtype: the weight that
//     gptqkit_dequantize gives, so y is what a dense gemm with it computes (weights.cuh).
// Operands. As in gemm_small_m.cuh: W is the 16-row operand, x the 8-column one.
// Grid (token tiles of TOKENS, split, column tiles of 256), block of 4 warps, one per 64 columns. The units are
//     dealt to the blocks of a column tile in contiguous runs. Per unit a block copies 64 inputs of all its tokens to
//     shared memory, for all warps, and every thread its own vectors of the weight; one barrier per unit says that the
//     tokens are there. Token rows lie 160 bytes apart there: then the eight bytes per lane of half a warp fall into
//     32 different banks.
// Preconditions and layouts as in gemm_small_m.cuh; any `group` that is a multiple of 16.
// Numerics: products exact, one float32 sum per element over the block's inputs, those of blocks added in a fixed
//     order by add_large_m, which follows where there are several; y is rounded once.
#pragma once

#include "weights.cuh"

constexpr int kLargeMWarps = 4;
constexpr int kLargeMColumns = kLargeMWarps * kTile;
constexpr int kTokenRow = 160; // bytes
template <int TOKENS> constexpr int kLargeMRows = TOKENS / 4; // of a thread, see rows_of
// So few that the smaller kernels fit twice where a multiprocessor has 100 KB.
template <int BITS, int TOKENS> constexpr int kLargeMStages = BITS == 2 && TOKENS == 32 ? 4 : 3;
template <int BITS, int TOKENS> constexpr int kLargeMWeightBytes =
    kLargeMStages<BITS, TOKENS> * BITS * kLargeMWarps * kLanes * 16;
template <int BITS, int TOKENS> constexpr int kLargeMRingBytes =
    kLargeMWeightBytes<BITS, TOKENS> + kLargeMStages<BITS, TOKENS> * TOKENS * kTokenRow;

template <class T, int BITS, int TOKENS, bool FREE>
KERNEL(kLargeMWarps *kLanes, 2) gemm_large_m(const GemmArguments a) {
    constexpr int kThreads = kLargeMWarps * kLanes, kStages = kLargeMStages<BITS, TOKENS>;
    constexpr int kFragments = TOKENS / 8; // of x, a lane's part of eight tokens each
    // Of 16 bytes: in a row of tokens, for every thread.
    constexpr int kPieces = kTile * 2 / 16, kCopies = TOKENS * kPieces / kThreads;
    DYNAMIC_SHARED(uint4, ring);
    unsigned char *const token_ring = reinterpret_cast<unsigned char *>(ring) + kLargeMWeightBytes<BITS, TOKENS>;
    const int thread = threadIdx.x, lane = thread % kLanes, warp = thread / kLanes, c = lane / 4, t = lane % 4;
    const int token0 = int(blockIdx.x) * TOKENS, parts = gridDim.y, part = blockIdx.y;
    const int first = int(int64_t(a.units) * part / parts), end = int(int64_t(a.units) * (part + 1) / parts);
    // Warps and tokens beyond the edges repeat the last tile and row: what they compute is never stored.
    const int own_tile = int(blockIdx.z) * kLargeMWarps + warp;
    const int tile = own_tile < a.column_tiles ? own_tile : a.column_tiles - 1;

    const uint4 *source = a.weight + (int64_t(tile) * a.units + first) * BITS * kLanes + lane;
    uint4 *const slots = ring + thread;
    const int piece = thread % kPieces;
    const uint16_t *rows[kCopies];
#pragma unroll
    for (int r = 0; r < kCopies; r++) {
        const int token = token0 + r * (kThreads / kPieces) + thread / kPieces;
        rows[r] = a.x + (token < a.m ? token : a.m - 1) * a.ldx + 8 * piece;
    }
    unsigned char *const token_slots = token_ring + thread / kPieces * kTokenRow + 16 * piece;
    int unit_to_copy = first, stage_to_copy = 0, stage = 0;
    auto copy_next = [&] {
        if (unit_to_copy < end) {
#pragma unroll
            for (int v = 0; v < BITS; v++)
                copy_async(slots + (stage_to_copy * BITS + v) * kThreads, source + v * kLanes);
            source += BITS * kLanes;
            const int k = unit_to_copy * kTile;
            if (k + 8 * piece < a.k) {
#pragma unroll
                for (int r = 0; r < kCopies; r++)
                    copy_async(token_slots + (stage_to_copy * TOKENS + r * (kThreads / kPieces)) * kTokenRow,
                               rows[r] + k);
            }
        }
        copy_commit(); // an empty group at the end keeps the count of groups
        unit_to_copy++;
        stage_to_copy = stage_to_copy + 1 == kStages ? 0 : stage_to_copy + 1;
    };

    const int group_steps = a.group / kStep, groups = (a.k + a.group - 1) / a.group;
    int group = first * kTile / a.group, steps_left = (group + 1) * group_steps - first * kSteps;
    GridWords<BITS, FREE> grid = load_grid<BITS, FREE>(a, group < groups ? group : groups - 1, tile, c);
    Weights<T, BITS, FREE> weights;
    auto open_group = [&] {
        weights.open(grid);
        if (++group < groups) grid = load_grid<BITS, FREE>(a, group, tile, c); // for the next time
    };

    float total[4][kFragments][4] = {};
#pragma unroll
    for (int s = 0; s < kStages - 1; s++) copy_next();
    if (first < end) open_group();
    for (int unit = first; unit < end; unit++) {
        copy_wait<kStages - 2>();
        block_barrier(); // everybody's part of this unit is there, and nobody reads the stage that comes next
        copy_next();
        uint32_t word[4 * BITS];
#pragma unroll
        for (int v = 0; v < BITS; v++) {
            const uint4 vector = load_shared(slots + (stage * BITS + v) * kThreads);
            word[4 * v] = vector.x, word[4 * v + 1] = vector.y, word[4 * v + 2] = vector.z, word[4 * v + 3] = vector.w;
        }
        const unsigned char *const tokens_here = token_ring + (stage * TOKENS + c) * kTokenRow + 8 * t;
#pragma unroll
        for (int j = 0; j < kSteps; j++) {
            if (j >= kSteps / 2 && unit * kTile + kStep * j >= a.k) break; // half a unit, the last one
            if (steps_left == 0) {
                open_group();
                steps_left = group_steps;
            }
            steps_left--;
            uint32_t w[4][4];
            weights.make(word + j * BITS, w);
#pragma unroll
            for (int m = 0; m < kFragments; m++) {
                const uint2 x =
                    load_shared(reinterpret_cast<const uint2 *>(tokens_here + 8 * m * kTokenRow + 2 * kStep * j));
                const uint32_t tokens[2] = {x.x, x.y};
#pragma unroll
                for (int i = 0; i < 4; i++) multiply_add<T>(total[i][m], w[i], tokens);
            }
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    copy_wait<0>();
    constexpr int kRows = kLargeMRows<TOKENS>;
    float sums[kRows][8], bias[8];
    rows_of(total, sums);
    const int column = own_tile * kTile + 8 * c;
    load_bias<T>(a, column, bias);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const int token = token0 + token_of_row(r, t);
        if (token >= a.m || column >= a.n) continue;
        if (a.split == 1) {
            store_row<T>(sums[r], bias, a, token, column);
        } else {
            float4 *const target = part_of<kRows, kThreads>(a, tile_of_y(), blockIdx.y, r);
            store_global(target, half_of(sums[r], 0));
            store_global(target + kThreads, half_of(sums[r], 1));
        }
    }
}

// Adds the parts that the blocks of gemm_large_m left, after it: its tiles are so large that one block each would take
// longer than all blocks of another launch. Grid (token tiles, rows of a thread, column tiles), blocks as there.
template <class T, int TOKENS> KERNEL(kLargeMWarps *kLanes, 4) add_large_m(const GemmArguments a) {
    const int lane = threadIdx.x % kLanes, r = blockIdx.y;
    const int token = int(blockIdx.x) * TOKENS + token_of_row(r, lane % 4);
    const int column = (int(blockIdx.z) * kLargeMWarps + threadIdx.x / kLanes) * kTile + 8 * (lane / 4);
    if (token >= a.m || column >= a.n) return;
    float row[8] = {}, bias[8];
    load_bias<T>(a, column, bias);
    add_parts<kLargeMRows<TOKENS>, kLargeMWarps * kLanes>(
        row, a, tile_of_y(), r, [](const float4 *source) { return load_constant(source); });
    store_row<T>(row, bias, a, token, column);
}
