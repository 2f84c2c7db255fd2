// CUDA threads as fibers of one CPU thread, a few blocks of the grid at once, and the points where they meet.
//
// A fiber runs until it waits for others (a collective of its warp, a barrier of its block) or lets them pass (a fence,
// an arrival); which of those that can go on does so is random, from a seed.
#include "machine.h"

#include <cstdlib>
#include <cstring>

#include "api.h"

namespace emulator {

Machine machine;
Here here;

// Gives the CPU back; the fiber goes on when somebody has made it runnable.
static void pause() {
    if (!_setjmp(machine.current->place)) _longjmp(machine.scheduler, 1);
}

static void yield() {
    machine.runnable.push_back(machine.current);
    pause();
}

void note_fault(const char *what, int other_thread) {
    if (!machine.fault.empty()) return;
    const dim3 index = here.block;
    machine.fault = std::string("emulator: ") + what + ", block (" + std::to_string(index.x) + ", " +
                    std::to_string(index.y) + ", " + std::to_string(index.z) + "), thread " +
                    std::to_string(here.thread);
    if (other_thread >= 0) machine.fault += " and thread " + std::to_string(other_thread);
}

void fault(const char *what, int other_thread) {
    note_fault(what, other_thread);
    for (;;) pause();
}

static void wake(std::vector<Fiber *> &fibers) {
    machine.runnable.insert(machine.runnable.end(), fibers.begin(), fibers.end());
    fibers.clear();
}

void meet(void (*compute)(Tiles &)) {
    Warp &warp = *machine.current->warp;
    if (!warp.waiting.empty() && warp.collective != compute) fault("lanes of one warp met in different collectives");
    warp.collective = compute;
    warp.waiting.push_back(machine.current);
    if (int(warp.waiting.size()) == warp.lanes) {
        compute(warp.tiles);
        wake(warp.waiting);
    }
    pause();
}

void barrier() {
    Block &block = *machine.current->home;
    block.at_barrier.push_back(machine.current);
    if (int(block.at_barrier.size()) == machine.threads) {
        block.epoch = ++machine.epochs;
        wake(block.at_barrier);
    }
    pause();
}

void fence() {
    watch_fence();
    yield();
}

int arrive(int *lock, int value) {
    watch_arrival(lock);
    const int before = *lock;
    *lock += value;
    yield();
    return before;
}

static void run_fiber() {
    const Fiber &fiber = *machine.current;
    machine.kernel(machine.arguments);
    for (const auto &group : fiber.groups)
        if (!group.empty()) fault("an asynchronous copy is under way at the end of the kernel");
    if (!fiber.open.empty()) fault("an asynchronous copy was never committed");
    fiber.home->alive--;
    for (;;) pause();
}

// Runs a fiber until it pauses. Only the first switch goes through a context: it asks the system to change the signals.
static void resume(Fiber &fiber) {
    static ucontext_t unused;
    machine.current = &fiber;
    here = fiber.here;
    if (_setjmp(machine.scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    swapcontext(&unused, &fiber.beginning);
}

static int block_bytes() { return (kStatic + machine.dynamic_bytes + kGuard + 127) / 128 * 128; }

static void start_block(Block &block, int number) {
    const dim3 grid = machine.grid;
    block.number = number;
    block.index = dim3(number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y);
    block.alive = machine.threads;
    block.epoch = ++machine.epochs;
    block.at_barrier.clear();
    block.statics.clear();
    block.static_bytes = 0;
    block.fence = block.earlier_fence = block.fence_since = 0;
    block.others.clear();
    block.arrival = {};
    block.warps = std::vector<Warp>((machine.threads + 31) / 32);
    memset(block.memory.get(), 0xff, block_bytes());
    block.words.assign(block_bytes() / 4, Word());
    for (int thread = 0; thread < machine.threads; thread++) {
        Fiber &fiber = block.fibers[thread];
        Warp &warp = block.warps[thread / 32];
        warp.lanes++;
        fiber.here = {thread, block.index, grid, block.memory.get() + kStatic, &warp.tiles};
        fiber.home = &block;
        fiber.warp = &warp;
        fiber.open.clear();
        fiber.groups.clear();
        fiber.unfenced.clear();
        fiber.fence = {};
        fiber.begun = false;
        getcontext(&fiber.beginning);
        fiber.beginning.uc_stack.ss_sp = fiber.stack.get();
        fiber.beginning.uc_stack.ss_size = kStack;
        fiber.beginning.uc_link = nullptr;
        makecontext(&fiber.beginning, run_fiber, 0);
        machine.runnable.push_back(&fiber);
    }
}

static void end_block(Block &block) {
    const unsigned char *const guard = block.memory.get() + kStatic + machine.dynamic_bytes;
    for (int byte = 0; byte < kGuard; byte++)
        if (guard[byte] != 0xff) note_fault("a write beyond shared memory");
    if (machine.counting) count_block(block);
}

static uint32_t draw(uint32_t below) {
    machine.random = machine.random * 1664525u + 1013904223u;
    return (machine.random >> 8) % below;
}

// What every GPU since Ampere allows: bytes of shared memory per block, and without asking for more.
constexpr int kMostShared = 99 * 1024, kFreeShared = 48 * 1024;

static const char *wrong_launch(dim3 grid, int threads, int bytes, int &granted) {
    if (threads < 1 || threads > 1024) return "emulator: a block has 1 to 1024 threads";
    if (grid.x - 1 >= INT32_MAX || grid.y - 1 >= 65535 || grid.z - 1 >= 65535)
        return "emulator: too many blocks, or none";
    if (bytes > kMostShared) return "emulator: more shared memory than some GPUs have";
    if (bytes > kFreeShared && !granted) granted = bytes; // as `launch` of hardware.cuh asks, once
    if (bytes > kFreeShared && bytes > granted) return "emulator: more shared memory than the first launch asked for";
    return nullptr;
}

int run(void (*kernel)(const void *), const void *arguments, dim3 grid, int threads, int dynamic_bytes, int &granted) {
    if (const char *wrong = wrong_launch(grid, threads, dynamic_bytes + kStatic, granted)) {
        machine.fault = wrong;
        return GPTQKIT_FAULT;
    }
    machine.kernel = kernel;
    machine.arguments = arguments;
    machine.grid = grid;
    machine.threads = threads;
    machine.dynamic_bytes = dynamic_bytes;
    machine.runnable.clear();
    machine.parts.clear();
    machine.arrivals.clear();
    machine.fault.clear();
    const int blocks = grid.x * grid.y * grid.z;
    int started = 0, ended = 0;
    for (Block &block : machine.blocks) {
        if (started == blocks) break;
        if (int(block.fibers.size()) < threads) block.fibers.resize(threads);
        block.memory.reset(static_cast<unsigned char *>(aligned_alloc(128, block_bytes())));
        start_block(block, started++);
    }
    while (ended < blocks && machine.fault.empty()) {
        if (machine.runnable.empty()) {
            note_fault("threads wait for others that do not come");
            break;
        }
        std::swap(machine.runnable[draw(machine.runnable.size())], machine.runnable.back());
        Fiber &fiber = *machine.runnable.back();
        machine.runnable.pop_back();
        resume(fiber);
        if (fiber.home->alive) continue;
        end_block(*fiber.home);
        ended++;
        if (started < blocks) start_block(*fiber.home, started++);
    }
    return machine.fault.empty() ? GPTQKIT_OK : GPTQKIT_FAULT;
}

const char *fault_text() { return machine.fault.c_str(); }

} // namespace emulator

// Which order threads run in.
GPTQKIT_API void gptqkit_emulator_seed(unsigned seed) { emulator::machine.random = seed; }
