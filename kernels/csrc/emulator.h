// The names of hardware.cuh for g++: one CUDA block at a time on one CPU thread.
//
// Every CUDA thread is a fiber. Collectives of a warp and barriers of a block are meeting points; which of the fibers
// that can go on does so is random, from a seed. What the hardware would silently get wrong is made visible:
//   - shared memory starts as NaN; the target of an asynchronous copy is NaN from its issue to the matching wait;
//   - lanes of one warp that meet in different collectives, threads that wait for others that are gone, misaligned
//     copies and copies under way at the end of a kernel are faults: the launch stops and returns GPTQKIT_FAULT;
//   - behind dynamic shared memory lies a guard zone: reading it gives NaN, writing it is a fault.
// Not seen: races between blocks (they run one after another), speed, bank conflicts, rounding inside an instruction of
// the tensor cores: sums are float64 here, cut off once at the end, towards zero as the hardware does (Fasi et al. 2021,
// "Numerical behavior of NVIDIA tensor cores").
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api.h"

#define DEVICE inline
#define KERNEL(...) void
#define SHARED static
#define DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(emulator::machine.shared)

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

struct Float16 {};
struct BFloat16 {};

namespace emulator {

constexpr int kGuard = 16 * 1024; // bytes

enum class Meeting { none, barrier, multiply_add };

struct Copy {
    void *target;
    const void *source;
};

struct Fiber;

struct Warp {
    int lanes = 0;
    Meeting meeting = Meeting::none;
    std::vector<Fiber *> waiting;
    uint32_t a[32][4], b[32][2];
    float d[32][4];
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    int thread = 0, lane = 0;
    Warp *warp = nullptr;
    std::vector<Copy> open;                // copies since the last commit
    std::vector<std::vector<Copy>> groups; // committed, oldest first
};

struct Machine {
    ucontext_t scheduler;
    Fiber *current = nullptr;
    std::function<void()> body;
    dim3 grid, block;
    int threads = 0, alive = 0;
    unsigned char *shared = nullptr;
    std::vector<Fiber *> runnable, at_barrier;
    uint32_t random = 1;
    std::string fault;

    uint32_t draw(uint32_t below) {
        random = random * 1664525u + 1013904223u;
        return (random >> 8) % below;
    }
};
inline Machine machine;

// Gives the CPU back; the fiber goes on when somebody has made it runnable.
inline void pause() { swapcontext(&machine.current->context, &machine.scheduler); }

// Keeps the first fault; the launch ends with it.
inline void note_fault(const char *what) {
    if (machine.fault.empty())
        machine.fault = std::string("emulator: ") + what + ", block (" + std::to_string(machine.block.x) + ", " +
                        std::to_string(machine.block.y) + ", " + std::to_string(machine.block.z) + "), thread " +
                        std::to_string(machine.current->thread);
}

[[noreturn]] inline void fault(const char *what) {
    note_fault(what);
    for (;;) pause();
}

inline void wake(std::vector<Fiber *> &fibers) {
    machine.runnable.insert(machine.runnable.end(), fibers.begin(), fibers.end());
    fibers.clear();
}

// The lanes of a warp meet; the last one computes for all.
inline void meet(Meeting meeting, void (*compute)(Warp &)) {
    Warp &warp = *machine.current->warp;
    if (!warp.waiting.empty() && warp.meeting != meeting) fault("lanes of one warp met in different collectives");
    warp.meeting = meeting;
    warp.waiting.push_back(machine.current);
    if (int(warp.waiting.size()) == warp.lanes) {
        compute(warp);
        wake(warp.waiting);
    }
    pause();
}

inline void run_fiber() {
    machine.body();
    for (const auto &group : machine.current->groups)
        if (!group.empty()) fault("an asynchronous copy is under way at the end of the kernel");
    if (!machine.current->open.empty()) fault("an asynchronous copy was never committed");
    machine.alive--;
    for (;;) pause();
}

inline void run_block(std::vector<Fiber> &fibers) {
    std::vector<Warp> warps((machine.threads + 31) / 32);
    machine.runnable.clear();
    machine.at_barrier.clear();
    for (int thread = 0; thread < machine.threads; thread++) {
        Fiber &fiber = fibers[thread];
        fiber.thread = thread;
        fiber.lane = thread % 32;
        fiber.warp = &warps[thread / 32];
        fiber.warp->lanes++;
        fiber.open.clear();
        fiber.groups.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
        machine.runnable.push_back(&fiber);
    }
    machine.alive = machine.threads;
    while (machine.alive && machine.fault.empty()) {
        if (machine.runnable.empty()) {
            note_fault("threads wait for others that do not come");
            return;
        }
        std::swap(machine.runnable[machine.draw(machine.runnable.size())], machine.runnable.back());
        machine.current = machine.runnable.back();
        machine.runnable.pop_back();
        swapcontext(&machine.scheduler, &machine.current->context);
    }
}

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

#define threadIdx (dim3(emulator::machine.current->thread, 0, 0))
#define blockIdx emulator::machine.block
#define gridDim emulator::machine.grid

template <class T> float to_float(uint16_t bits);
template <> inline float to_float<Float16>(uint16_t bits) { return emulator::half_to_float(bits); }
template <> inline float to_float<BFloat16>(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

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

// As far off as the hardware may be, so that nobody counts on less.
inline float reciprocal(float value) { return std::nextafter(1.f / value, 0.f); }

inline uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) { return (word & mask) | bits; }

template <class T> uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result = 0;
    for (int half = 0; half < 32; half += 16)
        result |=
            uint32_t(from_float<T>(std::fma(to_float<T>(a >> half), to_float<T>(b >> half), to_float<T>(c >> half))))
            << half;
    return result;
}

