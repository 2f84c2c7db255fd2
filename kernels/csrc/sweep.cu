// The column sweep of GPTQ and GPTAQ over one block of columns, on grids that are given.
//
//     for i = 0 ... columns - 1, for every row r at once:
//         code = clamp(round(w_i / scale) + zero, 0, 2^bits - 1)     q = (code - zero) * scale     e = (w_i - q) / U_ii
//         w_j += w_i P_ij - e U_ij     for the block's columns j > i
//
// It is quantizer/sweep.py's `_sweep_segment`, which says where the formulas come from. Sums run in another order than
// there, so a code can differ where a weight lies on the edge between two.
//
// Layouts, all row-major: block, scaled, values and codes [columns][rows]; inverse and shift [columns][columns]; scale
// and zero [groups][rows]. `block` comes up to date with earlier blocks, and leaves as what its weights were when they
// were rounded.
// Grid and block: 32 rows, a lane each, and four warps. Columns go in segments of 16. All warps sweep a segment alike,
// so that each has its errors in registers; then each updates a quarter of the columns behind it.
// Preconditions, checked here: bits, columns; by the caller: shapes and contiguity, |w / scale| < 2^127.
// Bound by latency, as far as can be said without a GPU: with 4096 rows each scheduler of a large GPU has one warp. Then
// count ten dependent instructions per column, and the updates' 16-byte reads of shared memory. Bytes are few: 17 per
// weight.
// Numerics: float32. Codes are those of a division rounded as IEEE 754 has it where scales are float16 numbers, errors
// those of a product with 1 / U_ii. Equal calls give equal bits.
#include "api.h"
#include "hardware.cuh"

namespace {

constexpr int kLanes = 32; // rows of a block
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kLanes;
constexpr int kSegment = 4 * kWarps;
constexpr int kMostColumns = 384; // with rows of U and P 98 KiB of shared memory; every GPU since Ampere has 99

struct SweepArguments {
    float *block;
    const float *inverse;
    const float *shift;   // null: GPTQ
    const int32_t *group; // [columns] rows of scale and zero
    const float *scale;
    const float *zero;
    uint8_t *codes;
    float *values;
    float *scaled;
    int columns, rows, bits;
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

// ---- grids ----

struct Grid {
    float scale, zero;
    float inverse; // 1 / scale, nearly
};

DEVICE float clamped(float value, float low, float high) { return fminf(fmaxf(value, low), high); }

// rint(value) below 2^22: floats from 2^23 on are integers. Two instructions at full rate.
DEVICE float rounded(float value) { return (value + 0x1.8p23f) - 0x1.8p23f; }

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
    return clamped(rounded(quotient(weight, grid.scale, grid.inverse)), -grid.zero, top - grid.zero);
}

DEVICE Grid make_grid(float scale, float zero) { return {scale, zero, reciprocal(scale)}; }

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

template <bool SHIFT> KERNEL(kThreads, 3) sweep_kernel(const SweepArguments a) {
    DYNAMIC_SHARED(float, weight); // [columns][kLanes]
    const int stride = a.columns + kBeyond;
    const Transposed inverse{reinterpret_cast<Four *>(weight + a.columns * kLanes), stride};
    const Transposed shift{inverse.four + stride * (kSegment / 4), stride};
    const int row = blockIdx.x * kLanes + lane();
    const bool inside = row < a.rows; // rows beyond the last are zeros, never stored
    const auto at = [&](int column) { return int64_t(column) * a.rows + row; };
    for (int j = warp(); j < a.columns; j += kWarps) store_lane(weight, j, inside ? a.block[at(j)] : 0.f);

    const float top = float((1 << a.bits) - 1);
    Grid grid[kSegment] = {};
    for (int begin = 0, end; begin < a.columns; begin = end) {
        block_barrier(); // all weights are up to date, and nobody reads `inverse` any more
        end = begin + kSegment < a.columns ? begin + kSegment : a.columns;
#pragma unroll
        for (int i = 0; i < kSegment; i++)
            if (begin + i < end && inside) {
                const int64_t place = at(load_constant(a.group + begin + i));
                grid[i] = make_grid(load_constant(a.scale + place), load_constant(a.zero + place));
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
            const Grid &mine = grid[i];
            const float diagonal = load_four(inverse, begin + i, i / 4).value[i % 4];
            now[i] = moved(i < count ? load_lane(weight, begin + i) : 0.f, begin + i, i);
            level[i] = nearest_level(now[i], mine, top);
            error[i] = fmaf(-level[i], mine.scale, now[i]) * quotient(1.f, diagonal);
        }
        const auto store = [&](auto *target, const auto &value) {
            target += at(begin);
#pragma unroll
            for (int i = 0; i < kSegment; i++, target += a.rows)
                if (i < count) store_global(target, value(i, grid[i]));
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

int start(const SweepArguments &a, void *stream) {
    const auto bytes = [&](int columns) {
        const int transposed = (columns + kBeyond) * kSegment * (a.shift ? 2 : 1);
        return int(sizeof(float)) * (columns * kLanes + transposed);
    };
    // Beyond what every block may have, always as much: see `launch`.
    const int shared = bytes(bytes(a.columns) > 47 * 1024 ? kMostColumns : a.columns);
    const dim3 grid((a.rows + kLanes - 1) / kLanes);
    return a.shift ? launch<sweep_kernel<true>>(grid, kThreads, shared, stream, a)
                   : launch<sweep_kernel<false>>(grid, kThreads, shared, stream, a);
}

} // namespace

int gptqkit_sweep(float *block, const float *inverse, const float *shift, const int32_t *group, const float *scale,
                  const float *zero, uint8_t *codes, float *values, float *scaled, int columns, int rows, int bits,
                  void *stream) {
    if (bits < 2 || bits > 8) return GPTQKIT_BAD_BITS;
    if (columns < 0 || rows < 0 || columns > kMostColumns) return GPTQKIT_BAD_SHAPE;
    if (columns == 0 || rows == 0) return GPTQKIT_OK;
    return start({block, inverse, shift, group, scale, zero, codes, values, scaled, columns, rows, bits}, stream);
}
