// y = x WT + bias for up to 16 tokens: bound by reading the weight, bits / 8 + (2 + zero bytes) / group bytes each.
//
// Formula. Within a group every product shares scale and zero, so they are applied once per group, to float32 sums,
//     and after 128 inputs at the latest:
//     y += scale * (sum_k code_k x_k - zero * sum_k x_k)        or, on a FREE grid,
//     y += scale * sum_k code_k x_k + offset * sum_k x_k
//     The operands are base + code * 2^place in `unit`s (fragments.cuh): the zero is taken for what it would be as an
//     operand, and the powers of two go at the very end. sum_k x_k comes from the same tensor cores with an operand of
//     ones, so asymmetric grids cost what symmetric ones cost and no product zero * scale is ever rounded.
// Operands. W is the 16-row operand of the tensor cores and x the 8-column one: one token wastes 7/8 of idle cores
//     instead of 15/16. Layouts: layout.cuh; x [M, K] rows ldx apart; y [M, N].
// Grid (token tiles of TOKENS, split, column tiles of 64), block of 8 or 4 warps. The units of a column tile are
//     dealt to the warps of its blocks in contiguous runs. Each thread copies its own pieces of weight and x into a
//     ring in shared memory and reads back only its own: the loop has no barrier and waits for nothing that was not
//     asked for two or three units earlier. Token tiles are the fastest index: they share the weight in L2.
// Preconditions, checked by gptqkit_gemm: M >= 1, K a multiple of 32, x 16-byte aligned with ldx a multiple of 8;
//     `group` a multiple of 16, of 64 unless FINE; locks 0.
// Numerics: products of 16-bit operands are exact in the float32 sums; the sums of a group, the scaled sums, the parts
//     of warps and of blocks are float32, each in a fixed order; y is rounded once. The two sums are larger than their
//     difference, the more so the farther the mean of x is from 0, and tensor cores round towards zero: over 128 inputs
//     at a time what they lose stays far below the rounding of y. An infinite activation gives NaN (inf less zero times
//     inf), where a dense product gives infinity.
#pragma once

#include "gemm.cuh"

// Sixteen tokens and eight bits need more registers: fewer warps share a multiprocessor, as many as fit without spills.
template <int BITS, int TOKENS> constexpr int kSmallMWarps = TOKENS == 8 && BITS < 8 ? 8 : 4;
template <int BITS, int TOKENS> constexpr int kSmallMBlocks = (TOKENS == 8) == (BITS == 8) ? 3 : 2;
template <int BITS> constexpr int kSmallMStages = BITS == 2 ? 4 : 3; // the smallest units need the most under way
template <int BITS, int TOKENS> constexpr int kSmallMCodeBytes =
    kSmallMStages<BITS> * BITS * kSmallMWarps<BITS, TOKENS> * kLanes * 16;
template <int BITS, int TOKENS> constexpr int kSmallMRingBytes =
    kSmallMCodeBytes<BITS, TOKENS> + kSmallMStages<BITS> * kSteps * TOKENS * kSmallMWarps<BITS, TOKENS> * kLanes;

