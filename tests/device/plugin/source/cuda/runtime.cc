// CUDA's answers to what the plugin asks of a runtime. Several devices of the plugin may be one card.
#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "../rehearsal.h"
#include "cuda.h"

namespace rehearsal {
namespace {

struct Block {
  size_t size;
  int device;
};
std::mutex blocks_mutex;
// Not destroyed at the end of a process, when Paddle still gives memory back.
auto& blocks = *new std::map<uintptr_t, Block>;          // live allocations, by address
size_t used[kMaxDevices];
std::mutex pinned_mutex;
auto& pinned = *new std::map<uintptr_t, size_t>;         // page-locked by this plugin
std::mutex streams_mutex;
Stream* defaults[kMaxDevices];
int created[kMaxDevices];
thread_local int current = 0;

int cards() {
  static const int count = [] {
    int found = 0;
    CUDA_CALL(cudaGetDeviceCount(&found));
    return found;
  }();
  return count;
}

uintptr_t number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// The live allocation that holds a range; raises an error where there is none.
std::pair<uintptr_t, Block> holder(const void* pointer, size_t size) {
  const uintptr_t address = number(pointer);
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto after = blocks.upper_bound(address);
  if (after != blocks.begin()) {
    const auto found = *std::prev(after);
    if (address + size <= found.first + found.second.size) return found;
  }
  refuse(text("%zu bytes at %p are not within one live allocation", size, pointer));
}

void count_pinned(void* pointer, size_t size) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned[number(pointer)] = size;
  tally().pinned_bytes += size;
  raise_peak(tally().pinned_peak, tally().pinned_bytes);
}
bool uncount_pinned(void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto found = pinned.find(number(pointer));
  if (found == pinned.end()) return false;
  tally().pinned_bytes -= found->second;
  pinned.erase(found);
  return true;
}

// ---- times of copies ----

struct Timing {
  cudaEvent_t begin, end;
  Way way;
  int device;
  size_t size;
  bool pinned;
  Origin who;
};
struct Clock {  // of a card: an event, and when it was
  cudaEvent_t event = nullptr;
  double at = 0;
};
std::mutex timings_mutex;
auto& timings = *new std::deque<Timing>;
auto& spare = *new std::array<std::vector<cudaEvent_t>, kMaxDevices>;
Clock clocks[kMaxDevices];

cudaEvent_t timing_event(int card) {
  if (spare[card].empty()) {
    cudaEvent_t fresh;
    CUDA_CALL(cudaEventCreateWithFlags(&fresh, cudaEventDefault));
    return fresh;
  }
  cudaEvent_t event = spare[card].back();
  spare[card].pop_back();
  return event;
}

// Sets a card's clock, where there is none.
void start_clock(int card) {
  if (clocks[card].event) return;
  clocks[card].event = timing_event(card);
  CUDA_CALL(cudaEventRecord(clocks[card].event, nullptr));
  CUDA_CALL(cudaEventSynchronize(clocks[card].event));
  clocks[card].at = now();
}

double time_of(cudaEvent_t event, int card) {
  float milliseconds = 0;  // of 24 bits: after ten minutes, exact to 0.04 ms
  CUDA_CALL(cudaEventElapsedTime(&milliseconds, clocks[card].event, event));
  return clocks[card].at + milliseconds * 1e-3;
}

cudaMemcpyKind kind(Way way) {
  return way == Way::H2D ? cudaMemcpyHostToDevice : way == Way::D2H ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice;
}

// Checks the device's sides of a copy; returns whether the host's side is page-locked.
bool check_copy(Way way, const void* to, const void* from, size_t size) {
  if (way != Way::D2H) holder(to, size);
  if (way != Way::H2D) holder(from, size);
  return way == Way::D2D || runtime::is_pinned(way == Way::H2D ? from : to);
}

// ---- work on the host: copies of the allocations that it names ----

struct Mirror {
  uintptr_t begin;
  int device;
  char* host;
  size_t room;
  std::vector<std::pair<size_t, size_t>> ranges;  // offset, size
};
thread_local std::vector<Mirror> mirrors;
std::mutex rooms_mutex;
auto& rooms = *new std::multimap<size_t, char*>;  // page-locked, not in use

char* take_room(size_t size) {
  {
    std::lock_guard<std::mutex> lock(rooms_mutex);
    const auto found = rooms.find(size);
    if (found != rooms.end()) {
      char* room = found->second;
      rooms.erase(found);
      return room;
    }
  }
  void* room = nullptr;
  CUDA_CALL(cudaHostAlloc(&room, size, cudaHostAllocPortable));
  return static_cast<char*>(room);
}

// Brings what the work has written to the device.
void upload(Stream* stream) {
  use(stream->device);
  for (const Mirror& mirror : mirrors) {
    {
      std::lock_guard<std::mutex> lock(blocks_mutex);
      if (!blocks.count(mirror.begin)) continue;  // a result has taken the place of an operand
    }
    for (const auto& [offset, size] : mirror.ranges) {
      void* to = reinterpret_cast<void*>(mirror.begin + offset);
      CUDA_CALL(cudaMemcpyAsync(to, mirror.host + offset, size, cudaMemcpyHostToDevice, stream->handle));
    }
  }
  CUDA_CALL(cudaStreamSynchronize(stream->handle));
}

}  // namespace

