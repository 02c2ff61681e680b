// Functions that look like CUDA's: each looks at its arguments, and does its work at once, on host memory.
#include "cuda_runtime.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <utility>

struct FakeStream {};
struct FakeEvent {
  unsigned flags;
  double at;   // when it was recorded; negative: never
  bool asked;  // the first query after a recording finds it not ready
};

namespace {

constexpr size_t kMemory = 2ull << 30, kShared = 1 << 20;
constexpr int kFresh = 0xff, kPrivate = -1, kForeign = -2;

struct Block {
  size_t size;
  int file;  // that other processes can open
};
using Blocks = std::map<uintptr_t, Block>;
std::recursive_mutex mutex;
Blocks device, host;      // allocated here, opened from others; page-locked
std::set<FakeStream*> streams;
std::set<FakeEvent*> events;
size_t used = 0;
thread_local cudaError_t last = cudaSuccess;

struct Lock : std::lock_guard<std::recursive_mutex> {
  Lock() : std::lock_guard<std::recursive_mutex>(mutex) {}
};

cudaError_t outcome(cudaError_t error) { return error == cudaSuccess ? error : last = error; }
cudaError_t wrong(const char* call, const char* why) {
  fprintf(stderr, "fake cudart: %s: %s\n", call, why);
  return outcome(cudaErrorInvalidValue);
}
#define REQUIRE(truth, why) \
  if (!(truth)) return wrong(__func__, why)
#define REQUIRE_STREAM(stream) REQUIRE(!stream || streams.count(stream), "a stream that does not exist")
#define REQUIRE_EVENT(event) REQUIRE(events.count(event), "an event that does not exist")

Blocks::iterator holder(Blocks& blocks, const void* pointer, size_t size) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return blocks.end();
  auto block = std::prev(after);
  return address + size <= block->first + block->second.size ? block : blocks.end();
}
bool on_device(const void* pointer, size_t size) { return holder(device, pointer, size) != device.end(); }
// Whether a side of a copy is where its kind says.
bool fits(const void* pointer, size_t size, bool of_device) {
  return of_device ? on_device(pointer, size) : holder(device, pointer, 1) == device.end();
}

