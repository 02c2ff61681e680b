// A pretended device: what its parts know of each other.
#pragma once
#include "../rehearsal.h"

namespace rehearsal {

// ---- memory.cc ----
// What a tensor's data_ptr() is lies in a range without access rights; the bytes are in a second mapping that only the
// plugin knows, so that host code which follows a device pointer is noticed, at an address that starts with 0xfa.
void memory_initialize();
// The plugin's own address of a range of a device. Raises an error where the range is not within one live allocation.
char* shadow(const void* pointer, size_t size);

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

// ---- touch.cc: accesses of the host to device memory ----
void touch_watch();  // makes the handler of faults the first one, if it is not

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

Stream* main_stream(int device);  // the one that the framework computes in: the first
void defer_if_alive(Stream* stream, int device, std::function<void()> work);  // otherwise, the main stream gets it

// ---- link.cc: between host and device ----
// Moves bytes in pieces and takes as long as the link would.
void transfer(Way way, int device, char* to, const char* from, size_t size, bool pinned);

}  // namespace rehearsal
