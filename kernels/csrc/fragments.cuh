// Codes -> operands of the tensor cores, in as few instructions as the width allows.
//
// A 16-bit float with the right exponent bits holds code * 2^place in its mantissa wherever the code lies in there, so
// that a mask (and no shift, no conversion) makes an operand of value
//
//     base + code * 2^place        place = place(i, h) depends on the register: h = r & 1 is its half of the 16 columns
//
// as an integer number of `unit`s. The consumer takes out base and zero together, as value(zero, place), or base alone,
// then place and unit. There is room for a zero of 2^bits.
//   Float16, kBiased: exponent of 1024; base 1024, unit 1; ten mantissa bits.
//   Float16, not kBiased: exponent 0: the operand is subnormal; base 0, unit 2^-24. One instruction less per operand.
//   BFloat16: exponent of 128; base 128, unit 1; seven mantissa bits. Eight-bit codes take two exact halves: base 0.
#pragma once

#include "layout.cuh"

template <class T> constexpr uint32_t kPairOfOnes = 0;
template <> constexpr uint32_t kPairOfOnes<Float16> = 0x3c003c00;
template <> constexpr uint32_t kPairOfOnes<BFloat16> = 0x3f803f80;

template <class T, int BITS, bool kBiased> struct Fragments;

template <int BITS, bool kBiased> struct Fragments<Float16, BITS, kBiased> {
    static constexpr float base = kBiased ? 1024 : 0, unit = kBiased ? 1 : 0x1p-24f;
    static constexpr uint32_t exponent = kBiased ? 0x64006400 : 0;

    static constexpr DEVICE int place(int i, int h) {
        return BITS == 2 ? 4 * (i & 1) + 2 * h : BITS == 3 ? (i == 3 ? 6 : 3 * h) : BITS == 4 ? 4 * h : 0;
    }
    static DEVICE float value(uint32_t code, int place) {
        return to_float<Float16>(uint16_t(exponent | code << place));
    }

    static DEVICE void operands(const uint32_t *word, uint32_t (&a)[4][4]) {
        constexpr uint32_t mask = ((1u << BITS) - 1) * 0x00010001u;
        if constexpr (BITS == 3) {
            a[3][0] = and_or(word[0] >> 6, mask << 6, exponent);
            a[3][2] = and_or(word[1] >> 6, mask << 6, exponent);
            a[3][1] = and_or(word[2] >> 6, mask << 6, exponent);
            a[3][3] = and_or(word[0] >> 9, 0x00400040,
                             and_or(word[1] >> 8, 0x00800080, and_or(word[2] >> 7, 0x01000100, exponent)));
        }
#pragma unroll
        for (int i = 0; i < (BITS == 3 ? 3 : 4); i++) {
            // The two input pairs of a register half share their place: the second pair is a whole shift away.
            constexpr int second = BITS == 3 ? 6 : 8;
            const uint32_t first = word[BITS == 2 ? i / 2 : BITS == 8 ? 2 * i : i];
            const uint32_t other = BITS == 8 ? word[2 * i + 1] : first;
            a[i][0] = and_or(first, mask << place(i, 0), exponent);
            a[i][1] = and_or(other, mask << place(i, 1), exponent);
            a[i][2] = and_or(first >> second, mask << place(i, 0), exponent);
            a[i][3] = and_or(other >> second, mask << place(i, 1), exponent);
        }
    }
};

template <int BITS, bool kBiased> struct Fragments<BFloat16, BITS, kBiased> {
    static constexpr float base = 128, unit = 1;
    static constexpr uint32_t exponent = 0x43004300;

    static constexpr DEVICE int place(int i, int h) {
        return BITS == 2 ? (i & 1 ? (h ? 0 : 4) : 2 * h) : BITS == 3 ? (i == 3 ? 0 : 3 * h) : 0;
    }
    static DEVICE float value(uint32_t code, int place) {
        return to_float<BFloat16>(uint16_t(exponent | code << place));
    }

    static DEVICE void operands(const uint32_t *word, uint32_t (&a)[4][4]) {
        constexpr uint32_t mask = ((1u << BITS) - 1) * 0x00010001u;
        if constexpr (BITS == 3) {
            a[3][0] = and_or(word[0] >> 12, mask, exponent);
            a[3][2] = and_or(word[1] >> 12, mask, exponent);
            a[3][1] = and_or(word[2] >> 12, mask, exponent);
            a[3][3] = and_or(word[0] >> 15, 0x00010001,
                             and_or(word[1] >> 14, 0x00020002, and_or(word[2] >> 13, 0x00040004, exponent)));
        }
#pragma unroll
        for (int i = 0; i < (BITS == 3 ? 3 : 4); i++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                // Where layout.cuh puts the pair, less where its place wants it.
                const int bit = BITS == 2 ? 4 * (i & 1) + 2 * (r & 1) + 8 * (r >> 1) : BITS * r;
                a[i][r] =
                    and_or(word[BITS == 2 ? i / 2 : i] >> (bit - place(i, r & 1)), mask << place(i, r & 1), exponent);
            }
    }
};

template <bool kBiased> struct Fragments<BFloat16, 8, kBiased> {
    static constexpr float base = 0, unit = 1;

    static constexpr DEVICE int place(int, int) { return 0; }
    static DEVICE float value(uint32_t code, int) { return float(code); }

    // Code = 16 * high + low; (128 + low) - 128 and the sum are exact in eight bits.
    static DEVICE uint32_t codes(uint32_t word) {
        constexpr uint32_t one = 0x3f803f80, sixteen = 0x41804180, minus_128 = 0xc300c300, exponent = 0x43004300;
        const uint32_t low = pair_fma<BFloat16>(and_or(word, 0x000f000f, exponent), one, minus_128);
        const uint32_t high = pair_fma<BFloat16>(and_or(word >> 4, 0x000f000f, exponent), one, minus_128);
        return pair_fma<BFloat16>(high, sixteen, low);
    }

    static DEVICE void operands(const uint32_t *word, uint32_t (&a)[4][4]) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < 4; r++) a[i][r] = codes(word[2 * i + (r & 1)] >> 8 * (r >> 1));
    }
};