cudaError_t copy(const char* call, void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  if (kind < cudaMemcpyHostToDevice || kind > cudaMemcpyDeviceToDevice) return wrong(call, "an unknown kind");
  if (!fits(to, size, kind != cudaMemcpyDeviceToHost)) return wrong(call, "the target is not where the kind says");
  if (!fits(from, size, kind != cudaMemcpyHostToDevice)) return wrong(call, "the source is not where the kind says");
  memmove(to, from, size);
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaSetDevice(int number) { return number ? wrong(__func__, "a card that does not exist") : cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  const Lock lock;
  for (FakeEvent* event : events) event->asked = true;  // all that was recorded is done
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "invalid argument"; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorInvalidValue";
}

// -- memory --
cudaError_t cudaMalloc(void** out, size_t size) {
  const Lock lock;
  REQUIRE(size, "no bytes");
  if (used + size > kMemory) return outcome(cudaErrorMemoryAllocation);
  // Small allocations of CUDA share pages: a handle would open their neighbours as well.
  const int file = size >= kShared ? memfd_create("fake-cudart", MFD_CLOEXEC) : kPrivate;
  if (file >= 0 && ftruncate(file, size)) return outcome(cudaErrorMemoryAllocation);
  const int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file, 0);
  if (at == MAP_FAILED) return outcome(cudaErrorMemoryAllocation);
  if (size < kShared) memset(at, kFresh, size);
  device[reinterpret_cast<uintptr_t>(at)] = {size, file};
  used += size;
  *out = at;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  const Lock lock;
  auto block = device.find(reinterpret_cast<uintptr_t>(pointer));
  REQUIRE(block != device.end() && block->second.file != kForeign, "memory that was not allocated");
  munmap(pointer, block->second.size);
  if (block->second.file >= 0) close(block->second.file);
  used -= block->second.size;
  device.erase(block);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Lock lock;
  *total = kMemory;
  *free = kMemory - used;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  const Lock lock;
  REQUIRE_STREAM(stream);
  REQUIRE(on_device(pointer, size), "memory that was not allocated");
  memset(pointer, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* pointer, int value, size_t size) { return cudaMemsetAsync(pointer, value, size, nullptr); }
cudaError_t cudaHostAlloc(void** out, size_t size, unsigned flags) {
  const Lock lock;
  REQUIRE(size && flags == cudaHostAllocPortable, "no bytes, or other flags");
  *out = malloc(size);
  host[reinterpret_cast<uintptr_t>(*out)] = {size, kPrivate};
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  const Lock lock;
  REQUIRE(host.erase(reinterpret_cast<uintptr_t>(pointer)), "memory that was not allocated");
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned flags) {
  const Lock lock;
  REQUIRE(size && flags == cudaHostRegisterPortable, "no bytes, or other flags");
  if (holder(host, pointer, 1) != host.end()) return outcome(cudaErrorHostMemoryAlreadyRegistered);
  host[reinterpret_cast<uintptr_t>(pointer)] = {size, kPrivate};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  const Lock lock;
  return host.erase(reinterpret_cast<uintptr_t>(pointer)) ? cudaSuccess : outcome(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  const Lock lock;
  found->type = on_device(pointer, 1)                     ? cudaMemoryTypeDevice
                : holder(host, pointer, 1) != host.end() ? cudaMemoryTypeHost
                                                          : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

// -- copies --
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  const Lock lock;
  REQUIRE_STREAM(stream);
  return copy(__func__, to, from, size, kind);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, size, kind, nullptr);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  const Lock lock;
  REQUIRE_STREAM(stream);
  REQUIRE(width <= to_pitch && width <= from_pitch, "rows that are wider than their pitch");
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t error =
        copy(__func__, static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, kind);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
cudaError_t cudaLaunchFake(cudaStream_t stream) {
  REQUIRE(last == cudaSuccess, "a call before has failed, and its error was left for others to meet");
  return cudaStreamSynchronize(stream);
}

// -- streams and events --
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  const Lock lock;
  REQUIRE(flags == cudaStreamNonBlocking, "other flags");
  streams.insert(*out = new FakeStream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock;
  REQUIRE(streams.erase(stream), "a stream that does not exist");
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Lock lock;
  REQUIRE_STREAM(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  const Lock lock;
  REQUIRE_STREAM(stream);
  REQUIRE_EVENT(event);
  REQUIRE(!flags, "other flags");
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  {
    const Lock lock;
    REQUIRE_STREAM(stream);
  }
  function(data);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  const Lock lock;
  REQUIRE(!(flags & cudaEventInterprocess) || flags & cudaEventDisableTiming, "an event between processes has no times");
  events.insert(*out = new FakeEvent{flags, -1, true});
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock;
  REQUIRE(events.erase(event), "an event that does not exist");
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock;
  REQUIRE_STREAM(stream);
  REQUIRE_EVENT(event);
  event->asked = false;
  event->at = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock;
  REQUIRE_EVENT(event);
  return std::exchange(event->asked, true) ? cudaSuccess : outcome(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Lock lock;
  REQUIRE_EVENT(event);
  event->asked = true;
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const Lock lock;
  REQUIRE_EVENT(begin);
  REQUIRE_EVENT(end);
  for (const FakeEvent* event : {begin, end}) REQUIRE(!(event->flags & cudaEventDisableTiming) && event->at >= 0, "an event without a time");
  *milliseconds = static_cast<float>((end->at - begin->at) * 1e3);
  return cudaSuccess;
}

// -- other processes: a file of this one, and that there is an event --
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  const Lock lock;
  auto block = device.find(reinterpret_cast<uintptr_t>(pointer));
  if (getenv("FAKE_CUDART_WITHOUT_IPC")) return outcome(cudaErrorInvalidValue);
  REQUIRE(block != device.end() && block->second.file >= 0, "not the begin of an allocation that can be shared");
  snprintf(handle->reserved, sizeof handle->reserved, "%d %d %zu", getpid(), block->second.file, block->second.size);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t handle, unsigned flags) {
  const Lock lock;
  int process = 0, file = -1;
  size_t size = 0;
  REQUIRE(sscanf(handle.reserved, "%d %d %zu", &process, &file, &size) == 3, "not a handle");
  REQUIRE(process != getpid() && flags == cudaIpcMemLazyEnablePeerAccess, "a handle of this process, or other flags");
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
  const int opened = open(path, O_RDWR | O_CLOEXEC);
  REQUIRE(opened >= 0, "a process that has gone");
  *out = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
  close(opened);
  device[reinterpret_cast<uintptr_t>(*out)] = {size, kForeign};
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  const Lock lock;
  auto block = device.find(reinterpret_cast<uintptr_t>(pointer));
  REQUIRE(block != device.end() && block->second.file == kForeign, "memory that was not opened");
  munmap(pointer, block->second.size);
  device.erase(block);
  return cudaSuccess;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  const Lock lock;
  REQUIRE_EVENT(event);
  REQUIRE(event->flags & cudaEventInterprocess, "an event of this process alone");
  memset(handle, 0, sizeof *handle);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* out, cudaIpcEventHandle_t) {
  return cudaEventCreateWithFlags(out, cudaEventDisableTiming | cudaEventInterprocess);
}