template <class T, int BITS, int TOKENS, bool FINE, bool FREE>
KERNEL(kSmallMWarps<BITS, TOKENS> *kLanes, kSmallMBlocks<BITS, TOKENS>)
gemm_small_m(const GemmArguments a) {
    // Subnormal operands save an instruction each. If some GPU is slow at them, kBiased = true is the way out.
    using Operands = Fragments<T, BITS, false>;
    constexpr int kWarps = kSmallMWarps<BITS, TOKENS>, kThreads = kWarps * kLanes, kStages = kSmallMStages<BITS>,
                  kFragments = TOKENS / 8; // of x, a lane's part of eight tokens each
    DYNAMIC_SHARED(uint4, ring);
    const int thread = threadIdx.x, lane = thread % kLanes, warp = thread / kLanes, c = lane / 4, t = lane % 4;
    const int tile = blockIdx.z, token0 = int(blockIdx.x) * TOKENS;
    const int parts = int(gridDim.y) * kWarps, part = int(blockIdx.y) * kWarps + warp;
    const int first = int(int64_t(a.units) * part / parts), end = int(int64_t(a.units) * (part + 1) / parts);

    const uint4 *source = a.weight + (int64_t(tile) * a.units + first) * BITS * kLanes + lane;
    uint4 *const slots = ring + thread;
    // Tokens beyond M are zeros: their columns of y are never stored.
    uint2 *const x_slots = reinterpret_cast<uint2 *>(ring + kSmallMCodeBytes<BITS, TOKENS> / 16) + thread;
    const uint16_t *x_source[kFragments];
    int x_bytes[kFragments];
#pragma unroll
    for (int m = 0; m < kFragments; m++) {
        const int token = token0 + 8 * m + c;
        x_source[m] = a.x + (token < a.m ? token : 0) * a.ldx + first * kTile + 4 * t;
        x_bytes[m] = token < a.m ? 8 : 0;
    }
    int unit_to_copy = first, stage_to_copy = 0, stage = 0;
    auto copy_next = [&] {
        if (unit_to_copy < end) {
#pragma unroll
            for (int v = 0; v < BITS; v++)
                copy_async(slots + (stage_to_copy * BITS + v) * kThreads, source + v * kLanes);
            source += BITS * kLanes;
            const bool whole = unit_to_copy * kTile + kTile / 2 < a.k; // K is a multiple of half a unit
#pragma unroll
            for (int m = 0; m < kFragments; m++) {
#pragma unroll
                for (int j = 0; j < kSteps; j++)
                    copy_async_or_zero(x_slots + ((stage_to_copy * kFragments + m) * kSteps + j) * kThreads,
                                       x_source[m] + kStep * j, j < kSteps / 2 || whole ? x_bytes[m] : 0);
                x_source[m] += kTile;
            }
        }
        copy_commit(); // an empty group at the end keeps the count of groups
        unit_to_copy++;
        stage_to_copy = stage_to_copy + 1 == kStages ? 0 : stage_to_copy + 1;
    };

    float total[4][kFragments][4] = {}, sum[4][kFragments][4] = {}, sum_x[kFragments][4] = {};
    const uint32_t ones[4] = {kPairOfOnes<T>, kPairOfOnes<T>, kPairOfOnes<T>, kPairOfOnes<T>};
    const int group_steps = a.group / kStep, groups = (a.k + a.group - 1) / a.group;
    int group = first * kTile / a.group, steps_left = (group + 1) * group_steps - first * kSteps;
    // Loaded when the group begins and used when it ends, so nobody waits for it.
    GridWords<BITS, FREE> grid = load_grid<BITS, FREE>(a, group < groups ? group : groups - 1, tile, c);
    auto add_sums = [&] {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float scale = grid.scale_at(i, h);
                float zero = Operands::base, offset = 0;
                if constexpr (FREE)
                    offset = grid.offset_at(i, h) * (Operands::unit * (1 << Operands::place(i, h)));
                else
                    zero = Operands::value(grid.zero_at(i, h), Operands::place(i, h));
#pragma unroll
                for (int m = 0; m < kFragments; m++)
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; e++) {
                        if constexpr (FREE) total[i][m][e] = fmaf(offset, sum_x[m][e], total[i][m][e]);
                        if (!FREE || Operands::base != 0) sum[i][m][e] = fmaf(-zero, sum_x[m][e], sum[i][m][e]);
                        total[i][m][e] = fmaf(scale, sum[i][m][e], total[i][m][e]);
                        sum[i][m][e] = 0;
                    }
            }
#pragma unroll
        for (int m = 0; m < kFragments; m++) sum_x[m][0] = sum_x[m][1] = sum_x[m][2] = sum_x[m][3] = 0;
    };
    auto next_group = [&] {
        steps_left = group_steps;
        if (++group < groups) grid = load_grid<BITS, FREE>(a, group, tile, c);
    };

