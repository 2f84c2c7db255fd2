// The names of hardware.cuh for g++: the kernels' own sources run on one CPU thread, a few blocks at once.
//
// Every CUDA thread is a fiber (machine.cc); which of them goes on where several can is random, from a seed.
// What the hardware would silently get wrong is a fault: the launch stops and returns GPTQKIT_FAULT. Faults are
//   - races within a block, found whatever the order was, uses of what a copy under way brings, and accesses outside
//     shared memory (memory.cc); what nobody has written there is NaN;
//   - partial sums that blocks leave for each other without the barriers and fences that this takes (memory.cc);
//   - lanes of one warp that meet in different collectives, threads that wait for others that are gone, misaligned
//     accesses, copies under way at the end of a kernel;
//   - writes to the guard zone behind dynamic shared memory, for accesses that bypass the functions below.
// Bank conflicts and the sectors of global memory are counted where that is asked for: gptqkit_emulator_traffic.
// Not seen: speed, races in global memory other than on those sums, rounding inside an instruction of the tensor
// cores: sums are float64 here, cut off once at the end, towards zero as the hardware does (Fasi et al. 2021,
// "Numerical behavior of NVIDIA tensor cores").
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "api.h"

#define DEVICE inline
#define KERNEL(...) void
#define STATIC_SHARED(type, name)                                                                                      \
    static const char name##_tag = 0;                                                                                  \
    type *const name = static_cast<type *>(emulator::static_shared(&name##_tag, sizeof(type)))
#define DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(emulator::here.dynamic_shared)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

struct Float16 {};
struct BFloat16 {};

// What the names below ask of the machine: machine.cc and memory.cc.
namespace emulator {

// A warp's operands of the tensor cores.
struct Tiles {
    uint32_t a[32][4], b[32][2];
    float d[32][4];
};

// Where the running thread is.
struct Here {
    int thread;
    dim3 block, grid;
    unsigned char *dynamic_shared;
    Tiles *tiles;
};
extern Here here;

int run(void (*kernel)(const void *), const void *arguments, dim3 grid, int threads, int dynamic_bytes, int &granted);
const char *fault_text();

// The lanes of a warp meet; the last one computes for all.
void meet(void (*compute)(Tiles &));
void barrier();
void fence();
int arrive(int *lock, int value);

// To be called before the access; `function` is its name here, `file` and `line` say where the kernel makes it.
void read_shared(const void *source, int bytes, const char *file, int line);
void write_shared(void *target, int bytes, const char *file, int line);
void read_part(const float4 *source, const char *file, int line);
void write_part(float4 *target, const char *file, int line);
void use_global(const void *address, int bytes, const char *function, const char *file, int line);
// From issue to `wait`, which leaves the thread's last `pending` groups; a null source gives zeros.
void copy(void *target, const void *source, int bytes, const char *file, int line);
void commit();
void wait(int pending);
void *static_shared(const void *tag, int bytes);

inline float half_to_float(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    uint32_t word;
    if (exponent == 0) {
        const float value = float(mantissa) * 0x1p-24f;
        memcpy(&word, &value, 4);
    } else {
        word = (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
    }
    word |= sign;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

inline float towards_zero(double value) {
    const float near = float(value);
    return std::fabs(double(near)) > std::fabs(value) ? std::nextafter(near, 0.f) : near;
}

inline uint16_t float_to_half(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    const uint16_t sign = word >> 16 & 0x8000;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7fff;
    if (magnitude >= 65520.f) return sign | 0x7c00;
    if (magnitude < 0x1p-14f) return sign | uint16_t(std::nearbyint(magnitude * 0x1p24f));
    word &= 0x7fffffff;
    word += 0xfff + (word >> 13 & 1);
    return sign | uint16_t((word >> 13) - (112 << 10));
}

} // namespace emulator

#define threadIdx (dim3(emulator::here.thread, 0, 0))
#define blockIdx (emulator::here.block)
#define gridDim (emulator::here.grid)

inline float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

template <class T> float to_float(uint16_t bits);
template <> inline float to_float<Float16>(uint16_t bits) { return emulator::half_to_float(bits); }
template <> inline float to_float<BFloat16>(uint16_t bits) { return float_from_bits(uint32_t(bits) << 16); }

template <class T> uint16_t from_float(float value);
template <> inline uint16_t from_float<Float16>(float value) { return emulator::float_to_half(value); }
template <> inline uint16_t from_float<BFloat16>(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    return std::isnan(value) ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

template <class T> uint32_t pair_from_floats(float low, float high) {
    return from_float<T>(low) | uint32_t(from_float<T>(high)) << 16;
}

inline float product(float a, float b) { return a * b; }
// As far off as the hardware may be, so that nobody counts on less.
inline float reciprocal(float value) { return std::nextafter(1.f / value, 0.f); }

inline uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) { return (word & mask) | bits; }

inline uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = a | uint64_t(b) << 32;
    uint32_t result = 0;
    for (int byte = 0; byte < 4; byte++) result |= uint32_t(both >> 8 * (selector >> 4 * byte & 7) & 0xff) << 8 * byte;
    return result;
}

template <class T> uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result = 0;
    for (int half = 0; half < 32; half += 16)
        result |=
            uint32_t(from_float<T>(std::fma(to_float<T>(a >> half), to_float<T>(b >> half), to_float<T>(c >> half))))
            << half;
    return result;
}

#define SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

template <class V> V load_shared(const V *source, SITE) {
    emulator::read_shared(source, sizeof(V), file, line);
    return *source;
}
template <class V> void store_shared(V *target, V value, SITE) {
    emulator::write_shared(target, sizeof(V), file, line);
    *target = value;
}
template <class V> V load_constant(const V *source, SITE) {
    emulator::use_global(source, sizeof(V), "load_constant", file, line);
    return *source;
}
template <class V> void store_global(V *target, V value, SITE) {
    emulator::use_global(target, sizeof(V), "store_global", file, line);
    *target = value;
}
inline void store_for_blocks(float4 *target, const float4 &value, SITE) {
    emulator::write_part(target, file, line);
    *target = value;
}
inline float4 load_from_blocks(const float4 *source, SITE) {
    emulator::read_part(source, file, line);
    return *source;
}

inline void copy_async(void *target, const void *source, SITE) { emulator::copy(target, source, 16, file, line); }
inline void copy_async_or_zero(void *target, const void *source, int bytes, SITE) {
    emulator::copy(target, bytes ? source : nullptr, 8, file, line);
}
inline void copy_commit() { emulator::commit(); }
template <int PENDING> void copy_wait() { emulator::wait(PENDING); }

template <class T> void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    emulator::Tiles &tiles = *emulator::here.tiles;
    const int lane = emulator::here.thread % 32;
    memcpy(tiles.a[lane], a, sizeof a);
    memcpy(tiles.b[lane], b, sizeof b);
    memcpy(tiles.d[lane], d, sizeof d);
    emulator::meet([](emulator::Tiles &tiles) {
        float left[16][16], right[8][16];
        for (int lane = 0; lane < 32; lane++)
            for (int half = 0; half < 2; half++) {
                const int c = lane / 4, element = 2 * (lane % 4) + half;
                for (int r = 0; r < 4; r++)
                    left[c + 8 * (r & 1)][element + 8 * (r >> 1)] = to_float<T>(tiles.a[lane][r] >> 16 * half);
                for (int r = 0; r < 2; r++) right[c][element + 8 * r] = to_float<T>(tiles.b[lane][r] >> 16 * half);
            }
        for (int lane = 0; lane < 32; lane++)
            for (int e = 0; e < 4; e++) {
                const float *row = left[lane / 4 + 8 * (e >> 1)], *column = right[2 * (lane % 4) + (e & 1)];
                double sum = tiles.d[lane][e];
                for (int k = 0; k < 16; k++) sum += double(row[k]) * column[k];
                tiles.d[lane][e] = emulator::towards_zero(sum);
            }
    });
    memcpy(d, tiles.d[lane], sizeof d);
}

inline void block_barrier() { emulator::barrier(); }
inline void device_fence() { emulator::fence(); }
inline int fetch_add(int *target, int value) { return emulator::arrive(target, value); }

template <auto kernel, class Arguments>
int launch(dim3 grid, int threads, int shared_bytes, void *, const Arguments &arguments) {
    const auto run_kernel = [](const void *arguments) { kernel(*static_cast<const Arguments *>(arguments)); };
    static int granted = 0; // bytes of shared memory
    return emulator::run(run_kernel, &arguments, grid, threads, shared_bytes, granted);
}

// Of a multiprocessor with 227 KiB of shared memory and 2,048 threads; nobody knows the registers here.
template <auto kernel> int resident_blocks(int threads, int shared_bytes, int *blocks) {
    const int by_memory = 227 * 1024 / (shared_bytes + 1024), by_threads = 2048 / threads;
    *blocks = by_memory < by_threads ? by_memory : by_threads;
    return 0;
}

inline int64_t stream_user(void *stream) { return reinterpret_cast<intptr_t>(stream) + 1; }

inline const char *runtime_error(int) { return emulator::fault_text(); }
inline int runtime_versions(int *driver, int *built) { return *driver = *built = 0; }
