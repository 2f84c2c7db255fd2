// Codes -> weights as operands of the tensor cores, (code - zero) * scale rounded once to the dtype; on a FREE grid code *
// scale + offset in float32, then rounded to the dtype.
//
// Instructions per pair of weights, after the mask that makes an operand of a pair of codes (fragments.cuh):
//   Float16   2: the operand less its bias and the zero, exact; times the scale.
//   BFloat16  3, up to four bits: a float16 scale is the sum of a bfloat16 of eight bits and one of three. The
//             difference of code and zero has at most four bits (or is 16), so its product with the small part is
//             exact, and adding the product with the large part rounds once. (An infinite scale gives NaN.)
//             7, eight bits: by way of float32, which holds the product exactly.
//   FREE      9.
#pragma once

#include "gemm.cuh"

// One 16-bit half of `word`, twice.
DEVICE uint32_t pair_of_half(uint32_t word, int h) { return select_bytes(word, 0, h ? 0x3232 : 0x1010); }

constexpr uint32_t kMinusZeros = 0x80008000; // the c of a * b + c that changes no product

// Of a pair of operands base + code * 2^place: code - zero.
template <class T, int BITS> struct Difference {
    static constexpr int kMantissa = kPairOfOnes<T> == kPairOfOnes<Float16> ? 10 : 7;
    uint32_t shift; // the operand that the zero would be, negative and divided by 2^place

    DEVICE void open(uint32_t zero, int place) {
        constexpr uint32_t twice = 0x00010001;
        shift =
            kMinusZeros + Fragments<T, BITS, true>::exponent - (place << kMantissa) * twice + zero * (twice << place);
    }
    DEVICE uint32_t of(uint32_t pair, int place) const {
        return pair_fma<T>(pair, kPairOfOnes<T> - (place << kMantissa) * 0x00010001u, shift);
    }
};

// Makes the weights of one step, for one group at a time.
template <class T, int BITS, bool FREE> struct Weights;

template <int BITS> struct Weights<Float16, BITS, false> {
    using Operands = Fragments<Float16, BITS, true>;
    Difference<Float16, BITS> difference[4][2];
    uint32_t scale[4][2];

    DEVICE void open(const GridWords<BITS, false> &grid) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                difference[i][h].open(grid.zero_at(i, h), Operands::place(i, h));
                scale[i][h] = pair_of_half(grid.scale[i], h);
            }
    }
    DEVICE void make(const uint32_t *word, uint32_t (&w)[4][4]) const {
        Operands::operands(word, w);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int h = r & 1;
                w[i][r] =
                    pair_fma<Float16>(difference[i][h].of(w[i][r], Operands::place(i, h)), scale[i][h], kMinusZeros);
            }
    }
};

template <int BITS> struct Weights<BFloat16, BITS, false> {
    using Operands = Fragments<BFloat16, BITS, true>;
    Difference<BFloat16, BITS> difference[4][2];
    uint32_t large[4][2], small[4][2]; // parts of the scale

    DEVICE void open(const GridWords<BITS, false> &grid) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                difference[i][h].open(grid.zero_at(i, h), Operands::place(i, h));
                const float scale = grid.scale_at(i, h);
                const uint32_t bits = bits_of_float(scale);
                large[i][h] = pair_of_half(bits, 1);
                small[i][h] = pair_of_half(bits_of_float(scale - float_from_bits(bits & 0xffff0000)), 1);
            }
    }
    DEVICE void make(const uint32_t *word, uint32_t (&w)[4][4]) const {
        Operands::operands(word, w);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int h = r & 1;
                const uint32_t codes = difference[i][h].of(w[i][r], Operands::place(i, h));
                w[i][r] = pair_fma<BFloat16>(codes, large[i][h], pair_fma<BFloat16>(codes, small[i][h], kMinusZeros));
            }
    }
};

template <> struct Weights<BFloat16, 8, false> {
    float shift[4][2], scale[4][2]; // shift: minus 2^23 and the zero

    DEVICE void open(const GridWords<8, false> &grid) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                shift[i][h] = float_from_bits(0xcb000000 + grid.zero_at(i, h));
                scale[i][h] = grid.scale_at(i, h);
            }
    }
    DEVICE void make(const uint32_t *word, uint32_t (&w)[4][4]) const {
        constexpr uint32_t exponent = 0x4b000000; // of 2^23: the code is the lowest byte of the mantissa
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int h = r & 1, byte = r >> 1;
                float weight[2];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const uint32_t code = select_bytes(word[2 * i + h], exponent, 0x7440 + byte + 2 * k);
                    weight[k] = (float_from_bits(code) + shift[i][h]) * scale[i][h];
                }
                w[i][r] = pair_from_floats<BFloat16>(weight[0], weight[1]);
            }
    }
};

template <class T, int BITS> struct Weights<T, BITS, true> {
    using Operands = Fragments<T, BITS, true>;
    float scale[4][2], offset[4][2]; // scale: of the operand less its base

    DEVICE void open(const GridWords<BITS, true> &grid) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                scale[i][h] = grid.scale_at(i, h) * (1.f / (1 << Operands::place(i, h)));
                offset[i][h] = grid.offset_at(i, h);
            }
    }
    DEVICE void make(const uint32_t *word, uint32_t (&w)[4][4]) const {
        Operands::operands(word, w);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int h = r & 1;
                float weight[2];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const float code = to_float<T>(uint16_t(w[i][r] >> 16 * k)) - Operands::base;
                    weight[k] = product(code, scale[i][h]) + offset[i][h];
                }
                w[i][r] = pair_from_floats<T>(weight[0], weight[1]);
            }
    }
};
