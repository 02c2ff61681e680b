// The pretended device's answers to what the plugin asks of a runtime, but for those of memory.cc, pinned.cc, streams.cc
// and link.cc.
#include <cstdio>
#include <cstring>

#include "../native.h"
#include "simulated.h"

namespace rehearsal {

class Event {
 public:
  std::shared_ptr<Mark> last() {
    std::lock_guard<std::mutex> lock(mutex_);
    return mark_;
  }
  void record(Stream* stream) {
    auto mark = std::make_shared<Mark>();
    std::lock_guard<std::mutex> lock(mutex_);
    mark_ = mark;
    mark->stream = stream;
    mark->position = stream->push_order([mark] { mark->finish(); });
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Mark> mark_;
};

namespace runtime {
namespace {

// The stream that this thread has waited for last. Paddle waits for its current stream before each synchronous copy.
thread_local Stream* waited_for = nullptr;

struct Ends {  // of a copy: the plugin's own addresses
  char* to;
  const char* from;
  bool pinned;
};
Ends ends_of(Way way, void* to, const void* from, size_t size) {
  return {way == Way::H2D || way == Way::D2D ? shadow(to, size) : static_cast<char*>(to),
          way == Way::D2H || way == Way::D2D ? shadow(from, size) : static_cast<const char*>(from),
          way == Way::D2D || is_pinned(way == Way::H2D ? from : to)};
}

}  // namespace

void initialize() { memory_initialize(); }
const char* name() { return "simulated"; }
void use_device(int) {}

void set_bytes(int device, void* pointer, unsigned char value, size_t size) {
  char* at = shadow(pointer, size);
  synchronize_device(device);
  memset(at, value, size);
}

void copy(Way way, int device, void* to, const void* from, size_t size) {
  const Ends ends = ends_of(way, to, from, size);
  // Paddle's all_gather into a list splits its result with synchronous D2D copies, right after it has started the
  // collective on another stream: they have to wait for all streams, as those of CUDA's default stream do. Copies from
  // and to the host wait for nothing but what Paddle itself waits for, so that a forgotten wait shows.
  if (way == Way::D2D) synchronize_device(device);
  memory_adopt(waited_for ? waited_for : main_stream(device));
  origin() = {-1, caller()};
  transfer(way, device, ends.to, ends.from, size, ends.pinned);
}

void copy_async(Way way, Stream* stream, void* to, const void* from, size_t size) {
  const Ends ends = ends_of(way, to, from, size);
  const int device = stream->device();
  if (way == Way::H2D && !ends.pinned && !settings().eager_pageable && size <= 64 << 10) {
    // Small pageable sources are taken before the call returns.
    auto taken = std::make_shared<std::vector<char>>(ends.from, ends.from + size);
    stream->push([=] { transfer(way, device, ends.to, taken->data(), size, false); });
    return;
  }
  stream->push([=] { transfer(way, device, ends.to, ends.from, size, ends.pinned); });
  if (!ends.pinned && !settings().eager_pageable) stream->synchronize();  // as CUDA: pageable copies wait
}

void collect_times() {}

Stream* create_stream(int device) { return new Stream(device); }
void destroy_stream(Stream* stream) { delete stream; }
int device_of(const Stream* stream) { return stream->device(); }
bool is_idle(Stream* stream) { return stream->idle(); }

void synchronize_stream(Stream* stream) {
  waited_for = stream;
  stream->synchronize();
}

void call_back(Stream* stream, std::function<void()> work) {
  stream->demand(stream->push_order(std::move(work)));  // whoever waits for its effect does not ask the device
}

Event* create_event(int) { return new Event; }
void destroy_event(Event* event) { delete event; }
void record_event(Event* event, Stream* stream) { event->record(stream); }

bool is_done(Event* event) {
  auto mark = event->last();
  return !mark || mark->query();
}

void synchronize_event(Event* event) {
  if (auto mark = event->last()) mark->wait();
}

void wait_for_event(Stream* stream, Event* event) {
  auto mark = event->last();
  if (!mark) return;
  const int device = stream->device();
  stream->push_order([mark, device] {
    const double begin = now();
    mark->wait();
    if (settings().trace) record_span("stream_wait", device, begin, now(), 0);
  });
}

char* seen_by_work(const void* pointer, size_t size) { return shadow(pointer, size); }
void end_work() {}
void launch(Stream* stream, std::function<void()> work) { stream->push(std::move(work)); }

void launch_collective(Stream* stream, std::function<std::string()> work) {
  const int device = stream->device();
  memory_adopt(nullptr);  // collectives have streams of their own, but their tensors come from the framework's
  const uint64_t position = stream->push([=] {
    if (failed(device)) return;
    const std::string wrong = work();
    if (!wrong.empty()) fail(device, wrong);
  });
  stream->demand(position);  // the other ranks wait for it
}

void prepare_group(Comm*) {}
bool exchange_on_device(const char*, Comm*, Stream*, const std::vector<Part>&) { return false; }

}  // namespace runtime

namespace native {

bool move(Stream*, size_t, void*, const Extents&, const Extents&, const void*, const Extents&, const Extents&) {
  return false;
}
bool fill(Stream*, size_t, void*, size_t, const void*) { return false; }
bool copy_rows(Stream*, size_t, const std::vector<Rows>&) { return false; }
bool cast(Stream*, Type, void*, Type, const void*, size_t) { return false; }
bool combine(Stream*, Combination, Type, void*, const Extents&, const void*, const Extents&, const void*,
             const Extents&) {
  return false;
}
bool sum(Stream*, Type, const void*, const Extents&, void*, size_t, const Extents&) { return false; }

}  // namespace native
}  // namespace rehearsal
