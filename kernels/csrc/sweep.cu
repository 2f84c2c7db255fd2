// The column sweep of GPTQ and GPTAQ over one block of columns, with the fit of each group's grid.
//
//     for i = 0 ... columns - 1, for every row r at once:
//         where a group begins at i: fit scale and zero of its columns' current weights
//         code = clamp(round(w_i / scale) + zero, 0, 2^bits - 1)     q = (code - zero) * scale     e = (w_i - q) / U_ii
//         w_j += w_i P_ij - e U_ij     for the block's columns j > i
//
// It is quantizer/sweep.py's `_sweep_block` with quantizer/grid.py's `fit_grid` inside; both say where the formulas
// come from. Sums run in another order than there, so a code can differ where a weight lies on the edge between two.
//
// Layouts, all row-major: block, scaled, values and codes [columns][rows]; inverse and shift [columns][columns]; scale
// and zero [groups][rows]. `block` comes up to date with earlier blocks, and leaves as what its weights were when they
// were rounded.
// Grid and block: 32 rows, a lane each, and four warps. Columns go in segments of 16, which end where groups begin. All
// warps sweep a segment alike, so that each has its errors in registers; then each updates a quarter of the columns
// behind it. A search of grids is shared too: each warp sums the errors of a quarter of the group's columns.
// Preconditions, checked here: bits, columns; by the caller: shapes and contiguity, |w / scale| < 2^127.
// Bound by latency, as far as can be said without a GPU: with 4096 rows each scheduler of a large GPU has one warp. Then
// count ten dependent instructions per column, the updates' 16-byte reads of shared memory and, where grids are
// searched, eight instructions per weight and candidate. Bytes are few: 17 per weight.
// Numerics: float32. Codes are those of a division rounded as IEEE 754 has it where given scales are float16 numbers,
// errors those of a product with 1 / U_ii; fitted scales are rounded to float16 before use. Equal calls give equal bits.
#include "api.h"
#include "hardware.cuh"