void check(cudaError_t status, const char* call) {
  if (status == cudaErrorCudartUnloading) return;  // the process ends, and Paddle gives back what it has
  if (status != cudaSuccess) refuse(text("%s: %s (%s)", call, cudaGetErrorString(status), cudaGetErrorName(status)));
}

bool went_well(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaSuccess;
}

void use(int device) {
  current = device;
  CUDA_CALL(cudaSetDevice(device % cards()));
}

int current_device() { return current; }

namespace runtime {

void initialize() {
  if (!cards()) refuse("CUDA sees no card");
}
const char* name() { return REHEARSAL_RUNTIME; }
void use_device(int device) { use(device); }
void synchronize_device(int device) {
  use(device);
  CUDA_CALL(cudaDeviceSynchronize());
}
void settings_changed() {}

bool allocate(int device, void** out, size_t size) {
  use(device);
  const double limit = settings().memory_gib * (1 << 30);
  {
    std::lock_guard<std::mutex> lock(blocks_mutex);
    used[device] += size;
  }
  // Not under the lock: CUDA may wait for the device here, and the device for a callback that frees memory.
  const bool fits = limit <= 0 || used[device] <= limit;
  const cudaError_t status = fits ? cudaMalloc(out, std::max<size_t>(size, 1)) : cudaErrorMemoryAllocation;
  std::lock_guard<std::mutex> lock(blocks_mutex);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // it is not to be met again
    used[device] -= size;
    ++tally().refused_allocations;
    return false;
  }
  check(status, "cudaMalloc");
  blocks[number(*out)] = {size, device};
  ++tally().allocations;
  tally().device_bytes += size;
  raise_peak(tally().device_peak, tally().device_bytes);
  return true;
}

bool release(int device, void* pointer) {
  use(device);
  {
    std::lock_guard<std::mutex> lock(blocks_mutex);
    const auto found = blocks.find(number(pointer));
    if (found == blocks.end()) return false;
    used[device] -= found->second.size;
    tally().device_bytes -= found->second.size;
    blocks.erase(found);
  }
  CUDA_CALL(cudaFree(pointer));
  return true;
}

void memory_info(int device, size_t* total, size_t* free) {
  use(device);
  CUDA_CALL(cudaMemGetInfo(free, total));
  const auto limit = static_cast<size_t>(settings().memory_gib * (1 << 30));
  if (!limit) return;
  std::lock_guard<std::mutex> lock(blocks_mutex);
  *total = std::min(*total, limit);
  *free = std::min(*free, limit - std::min(limit, used[device]));
}

void set_bytes(int device, void* pointer, unsigned char value, size_t size) {
  holder(pointer, size);
  synchronize_device(device);
  CUDA_CALL(cudaMemset(pointer, value, size));
  synchronize_device(device);
}

