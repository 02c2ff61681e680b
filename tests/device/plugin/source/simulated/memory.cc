// Device memory behind addresses that the host cannot follow.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "simulated.h"

namespace rehearsal {
namespace {

constexpr size_t kAlignment = 256;            // what an allocation takes of a device's memory is a multiple of it
constexpr size_t kPage = 4096;                // and of a device's addresses, so that each has pages of its own
constexpr uintptr_t kBase = 0xfa000000000;    // device d's addresses start at kBase + d * kStride
constexpr uintptr_t kStride = 0x1000000000;   // 64 GiB, however small the memory is
constexpr int kFresh = 0xff;                  // NaN in every float type
constexpr int kFreed = 0xfb;
// Addresses are used anew only when so many more have been freed, so that a use of freed memory is recognised.
constexpr size_t kQuarantinedAddresses = kStride / 4, kQuarantinedBlocks = 20000;
constexpr size_t kPoisonedBytes = 64 << 20;   // of freed memory that keep their pages

struct Block {
  size_t size;
  const char* origin;
  Stream* owner;
  uint64_t serial;
  size_t taken() const { return (std::max<size_t>(size, 1) + kAlignment - 1) / kAlignment * kAlignment; }
  size_t span() const { return (std::max<size_t>(size, 1) + kPage - 1) / kPage * kPage; }
};
using Blocks = std::map<size_t, Block>;  // by offset

struct Arena {
  std::mutex mutex;
  char* visible = nullptr;  // what the framework sees; PROT_NONE
  char* hidden = nullptr;   // where the bytes are
  size_t used = 0;
  Blocks live, dead;
  std::map<size_t, size_t> gaps;       // offset -> size
  std::deque<size_t> poisoned, dry;    // of `dead`, oldest first: those that still have pages, and those without
  size_t poisoned_bytes = 0, dead_span = 0;
};
Arena arenas[kMaxDevices];
// Allocations that this thread has named, and whose stream is not known yet: device and offset.
thread_local std::vector<std::pair<int, size_t>> unowned;

size_t device_capacity() {
  const double gib = settings().memory_gib;
  return static_cast<size_t>((gib > 0 ? gib : 4) * (1ull << 30));
}

Arena* arena_of(uintptr_t address) {
  const uintptr_t index = (address - kBase) / kStride;
  return address >= kBase && index < static_cast<uintptr_t>(device_count()) ? &arenas[index] : nullptr;
}

Blocks::const_iterator holding(const Blocks& blocks, size_t offset) {
  auto after = blocks.upper_bound(offset);
  if (after == blocks.begin()) return blocks.end();
  auto block = std::prev(after);
  return offset < block->first + block->second.span() ? block : blocks.end();
}

void add_gap(Arena& arena, size_t offset, size_t size) {
  auto next = arena.gaps.lower_bound(offset);
  if (next != arena.gaps.end() && next->first == offset + size) {
    size += next->second;
    next = arena.gaps.erase(next);
  }
  if (next != arena.gaps.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  arena.gaps[offset] = size;
}

// Takes the pages of what was freed long ago, and then its addresses.
void retire(Arena& arena) {
  while (arena.poisoned_bytes > kPoisonedBytes) {
    const size_t offset = arena.poisoned.front(), span = arena.dead.at(offset).span();
    madvise(arena.hidden + offset, span, MADV_DONTNEED);
    arena.poisoned_bytes -= span;
    arena.poisoned.pop_front();
    arena.dry.push_back(offset);
  }
  while (arena.dead_span > kQuarantinedAddresses || arena.dead.size() > kQuarantinedBlocks) {
    auto& oldest = arena.dry.empty() ? arena.poisoned : arena.dry;
    if (oldest.empty()) return;  // all that is dead may still be in use
    const size_t offset = oldest.front(), span = arena.dead.at(offset).span();
    if (&oldest == &arena.poisoned) arena.poisoned_bytes -= span;
    oldest.pop_front();
    arena.dead.erase(offset);
    arena.dead_span -= span;
    add_gap(arena, offset, span);
  }
}

bool place_block(Arena& arena, const Block& block, size_t* offset) {
  for (auto gap = arena.gaps.begin(); gap != arena.gaps.end(); ++gap) {
    if (gap->second < block.span()) continue;
    *offset = gap->first;
    const size_t rest = gap->second - block.span();
    arena.gaps.erase(gap);
    if (rest) arena.gaps[*offset + block.span()] = rest;
    arena.live[*offset] = block;
    return true;
  }
  return false;
}

}  // namespace

void memory_initialize() {
  const bool open = getenv("REHEARSAL_OPEN") && atoi(getenv("REHEARSAL_OPEN"));  // host access allowed, to compare with
  for (int d = 0; d < device_count(); ++d) {
    Arena& arena = arenas[d];
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* at = reinterpret_cast<void*>(kBase + d * kStride);
    const int access = open ? PROT_READ | PROT_WRITE : PROT_NONE;
    void* seen = mmap(at, kStride, access, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
    void* held = open ? seen : mmap(nullptr, kStride, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (seen == MAP_FAILED || held == MAP_FAILED) {
      perror("rehearsal: mmap");
      abort();
    }
    madvise(held, kStride, MADV_NOHUGEPAGE);
    arena.visible = static_cast<char*>(seen);
    arena.hidden = static_cast<char*>(held);
    arena.gaps[0] = kStride;
  }
}

void memory_adopt(Stream* stream) {
  for (const auto& [device, offset] : unowned) {
    if (!stream) break;
    std::lock_guard<std::mutex> lock(arenas[device].mutex);
    auto block = arenas[device].live.find(offset);
    if (block != arenas[device].live.end() && !block->second.owner) block->second.owner = stream;
  }
  unowned.clear();
}

bool memory_find(uintptr_t address, Touched* found) {
  Arena* arena = arena_of(address);
  if (!arena) return false;
  const size_t offset = address - reinterpret_cast<uintptr_t>(arena->visible);
  *found = Touched{static_cast<int>(arena - arenas), address, address / kPage * kPage, kPage, false, false, ""};
  std::lock_guard<std::mutex> lock(arena->mutex);
  for (const Blocks* blocks : {&arena->live, &arena->dead}) {
    auto block = holding(*blocks, offset);
    if (block == blocks->end()) continue;
    found->begin = reinterpret_cast<uintptr_t>(arena->visible) + block->first;
    found->size = block->second.size;
    found->freed = blocks == &arena->dead;
    found->known = true;
    found->origin = block->second.origin;
    break;
  }
  return true;
}

char* shadow(const void* pointer, size_t size) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (Arena* arena = arena_of(address)) {
    const size_t offset = address - reinterpret_cast<uintptr_t>(arena->visible);
    std::lock_guard<std::mutex> lock(arena->mutex);
    auto block = holding(arena->live, offset);
    if (block != arena->live.end() && offset + size <= block->first + block->second.taken()) {
      if (!block->second.owner) unowned.emplace_back(arena - arenas, block->first);
      return arena->hidden + offset;
    }
  }
  Touched met{};
  if (!memory_find(address, &met)) refuse(text("%p is not an address of a device", pointer));
  const std::string place = text("%zu bytes at %p of device %d", size, pointer, met.device);
  if (met.freed) {
    ++tally().freed_uses;
    const std::string where = *met.origin ? std::string(", at ") + met.origin : "";
    refuse("use of freed memory: " + place + text(" lie in an allocation of %zu bytes that has been freed", met.size) + where);
  }
  if (!met.known) refuse(place + " are in no allocation");
  refuse(place + text(" go over the end of their allocation, %zu bytes at %#zx", met.size, met.begin));
}

namespace runtime {

bool allocate(int device, void** out, size_t size) {
  touch_watch();
  Arena& arena = arenas[device];
  static std::atomic<uint64_t> serials{0};
  const Block block{size, caller(), nullptr, ++serials};
  size_t offset;
  {
    std::lock_guard<std::mutex> lock(arena.mutex);
    if (arena.used + block.taken() > device_capacity() || !place_block(arena, block, &offset)) {
      ++tally().refused_allocations;
      return false;
    }
    arena.used += block.taken();
  }
  // Fresh device memory holds anything but zeros.
  memset(arena.hidden + offset, kFresh, block.taken());
  ++tally().allocations;
  tally().device_bytes += block.taken();
  raise_peak(tally().device_peak, tally().device_bytes);
  *out = arena.visible + offset;
  return true;
}

bool release(int device, void* pointer) {
  const bool eager = settings().eager_free != 0;
  // As freeing device memory does elsewhere: nothing in flight may still use it.
  if (!eager) synchronize_device(device);
  Arena& arena = arenas[device];
  const size_t offset = static_cast<char*>(pointer) - arena.visible;
  Block block;
  {
    std::lock_guard<std::mutex> lock(arena.mutex);
    auto found = arena.live.find(offset);
    if (found == arena.live.end()) return false;
    block = found->second;
    arena.live.erase(found);
    arena.used -= block.taken();
    block.origin = caller();
    arena.dead[offset] = block;
    arena.dead_span += block.span();
  }
  tally().device_bytes -= block.taken();
  auto poison = [&arena, offset, serial = block.serial] {
    std::lock_guard<std::mutex> lock(arena.mutex);
    auto found = arena.dead.find(offset);
    if (found == arena.dead.end() || found->second.serial != serial) return;  // in use again
    memset(arena.hidden + offset, kFreed, found->second.taken());
    // Not before: until its stream has come so far, what was freed is as it was.
    arena.poisoned.push_back(offset);
    arena.poisoned_bytes += found->second.span();
    retire(arena);
  };
  // A caching allocator gives freed memory to what its stream does next; other streams may still use it.
  if (eager) defer_if_alive(block.owner, device, poison);
  else poison();
  return true;
}

void memory_info(int device, size_t* total, size_t* free) {
  std::lock_guard<std::mutex> lock(arenas[device].mutex);
  *total = device_capacity();
  *free = *total - std::min(*total, arenas[device].used);
}

}  // namespace runtime
}  // namespace rehearsal