namespace {

constexpr int kLanes = 32; // rows of a block
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kLanes;
constexpr int kSegment = 4 * kWarps;
constexpr int kMostColumns = 384; // with rows of U and P 98 KiB of shared memory; every GPU since Ampere has 99
constexpr int kCandidates = 4;    // grids that are judged together

struct SweepArguments {
    float *block;
    const float *inverse;
    const float *shift;      // null: GPTQ
    const float *importance; // [columns]; null: grids span minimum to maximum
    const int32_t *group;    // [columns] rows of scale and zero that are given; null: grids are fitted here
    float *scale;
    float *zero;
    uint8_t *codes;
    float *values;
    float *scaled;
    int columns, rows, group_size, bits, sym, min_zero;
};

DEVICE int lane() { return threadIdx.x % kLanes; }
DEVICE int warp() { return threadIdx.x / kLanes; }

// ---- shared memory ----

// Every lane its own bank.
DEVICE float load_lane(const float *rows, int index) { return load_shared(rows + index * kLanes + lane()); }
DEVICE void store_lane(float *rows, int index, float value) { store_shared(rows + index * kLanes + lane(), value); }

// The rows of a segment in a [columns][columns] matrix, transposed: four at a time, column by column.
struct alignas(16) Four {
    float value[4];
};
struct Transposed {
    Four *four; // [kSegment / 4][stride]
    int stride; // columns + kBeyond
};
constexpr int kBeyond = kSegment - 1; // a short segment reads on beyond its last column, for nothing
DEVICE Four load_four(const Transposed &transposed, int column, int part) {
    return load_shared(transposed.four + part * transposed.stride + column);
}
DEVICE void store_four(const Transposed &transposed, int column, int part, const Four &value) {
    store_shared(transposed.four + part * transposed.stride + column, value);
}

// What each warp has to say of the block's rows: all[w][c] is warp w's mine[c].
template <int COUNT> DEVICE void exchange(float *slots, const float (&mine)[COUNT], float (&all)[kWarps][COUNT]) {
    static_assert(COUNT <= kCandidates, "the slots are fewer");
#pragma unroll
    for (int c = 0; c < COUNT; c++) store_lane(slots, warp() * COUNT + c, mine[c]);
    block_barrier();
#pragma unroll
    for (int w = 0; w < kWarps; w++)
#pragma unroll
        for (int c = 0; c < COUNT; c++) all[w][c] = load_lane(slots, w * COUNT + c);
    block_barrier(); // the slots are free
}

// ---- grids ----

struct Grid {
    float scale, zero;
    float inverse; // 1 / scale, nearly
};

// The weights of one group, and how its grids are judged.
struct Group {
    const float *weight;     // shared memory, [count][kLanes]
    const float *importance; // [count] or null
    float *slots;            // shared memory for `exchange`
    int count;
    float top;  // 2^bits - 1
    float half; // 2^(bits - 1)
    float min_zero;
    bool sym;
};

DEVICE float clamped(float value, float low, float high) { return fminf(fmaxf(value, low), high); }

// rint(a * b) for products below 2^22: floats from 2^23 on are integers. Two instructions at full rate.
DEVICE float rounded_product(float a, float b) { return fmaf(a, b, 0x1.8p23f) - 0x1.8p23f; }

// a / b from about 1 / b, by a step of Newton. If b is a float16 number and |a / b| < 2^12, it rounds to the integer
// that IEEE's a / b rounds to: both are half integers where the true quotient is one, and beside it where it is not,
// because then it is more than half a unit in the last place away from one, and the step's error is far less.
DEVICE float quotient(float a, float b, float inverse) {
    const float near = a * inverse;
    return fmaf(fmaf(-near, b, a), inverse, near);
}
DEVICE float quotient(float a, float b) { return quotient(a, b, reciprocal(b)); }

// code - zero of the nearest code.
DEVICE float nearest_level(float weight, const Grid &grid, float top) {
    return clamped(rounded_product(quotient(weight, grid.scale, grid.inverse), 1.f), -grid.zero, top - grid.zero);
}

// Rounded to the float16 that will be stored, kept normal and finite.
DEVICE float as_float16(float scale) {
    return to_float<Float16>(from_float<Float16>(clamped(scale, 0x1p-14f, 65504.f)));
}

DEVICE Grid make_grid(float scale, float zero) { return {scale, zero, reciprocal(scale)}; }

// The grid for `share` of the range from `low` to `high`.
DEVICE Grid shrunk(const Group &group, float low, float high, float share) {
    const Grid grid = make_grid(as_float16((high - low) * quotient(share, group.top)), group.half);
    if (group.sym) return grid;
    const float zero = rounded_product(quotient(-low * share, grid.scale, grid.inverse), 1.f);
    if (group.min_zero > 0.f && zero <= group.min_zero) { // a range that starts at zero gives up its lowest code
        const float wider = high * quotient(share, group.top - group.min_zero);
        return make_grid(as_float16(fmaxf(grid.scale, wider)), group.min_zero);
    }
    return {grid.scale, clamped(zero, 0.f, group.top), grid.inverse};
}

// Every candidate's weighted error, cubed, each warp summing a quarter of the columns. On the edge between two codes
// both are as good, so a product does in place of the quotient.
template <int COUNT> DEVICE void judge(const Group &group, const Grid (&grid)[COUNT], float (&error)[COUNT]) {
    float sum[COUNT] = {}, all[kWarps][COUNT];
#pragma unroll 4
    for (int j = warp(); j < group.count; j += kWarps) {
        const float weight = load_lane(group.weight, j), importance = load_constant(group.importance + j);
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            const float level =
                clamped(rounded_product(weight, grid[c].inverse), -grid[c].zero, group.top - grid[c].zero);
            const float difference = fmaf(level, grid[c].scale, -weight);
            sum[c] = fmaf(importance, difference * difference * fabsf(difference), sum[c]);
        }
    }
    exchange(group.slots, sum, all);
#pragma unroll
    for (int c = 0; c < COUNT; c++) error[c] = (all[0][c] + all[1][c]) + (all[2][c] + all[3][c]);
}

