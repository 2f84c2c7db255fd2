// The column sweep of GPTQ and GPTAQ over one block of columns, with the fit of each group's grid.
//
//     for i = 0 ... columns - 1, for every row r at once:
//         where a group begins at i: fit scale and zero of its columns' current weights
//         code = clamp(round(w_i / scale) + zero, 0, 2^bits - 1)     q = (code - zero) * scale     e = (w_i - q) / U_ii
//         w_j += w_i P_ij - e U_ij     for the block's columns j > i
//
// It is quantizer/solver.py's `_sweep_block` with quantizer/grid.py's `fit_grid` inside; both say where the formulas come
// from. Sums run in another order than there, so a code can differ where a weight lies on the edge between two.
//
// Layouts, all row-major: block, scaled, values and codes [columns][rows]; inverse and shift [columns][columns]; scale and
// zero [groups][rows]. `block` comes up to date with earlier blocks and leaves as the weights when they were rounded.
// Grid and block: a thread per row, a warp per block; no thread waits for another.
// Preconditions, checked here: bits, and shared memory for columns x 32 floats; by the caller: shapes and contiguity.
// Bound by: issue slots, about columns^2 / 2 multiply-adds and 19 * columns rounded weights a thread where grids are
// searched; bytes are few (each weight is read and written once).
// Numerics: float32, division and rounding to nearest as IEEE 754 has them; scales are rounded to float16 before use.
#include "api.h"
#include "hardware.cuh"