template <class V> V load_constant(const V *source) {
    if (reinterpret_cast<uintptr_t>(source) % sizeof(V)) emulator::fault("a misaligned load");
    return *source;
}
inline float load_shared_by_blocks(const float *source) { return *source; }

inline void copy_async(void *target, const void *source) {
    if (reinterpret_cast<uintptr_t>(target) % 16 || reinterpret_cast<uintptr_t>(source) % 16)
        emulator::fault("a misaligned copy");
    memset(target, 0xff, 16);
    emulator::machine.current->open.push_back({target, source});
}
inline void copy_commit() {
    emulator::Fiber &fiber = *emulator::machine.current;
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}
template <int PENDING> void copy_wait() {
    auto &groups = emulator::machine.current->groups;
    while (int(groups.size()) > PENDING) {
        for (const auto &copy : groups.front()) memcpy(copy.target, copy.source, 16);
        groups.erase(groups.begin());
    }
}

template <class T> void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    emulator::Warp &warp = *emulator::machine.current->warp;
    const int lane = emulator::machine.current->lane;
    memcpy(warp.a[lane], a, sizeof a);
    memcpy(warp.b[lane], b, sizeof b);
    memcpy(warp.d[lane], d, sizeof d);
    emulator::meet(emulator::Meeting::multiply_add, [](emulator::Warp &warp) {
        float left[16][16], right[8][16];
        for (int lane = 0; lane < 32; lane++)
            for (int half = 0; half < 2; half++) {
                const int c = lane / 4, element = 2 * (lane % 4) + half;
                for (int r = 0; r < 4; r++)
                    left[c + 8 * (r & 1)][element + 8 * (r >> 1)] = to_float<T>(warp.a[lane][r] >> 16 * half);
                for (int r = 0; r < 2; r++) right[c][element + 8 * r] = to_float<T>(warp.b[lane][r] >> 16 * half);
            }
        for (int lane = 0; lane < 32; lane++)
            for (int e = 0; e < 4; e++) {
                const float *row = left[lane / 4 + 8 * (e >> 1)], *column = right[2 * (lane % 4) + (e & 1)];
                double sum = warp.d[lane][e];
                for (int k = 0; k < 16; k++) sum += double(row[k]) * column[k];
                warp.d[lane][e] = emulator::towards_zero(sum);
            }
    });
    memcpy(d, warp.d[lane], sizeof d);
}

inline void block_barrier() {
    emulator::Machine &machine = emulator::machine;
    machine.at_barrier.push_back(machine.current);
    if (int(machine.at_barrier.size()) == machine.threads) emulator::wake(machine.at_barrier);
    emulator::pause();
}
inline void device_fence() {}
inline int fetch_add(int *target, int value) {
    *target += value;
    return *target - value;
}

template <auto kernel, class Arguments>
int launch(dim3 grid, int threads, int shared_bytes, void *, const Arguments &arguments) {
    emulator::Machine &machine = emulator::machine;
    machine.fault.clear();
    machine.body = [&] { kernel(arguments); };
    machine.grid = grid;
    machine.threads = threads;
    std::vector<emulator::Fiber> fibers(threads);
    const std::unique_ptr<unsigned char, decltype(&free)> shared(
        static_cast<unsigned char *>(aligned_alloc(128, (shared_bytes + emulator::kGuard + 127) / 128 * 128)), free);
    machine.shared = shared.get();
    for (machine.block.z = 0; machine.block.z < grid.z; machine.block.z++)
        for (machine.block.y = 0; machine.block.y < grid.y; machine.block.y++)
            for (machine.block.x = 0; machine.block.x < grid.x; machine.block.x++) {
                memset(shared.get(), 0xff, shared_bytes + emulator::kGuard);
                emulator::run_block(fibers);
                for (int byte = 0; byte < emulator::kGuard; byte++)
                    if (shared.get()[shared_bytes + byte] != 0xff) emulator::note_fault("a write beyond shared memory");
                if (!machine.fault.empty()) return GPTQKIT_FAULT;
            }
    return GPTQKIT_OK;
}

inline const char *runtime_error(int) { return emulator::machine.fault.c_str(); }
inline int runtime_versions(int *driver, int *built) { return *driver = *built = 0; }
