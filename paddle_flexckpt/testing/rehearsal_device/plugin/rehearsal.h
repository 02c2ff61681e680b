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

// ---- settings: from the environment (REHEARSAL_<NAME>), and changeable while running by rehearsal_set ----
struct Settings {
  std::atomic<double> h2d_gibs{0};           // bandwidth of pinned copies, GiB/s; 0: as fast as memcpy
  std::atomic<double> d2h_gibs{0};
  std::atomic<double> d2d_gibs{0};           // within one device
  std::atomic<double> ccl_gibs{0};           // between devices
  std::atomic<double> latency_us{0};         // of every copy
  std::atomic<double> pageable_factor{0.5};  // bandwidth of copies from and to pageable host memory, relative
  std::atomic<double> eager_pageable{0};     // 1: asynchronous copies of pageable memory do not wait either (harsher
                                             // than CUDA, which makes a D2H copy wait)
  std::atomic<double> log{0};
};
Settings& settings();
std::atomic<double>* setting(const std::string& name);
int device_count();
size_t device_capacity();

// ---- memory ----
// What a tensor's data_ptr() is lies in a range without access rights; the bytes are in a second mapping that only the
// plugin knows, so that host code which follows a device pointer dies at once, at an address that starts with 0xfa.
void memory_initialize();
bool memory_allocate(int device, void** out, size_t size);
bool memory_release(int device, void* pointer);
void memory_statistics(int device, size_t* total, size_t* free);
// The plugin's own address of a range of a device, or nullptr where the range is not within one live allocation.
char* shadow(const void* pointer, size_t size);
bool pinned_allocate(void** out, size_t size);
bool pinned_release(void* pointer);
bool is_pinned(const void* pointer);

// ---- streams: one worker thread each, in order ----
struct Mark {  // one recording of an event
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  void finish();
  void wait();
  bool query();
};

class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  int device() const { return device_; }
  void push(std::function<void()> work);
  void synchronize();
  bool idle();

 private:
  void run();
  int device_;
  std::mutex mutex_;
  std::condition_variable arrived_, drained_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false, stop_ = false;
  std::thread worker_;
};

Stream* stream_of(C_Stream handle, int device);  // nullptr: the device's default stream
void synchronize_device(int device);
void fail(int device, const std::string& why);  // an error of asynchronous work: the next synchronisation reports it
bool failed(int device);
bool forked();  // a child of fork has no worker threads: like CUDA, nothing works there

// ---- the link between host and device ----
enum class Way { H2D, D2H, D2D, CCL };
// Moves bytes in pieces and takes as long as the link would.
void transfer(Way way, int device, char* to, const char* from, size_t size, bool pinned);
void occupy(Way way, int device, size_t size, double since);  // waits until the link would have moved so much
double now();

// ---- what is counted ----
struct Counter {
  std::atomic<uint64_t> calls{0}, bytes{0}, pageable_bytes{0}, nanoseconds{0}, largest{0};
};
Counter& counter(Way way);
struct Tally {
  std::atomic<uint64_t> asynchronous{0}, synchronous{0}, stream_syncs{0}, device_syncs{0}, event_syncs{0}, allocations{0},
      device_bytes{0}, device_peak{0}, pinned_bytes{0}, pinned_peak{0}, kernels{0};
};
Tally& tally();
void record_span(const char* what, int device, double begin, double end, size_t bytes);

void fill_ccl(C_DeviceInterface* table);

}  // namespace rehearsal
