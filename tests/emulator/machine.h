// The machine that machine.cc runs and whose memory memory.cc watches. Kernels see only emulator.h.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulator.h"

namespace emulator {

constexpr int kBlocksAtOnce = 4;
constexpr int kStack = 64 * 1024, kStatic = 1024, kGuard = 16 * 1024; // bytes

struct Copy {
    void *target;
    const void *source; // null: zeros
    int bytes;
};

// Four bytes of shared memory: the last write, and who has read since the last barrier.
struct Word {
    uint32_t written = 0, read = 0; // epochs
    int16_t writer = 0, reader = 0; // threads
};

// When something happened: epochs order what two threads of a block did, ticks what one did. 0: never.
struct Moment {
    uint32_t epoch = 0;
    uint64_t tick = 0;
};

// A vector of partial sums that one block leaves for others, and its thread's first fence after it.
struct Part {
    int block, thread;
    uint32_t epoch;
    Moment fence;
};

// That a thread added to a lock; `fence` is the epoch of the last fence that certainly came before.
struct Arrival {
    int block, thread;
    Moment at;
    uint32_t fence;
};

// Accesses of one kind at one place in the sources.
struct Site {
    const char *file;
    int line;
    const char *function;
    int bytes;
    bool operator<(const Site &other) const {
        return std::tie(file, line, function, bytes) < std::tie(other.file, other.line, other.function, other.bytes);
    }
};

// A warp's accesses at one site: the n-th ones of all lanes are one instruction. Null: the lane had no n-th one.
using Lanes = std::array<const char *, 32>;
struct Accesses {
    std::array<int, 32> seen{};
    std::vector<Lanes> addresses;
};

struct Count {
    int64_t instructions = 0, spent = 0, least = 0;
};

struct Fiber;

struct Warp {
    int lanes = 0;
    void (*collective)(Tiles &) = nullptr;
    std::vector<Fiber *> waiting;
    Tiles tiles;
    std::map<Site, Accesses> accesses; // where they are counted
};

struct Block {
    dim3 index;
    int number = 0; // of the grid's
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Fiber *> at_barrier;
    int alive = 0;
    uint32_t epoch = 0; // a new one at every barrier, never used twice
    std::unique_ptr<unsigned char, decltype(&free)> memory{nullptr, free}; // static, dynamic, guard
    std::vector<Word> words;
    std::vector<std::pair<const void *, int>> statics; // tags and places
    int static_bytes = 0;
    uint32_t fence = 0, earlier_fence = 0;  // the last two epochs with fences
    std::unordered_map<int, Arrival> others; // arrivals of other blocks that this one has seen
    Arrival arrival{};                       // its own last one
    uint32_t fence_since = 0;               // the epoch of the first fence that certainly came after it
};

struct Fiber {
    ucontext_t beginning;
    jmp_buf place;
    bool begun = false;
    std::unique_ptr<char[]> stack{new char[kStack]};
    Here here{};
    Block *home = nullptr;
    Warp *warp = nullptr;
    std::vector<Copy> open;                // copies since the last commit
    std::vector<std::vector<Copy>> groups; // committed, oldest first
    std::vector<Part *> unfenced;       // written since its last fence
    Moment fence;                          // the last one
};

struct Machine {
    void (*kernel)(const void *);
    const void *arguments;
    dim3 grid;
    int threads = 0, dynamic_bytes = 0;
    std::array<Block, kBlocksAtOnce> blocks;
    std::vector<Fiber *> runnable;
    Fiber *current = nullptr;
    jmp_buf scheduler;
    uint32_t random = 1, epochs = 0;
    uint64_t ticks = 0;
    std::unordered_map<const void *, Part> parts;
    std::unordered_map<const void *, std::vector<Arrival>> arrivals;
    bool counting = false;
    std::map<Site, Count> counts;
    std::string fault;
};
extern Machine machine;

// Keep the first fault; the launch ends with it.
void note_fault(const char *what, int other_thread = -1);
[[noreturn]] void fault(const char *what, int other_thread = -1);

// What memory.cc has to know of time.
void watch_fence();
void watch_arrival(const void *lock);
void count_block(Block &block);

} // namespace emulator
