// Device memory behind addresses that the host cannot follow, and pinned host memory.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "rehearsal.h"

namespace rehearsal {
namespace {

constexpr size_t kAlignment = 256;
constexpr uintptr_t kBase = 0xfa000000000;    // device d's addresses start at kBase + d * kStride
constexpr uintptr_t kStride = 0x1000000000;   // 64 GiB

struct Arena {
  std::mutex mutex;
  char* visible = nullptr;  // what the framework sees; PROT_NONE
  char* hidden = nullptr;   // where the bytes are
  size_t capacity = 0, used = 0;
  std::map<size_t, size_t> live;  // offset -> size
  std::map<size_t, size_t> gaps;  // offset -> size
};
Arena arenas[kMaxDevices];
std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;

size_t rounded(size_t size) { return (std::max<size_t>(size, 1) + kAlignment - 1) / kAlignment * kAlignment; }

void raise_peak(std::atomic<uint64_t>& peak, uint64_t value) {
  uint64_t seen = peak;
  while (seen < value && !peak.compare_exchange_weak(seen, value)) {
  }
}

}  // namespace

void memory_initialize() {
  const bool open = getenv("REHEARSAL_OPEN") && atoi(getenv("REHEARSAL_OPEN"));  // host access allowed, to compare with
  for (int d = 0; d < device_count(); ++d) {
    Arena& arena = arenas[d];
    arena.capacity = device_capacity();
    void* at = reinterpret_cast<void*>(kBase + d * kStride);
    const int access = open ? PROT_READ | PROT_WRITE : PROT_NONE;
    void* seen = mmap(at, arena.capacity, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    void* held = open ? seen
                      : mmap(nullptr, arena.capacity, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (seen == MAP_FAILED || held == MAP_FAILED) {
      perror("rehearsal: mmap");
      abort();
    }
    arena.visible = static_cast<char*>(seen);
    arena.hidden = static_cast<char*>(held);
    arena.gaps[0] = arena.capacity;
  }
}

bool memory_allocate(int device, void** out, size_t size) {
  Arena& arena = arenas[device];
  const size_t need = rounded(size);
  std::lock_guard<std::mutex> lock(arena.mutex);
  for (auto gap = arena.gaps.begin(); gap != arena.gaps.end(); ++gap) {
    if (gap->second < need) continue;
    const size_t offset = gap->first, rest = gap->second - need;
    arena.gaps.erase(gap);
    if (rest) arena.gaps[offset + need] = rest;
    arena.live[offset] = size;
    arena.used += need;
    *out = arena.visible + offset;
    // Fresh device memory holds anything but zeros: NaN in every float type.
    memset(arena.hidden + offset, 0xff, need);
    ++tally().allocations;
    tally().device_bytes += need;
    raise_peak(tally().device_peak, tally().device_bytes);
    return true;
  }
  return false;  // out of memory
}

bool memory_release(int device, void* pointer) {
  synchronize_device(device);  // as freeing device memory does elsewhere: nothing in flight may still use it
  Arena& arena = arenas[device];
  std::lock_guard<std::mutex> lock(arena.mutex);
  size_t offset = static_cast<char*>(pointer) - arena.visible;
  auto found = arena.live.find(offset);
  if (found == arena.live.end()) return false;
  size_t size = rounded(found->second);
  arena.live.erase(found);
  arena.used -= size;
  tally().device_bytes -= size;
  madvise(arena.hidden + (offset + 4095) / 4096 * 4096, size > 4096 ? (size - 4096) / 4096 * 4096 : 0, MADV_DONTNEED);
  auto next = arena.gaps.lower_bound(offset);
  if (next != arena.gaps.end() && next->first == offset + size) {
    size += next->second;
    next = arena.gaps.erase(next);
  }
  if (next != arena.gaps.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return true;
    }
  }
  arena.gaps[offset] = size;
  return true;
}

void memory_statistics(int device, size_t* total, size_t* free) {
  std::lock_guard<std::mutex> lock(arenas[device].mutex);
  *total = arenas[device].capacity;
  *free = arenas[device].capacity - arenas[device].used;
}

char* shadow(const void* pointer, size_t size) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  const uintptr_t index = (address - kBase) / kStride;
  if (address >= kBase && index < static_cast<uintptr_t>(device_count())) {
    Arena& arena = arenas[index];
    const size_t offset = address - reinterpret_cast<uintptr_t>(arena.visible);
    std::lock_guard<std::mutex> lock(arena.mutex);
    auto after = arena.live.upper_bound(offset);
    if (after != arena.live.begin()) {
      auto block = std::prev(after);
      if (offset + size <= block->first + rounded(block->second)) return arena.hidden + offset;
    }
  }
  fprintf(stderr, "rehearsal: %p + %zu is not within a live allocation of a device\n", pointer, size);
  return nullptr;
}

bool pinned_allocate(void** out, size_t size) {
  size_t need = (std::max<size_t>(size, 1) + 4095) / 4096 * 4096;
  void* at = mmap(nullptr, need, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return false;
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned[reinterpret_cast<uintptr_t>(at)] = need;
  tally().pinned_bytes += need;
  raise_peak(tally().pinned_peak, tally().pinned_bytes);
  *out = at;
  return true;
}

bool pinned_release(void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto found = pinned.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == pinned.end()) return false;
  munmap(pointer, found->second);
  tally().pinned_bytes -= found->second;
  pinned.erase(found);
  return true;
}

bool is_pinned(const void* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) return false;
  auto block = std::prev(after);
  return address < block->first + block->second;
}

}  // namespace rehearsal

// For ctypes: page-locks memory that exists (as cudaHostRegister does).
extern "C" __attribute__((visibility("default"))) void rehearsal_register_host(void* pointer, size_t size) {
  std::lock_guard<std::mutex> lock(rehearsal::pinned_mutex);
  rehearsal::pinned[reinterpret_cast<uintptr_t>(pointer)] = size;
}
extern "C" __attribute__((visibility("default"))) void rehearsal_unregister_host(void* pointer) {
  std::lock_guard<std::mutex> lock(rehearsal::pinned_mutex);
  rehearsal::pinned.erase(reinterpret_cast<uintptr_t>(pointer));
}
