// Streams as worker threads, events, seeded delays.
#include <algorithm>
#include <set>

#include "simulated.h"

namespace rehearsal {
namespace {

std::mutex streams_mutex;
std::set<Stream*> streams;
Stream* defaults[kMaxDevices];
std::atomic<Stream*> first[kMaxDevices];
int created[kMaxDevices];

// A number from 0 to 1 that depends on nothing else than its arguments (SplitMix64).
double scattered(uint64_t seed, uint64_t device, uint64_t stream, uint64_t operation) {
  uint64_t x = seed;
  for (uint64_t part : {device, stream, operation}) {
    x += part + 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) / (1ull << 53);
}

double delay(int device, int stream, uint64_t operation) {
  const double longest = settings().delay_us * 1e-6;
  return longest > 0 ? longest * scattered(static_cast<uint64_t>(settings().seed), device, stream, operation) : 0;
}

// Has the stream do its work up to there. A stream that is no more has done all of it.
void demand(Stream* stream, uint64_t position) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  if (streams.count(stream)) stream->demand(position);
}

}  // namespace

// ---- events ----

void Mark::finish() {
  std::lock_guard<std::mutex> lock(mutex);
  done = true;
  changed.notify_all();
}

void Mark::wait() {
  if (query()) return;
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [this] { return done; });
}

bool Mark::query() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (done) return true;  // its stream may be no more, and another one be where that was
  }
  demand(stream, position);  // it may be asked for again and again until it is done
  std::lock_guard<std::mutex> lock(mutex);
  return done;
}

// ---- streams ----

Stream::Stream(int device) : device_(device) {
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    number_ = created[device]++;
    streams.insert(this);
    Stream* none = nullptr;
    first[device].compare_exchange_strong(none, this);
  }
  worker_ = std::thread(&Stream::run, this);
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.erase(this);
    Stream* self = this;
    first[device_].compare_exchange_strong(self, nullptr);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    arrived_.notify_all();
  }
  worker_.join();
}

uint64_t Stream::push(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& before : deferred_) {
      queue_.push_back({std::move(before), ""});
      ++pushed_;
    }
    deferred_.clear();
  }
  memory_adopt(this);
  return push_order(std::move(work));
}

uint64_t Stream::push_order(std::function<void()> work) {
  const char* who = caller();
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back({std::move(work), who});
  arrived_.notify_one();
  return ++pushed_;
}

void Stream::defer(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  deferred_.push_back(std::move(work));
}

void Stream::demand(uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  demanded_ = std::max(demanded_, position);
  arrived_.notify_one();
}

void Stream::wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  arrived_.notify_one();
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [this] { return stop_ || (!queue_.empty() && (begun_ < demanded_ || settings().lazy == 0)); });
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    ++begun_;
    busy_ = true;
    lock.unlock();
    nap(delay(device_, number_, begun_));
    origin() = {number_, work.caller};
    work.run();
    work.run = nullptr;
    lock.lock();
    busy_ = false;
    drained_.notify_all();
  }
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  demanded_ = pushed_;
  arrived_.notify_one();
  const uint64_t all = pushed_;
  drained_.wait(lock, [this, all] { return begun_ > all || (begun_ == all && !busy_); });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  demanded_ = pushed_;
  arrived_.notify_one();
  return queue_.empty() && !busy_;
}

Stream* main_stream(int device) {
  Stream* stream = first[device];
  return stream ? stream : runtime::stream_of(nullptr, device);
}

void defer_if_alive(Stream* stream, int device, std::function<void()> work) {
  if (stream) {
    std::lock_guard<std::mutex> lock(streams_mutex);
    if (streams.count(stream)) {
      stream->defer(std::move(work));
      return;
    }
  }
  main_stream(device)->defer(std::move(work));
}

namespace runtime {

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

void settings_changed() {
  std::lock_guard<std::mutex> lock(streams_mutex);
  for (Stream* stream : streams) stream->wake();
}

}  // namespace runtime
}  // namespace rehearsal

// The delay before an operation of a stream (the first is number 1) in seconds, under the present settings.
REHEARSAL_EXPORT double rehearsal_delay(int device, int stream, uint64_t operation) {
  return rehearsal::delay(device, stream, operation);
}
