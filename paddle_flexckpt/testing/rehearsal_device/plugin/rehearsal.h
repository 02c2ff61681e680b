// A pretended accelerator for Paddle's CustomDevice runtime: what the plugin's parts know of each other.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "paddle/phi/backends/device_ext.h"

namespace rehearsal {

constexpr int kMaxDevices = 16;

// ---- settings.cc: from the environment (REHEARSAL_<NAME>), and changeable while running by rehearsal_set ----
// name, value unless set
#define REHEARSAL_SETTINGS(SETTING)                                                                                   \
  SETTING(h2d_gibs, 0)          /* bandwidth of pinned copies, GiB/s; 0: as fast as memcpy */                         \
  SETTING(d2h_gibs, 0)                                                                                                \
  SETTING(d2d_gibs, 0)          /* within one device */                                                               \
  SETTING(ccl_gibs, 0)          /* between devices */                                                                 \
  SETTING(latency_us, 0)        /* of every copy */                                                                   \
  SETTING(pageable_factor, 0.5) /* bandwidth of copies from and to pageable host memory, relative */                  \
  SETTING(eager_pageable, 0)    /* 1: asynchronous copies of pageable memory do not wait either (CUDA's do) */        \
  SETTING(eager_free, 1)        /* 1: freeing does not wait, as with a caching allocator; 0: as cudaFree does */      \
  SETTING(delay_us, 0)          /* longest of the random delays before the operations of a stream */                  \
  SETTING(seed, 0)              /* of these delays */                                                                 \
  SETTING(lazy, 0)              /* 1: a stream does nothing that nobody waits for; collectives are waited for */      \
  SETTING(memory_gib, 4)        /* of each device */                                                                  \
  SETTING(patience_s, 60)       /* how long a collective waits for a peer that says nothing */                        \
  SETTING(lose_event, 0)        /* N: the N-th recording of an event from now on is lost; -1: all */                  \
  SETTING(lose_wait, 0)         /* N: the N-th wait from now on does not wait; -1: all */                             \
  SETTING(trace, 0)             /* 1: record waits too, and the Python line that asked for each operation */          \
  SETTING(log, 0)               /* 1: a line on stderr for each copy */

struct Settings {
#define REHEARSAL_DECLARE(name, otherwise) std::atomic<double> name{otherwise};
  REHEARSAL_SETTINGS(REHEARSAL_DECLARE)
#undef REHEARSAL_DECLARE
};
Settings& settings();
std::atomic<double>* setting(const std::string& name);
int device_count();
size_t device_capacity();
double now();  // CLOCK_MONOTONIC, which is time.monotonic()

// ---- errors.cc ----
// Raises an error in the Python code that asked for the operation. Not for the streams' threads: see fail().
[[noreturn]] void refuse(const std::string& why);
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- memory.cc ----
// What a tensor's data_ptr() is lies in a range without access rights; the bytes are in a second mapping that only the
// plugin knows, so that host code which follows a device pointer is noticed, at an address that starts with 0xfa.
void memory_initialize();
bool memory_allocate(int device, void** out, size_t size);  // false: out of memory
bool memory_release(int device, void* pointer);
void memory_statistics(int device, size_t* total, size_t* free);
// The plugin's own address of a range of a device. Raises an error where the range is not within one live allocation.
char* shadow(const void* pointer, size_t size);

class Stream;
// The stream in which an allocation is used first, but for collectives, is its own: freed, it serves the next work of that
// stream. To be called by the thread that got the addresses; nullptr: this was no such use.
void memory_adopt(Stream* stream);

struct Touched {  // what a host access has met
  int device;
  uintptr_t address, begin;  // of the access, and of the allocation
  size_t size;
  bool freed;
  bool known;          // whether there is an allocation at all
  const char* origin;  // Python's line that allocated it, or freed it; known while tracing
};
bool memory_find(uintptr_t address, Touched* found);  // false: not an address of a device

// ---- pinned.cc ----
bool pinned_allocate(void** out, size_t size);
bool pinned_release(void* pointer);
bool is_pinned(const void* pointer);

// ---- touch.cc: accesses of the host to device memory ----
void touch_watch();  // makes the handler of faults the first one, if it is not

// ---- python.cc ----
void python_initialize();
const char* caller();  // the line of Python that called, outside Paddle and this package; "" unless tracing
bool python_interrupt(int (*callback)(void*));         // has it called in the main thread
int python_report(const char* otherwise);              // calls touches.report() and returns -1 with an exception set
void python_dump_threads(int descriptor);              // tracebacks of all threads; from a handler of signals

// ---- streams.cc: one worker thread each, in order ----
struct Mark {  // one recording of an event
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Stream* stream = nullptr;
  uint64_t position = 0;
  void finish();
  void wait();
  bool query();
};

class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  int device() const { return device_; }
  int number() const { return number_; }  // among the streams of its device, in the order of their creation
  uint64_t push(std::function<void()> work);        // returns its number, from 1 on
  uint64_t push_order(std::function<void()> work);  // what uses no memory: a recording of an event, a wait
  void defer(std::function<void()> work);           // to be done before the next use of memory, if there is one
  void demand(uint64_t position);             // that the work up to this number be done: lazy streams do no other
  void wake();
  void synchronize();
  bool idle();

