// Streams as worker threads, events, the link's speed, settings and counters.
#include <pthread.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "rehearsal.h"

namespace rehearsal {
namespace {

double from_environment(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text && *text ? atof(text) : otherwise;
}

std::mutex streams_mutex;
std::set<Stream*> streams;
Stream* defaults[kMaxDevices];
std::atomic<bool> device_failed[kMaxDevices];
std::atomic<bool> is_child{false};
std::mutex engines[4][kMaxDevices];  // one copy at a time in each direction

void nap(double seconds) {
  if (seconds <= 0) return;
  timespec time{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
  nanosleep(&time, nullptr);
}

double bandwidth(Way way, bool pinned) {
  Settings& s = settings();
  double gibs = way == Way::H2D ? s.h2d_gibs : way == Way::D2H ? s.d2h_gibs : way == Way::D2D ? s.d2d_gibs : s.ccl_gibs;
  if (!pinned) gibs *= s.pageable_factor;
  return gibs * (1ull << 30);
}

struct Span {
  const char* what;
  int device;
  double begin, end;
  size_t bytes;
};
std::mutex spans_mutex;
std::vector<Span> spans;

}  // namespace

Settings& settings() {
  static Settings* s = [] {
    auto* fresh = new Settings;
    for (const char* name : {"h2d_gibs", "d2h_gibs", "d2d_gibs", "ccl_gibs", "latency_us", "pageable_factor",
                             "eager_pageable", "log"}) {
      std::string variable = std::string("REHEARSAL_") + name;
      for (char& c : variable) c = toupper(c);
      std::atomic<double>* at =
          std::map<std::string, std::atomic<double>*>{{"h2d_gibs", &fresh->h2d_gibs},
                                                      {"d2h_gibs", &fresh->d2h_gibs},
                                                      {"d2d_gibs", &fresh->d2d_gibs},
                                                      {"ccl_gibs", &fresh->ccl_gibs},
                                                      {"latency_us", &fresh->latency_us},
                                                      {"pageable_factor", &fresh->pageable_factor},
                                                      {"eager_pageable", &fresh->eager_pageable},
                                                      {"log", &fresh->log}}[name];
      *at = from_environment(variable.c_str(), *at);
    }
    return fresh;
  }();
  return *s;
}

std::atomic<double>* setting(const std::string& name) {
  Settings& s = settings();
  if (name == "h2d_gibs") return &s.h2d_gibs;
  if (name == "d2h_gibs") return &s.d2h_gibs;
  if (name == "d2d_gibs") return &s.d2d_gibs;
  if (name == "ccl_gibs") return &s.ccl_gibs;
  if (name == "latency_us") return &s.latency_us;
  if (name == "pageable_factor") return &s.pageable_factor;
  if (name == "eager_pageable") return &s.eager_pageable;
  if (name == "log") return &s.log;
  return nullptr;
}

int device_count() {
  static const int count = std::min(kMaxDevices, static_cast<int>(from_environment("REHEARSAL_DEVICES", 2)));
  return count;
}

size_t device_capacity() {
  static const size_t bytes = from_environment("REHEARSAL_MEMORY_GIB", 4) * (1ull << 30);
  return bytes;
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

Counter& counter(Way way) {
  static Counter counters[4];
  return counters[static_cast<int>(way)];
}

Tally& tally() {
  static Tally t;
  return t;
}

void record_span(const char* what, int device, double begin, double end, size_t bytes) {
  std::lock_guard<std::mutex> lock(spans_mutex);
  if (spans.size() < 1000000) spans.push_back({what, device, begin, end, bytes});
}

// ---- events ----

void Mark::finish() {
  std::lock_guard<std::mutex> lock(mutex);
  done = true;
  changed.notify_all();
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [this] { return done; });
}

bool Mark::query() {
  std::lock_guard<std::mutex> lock(mutex);
  return done;
}

// ---- streams ----

Stream::Stream(int device) : device_(device) {
  static const int watch = pthread_atfork(nullptr, nullptr, [] { is_child = true; });
  (void)watch;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.insert(this);
  }
  worker_ = std::thread(&Stream::run, this);
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.erase(this);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    arrived_.notify_all();
  }
  worker_.join();
}

void Stream::push(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  arrived_.notify_one();
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    busy_ = false;
    if (queue_.empty()) drained_.notify_all();
  }
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  drained_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

Stream* stream_of(C_Stream handle, int device) {
  if (handle) return reinterpret_cast<Stream*>(handle);
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!defaults[device]) defaults[device] = new Stream(device);
  return defaults[device];
}

void synchronize_device(int device) {
  std::vector<Stream*> mine;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    for (Stream* stream : streams)
      if (stream->device() == device) mine.push_back(stream);
  }
  for (Stream* stream : mine) stream->synchronize();
}

