// Settings, from the environment and while running, and the clock.
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "rehearsal.h"

namespace rehearsal {
namespace {

double from_environment(const std::string& name, double otherwise) {
  std::string variable = "REHEARSAL_" + name;
  for (char& c : variable) c = toupper(c);
  const char* value = getenv(variable.c_str());
  return value && *value ? atof(value) : otherwise;
}

}  // namespace

Settings& settings() {
  static Settings* const all = [] {
    auto* fresh = new Settings;
#define REHEARSAL_READ(name, otherwise) fresh->name = from_environment(#name, otherwise);
    REHEARSAL_SETTINGS(REHEARSAL_READ)
#undef REHEARSAL_READ
    return fresh;
  }();
  return *all;
}

std::atomic<double>* setting(const std::string& name) {
#define REHEARSAL_FIND(known, otherwise) \
  if (name == #known) return &settings().known;
  REHEARSAL_SETTINGS(REHEARSAL_FIND)
#undef REHEARSAL_FIND
  return nullptr;
}

int device_count() {
  static const int count = std::min(kMaxDevices, static_cast<int>(from_environment("devices", 2)));
  return count;
}

void nap(double seconds) {
  if (seconds <= 0) return;
  timespec time{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
  nanosleep(&time, nullptr);
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

}  // namespace rehearsal

REHEARSAL_EXPORT int rehearsal_set(const char* name, double value) {
  auto* at = rehearsal::setting(name);
  if (!at) return -1;
  *at = value;
  rehearsal::runtime::settings_changed();
  return 0;
}
