// The table of functions that Paddle asks for: InitPlugin and the runtime part of it.
#include <cstdio>
#include <cstring>

#include "rehearsal.h"

using namespace rehearsal;

namespace {

thread_local int current = 0;
// The stream that this thread has waited for last. Paddle waits for its current stream before each synchronous copy.
thread_local Stream* waited_for = nullptr;

struct Event {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;
  std::shared_ptr<Mark> last() {
    std::lock_guard<std::mutex> lock(mutex);
    return mark;
  }
};

// The error of asynchronous work, if there was one. It stays: such a device is lost to the process.
C_Status outcome(int device) {
  if (failed(device)) refuse(text("device %d: ", device) + failure(device));
  return C_SUCCESS;
}

void check_process() {
  if (forked()) refuse("a forked child has no device: start the process anew");
}

// Takes one from a setting that counts down. True: this is the one that is to be lost.
bool lose(std::atomic<double>& countdown) {
  double left = countdown;
  while (left > 0 && !countdown.compare_exchange_weak(left, left - 1)) {
  }
  const bool lost = left < 0 || left == 1;
  if (lost) ++tally().lost;
  return lost;
}

// A wait of the host, counted, traced, and lost if that is asked for.
template <typename Wait>
C_Status wait(const char* what, int device, std::atomic<uint64_t>& count, Wait&& until) {
  check_process();
  ++count;
  if (lose(settings().lose_wait)) return outcome(device);
  const double begin = now();
  until();
  if (settings().trace) {
    origin() = {-1, caller()};
    record_span(what, device, begin, now(), 0);
  }
  return outcome(device);
}

// -- device --
C_Status initialize() {
  streams_initialize();
  python_initialize();
  memory_initialize();
  return C_SUCCESS;
}
C_Status finalize() { return C_SUCCESS; }
C_Status init_device(const C_Device) { return C_SUCCESS; }
C_Status deinit_device(const C_Device) { return C_SUCCESS; }
C_Status set_device(const C_Device device) {
  if (device->id < 0 || device->id >= device_count()) return C_ERROR;
  current = device->id;
  return C_SUCCESS;
}
C_Status get_device(const C_Device device) {
  device->id = current;
  return C_SUCCESS;
}
C_Status get_device_count(size_t* count) {
  *count = device_count();
  return C_SUCCESS;
}
C_Status get_device_list(size_t* devices) {
  for (int d = 0; d < device_count(); ++d) devices[d] = d;
  return C_SUCCESS;
}

// -- streams and events --
C_Status create_stream(const C_Device device, C_Stream* stream) {
  *stream = reinterpret_cast<C_Stream>(new Stream(device->id));
  return C_SUCCESS;
}
C_Status destroy_stream(const C_Device, C_Stream stream) {
  if (forked()) return C_SUCCESS;
  delete reinterpret_cast<Stream*>(stream);
  return C_SUCCESS;
}
C_Status query_stream(const C_Device device, C_Stream stream) {
  return stream_of(stream, device->id)->idle() ? C_SUCCESS : C_FAILED;
}
C_Status stream_add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  const int id = device->id;
  Stream* where = stream_of(stream, id);
  where->demand(where->push([=] {  // whoever waits for its effect does not ask the device
    C_Device_st d{id};
    C_Status status = C_SUCCESS;
    callback(&d, stream, data, &status);
  }));
  return C_SUCCESS;
}
C_Status create_event(const C_Device, C_Event* event) {
  *event = reinterpret_cast<C_Event>(new Event);
  return C_SUCCESS;
}
C_Status destroy_event(const C_Device, C_Event event) {
  delete reinterpret_cast<Event*>(event);
  return C_SUCCESS;
}
C_Status record_event(const C_Device device, C_Stream stream, C_Event handle) {
  ++tally().events;
  if (lose(settings().lose_event)) return C_SUCCESS;
  auto* event = reinterpret_cast<Event*>(handle);
  auto mark = std::make_shared<Mark>();
  std::lock_guard<std::mutex> lock(event->mutex);
  event->mark = mark;
  mark->stream = stream_of(stream, device->id);
  mark->position = mark->stream->push([mark] { mark->finish(); });
  return C_SUCCESS;
}
C_Status query_event(const C_Device, C_Event event) {
  auto mark = reinterpret_cast<Event*>(event)->last();
  return !mark || mark->query() ? C_SUCCESS : C_FAILED;
}
C_Status synchronize_event(const C_Device device, C_Event event) {
  return wait("wait_event", device->id, tally().event_syncs, [&] {
    if (auto mark = reinterpret_cast<Event*>(event)->last()) mark->wait();
  });
}
C_Status stream_wait_event(const C_Device device, C_Stream stream, C_Event event) {
  ++tally().stream_waits;
  auto mark = reinterpret_cast<Event*>(event)->last();
  if (!mark || lose(settings().lose_wait)) return C_SUCCESS;
  const int id = device->id;
  stream_of(stream, id)->push([mark, id] {
    const double begin = now();
    mark->wait();
    if (settings().trace) record_span("stream_wait", id, begin, now(), 0);
  });
  return C_SUCCESS;
}
C_Status synchronize_stream(const C_Device device, C_Stream stream) {
  waited_for = stream_of(stream, device->id);
  return wait("wait_stream", device->id, tally().stream_syncs, [] { waited_for->synchronize(); });
}
C_Status synchronize_whole_device(const C_Device device) {
  return wait("wait_device", device->id, tally().device_syncs, [&] { synchronize_device(device->id); });
}

