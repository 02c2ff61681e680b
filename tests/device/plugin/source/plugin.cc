// The table of functions that Paddle asks for: InitPlugin and the runtime part of it.
#include <cstdio>
#include <cstring>

#include "rehearsal.h"

using namespace rehearsal;

namespace {

thread_local int current = 0;

Stream* of(C_Stream handle, const C_Device device) { return runtime::stream_of(handle, device->id); }
Event* of(C_Event handle) { return reinterpret_cast<Event*>(handle); }

// An error of asynchronous work is raised where the host waits next.
C_Status outcome(int device) {
  check_device(device);
  return C_SUCCESS;
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
  if (failed(device)) return outcome(device);  // what this would wait for may never come
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
  watch_forks();
  python_initialize();
  runtime::initialize();
  return C_SUCCESS;
}
C_Status finalize() { return C_SUCCESS; }
C_Status init_device(const C_Device) { return C_SUCCESS; }
C_Status deinit_device(const C_Device) { return C_SUCCESS; }
C_Status set_device(const C_Device device) {
  if (device->id < 0 || device->id >= device_count()) return C_ERROR;
  current = device->id;
  if (!forked()) runtime::use_device(current);
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
  *stream = reinterpret_cast<C_Stream>(runtime::create_stream(device->id));
  return C_SUCCESS;
}
C_Status destroy_stream(const C_Device device, C_Stream stream) {
  if (!forked() && stream) runtime::destroy_stream(of(stream, device));
  return C_SUCCESS;
}
C_Status query_stream(const C_Device device, C_Stream stream) {
  if (forked()) return C_SUCCESS;
  return runtime::is_idle(of(stream, device)) ? C_SUCCESS : C_FAILED;
}
C_Status stream_add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  const int id = device->id;
  runtime::call_back(of(stream, device), [=] {
    C_Device_st d{id};
    C_Status status = C_SUCCESS;
    callback(&d, stream, data, &status);
  });
  return C_SUCCESS;
}
C_Status create_event(const C_Device device, C_Event* event) {
  *event = reinterpret_cast<C_Event>(runtime::create_event(device->id));
  return C_SUCCESS;
}
C_Status destroy_event(const C_Device, C_Event event) {
  if (!forked()) runtime::destroy_event(of(event));
  return C_SUCCESS;
}
C_Status record_event(const C_Device device, C_Stream stream, C_Event event) {
  if (forked()) return C_SUCCESS;
  ++tally().events;
  if (!lose(settings().lose_event)) runtime::record_event(of(event), of(stream, device));
  return C_SUCCESS;
}
C_Status query_event(const C_Device, C_Event event) {
  return forked() || runtime::is_done(of(event)) ? C_SUCCESS : C_FAILED;
}
C_Status synchronize_event(const C_Device device, C_Event event) {
  return wait("wait_event", device->id, tally().event_syncs, [&] { runtime::synchronize_event(of(event)); });
}
C_Status stream_wait_event(const C_Device device, C_Stream stream, C_Event event) {
  if (forked()) return C_SUCCESS;
  ++tally().stream_waits;
  if (!lose(settings().lose_wait)) runtime::wait_for_event(of(stream, device), of(event));
  return C_SUCCESS;
}
C_Status synchronize_stream(const C_Device device, C_Stream stream) {
  return wait("wait_stream", device->id, tally().stream_syncs, [&] { runtime::synchronize_stream(of(stream, device)); });
}
C_Status synchronize_whole_device(const C_Device device) {
  return wait("wait_device", device->id, tally().device_syncs, [&] { runtime::synchronize_device(device->id); });
}

