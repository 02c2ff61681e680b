// Page-locked host memory: allocated here, or registered as cudaHostRegister does.
#include <sys/mman.h>

#include <algorithm>
#include <map>

#include "simulated.h"

namespace rehearsal {
namespace {

std::mutex mutex;
std::map<uintptr_t, size_t> ranges;

void count(size_t more) {
  tally().pinned_bytes += more;
  raise_peak(tally().pinned_peak, tally().pinned_bytes);
}

}  // namespace

namespace runtime {

bool allocate_host(void** out, size_t size) {
  const size_t need = (std::max<size_t>(size, 1) + 4095) / 4096 * 4096;
  void* at = mmap(nullptr, need, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return false;
  std::lock_guard<std::mutex> lock(mutex);
  ranges[reinterpret_cast<uintptr_t>(at)] = need;
  count(need);
  *out = at;
  return true;
}

bool release_host(void* pointer) {
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

bool register_host(void* pointer, size_t size) {
  if (is_pinned(pointer)) return false;  // what is registered must not be registered again
  std::lock_guard<std::mutex> lock(mutex);
  ranges[reinterpret_cast<uintptr_t>(pointer)] = size;
  count(size);
  return true;
}

bool unregister_host(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = ranges.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == ranges.end()) return false;
  tally().pinned_bytes -= found->second;
  ranges.erase(found);
  return true;
}

}  // namespace runtime
}  // namespace rehearsal