#pragma unroll
    for (int s = 0; s < kStages - 1; s++) copy_next();
    for (int unit = first; unit < end; unit++) {
        copy_wait<kStages - 2>();
        copy_next(); // into the stage of the unit before this one
        uint32_t word[4 * BITS];
#pragma unroll
        for (int v = 0; v < BITS; v++) {
            const uint4 vector = load_shared(slots + (stage * BITS + v) * kThreads);
            word[4 * v] = vector.x, word[4 * v + 1] = vector.y, word[4 * v + 2] = vector.z, word[4 * v + 3] = vector.w;
        }
        const uint2 *const x_here = x_slots + stage * kFragments * kSteps * kThreads;
        stage = stage + 1 == kStages ? 0 : stage + 1;
#pragma unroll
        for (int j = 0; j < kSteps; j++) {
            uint32_t w[4][4];
            Operands::operands(word + j * BITS, w);
#pragma unroll
            for (int m = 0; m < kFragments; m++) {
                const uint2 x = load_shared(x_here + (m * kSteps + j) * kThreads);
                const uint32_t tokens[2] = {x.x, x.y};
                multiply_add<T>(sum_x[m], ones, tokens);
#pragma unroll
                for (int i = 0; i < 4; i++) multiply_add<T>(sum[i][m], w[i], tokens);
            }
            if (FINE && --steps_left == 0) {
                add_sums();
                next_group();
            }
        }
        if (!FINE) steps_left -= kSteps;
        if (steps_left == 0 || (unit % 2 && steps_left != group_steps)) add_sums();
        if (steps_left == 0) next_group();
    }
    add_sums();

    // The warps' parts, in shared memory: warp r adds up row r of all.
    constexpr int kRows = 2 * kFragments;
    static_assert(kRows <= kWarps && kWarps * kRows * 2 * kLanes * 16 <= kSmallMRingBytes<BITS, TOKENS>);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int m = 0; m < kFragments; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) total[i][m][e] *= 1 / (Operands::unit * (1 << Operands::place(i, e >> 1)));
    float rows[kRows][8];
    rows_of(total, rows);
    copy_wait<0>();
    block_barrier(); // the ring becomes the place of the parts
    float4 *const corner = reinterpret_cast<float4 *>(ring) + lane;
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            store_shared(corner + ((warp * kRows + r) * 2 + half) * kLanes, half_of(rows[r], half));
    block_barrier();
    const int token = token0 + token_of_row(warp, t), column = tile * kTile + 8 * c;
    const bool mine = warp < kRows && token < a.m && column < a.n;
    float row[8] = {}, bias[8];
    load_bias<T>(a, column, bias);
    if (mine)
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
            const float4 *const source = corner + (w * kRows + warp) * 2 * kLanes;
            add(row, load_shared(source), load_shared(source + kLanes));
        }
    if (a.split > 1) {
        // The blocks' parts, in the workspace: whichever block comes last adds all of them in their order, so that the
        // result does not depend on who that is.
        constexpr int kOwners = kRows * kLanes; // threads that have a row
        STATIC_SHARED(bool, last);
        const int64_t place = tile_of_y();
        if (mine) {
            float4 *const target = part_of<1, kOwners>(a, place, blockIdx.y, 0);
            store_for_blocks(target, half_of(row, 0));
            store_for_blocks(target + kOwners, half_of(row, 1));
        }
        block_barrier();
        if (thread == 0) {
            device_fence(); // for the whole block: the barriers pass it on
            const bool all_others_came = fetch_add(a.locks + place, 1) == a.split - 1;
            device_fence();
            store_shared(last, all_others_came);
            if (all_others_came) store_global(a.locks + place, 0);
        }
        block_barrier();
        if (!load_shared(last) || !mine) return;
#pragma unroll
        for (int e = 0; e < 8; e++) row[e] = 0;
        add_parts<1, kOwners>(row, a, place, 0, [](const float4 *source) { return load_from_blocks(source); });
    }
    if (mine) store_row<T>(row, bias, a, token, column);
}
