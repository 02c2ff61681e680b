// What is counted, and the trace.
#include <cstdio>
#include <cstring>
#include <map>

#include "rehearsal.h"

namespace rehearsal {
namespace {

constexpr const char* kWays[] = {"h2d", "d2h", "d2d", "ccl"};
constexpr size_t kMostSpans = 1000000;

struct Span {
  const char* what;
  int device, stream;
  double begin, end;
  size_t bytes;
  bool pageable;
  const char* caller;
};
std::mutex spans_mutex;
std::vector<Span> spans;

// Collectives, and kernels that ran on the host, by name.
std::mutex names_mutex;
std::map<std::string, uint64_t> collectives, fallbacks;

// Of what the counters were before they were set to zero.
std::atomic<uint64_t> guarded_before{0};

// Every call that got the address of a device and had it checked.
uint64_t guarded() {
  const Tally& t = tally();
  return t.asynchronous + t.synchronous + t.kernels + t.memory_sets + t.collective_calls;
}

void append(std::string& out, const char* name, uint64_t value) { out += text("\"%s\": %lu, ", name, value); }

std::string listed(const std::map<std::string, uint64_t>& counts) {
  std::string all = "{";
  for (const auto& one : counts) all += text("%s\"%s\": %lu", all.size() > 1 ? ", " : "", one.first.c_str(), one.second);
  return all + "}";
}

}  // namespace

Counter& counter(Way way) {
  static Counter counters[4];
  return counters[static_cast<int>(way)];
}

Tally& tally() {
  static Tally t;
  return t;
}

void raise_peak(std::atomic<uint64_t>& peak, uint64_t value) {
  uint64_t seen = peak;
  while (seen < value && !peak.compare_exchange_weak(seen, value)) {
  }
}

void count_collective(const char* name) {
  ++tally().collective_calls;
  std::lock_guard<std::mutex> lock(names_mutex);
  ++collectives[name];
}

void count_fallback(const char* kernel) {
  std::lock_guard<std::mutex> lock(names_mutex);
  ++fallbacks[kernel];
}

const char*& current_kernel() {
  thread_local const char* mine = "";
  return mine;
}

Origin& origin() {
  thread_local Origin mine;
  return mine;
}

void record_span(const char* what, int device, double begin, double end, size_t bytes, bool pageable) {
  const Origin& who = origin();
  std::lock_guard<std::mutex> lock(spans_mutex);
  if (spans.size() < kMostSpans) spans.push_back({what, device, who.stream, begin, end, bytes, pageable, who.caller});
}

static void record_moved(Way way, const char* what, int device, double begin, double end, size_t size, bool pinned) {
  Counter& c = counter(way);
  ++c.calls;
  c.bytes += size;
  if (!pinned) c.pageable_bytes += size;
  c.nanoseconds += static_cast<uint64_t>((end - begin) * 1e9);
  raise_peak(c.largest, size);
  record_span(what, device, begin, end, size, !pinned);
}

void record_copy(Way way, int device, double begin, double end, size_t size, bool pinned) {
  record_moved(way, kWays[static_cast<int>(way)], device, begin, end, size, pinned);
}

void record_collective(const char* what, int device, double begin, double end, size_t bytes) {
  record_moved(Way::CCL, what, device, begin, end, bytes, true);
}

}  // namespace rehearsal

using namespace rehearsal;

// All counters as JSON.
REHEARSAL_EXPORT int rehearsal_stats(char* out, size_t size) {
  runtime::collect_times();
  std::string all = "{";
  for (int i = 0; i < 4; ++i) {
    const Counter& c = counter(static_cast<Way>(i));
    all += text("\"%s\": {\"calls\": %lu, \"bytes\": %lu, \"pageable_bytes\": %lu, \"seconds\": %.6f, \"largest\": %lu}, ",
                kWays[i], c.calls.load(), c.bytes.load(), c.pageable_bytes.load(), c.nanoseconds * 1e-9, c.largest.load());
  }
  const Tally& t = tally();
#define REHEARSAL_SHOW(name, resets) append(all, #name, t.name);
  REHEARSAL_TALLIES(REHEARSAL_SHOW)
#undef REHEARSAL_SHOW
  append(all, "guarded_calls", guarded());
  append(all, "guarded_calls_ever", guarded_before + guarded());
  append(all, "waits", t.stream_syncs + t.device_syncs + t.event_syncs);
  {
    std::lock_guard<std::mutex> lock(names_mutex);
    all += "\"fallbacks\": " + listed(fallbacks) + ", \"collectives\": " + listed(collectives) + "}";
  }
  if (all.size() + 1 > size) return -1;
  memcpy(out, all.c_str(), all.size() + 1);
  return 0;
}

REHEARSAL_EXPORT void rehearsal_reset() {
  runtime::collect_times();
  guarded_before += guarded();
  for (int i = 0; i < 4; ++i) {
    Counter& c = counter(static_cast<Way>(i));
    c.calls = c.bytes = c.pageable_bytes = c.nanoseconds = c.largest = 0;
  }
  Tally& t = tally();
#define REHEARSAL_ZERO(name, resets) \
  if (resets) t.name = 0;
  REHEARSAL_TALLIES(REHEARSAL_ZERO)
#undef REHEARSAL_ZERO
  t.device_peak = t.device_bytes.load();
  t.pinned_peak = t.pinned_bytes.load();
  {
    std::lock_guard<std::mutex> lock(names_mutex);
    collectives.clear();
    fallbacks.clear();
  }
  std::lock_guard<std::mutex> lock(spans_mutex);
  spans.clear();
}

// Every copy, collective and (while tracing) wait since the last reset, a line each, separated by tabs.
REHEARSAL_EXPORT int rehearsal_spans(const char* path) {
  runtime::collect_times();
  FILE* file = fopen(path, "w");
  if (!file) return -1;
  std::lock_guard<std::mutex> lock(spans_mutex);
  for (const auto& s : spans)
    fprintf(file, "%s\t%d\t%d\t%.9f\t%.9f\t%zu\t%d\t%s\n", s.what, s.device, s.stream, s.begin, s.end, s.bytes, s.pageable,
            s.caller);
  return fclose(file);
}