namespace {

constexpr int ROWS = 32;          // rows, and threads, of a block
constexpr int MOST_COLUMNS = 384; // their weights fill the 48 KiB of shared memory that every block may have

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

// One row's weights of one group in shared memory, and how its grids are judged.
struct Group {
    const float *weight;     // element j at weight[j * ROWS]
    const float *importance; // [count] or null
    int count;
    float top; // 2^bits - 1
    float half; // 2^(bits - 1)
    float min_zero;
    bool sym;
};

struct Grid {
    float scale, zero;
};

DEVICE float clamped(float value, float low, float high) { return fminf(fmaxf(value, low), high); }

// Rounded to the float16 that will be stored, kept normal and finite.
DEVICE float as_float16(float scale) {
    return to_float<Float16>(from_float<Float16>(clamped(scale, 0x1p-14f, 65504.f)));
}

DEVICE float encode(float weight, const Grid &grid, float top) {
    return clamped(rintf(weight / grid.scale) + grid.zero, 0.f, top);
}

DEVICE float decode(float code, const Grid &grid) { return (code - grid.zero) * grid.scale; }

// The grid for `share` of the range from `low` to `high`.
DEVICE Grid shrunk(const Group &group, float low, float high, float share) {
    Grid grid;
    grid.scale = as_float16((high - low) * (share / group.top));
    if (group.sym) {
        grid.zero = group.half;
        return grid;
    }
    grid.zero = clamped(rintf(-low * share / grid.scale), 0.f, group.top);
    if (group.min_zero > 0.f && grid.zero <= group.min_zero) { // a range that starts at zero gives up its lowest code
        grid.zero = group.min_zero;
        grid.scale = as_float16(fmaxf(grid.scale, high * (share / (group.top - group.min_zero))));
    }
    return grid;
}

DEVICE float weighted_error(const Group &group, const Grid &grid) {
    float sum = 0.f;
    for (int j = 0; j < group.count; j++) {
        const float weight = group.weight[j * ROWS];
        const float error = decode(encode(weight, grid, group.top), grid) - weight;
        sum += load_constant(group.importance + j) * (error * error);
    }
    return sum;
}

DEVICE Grid fit_grid(const Group &group) {
    float low = 0.f, high = 0.f;
    for (int j = 0; j < group.count; j++) {
        low = fminf(low, group.weight[j * ROWS]);
        high = fmaxf(high, group.weight[j * ROWS]);
    }
    if (group.sym) {
        high = fmaxf(-low, high);
        low = -high;
    }
    Grid best = shrunk(group, low, high, 1.f);
    if (!group.importance) return best;

    float least = weighted_error(group, best), share = 1.f;
    const auto try_share = [&](float candidate_share) {
        const Grid candidate = shrunk(group, low, high, candidate_share);
        const float error = weighted_error(group, candidate);
        if (error < least) {
            least = error;
            best = candidate;
            share = candidate_share;
        }
    };
    for (int step = 1; step <= 12; step++) try_share(float(1.0 - 0.05 * step));
    const float centre = share;
    try_share(centre - 0.025f);
    try_share(centre + 0.025f);
    try_share(centre - 0.0125f);
    try_share(centre + 0.0125f);
    if (!group.sym)
        for (int step = -1; step <= 1; step += 2) {
            Grid candidate = best;
            candidate.zero = clamped(best.zero + float(step), group.min_zero, group.top);
            const float error = weighted_error(group, candidate);
            if (error < least) {
                least = error;
                best = candidate;
            }
        }
    return best;
}

KERNEL(ROWS, 1) sweep_kernel(const SweepArguments a) {
    DYNAMIC_SHARED(float, tile); // [columns][ROWS]
    const int lane = threadIdx.x, row = blockIdx.x * ROWS + lane;
    if (row >= a.rows) return;
    float *const weight = tile + lane;
    const auto at = [&](int column) { return int64_t(column) * a.rows + row; };
    for (int i = 0; i < a.columns; i++) weight[i * ROWS] = a.block[at(i)];

    const float top = float((1 << a.bits) - 1);
    Grid grid{};
    for (int i = 0; i < a.columns; i++) {
        if (a.group) {
            const int group = load_constant(a.group + i);
            grid = {load_constant(a.scale + at(group)), load_constant(a.zero + at(group))};
        } else if (i % a.group_size == 0) {
            const Group members{weight + i * ROWS, a.importance ? a.importance + i : nullptr,
                                a.columns - i < a.group_size ? a.columns - i : a.group_size, top,
                                float(1 << (a.bits - 1)), float(a.min_zero), a.sym != 0};
            grid = fit_grid(members);
            a.scale[at(i / a.group_size)] = grid.scale;
            a.zero[at(i / a.group_size)] = grid.zero;
        }
        const float now = weight[i * ROWS], code = encode(now, grid, top), value = decode(code, grid);
        const float *const inverse = a.inverse + int64_t(i) * a.columns;
        const float error = (now - value) / load_constant(inverse + i);
        a.block[at(i)] = now;
        a.codes[at(i)] = uint8_t(code);
        a.values[at(i)] = value;
        a.scaled[at(i)] = error;
        for (int j = i + 1; j < a.columns; j++) weight[j * ROWS] -= error * load_constant(inverse + j);
        if (a.shift) {
            const float *const shift = a.shift + int64_t(i) * a.columns;
            for (int j = i + 1; j < a.columns; j++) weight[j * ROWS] += now * load_constant(shift + j);
        }
    }
}

} // namespace

int gptqkit_sweep(float *block, const float *inverse, const float *shift, const float *importance, const int32_t *group,
                  float *scale, float *zero, uint8_t *codes, float *values, float *scaled, int columns, int rows,
                  int group_size, int bits, int sym, int min_zero, void *stream) {
    if (bits != 2 && bits != 3 && bits != 4 && bits != 8) return GPTQKIT_BAD_BITS;
    if (columns < 0 || rows < 0 || columns > MOST_COLUMNS) return GPTQKIT_BAD_SHAPE;
    if (!group && group_size < 1) return GPTQKIT_BAD_GROUP;
    if (columns == 0 || rows == 0) return GPTQKIT_OK;
    const SweepArguments arguments{block,  inverse, shift,   importance, group, scale,    zero,
                                   codes,  values,  scaled,  columns,    rows,  group_size, bits,
                                   sym,    min_zero};
    return launch<sweep_kernel>(dim3((rows + ROWS - 1) / ROWS), ROWS, columns * ROWS * int(sizeof(float)), stream, arguments);
}