 private:
  struct Work {
    std::function<void()> run;
    const char* caller;
  };
  void run();
  const int device_;
  int number_ = 0;
  std::mutex mutex_;
  std::condition_variable arrived_, drained_;
  std::deque<Work> queue_;
  std::vector<std::function<void()>> deferred_;
  bool busy_ = false, stop_ = false;
  uint64_t pushed_ = 0, demanded_ = 0, begun_ = 0;
  std::thread worker_;
};

void streams_initialize();
Stream* stream_of(C_Stream handle, int device);  // nullptr: the device's default stream
Stream* main_stream(int device);  // the one that the framework computes in: the first
void synchronize_device(int device);
void defer_if_alive(Stream* stream, int device, std::function<void()> work);  // otherwise, the main stream gets it
void wake_streams();  // after a change of settings
void fail(int device, const std::string& why);  // an error of asynchronous work: the next synchronisation raises it
bool failed(int device);
std::string failure(int device);
bool forked();  // in a child of fork, which has none of the worker threads: like CUDA, nothing works there
void nap(double seconds);

// ---- link.cc: between host and device ----
enum class Way { H2D, D2H, D2D, CCL };
// Moves bytes in pieces and takes as long as the link would.
void transfer(Way way, int device, char* to, const char* from, size_t size, bool pinned);
void occupy(Way way, int device, size_t size, double since);  // waits until the link would have moved so much

// ---- counters.cc ----
struct Counter {
  std::atomic<uint64_t> calls{0}, bytes{0}, pageable_bytes{0}, nanoseconds{0}, largest{0};
};
Counter& counter(Way way);
// name, whether reset() makes it zero
#define REHEARSAL_TALLIES(TALLY)                                                                                      \
  TALLY(asynchronous, true)                                                                                           \
  TALLY(synchronous, true)                                                                                            \
  TALLY(stream_syncs, true)                                                                                           \
  TALLY(device_syncs, true)                                                                                           \
  TALLY(event_syncs, true)                                                                                            \
  TALLY(stream_waits, true) /* of a stream for an event */                                                            \
  TALLY(events, true)       /* recordings */                                                                          \
  TALLY(lost, true)         /* recordings and waits that were asked to be lost */                                     \
  TALLY(allocations, true)                                                                                            \
  TALLY(refused_allocations, true)                                                                                    \
  TALLY(device_bytes, false)                                                                                          \
  TALLY(device_peak, false)                                                                                           \
  TALLY(pinned_bytes, false)                                                                                          \
  TALLY(pinned_peak, false)                                                                                           \
  TALLY(kernels, true)                                                                                                \
  TALLY(memory_sets, true)                                                                                            \
  TALLY(collective_calls, true)                                                                                       \
  TALLY(host_touches, true)                                                                                           \
  TALLY(freed_uses, true)

struct Tally {
#define REHEARSAL_DECLARE(name, resets) std::atomic<uint64_t> name{0};
  REHEARSAL_TALLIES(REHEARSAL_DECLARE)
#undef REHEARSAL_DECLARE
};
Tally& tally();
void raise_peak(std::atomic<uint64_t>& peak, uint64_t value);
void count_collective(const char* name);

struct Origin {  // who asked for the operation that this thread is working on
  int stream = -1;  // -1: none, a synchronous operation
  const char* caller = "";
};
Origin& origin();
void record_span(const char* what, int device, double begin, double end, size_t bytes, bool pageable = false);

// ---- ccl.cc ----
void fill_ccl(C_DeviceInterface* table);

}  // namespace rehearsal

#define REHEARSAL_EXPORT extern "C" __attribute__((visibility("default")))  // for ctypes
