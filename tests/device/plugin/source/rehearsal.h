// A plugin for Paddle's CustomDevice interface: what its parts know of each other, whatever runtime is below (runtime.h).
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

#include "runtime.h"

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
  SETTING(memory_gib, 0)        /* of each device; 0: 4 where it is simulated, and all that a card has */             \
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
void nap(double seconds);
double now();  // CLOCK_MONOTONIC, which is time.monotonic()

// ---- errors.cc ----
// Raises an error in the Python code that asked for the operation. Not for the streams' threads: see fail().
[[noreturn]] void refuse(const std::string& why);
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
void fail(int device, const std::string& why);  // an error of asynchronous work: the next synchronisation raises it
bool failed(int device);
std::string failure(int device);
void check_device(int device);  // raises that error, if there is one
void watch_forks();
bool forked();         // in a child of fork: there nothing works, as with CUDA
void check_process();  // raises an error there

// ---- python.cc ----
void python_initialize();
const char* caller();  // the line of Python that called, outside Paddle and this package; "" unless tracing
bool python_interrupt(int (*callback)(void*));         // has it called in the main thread
int python_report(const char* otherwise);              // calls touches.report() and returns -1 with an exception set
void python_dump_threads(int descriptor);              // tracebacks of all threads; from a handler of signals

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
void count_fallback(const char* kernel);  // which ran on the host, on copies
void record_copy(Way way, int device, double begin, double end, size_t size, bool pinned);
void record_collective(const char* what, int device, double begin, double end, size_t bytes);

struct Origin {  // who asked for the operation that this thread is working on
  int stream = -1;  // -1: none, a synchronous operation
  const char* caller = "";
};
Origin& origin();
void record_span(const char* what, int device, double begin, double end, size_t bytes, bool pageable = false);

// The kernel that this thread works for; "" outside of kernels.
const char*& current_kernel();

// ---- ccl.cc ----
void fill_ccl(C_DeviceInterface* table);

}  // namespace rehearsal

#define REHEARSAL_EXPORT extern "C" __attribute__((visibility("default")))  // for ctypes