bool allocate_host(void** out, size_t size) {
  if (!went_well(cudaHostAlloc(out, std::max<size_t>(size, 1), cudaHostAllocPortable))) return false;
  count_pinned(*out, size);
  return true;
}
bool release_host(void* pointer) {
  if (!uncount_pinned(pointer)) return false;
  CUDA_CALL(cudaFreeHost(pointer));
  return true;
}
bool register_host(void* pointer, size_t size) {
  if (!went_well(cudaHostRegister(pointer, size, cudaHostRegisterPortable))) return false;
  count_pinned(pointer, size);
  return true;
}
bool unregister_host(void* pointer) { return uncount_pinned(pointer) && went_well(cudaHostUnregister(pointer)); }
bool is_pinned(const void* pointer) {
  cudaPointerAttributes found{};
  return went_well(cudaPointerGetAttributes(&found, pointer)) && found.type == cudaMemoryTypeHost;
}

void copy(Way way, int device, void* to, const void* from, size_t size) {
  const bool locked = check_copy(way, to, from, size);
  use(device);
  if (way == Way::D2D) CUDA_CALL(cudaDeviceSynchronize());  // the streams here do not wait for CUDA's default stream
  origin() = {-1, caller()};
  const double begin = now();
  CUDA_CALL(cudaMemcpy(to, from, size, kind(way)));
  // These alone return before they are done; after others this would wait for the copies of other threads.
  if (way == Way::D2D || (way == Way::H2D && !locked)) CUDA_CALL(cudaStreamSynchronize(nullptr));
  record_copy(way, device, begin, now(), size, locked);
}

void copy_async(Way way, Stream* stream, void* to, const void* from, size_t size) {
  const bool locked = check_copy(way, to, from, size);
  use(stream->device);
  const int card = stream->device % cards();
  Timing timing{nullptr, nullptr, way, stream->device, size, locked, {stream->number, caller()}};
  {
    std::lock_guard<std::mutex> lock(timings_mutex);
    start_clock(card);
    timing.begin = timing_event(card);
    timing.end = timing_event(card);
  }
  // Not under the lock: a copy of pageable memory returns when it is done.
  CUDA_CALL(cudaEventRecord(timing.begin, stream->handle));
  CUDA_CALL(cudaMemcpyAsync(to, from, size, kind(way), stream->handle));
  CUDA_CALL(cudaEventRecord(timing.end, stream->handle));
  bool many = false;
  {
    std::lock_guard<std::mutex> lock(timings_mutex);
    timings.push_back(timing);
    many = timings.size() > 4096;
  }
  if (many) collect_times();
}

void collect_times() {
  std::lock_guard<std::mutex> lock(timings_mutex);
  if (timings.empty() || forked()) return;
  const Origin before = origin();
  const int device_before = current;
  std::deque<Timing> unfinished;
  for (const Timing& timing : timings) {
    const int card = timing.device % cards();
    use(timing.device);
    const cudaError_t status = cudaEventQuery(timing.end);
    if (status == cudaErrorNotReady) unfinished.push_back(timing);
    if (!went_well(status)) continue;  // if the card is lost, the next wait says so
    float lasted = 0;
    CUDA_CALL(cudaEventElapsedTime(&lasted, timing.begin, timing.end));
    const double end = time_of(timing.end, card);
    origin() = timing.who;
    record_copy(timing.way, timing.device, end - lasted * 1e-3, end, timing.size, timing.pinned);
    spare[card].insert(spare[card].end(), {timing.begin, timing.end});
  }
  timings.swap(unfinished);
  for (int card = 0; timings.empty() && card < cards(); ++card)  // set anew by the next copy: clocks drift apart
    if (clocks[card].event) spare[card].push_back(std::exchange(clocks[card].event, nullptr));
  origin() = before;
  use(device_before);
}

