// What every C function checks before it starts a kernel.
#pragma once

#include <cstdint>

#include "api.h"

// Of n and k: a grid's last axis has 65,535 tiles, and sums of sizes fit an int.
constexpr int kLargest = (1 << 22) - 64;

inline int tiles(int size) { return (size + 63) / 64; }

inline int check_dtype(int dtype) { return dtype == 0 || dtype == 1 ? GPTQKIT_OK : GPTQKIT_BAD_DTYPE; }

inline int check_shape(int bits, int n, int k) {
    if (bits != 2 && bits != 3 && bits != 4 && bits != 8) return GPTQKIT_BAD_BITS;
    if (n < 0 || k < 0 || n > kLargest || k > kLargest || k % 32) return GPTQKIT_BAD_SHAPE;
    return GPTQKIT_OK;
}

inline bool misaligned(const void *pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes != 0; }