// -- memory --
C_Status device_allocate(const C_Device device, void** out, size_t size) {
  check_process();
  // No address and no error: Paddle then frees what it has cached, tries again, and says that the memory is used up.
  if (!memory_allocate(device->id, out, size)) *out = nullptr;
  return C_SUCCESS;
}
C_Status device_release(const C_Device device, void* pointer, size_t) {
  if (forked()) return C_SUCCESS;
  return memory_release(device->id, pointer) ? C_SUCCESS : C_ERROR;
}
C_Status host_allocate(const C_Device, void** out, size_t size) {
  return pinned_allocate(out, size) ? C_SUCCESS : C_FAILED;
}
C_Status host_release(const C_Device, void* pointer, size_t) { return pinned_release(pointer) ? C_SUCCESS : C_ERROR; }
C_Status device_set(const C_Device device, void* pointer, unsigned char value, size_t size) {
  check_process();
  ++tally().memory_sets;
  char* at = shadow(pointer, size);
  synchronize_device(device->id);
  memset(at, value, size);
  return C_SUCCESS;
}
C_Status statistics(const C_Device device, size_t* total, size_t* free) {
  memory_statistics(device->id, total, free);
  return C_SUCCESS;
}
C_Status min_chunk(const C_Device, size_t* size) {
  *size = 256;
  return C_SUCCESS;
}

// -- copies --
C_Status copy(Way way, int device, C_Stream stream, bool async, void* dst, const void* src, size_t size) {
  check_process();
  if (!size) return C_SUCCESS;
  ++(async ? tally().asynchronous : tally().synchronous);
  char* to = way == Way::H2D || way == Way::D2D ? shadow(dst, size) : static_cast<char*>(dst);
  const char* from = way == Way::D2H || way == Way::D2D ? shadow(src, size) : static_cast<const char*>(src);
  const bool pinned = way == Way::D2D || is_pinned(way == Way::H2D ? src : dst);
  if (settings().log)
    fprintf(stderr, "rehearsal: copy way %d device %d %s %zu bytes\n", int(way), device, async ? "async" : "sync", size);
  if (!async) {
    // Paddle's all_gather into a list splits its result with synchronous D2D copies, right after it has started the
    // collective on another stream: they have to wait for all streams, as those of CUDA's default stream do. Copies from
    // and to the host wait for nothing but what Paddle itself waits for, so that a forgotten wait shows.
    if (way == Way::D2D) synchronize_device(device);
    memory_adopt(waited_for ? waited_for : main_stream(device));
    origin() = {-1, caller()};
    transfer(way, device, to, from, size, pinned);
    return outcome(device);
  }
  Stream* where = stream_of(stream, device);
  if (way == Way::H2D && !pinned && !settings().eager_pageable && size <= 64 << 10) {
    // Small pageable sources are taken before the call returns.
    auto taken = std::make_shared<std::vector<char>>(from, from + size);
    where->push([=] { transfer(way, device, to, taken->data(), size, false); });
    return C_SUCCESS;
  }
  where->push([=] { transfer(way, device, to, from, size, pinned); });
  if (!pinned && !settings().eager_pageable) where->synchronize();  // as CUDA: pageable copies wait
  return C_SUCCESS;
}
C_Status copy_h2d(const C_Device d, void* dst, const void* src, size_t n) {
  return copy(Way::H2D, d->id, nullptr, false, dst, src, n);
}
C_Status copy_d2h(const C_Device d, void* dst, const void* src, size_t n) {
  return copy(Way::D2H, d->id, nullptr, false, dst, src, n);
}
C_Status copy_d2d(const C_Device d, void* dst, const void* src, size_t n) {
  return copy(Way::D2D, d->id, nullptr, false, dst, src, n);
}
C_Status copy_p2p(const C_Device to, const C_Device from, void* dst, const void* src, size_t n) {
  synchronize_device(to->id);
  return copy(Way::D2D, from->id, nullptr, false, dst, src, n);
}
C_Status async_h2d(const C_Device d, C_Stream s, void* dst, const void* src, size_t n) {
  return copy(Way::H2D, d->id, s, true, dst, src, n);
}
C_Status async_d2h(const C_Device d, C_Stream s, void* dst, const void* src, size_t n) {
  return copy(Way::D2H, d->id, s, true, dst, src, n);
}
C_Status async_d2d(const C_Device d, C_Stream s, void* dst, const void* src, size_t n) {
  return copy(Way::D2D, d->id, s, true, dst, src, n);
}
C_Status async_p2p(const C_Device d, const C_Device, C_Stream s, void* dst, const void* src, size_t n) {
  return copy(Way::D2D, d->id, s, true, dst, src, n);
}