Stream* create_stream(int device) {
  use(device);
  auto stream = std::make_unique<Stream>();
  CUDA_CALL(cudaStreamCreateWithFlags(&stream->handle, cudaStreamNonBlocking));
  std::lock_guard<std::mutex> lock(streams_mutex);
  stream->device = device;
  stream->number = created[device]++;
  return stream.release();
}
void destroy_stream(Stream* stream) {
  use(stream->device);
  CUDA_CALL(cudaStreamDestroy(stream->handle));
  delete stream;
}
Stream* stream_of(C_Stream handle, int device) {
  if (handle) return reinterpret_cast<Stream*>(handle);
  std::lock_guard<std::mutex> lock(streams_mutex);
  if (!defaults[device]) defaults[device] = new Stream{nullptr, device, created[device]++};
  return defaults[device];
}
int device_of(const Stream* stream) { return stream->device; }
bool is_idle(Stream* stream) {
  use(stream->device);
  const cudaError_t status = cudaStreamQuery(stream->handle);
  if (status != cudaErrorNotReady) check(status, "cudaStreamQuery");
  return went_well(status);
}
void synchronize_stream(Stream* stream) {
  use(stream->device);
  CUDA_CALL(cudaStreamSynchronize(stream->handle));
}
void call_back(Stream* stream, std::function<void()> work) {
  use(stream->device);
  auto* held = new std::function<void()>(std::move(work));
  // A thread of its own: in CUDA's, no function of CUDA may be called.
  const auto run = [](void* data) {
    std::thread([mine = std::unique_ptr<std::function<void()>>(static_cast<std::function<void()>*>(data))] {
      (*mine)();
    }).detach();
  };
  CUDA_CALL(cudaLaunchHostFunc(stream->handle, run, held));
}

Event* create_event(int device) {
  use(device);
  auto event = std::make_unique<Event>();
  CUDA_CALL(cudaEventCreateWithFlags(&event->handle, cudaEventDisableTiming));
  return event.release();
}
void destroy_event(Event* event) {
  CUDA_CALL(cudaEventDestroy(event->handle));
  delete event;
}
void record_event(Event* event, Stream* stream) {
  use(stream->device);
  CUDA_CALL(cudaEventRecord(event->handle, stream->handle));
}
bool is_done(Event* event) {
  const cudaError_t status = cudaEventQuery(event->handle);
  if (status != cudaErrorNotReady) check(status, "cudaEventQuery");
  return went_well(status);
}
void synchronize_event(Event* event) { CUDA_CALL(cudaEventSynchronize(event->handle)); }
void wait_for_event(Stream* stream, Event* event) {
  use(stream->device);
  CUDA_CALL(cudaStreamWaitEvent(stream->handle, event->handle, 0));
}

char* seen_by_work(const void* pointer, size_t size) {
  const auto [begin, block] = holder(pointer, size);
  const uintptr_t base = begin;
  auto mirror = std::find_if(mirrors.begin(), mirrors.end(), [=](const Mirror& m) { return m.begin == base; });
  if (mirror == mirrors.end()) {
    const size_t room = std::max<size_t>(block.size, 1);
    mirror = mirrors.insert(mirror, {begin, block.device, take_room(room), room, {}});
  }
  const size_t offset = number(pointer) - begin;
  for (const auto& [from, length] : mirror->ranges)
    if (from <= offset && offset + size <= from + length) return mirror->host + offset;
  synchronize_device(block.device);
  CUDA_CALL(cudaMemcpy(mirror->host + offset, pointer, size, cudaMemcpyDeviceToHost));
  mirror->ranges.emplace_back(offset, size);
  return mirror->host + offset;
}

void end_work() {
  std::lock_guard<std::mutex> lock(rooms_mutex);
  for (const Mirror& mirror : mirrors) rooms.emplace(mirror.room, mirror.host);
  mirrors.clear();
}

void launch(Stream* stream, std::function<void()> work) {
  count_fallback(current_kernel());
  work();
  upload(stream);
}

void launch_collective(Stream* stream, std::function<std::string()> work) {
  count_fallback(current_kernel());
  const std::string wrong = work();
  if (!wrong.empty()) return fail(stream->device, wrong);
  upload(stream);
}

void occupy_link(Way, int, size_t, double) {}

}  // namespace runtime
}  // namespace rehearsal
