// What the plugin asks of a device's runtime: functions of the shape that CUDA's runtime has. There are two: simulated/,
// which pretends a device in this process, and cuda/, over the real one. All else in this folder is the same over both.
//
// Errors are raised in the Python code that asked (see refuse()). Those of asynchronous work go to fail().
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "paddle/phi/backends/device_ext.h"

namespace rehearsal {

enum class Way { H2D, D2H, D2D, CCL };  // of bytes: between host and device, within a device, between ranks
class Stream;
class Event;
struct Comm;
struct Part;

namespace runtime {

// -- devices; several numbers may be the same device --
void initialize();
const char* name();
void use_device(int device);  // of this thread
void synchronize_device(int device);
void settings_changed();

// -- memory --
bool allocate(int device, void** out, size_t size);  // false: out of memory
bool release(int device, void* pointer);             // false: not the begin of a live allocation
void memory_info(int device, size_t* total, size_t* free);
void set_bytes(int device, void* pointer, unsigned char value, size_t size);

// -- page-locked host memory; false: the runtime refuses --
bool allocate_host(void** out, size_t size);
bool release_host(void* pointer);
bool register_host(void* pointer, size_t size);
bool unregister_host(void* pointer);
bool is_pinned(const void* pointer);

// -- copies. Each has its numbers counted and its time recorded (counters.cc) when it is done --
void copy(Way way, int device, void* to, const void* from, size_t size);
void copy_async(Way way, Stream* stream, void* to, const void* from, size_t size);
void collect_times();  // of the copies that are done

// -- streams and events --
Stream* create_stream(int device);
void destroy_stream(Stream* stream);
Stream* stream_of(C_Stream handle, int device);  // nullptr: the device's default stream
int device_of(const Stream* stream);
bool is_idle(Stream* stream);
void synchronize_stream(Stream* stream);
void call_back(Stream* stream, std::function<void()> work);  // after what is in the stream
Event* create_event(int device);
void destroy_event(Event* event);
void record_event(Event* event, Stream* stream);
bool is_done(Event* event);
void synchronize_event(Event* event);
void wait_for_event(Stream* stream, Event* event);

// -- work --
// Where the work of the next launch() or launch_collective() of this thread finds the bytes of a device: its own address
// of them. Raises an error where the range is not within one live allocation.
char* seen_by_work(const void* pointer, size_t size);
void end_work();  // those addresses are not used again
void launch(Stream* stream, std::function<void()> work);
// The same for work that other ranks wait for; what it returns, unless that is empty, is an error of the device.
void launch_collective(Stream* stream, std::function<std::string()> work);
// Makes what a new group of ranks needs for the function below; all ranks of the group call it.
void prepare_group(Comm* comm);
// Messages between ranks straight from device to device. False: this runtime, or this group, cannot.
bool exchange_on_device(const char* what, Comm* comm, Stream* stream, const std::vector<Part>& parts);
void occupy_link(Way way, int device, size_t size, double since);  // waits until the link would have moved so much

}  // namespace runtime

struct Work {  // from the first seen_by_work() to the last launch()
  Work() = default;
  Work(const Work&) = delete;
  ~Work() { runtime::end_work(); }
};

}  // namespace rehearsal