void fail(int device, const std::string& why) {
  fprintf(stderr, "rehearsal: device %d: %s\n", device, why.c_str());
  device_failed[device] = true;
}

bool failed(int device) { return device_failed[device]; }

bool forked() {
  if (is_child) fprintf(stderr, "rehearsal: used in a forked child, which has no device\n");
  return is_child;
}

// ---- the link ----

void occupy(Way way, int device, size_t size, double since) {
  const double rate = bandwidth(way, true);
  const double due = since + settings().latency_us * 1e-6 + (rate > 0 ? size / rate : 0);
  nap(due - now());
}

void transfer(Way way, int device, char* to, const char* from, size_t size, bool pinned) {
  static const char* names[] = {"h2d", "d2h", "d2d", "ccl"};
  std::lock_guard<std::mutex> engine(engines[static_cast<int>(way)][device]);
  const double begin = now(), rate = bandwidth(way, pinned);
  nap(settings().latency_us * 1e-6);
  const double started = now();
  // In pieces: who looks too early sees a part of it.
  constexpr size_t kPiece = 1 << 20;
  for (size_t done = 0; done < size;) {
    const size_t piece = std::min(kPiece, size - done);
    memcpy(to + done, from + done, piece);
    done += piece;
    if (rate > 0) nap(started + done / rate - now());
  }
  const double end = now();
  Counter& c = counter(way);
  ++c.calls;
  c.bytes += size;
  if (!pinned) c.pageable_bytes += size;
  c.nanoseconds += static_cast<uint64_t>((end - begin) * 1e9);
  uint64_t largest = c.largest;
  while (largest < size && !c.largest.compare_exchange_weak(largest, size)) {
  }
  record_span(names[static_cast<int>(way)], device, begin, end, size);
}

}  // namespace rehearsal

// ---- for ctypes ----

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace rehearsal;

EXPORT int rehearsal_set(const char* name, double value) {
  auto* at = setting(name);
  if (!at) return -1;
  *at = value;
  return 0;
}

EXPORT int rehearsal_stats(char* out, size_t size) {
  std::string text = "{";
  const char* names[] = {"h2d", "d2h", "d2d", "ccl"};
  char line[512];
  for (int i = 0; i < 4; ++i) {
    Counter& c = counter(static_cast<Way>(i));
    snprintf(line, sizeof line,
             "\"%s\": {\"calls\": %lu, \"bytes\": %lu, \"pageable_bytes\": %lu, \"seconds\": %.6f, \"largest\": %lu}, ",
             names[i], c.calls.load(), c.bytes.load(), c.pageable_bytes.load(), c.nanoseconds * 1e-9, c.largest.load());
    text += line;
  }
  Tally& t = tally();
  snprintf(line, sizeof line,
           "\"asynchronous\": %lu, \"synchronous\": %lu, \"stream_syncs\": %lu, \"device_syncs\": %lu, \"event_syncs\": %lu, "
           "\"allocations\": %lu, \"device_bytes\": %lu, \"device_peak\": %lu, \"pinned_bytes\": %lu, \"pinned_peak\": %lu, "
           "\"kernels\": %lu}",
           t.asynchronous.load(), t.synchronous.load(), t.stream_syncs.load(), t.device_syncs.load(), t.event_syncs.load(),
           t.allocations.load(), t.device_bytes.load(), t.device_peak.load(), t.pinned_bytes.load(), t.pinned_peak.load(),
           t.kernels.load());
  text += line;
  if (text.size() + 1 > size) return -1;
  memcpy(out, text.c_str(), text.size() + 1);
  return 0;
}

EXPORT void rehearsal_reset() {
  for (int i = 0; i < 4; ++i) {
    Counter& c = counter(static_cast<Way>(i));
    c.calls = c.bytes = c.pageable_bytes = c.nanoseconds = c.largest = 0;
  }
  Tally& t = tally();
  t.asynchronous = t.synchronous = t.stream_syncs = t.device_syncs = t.event_syncs = t.allocations = t.kernels = 0;
  t.device_peak = t.device_bytes.load();
  t.pinned_peak = t.pinned_bytes.load();
  std::lock_guard<std::mutex> lock(spans_mutex);
  spans.clear();
}

// Every copy since the last reset: what, device, begin, end (CLOCK_MONOTONIC, which is time.monotonic()), bytes.
EXPORT int rehearsal_spans(const char* path) {
  FILE* file = fopen(path, "w");
  if (!file) return -1;
  std::lock_guard<std::mutex> lock(spans_mutex);
  for (const auto& s : spans) fprintf(file, "%s %d %.9f %.9f %zu\n", s.what, s.device, s.begin, s.end, s.bytes);
  fclose(file);
  return 0;
}
