// The packed form of a weight, stated once.
//
// A unit is 64 columns x 64 inputs = 4 steps of 16 inputs, read by one warp as `bits` 16-byte vectors per lane:
//
//     weight  uint32 [column tile][unit][bits][32 lanes][4]     so lane l has 4 * bits words, `bits` for each step
//
// In step j lane 4c + t holds, for i and r from 0 to 3, the pair (i, r): the codes of inputs 16j + 4t + 2(r >> 1) and
// the next one in column 8c + 2i + (r & 1) of the tile. A pair's codes lie 16 bits apart, where the tensor cores want
// two 16-bit floats; (i, r) is register r of the lane's fragment of operand i, 16 of the tile's columns. (The hardware
// numbers inputs and columns otherwise. Activations are read in the same order of inputs, so the sum is the same, and a
// lane's four inputs are neighbours: one 8-byte load per token. A lane's eight columns are neighbours, too: their scales
// are one load, and the eight sums that it has for a token are one 16-byte store.)
//
// Where the pairs lie in a step's words, as bits of their first code:
//     2 bits  word i / 2, bits 4(i & 1) + {0, 2, 8, 10}[r]
//     3 bits  word i, bits {0, 3, 6, 9}[r] for i < 3; pairs (3, 0), (3, 2), (3, 1) at bit 12 of words 0, 1, 2;
//             bit b of pair (3, 3) at bit 15 of word b
//     4 bits  word i, bits {0, 4, 8, 12}[r]
//     8 bits  word 2i + (r & 1), bits {0, 8}[r >> 1]
//
// Scales and zeros: [group][column tile][64]; on a free grid column 8c + 4h + i stands at place 32h + 4c + i.
#pragma once

#include "hardware.cuh"

constexpr int kTile = 64; // columns of a tile, inputs of a unit
constexpr int kStep = 16; // inputs of a step
constexpr int kSteps = kTile / kStep;
constexpr int kLanes = 32;

// A zero is 0 ... 2^bits; a pair of them fills one of these.
template <int BITS> constexpr int kZeroBits = BITS < 4 ? 4 : BITS == 4 ? 8 : 16;
template <int BITS> struct ZeroPairOf {
    using Type = uint8_t;
};
template <> struct ZeroPairOf<4> {
    using Type = uint16_t;
};
template <> struct ZeroPairOf<8> {
    using Type = uint32_t;
};
template <int BITS> using ZeroPair = typename ZeroPairOf<BITS>::Type;

// Zero h of a pair.
template <int BITS> DEVICE uint32_t zero_of(uint32_t pair, int h) {
    return pair >> kZeroBits<BITS> * h & ((1u << kZeroBits<BITS>) - 1);
}
