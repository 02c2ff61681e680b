// Errors with a text, raised through Paddle; those of asynchronous work; and forks.
#include <pthread.h>

#include <cstdarg>
#include <cstdio>

#include "paddle/common/enforce.h"
#include "rehearsal.h"

namespace rehearsal {
namespace {

std::mutex failures_mutex;
std::string failures[kMaxDevices];
std::atomic<bool> device_failed[kMaxDevices];
std::atomic<bool> is_child{false};

}  // namespace

std::string text(const char* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return line;
}

void refuse(const std::string& why) { PADDLE_THROW(common::errors::PermissionDenied("rehearsal device: %s", why)); }

void fail(int device, const std::string& why) {
  fprintf(stderr, "rehearsal: device %d: %s\n", device, why.c_str());
  std::lock_guard<std::mutex> lock(failures_mutex);
  if (!device_failed[device]) failures[device] = why;  // the first one: the others follow from it
  device_failed[device] = true;
}

bool failed(int device) { return device_failed[device]; }

std::string failure(int device) {
  std::lock_guard<std::mutex> lock(failures_mutex);
  return failures[device];
}

// It stays: such a device is lost to the process.
void check_device(int device) {
  if (failed(device)) refuse(text("device %d: ", device) + failure(device));
}

void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { is_child = true; });
}

bool forked() { return is_child; }

void check_process() {
  if (forked()) refuse("a forked child has no device: start the process anew");
}

}  // namespace rehearsal
