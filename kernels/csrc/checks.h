// What every C function checks before it starts a kernel.
#pragma once

#include <cstdint>

#include "api.h"

// Of n and k: a grid's last axis has 65,535 tiles, and sums of sizes fit an int.
constexpr int kLargest = (1 << 22) - 64;

inline int tiles(int size) { return (size + 63) / 64; }

inline bool misaligned(const void *pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes != 0; }

inline int check_layer(const gptqkit_layer &layer) {
    const int bits = layer.bits, n = layer.n, k = layer.k, group = layer.group;
    if (bits != 2 && bits != 3 && bits != 4 && bits != 8) return GPTQKIT_BAD_BITS;
    if (layer.dtype != 0 && layer.dtype != 1) return GPTQKIT_BAD_DTYPE;
    if (n < 0 || k < 0 || n > kLargest || k > kLargest || k % 32) return GPTQKIT_BAD_SHAPE;
    if (group < 1 || (group < k && group % 16)) return GPTQKIT_BAD_GROUP;
    if (misaligned(layer.weight, 16) || misaligned(layer.scale, 16) || misaligned(layer.zero, 16))
        return GPTQKIT_BAD_ALIGNMENT;
    return GPTQKIT_OK;
}