DEVICE Grid fit_grid(const Group &group) {
    float range[2] = {}, all[kWarps][2];
    for (int j = warp(); j < group.count; j += kWarps) {
        range[0] = fminf(range[0], load_lane(group.weight, j));
        range[1] = fmaxf(range[1], load_lane(group.weight, j));
    }
    exchange(group.slots, range, all);
    float low = fminf(fminf(all[0][0], all[1][0]), fminf(all[2][0], all[3][0]));
    float high = fmaxf(fmaxf(all[0][1], all[1][1]), fmaxf(all[2][1], all[3][1]));
    if (group.sym) {
        high = fmaxf(-low, high);
        low = -high;
    }
    Grid best = shrunk(group, low, high, 1.f);
    if (!group.importance) return best;

    float least, share = 1.f;
    {
        const Grid grid[1] = {best};
        float error[1];
        judge(group, grid, error);
        least = error[0];
    }
    const auto try_shares = [&](const float (&candidate_share)[kCandidates]) {
        Grid grid[kCandidates];
        float error[kCandidates];
#pragma unroll
        for (int c = 0; c < kCandidates; c++) grid[c] = shrunk(group, low, high, candidate_share[c]);
        judge(group, grid, error);
#pragma unroll
        for (int c = 0; c < kCandidates; c++)
            if (error[c] < least) {
                least = error[c];
                best = grid[c];
                share = candidate_share[c];
            }
    };
#pragma unroll 1
    for (int step = 1; step <= 8; step += kCandidates)
        try_shares({1.f - step / 32.f, 1.f - (step + 1) / 32.f, 1.f - (step + 2) / 32.f, 1.f - (step + 3) / 32.f});
    try_shares({share - 1.f / 64, share + 1.f / 64, share - 1.f / 128, share + 1.f / 128});
    if (!group.sym) { // the second zero is judged as if the first had been no better: if it was, the second is no news
        Grid grid[2] = {best, best};
        grid[0].zero = clamped(best.zero - 1.f, group.min_zero, group.top);
        grid[1].zero = clamped(best.zero + 1.f, group.min_zero, group.top);
        float error[2];
        judge(group, grid, error);
        if (error[0] < least) return grid[0];
        if (error[1] < least) return grid[1];
    }
    return best;
}

// ---- the sweep ----

// Each warp transposes four of the segment's rows, from column `begin` on; rows beyond the last are zero.
DEVICE void transpose(const Transposed &transposed, const float *matrix, int begin, int columns) {
    const int first = begin + 4 * warp();
#pragma unroll 4
    for (int j = begin + lane(); j < columns; j += kLanes) {
        Four rows;
#pragma unroll
        for (int t = 0; t < 4; t++)
            rows.value[t] = first + t < columns ? load_constant(matrix + (first + t) * columns + j) : 0.f;
        store_four(transposed, j, warp(), rows);
    }
}

