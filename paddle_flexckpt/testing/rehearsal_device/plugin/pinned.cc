// Page-locked host memory: allocated here, or registered as cudaHostRegister does.
#include <sys/mman.h>

#include <algorithm>
#include <map>

#include "rehearsal.h"

namespace rehearsal {
namespace {

std::mutex mutex;
std::map<uintptr_t, size_t> ranges;

void count(size_t more) {
  tally().pinned_bytes += more;
  raise_peak(tally().pinned_peak, tally().pinned_bytes);
}

}  // namespace

bool pinned_allocate(void** out, size_t size) {
  const size_t need = (std::max<size_t>(size, 1) + 4095) / 4096 * 4096;
  void* at = mmap(nullptr, need, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return false;
  std::lock_guard<std::mutex> lock(mutex);
  ranges[reinterpret_cast<uintptr_t>(at)] = need;
  count(need);
  *out = at;
  return true;
}

bool pinned_release(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = ranges.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == ranges.end()) return false;
  munmap(pointer, found->second);
  tally().pinned_bytes -= found->second;
  ranges.erase(found);
  return true;
}

bool is_pinned(const void* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(mutex);
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  auto block = std::prev(after);
  return address < block->first + block->second;
}

}  // namespace rehearsal

// Both return 0 if that was right: what is registered must not be registered again, nor anything else be taken back.
REHEARSAL_EXPORT int rehearsal_register_host(void* pointer, size_t size) {
  if (rehearsal::is_pinned(pointer)) return 1;
  std::lock_guard<std::mutex> lock(rehearsal::mutex);
  rehearsal::ranges[reinterpret_cast<uintptr_t>(pointer)] = size;
  rehearsal::count(size);
  return 0;
}
REHEARSAL_EXPORT int rehearsal_unregister_host(void* pointer) {
  std::lock_guard<std::mutex> lock(rehearsal::mutex);
  auto found = rehearsal::ranges.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == rehearsal::ranges.end()) return 1;
  rehearsal::tally().pinned_bytes -= found->second;
  rehearsal::ranges.erase(found);
  return 0;
}