// -- memory --
C_Status device_allocate(const C_Device device, void** out, size_t size) {
  check_process();
  // No address and no error: Paddle then frees what it has cached, tries again, and says that the memory is used up.
  if (!runtime::allocate(device->id, out, size)) *out = nullptr;
  return C_SUCCESS;
}
C_Status device_release(const C_Device device, void* pointer, size_t) {
  if (forked()) return C_SUCCESS;
  return runtime::release(device->id, pointer) ? C_SUCCESS : C_ERROR;
}
C_Status host_allocate(const C_Device, void** out, size_t size) {
  return runtime::allocate_host(out, size) ? C_SUCCESS : C_FAILED;
}
C_Status host_release(const C_Device, void* pointer, size_t) {
  if (forked()) return C_SUCCESS;
  return runtime::release_host(pointer) ? C_SUCCESS : C_ERROR;
}
C_Status device_set(const C_Device device, void* pointer, unsigned char value, size_t size) {
  check_process();
  ++tally().memory_sets;
  runtime::set_bytes(device->id, pointer, value, size);
  return C_SUCCESS;
}
C_Status statistics(const C_Device device, size_t* total, size_t* free) {
  runtime::memory_info(device->id, total, free);
  return C_SUCCESS;
}
C_Status min_chunk(const C_Device, size_t* size) {
  *size = 256;
  return C_SUCCESS;
}

// -- copies --
C_Status copy(Way way, const C_Device device, void* to, const void* from, size_t size) {
  check_process();
  if (!size) return C_SUCCESS;
  ++tally().synchronous;
  if (settings().log) fprintf(stderr, "rehearsal: copy way %d device %d sync %zu bytes\n", int(way), device->id, size);
  runtime::copy(way, device->id, to, from, size);
  return outcome(device->id);
}
C_Status copy_async(Way way, const C_Device device, C_Stream stream, void* to, const void* from, size_t size) {
  check_process();
  if (!size) return C_SUCCESS;
  ++tally().asynchronous;
  if (settings().log) fprintf(stderr, "rehearsal: copy way %d device %d async %zu bytes\n", int(way), device->id, size);
  runtime::copy_async(way, of(stream, device), to, from, size);
  return C_SUCCESS;
}
C_Status copy_h2d(const C_Device d, void* dst, const void* src, size_t n) {
  return copy(Way::H2D, d, dst, src, n);
}
C_Status copy_d2h(const C_Device d, void* dst, const void* src, size_t n) {
  return copy(Way::D2H, d, dst, src, n);
}
C_Status copy_d2d(const C_Device d, void* dst, const void* src, size_t n) {
  return copy(Way::D2D, d, dst, src, n);
}
C_Status copy_p2p(const C_Device to, const C_Device from, void* dst, const void* src, size_t n) {
  runtime::synchronize_device(to->id);
  return copy(Way::D2D, from, dst, src, n);
}
C_Status async_h2d(const C_Device d, C_Stream s, void* dst, const void* src, size_t n) {
  return copy_async(Way::H2D, d, s, dst, src, n);
}
C_Status async_d2h(const C_Device d, C_Stream s, void* dst, const void* src, size_t n) {
  return copy_async(Way::D2H, d, s, dst, src, n);
}
C_Status async_d2d(const C_Device d, C_Stream s, void* dst, const void* src, size_t n) {
  return copy_async(Way::D2D, d, s, dst, src, n);
}
C_Status async_p2p(const C_Device d, const C_Device, C_Stream s, void* dst, const void* src, size_t n) {
  return copy_async(Way::D2D, d, s, dst, src, n);
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
  const Work scope;
  current_kernel() = "blas_axpby";
  auto* a = reinterpret_cast<float*>(runtime::seen_by_work(x, count * 4));
  auto* b = reinterpret_cast<float*>(runtime::seen_by_work(y, count * 4));
  runtime::launch(of(stream, device), [=] {
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

// Both return 0 unless the runtime refuses.
REHEARSAL_EXPORT int rehearsal_register_host(void* pointer, size_t size) {
  return runtime::register_host(pointer, size) ? 0 : 1;
}
REHEARSAL_EXPORT int rehearsal_unregister_host(void* pointer) { return runtime::unregister_host(pointer) ? 0 : 1; }
REHEARSAL_EXPORT const char* rehearsal_runtime() { return runtime::name(); }