template <bool GIVEN, bool SHIFT> KERNEL(kThreads, GIVEN || SHIFT ? 3 : 4) sweep_kernel(const SweepArguments a) {
    DYNAMIC_SHARED(float, weight); // [columns][kLanes]
    const int stride = a.columns + kBeyond;
    const Transposed inverse{reinterpret_cast<Four *>(weight + a.columns * kLanes), stride};
    const Transposed shift{inverse.four + stride * (kSegment / 4), stride};
    const int row = blockIdx.x * kLanes + lane();
    const bool inside = row < a.rows; // rows beyond the last are zeros, never stored
    const auto at = [&](int column) { return int64_t(column) * a.rows + row; };
    for (int j = warp(); j < a.columns; j += kWarps) store_lane(weight, j, inside ? a.block[at(j)] : 0.f);

    const float top = float((1 << a.bits) - 1);
    Grid grid[GIVEN ? kSegment : 1] = {};
    for (int begin = 0, end; begin < a.columns; begin = end) {
        block_barrier(); // all weights are up to date, and nobody reads `inverse` any more
        end = begin + kSegment < a.columns ? begin + kSegment : a.columns;
        if constexpr (GIVEN) {
#pragma unroll
            for (int i = 0; i < kSegment; i++)
                if (begin + i < end && inside) {
                    const int64_t place = at(load_constant(a.group + begin + i));
                    grid[i] = make_grid(load_constant(a.scale + place), load_constant(a.zero + place));
                }
        } else {
            const int group = begin / a.group_size, next = (group + 1) * a.group_size;
            if (begin == group * a.group_size) {
                float *const slots = reinterpret_cast<float *>(inverse.four); // not in use just now
                grid[0] = fit_grid({weight + begin * kLanes, a.importance ? a.importance + begin : nullptr, slots,
                                    (next < a.columns ? next : a.columns) - begin, top, float(1 << (a.bits - 1)),
                                    float(a.min_zero), a.sym != 0});
                if (warp() == 0 && inside) {
                    store_global(a.scale + at(group), grid[0].scale);
                    store_global(a.zero + at(group), grid[0].zero);
                }
            }
            if (end > next) end = next;
        }
        transpose(inverse, a.inverse, begin, a.columns);
        if constexpr (SHIFT) transpose(shift, a.shift, begin, a.columns);
        block_barrier();

        const int count = end - begin;
        float now[kSegment], level[kSegment], error[kSegment];
        // What `value` of column j becomes when the segment's first `done` columns are moved onto it.
        const auto moved = [&](float value, int j, int done) {
#pragma unroll
            for (int i = 0; i < done; i++) {
                if constexpr (SHIFT) value = fmaf(now[i], load_four(shift, j, i / 4).value[i % 4], value);
                value = fmaf(-error[i], load_four(inverse, j, i / 4).value[i % 4], value);
            }
            return value;
        };
#pragma unroll
        for (int i = 0; i < kSegment; i++) { // in a short segment the last are computed for nothing
            const Grid &mine = grid[GIVEN ? i : 0];
            const float diagonal = load_four(inverse, begin + i, i / 4).value[i % 4];
            now[i] = moved(i < count ? load_lane(weight, begin + i) : 0.f, begin + i, i);
            level[i] = nearest_level(now[i], mine, top);
            error[i] = fmaf(-level[i], mine.scale, now[i]) * quotient(1.f, diagonal);
        }
        const auto store = [&](auto *target, const auto &value) {
            target += at(begin);
#pragma unroll
            for (int i = 0; i < kSegment; i++, target += a.rows)
                if (i < count) store_global(target, value(i, grid[GIVEN ? i : 0]));
        };
        switch (inside ? warp() : kWarps) {
        case 0: store(a.block, [&](int i, const Grid &) { return now[i]; }); break;
        case 1: store(a.scaled, [&](int i, const Grid &) { return error[i]; }); break;
        case 2: store(a.values, [&](int i, const Grid &mine) { return level[i] * mine.scale; }); break;
        case 3: store(a.codes, [&](int i, const Grid &mine) { return uint8_t(level[i] + mine.zero); }); break;
        }
#pragma unroll
        for (int i = 0; i < kSegment; i++)
            if (i >= count) now[i] = error[i] = 0.f;
#pragma unroll 2
        for (int j = end + warp(); j < a.columns; j += kWarps)
            store_lane(weight, j, moved(load_lane(weight, j), j, kSegment));
    }
}

template <bool GIVEN> int start(const SweepArguments &a, void *stream) {
    const auto bytes = [&](int columns) {
        const int slots = kWarps * kCandidates * kLanes;
        const int transposed = (columns + kBeyond) * kSegment * (a.shift ? 2 : 1);
        return int(sizeof(float)) * (columns * kLanes + (transposed > slots ? transposed : slots));
    };
    // Beyond what every block may have, always as much: see `launch`.
    const int shared = bytes(bytes(a.columns) > 47 * 1024 ? kMostColumns : a.columns);
    const dim3 grid((a.rows + kLanes - 1) / kLanes);
    return a.shift ? launch<sweep_kernel<GIVEN, true>>(grid, kThreads, shared, stream, a)
                   : launch<sweep_kernel<GIVEN, false>>(grid, kThreads, shared, stream, a);
}

} // namespace

int gptqkit_sweep(float *block, const float *inverse, const float *shift, const float *importance, const int32_t *group,
                  float *scale, float *zero, uint8_t *codes, float *values, float *scaled, int columns, int rows,
                  int group_size, int bits, int sym, int min_zero, void *stream) {
    if (bits < 2 || bits > 8) return GPTQKIT_BAD_BITS;
    if (columns < 0 || rows < 0 || columns > kMostColumns) return GPTQKIT_BAD_SHAPE;
    if (!group && group_size < 1) return GPTQKIT_BAD_GROUP;
    if (columns == 0 || rows == 0) return GPTQKIT_OK;
    const SweepArguments arguments{block,  inverse, shift,   importance, group,      scale, zero, codes,
                                   values, scaled,  columns, rows,       group_size, bits,  sym,  min_zero};
    return group ? start<true>(arguments, stream) : start<false>(arguments, stream);
}