C_Status yes(const C_Device, bool* supported) {
  *supported = true;
  return C_SUCCESS;
}

// y = alpha x + beta y, used to add gradients.
C_Status axpby(const C_Device device, C_Stream stream, C_DataType type, size_t count, float alpha, void* x, float beta, void* y) {
  check_process();
  if (type != FLOAT32) refuse(text("blas_axpby of data type %d", static_cast<int>(type)));
  ++tally().kernels;
  auto* a = reinterpret_cast<float*>(shadow(x, count * 4));
  auto* b = reinterpret_cast<float*>(shadow(y, count * 4));
  stream_of(stream, device->id)->push([=] {
    for (size_t i = 0; i < count; ++i) b[i] = alpha * a[i] + beta * b[i];
  });
  return C_SUCCESS;
}

}  // namespace

REHEARSAL_EXPORT void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>("rehearsal");
  params->sub_device_type = const_cast<char*>("v1");
  C_DeviceInterface* t = params->interface;
  memset(static_cast<void*>(t), 0, sizeof(C_DeviceInterface));
  t->size = sizeof(C_DeviceInterface);

  t->initialize = initialize;
  t->finalize = finalize;
  t->init_device = init_device;
  t->deinit_device = deinit_device;
  t->set_device = set_device;
  t->get_device = get_device;
  t->get_device_count = get_device_count;
  t->get_device_list = get_device_list;

  t->create_stream = create_stream;
  t->destroy_stream = destroy_stream;
  t->query_stream = query_stream;
  t->stream_add_callback = stream_add_callback;
  t->create_event = create_event;
  t->destroy_event = destroy_event;
  t->record_event = record_event;
  t->query_event = query_event;
  t->synchronize_event = synchronize_event;
  t->stream_wait_event = stream_wait_event;
  t->synchronize_stream = synchronize_stream;
  t->synchronize_device = synchronize_whole_device;

  t->device_memory_allocate = device_allocate;
  t->device_memory_deallocate = device_release;
  t->host_memory_allocate = host_allocate;
  t->host_memory_deallocate = host_release;
  t->device_memory_set = device_set;
  t->device_memory_stats = statistics;
  t->device_min_chunk_size = min_chunk;

  t->memory_copy_h2d = copy_h2d;
  t->memory_copy_d2h = copy_d2h;
  t->memory_copy_d2d = copy_d2d;
  t->memory_copy_p2p = copy_p2p;
  t->async_memory_copy_h2d = async_h2d;
  t->async_memory_copy_d2h = async_d2h;
  t->async_memory_copy_d2d = async_d2d;
  t->async_memory_copy_p2p = async_p2p;

  t->is_float16_supported = yes;
  t->is_bfloat16_supported = yes;
  t->blas_axpby = axpby;
  fill_ccl(t);
}

// A copy to host memory, as an extension would make it; returns when it is done, with the error's text if there is one.
REHEARSAL_EXPORT int rehearsal_read(int device, void* to, const void* from, size_t size, char* wrong, size_t room) {
  const C_Device_st where{device};
  try {
    return copy_d2h(const_cast<C_Device>(&where), to, from, size);
  } catch (const std::exception& error) {  // ctypes knows none
    snprintf(wrong, room, "%s", error.what());
    return C_ERROR;
  }
}
