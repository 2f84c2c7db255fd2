// What the emulator watches in memory: races, visibility between blocks, and how many transfers hardware would take.
//
// Within a block, time is counted in epochs, which barriers end. Shared memory is watched in words of four bytes: two
// threads that use one word in one epoch, at least one writing, are a race, in whatever order they really came. (So
// narrower variables of different threads must not share a word, and a warp's collectives order nothing.) An
// asynchronous copy writes from its issue to its wait.
//
// Partial sums that one block leaves for others, 16 bytes at a time, may be read if between the two, in this order and each step by the same
// thread as the one before or after a barrier from it, stand: a fence, an arrival of the writer's block (an addition to a
// lock), a later arrival of the reader's block at the same lock, a fence.
//
// Traffic, where it is counted: the n-th accesses of a warp's lanes at one site are one instruction (where lanes skip
// some of their turns, that is a guess). Shared memory has 32 banks of four bytes; a warp's 8-byte accesses are served
// by halves and 16-byte ones by quarters, each as many times as some bank has different words to give. Global memory
// moves in sectors of 32 bytes.
#include "machine.h"

#include <algorithm>
#include <cstring>

#include "api.h"

namespace emulator {

constexpr uint32_t kUnderWay = UINT32_MAX; // the epoch of a write that has not ended
constexpr int16_t kSeveral = -1;           // readers

static bool is_shared(const Block &block, const void *address) {
    const auto *const byte = static_cast<const unsigned char *>(address);
    return byte >= block.memory.get() && byte < block.memory.get() + kStatic + machine.dynamic_bytes;
}

// ---- traffic ----

static void count(const void *address, const Site &site) {
    if (!machine.counting) return;
    Accesses &accesses = machine.current->warp->accesses[site];
    const int lane = here.thread % 32, turn = accesses.seen[lane]++;
    if (turn == int(accesses.addresses.size())) accesses.addresses.push_back({});
    accesses.addresses[turn][lane] = static_cast<const char *>(address);
}

static int distinct(std::vector<uintptr_t> values) {
    std::sort(values.begin(), values.end());
    return int(std::unique(values.begin(), values.end()) - values.begin());
}

// Adds one instruction's transfers to or from shared memory, and how many they would be without conflicts.
static void add_transfers(const Lanes &addresses, int bytes, Count &sum) {
    const int together = std::min(32, 128 / bytes);
    for (int first = 0; first < 32; first += together) {
        std::vector<uintptr_t> banks[32];
        for (int lane = first; lane < first + together; lane++)
            for (int byte = 0; addresses[lane] && byte < bytes; byte += 4) {
                const uintptr_t word = reinterpret_cast<uintptr_t>(addresses[lane] + byte) / 4;
                banks[word % 32].push_back(word);
            }
        int most = 0;
        for (const auto &words : banks) most = std::max(most, distinct(words));
        sum.spent += most;
        sum.least += most > 0;
    }
}

// Adds the bytes of the sectors that one instruction touches in global memory, and those that it needs.
static void add_sectors(const Lanes &addresses, int bytes, Count &sum) {
    std::vector<uintptr_t> needed, sectors;
    for (const char *address : addresses)
        for (int byte = 0; address && byte < bytes; byte++) {
            needed.push_back(reinterpret_cast<uintptr_t>(address + byte));
            sectors.push_back(needed.back() / 32);
        }
    sum.spent += 32 * distinct(sectors);
    sum.least += distinct(needed);
}

void count_block(Block &block) {
    for (Warp &warp : block.warps)
        for (const auto &[site, accesses] : warp.accesses) {
            Count &sum = machine.counts[site];
            for (const Lanes &lanes : accesses.addresses) {
                const char *const some = *std::find_if(lanes.begin(), lanes.end(), [](auto lane) { return lane; });
                (is_shared(block, some) ? add_transfers : add_sectors)(lanes, site.bytes, sum);
                sum.instructions++;
            }
        }
}

// ---- shared memory ----

// The words of an access.
static Word *words_at(const void *address, int bytes) {
    Block &block = *machine.current->home;
    if (reinterpret_cast<uintptr_t>(address) % bytes) fault("a misaligned access of shared memory");
    if (!is_shared(block, address)) fault("an access outside shared memory");
    return block.words.data() + (static_cast<const unsigned char *>(address) - block.memory.get()) / 4;
}

// In `epoch`, which is the block's or kUnderWay.
static void write_words(const void *target, int bytes, uint32_t epoch) {
    const uint32_t now = machine.current->home->epoch;
    Word *const words = words_at(target, bytes);
    for (Word *word = words; word < words + (bytes + 3) / 4; word++) {
        if (word->written == kUnderWay) fault("a write where a copy is still arriving, issued by", word->writer);
        if (word->written == now && word->writer != here.thread)
            fault("a race: two writes of one word between two barriers", word->writer);
        if (word->read == now && word->reader != here.thread)
            fault("a race: a write and a read of one word between two barriers", word->reader);
        word->writer = here.thread;
        word->written = epoch;
    }
}

void read_shared(const void *source, int bytes, const char *file, int line) {
    const Block &block = *machine.current->home;
    Word *const words = words_at(source, bytes);
    for (Word *word = words; word < words + (bytes + 3) / 4; word++) {
        if (word->written == kUnderWay) fault("a read of what a copy is still bringing, issued by", word->writer);
        if (word->written == block.epoch && word->writer != here.thread)
            fault("a race: a read and a write of one word between two barriers", word->writer);
        word->reader = word->read != block.epoch || word->reader == here.thread ? here.thread : kSeveral;
        word->read = block.epoch;
    }
    count(source, {file, line, "load_shared", bytes});
}

void write_shared(void *target, int bytes, const char *file, int line) {
    write_words(target, bytes, machine.current->home->epoch);
    count(target, {file, line, "store_shared", bytes});
}

void copy(void *target, const void *source, int bytes, const char *file, int line) {
    write_words(target, bytes, kUnderWay);
    memset(target, 0xff, bytes);
    count(target, {file, line, "copy_async_to", bytes});
    if (source) use_global(source, bytes, "copy_async_from", file, line);
    machine.current->open.push_back({target, source, bytes});
}

void commit() {
    Fiber &fiber = *machine.current;
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}

void wait(int pending) {
    auto &groups = machine.current->groups;
    while (int(groups.size()) > pending) {
        for (const Copy &copy : groups.front()) {
            if (copy.source)
                memcpy(copy.target, copy.source, copy.bytes);
            else
                memset(copy.target, 0, copy.bytes);
            Word *const words = words_at(copy.target, copy.bytes);
            for (Word *word = words; word < words + copy.bytes / 4; word++)
                word->written = machine.current->home->epoch;
        }
        groups.erase(groups.begin());
    }
}

void *static_shared(const void *tag, int bytes) {
    Block &block = *machine.current->home;
    for (const auto &[other, place] : block.statics)
        if (other == tag) return block.memory.get() + place;
    const int place = block.static_bytes;
    block.static_bytes += (bytes + 15) / 16 * 16;
    if (block.static_bytes > kStatic) fault("more static shared memory than hardware.cuh leaves room for");
    block.statics.push_back({tag, place});
    return block.memory.get() + place;
}

// ---- global memory ----

void use_global(const void *address, int bytes, const char *function, const char *file, int line) {
    if (reinterpret_cast<uintptr_t>(address) % bytes) fault("a misaligned access of global memory");
    count(address, {file, line, function, bytes});
}

void watch_fence() {
    Fiber &fiber = *machine.current;
    Block &block = *fiber.home;
    fiber.fence = {block.epoch, ++machine.ticks};
    for (Part *part : fiber.unfenced) part->fence = fiber.fence;
    fiber.unfenced.clear();
    if (block.fence < block.epoch) {
        block.earlier_fence = block.fence;
        block.fence = block.epoch;
    }
    if (!block.fence_since && (block.arrival.thread == here.thread || block.arrival.at.epoch < block.epoch))
        block.fence_since = block.epoch;
}

void watch_arrival(const void *lock) {
    const Fiber &fiber = *machine.current;
    Block &block = *fiber.home;
    std::vector<Arrival> &arrivals = machine.arrivals[lock];
    for (const Arrival &arrival : arrivals) block.others[arrival.block] = arrival;
    const uint32_t fence = std::max(block.fence < block.epoch ? block.fence : block.earlier_fence, fiber.fence.epoch);
    block.arrival = {block.number, here.thread, {block.epoch, ++machine.ticks}, fence};
    block.fence_since = 0;
    arrivals.push_back(block.arrival);
}

void write_part(float4 *target, const char *file, int line) {
    use_global(target, 16, "store_for_blocks", file, line);
    Fiber &fiber = *machine.current;
    const Part part{fiber.home->number, here.thread, fiber.home->epoch, {}};
    const auto [place, fresh] = machine.parts.insert({target, part});
    if (!fresh && place->second.block != part.block) fault("two blocks write one vector");
    place->second = part;
    fiber.unfenced.push_back(&place->second);
}

// Whether the part can be seen by whoever sees the arrival of its block, as far as fences go.
static bool fenced(const Part &part, const Arrival &arrival) {
    if (arrival.fence > part.epoch) return true;
    if (!part.fence.tick) return false;
    return part.thread == arrival.thread ? part.fence.tick < arrival.at.tick
                                           : part.fence.epoch < arrival.at.epoch;
}

void read_part(const float4 *source, const char *file, int line) {
    const Fiber &fiber = *machine.current;
    const Block &block = *fiber.home;
    use_global(source, 16, "load_from_blocks", file, line);
    const auto found = machine.parts.find(source);
    if (found == machine.parts.end()) fault("a read of what no block has written");
    const Part &part = found->second;
    if (part.block == block.number) {
        if (part.epoch == block.epoch && part.thread != here.thread)
            fault("a race: a write and a read of one vector between two barriers", part.thread);
        return;
    }
    const auto other = block.others.find(part.block);
    if (other == block.others.end()) fault("a read of what another block wrote, without its arrival");
    const Arrival &arrival = other->second, &own = block.arrival;
    if (part.epoch >= arrival.at.epoch && part.thread != arrival.thread)
        fault("no barrier between another block's write and its arrival; the write was by", part.thread);
    if (!fenced(part, arrival))
        fault("no fence between another block's write and its arrival; the write was by", part.thread);
    const bool same = own.thread == here.thread;
    if (own.at.epoch == block.epoch && !same)
        fault("no barrier between an arrival and a read; the arrival was by", own.thread);
    const bool own_fence = same ? fiber.fence.tick > own.at.tick : fiber.fence.epoch > own.at.epoch;
    if (!own_fence && (!block.fence_since || block.fence_since == block.epoch))
        fault("no fence between an arrival and a read");
}

} // namespace emulator

// Whether later launches count their traffic, which takes time.
GPTQKIT_API void gptqkit_emulator_count(int counting) { emulator::machine.counting = counting; }

// The traffic since it was last asked for, a line for each access in the sources:
//     file line function bytes instructions spent least
// where `bytes` are a lane's, `spent` and `least` transfers for shared and bytes for global memory.
GPTQKIT_API const char *gptqkit_emulator_traffic(void) {
    static std::string text;
    text.clear();
    for (const auto &[site, count] : emulator::machine.counts) {
        const char *const slash = strrchr(site.file, '/');
        text += slash ? slash + 1 : site.file;
        text += ' ' + std::to_string(site.line) + ' ' + site.function;
        for (const int64_t number : {int64_t(site.bytes), count.instructions, count.spent, count.least})
            text += ' ' + std::to_string(number);
        text += '\n';
    }
    emulator::machine.counts.clear();
    return text.c_str();
}
