// The link between host and device, and between devices: it moves bytes, and takes its time.
#include <algorithm>
#include <cstring>

#include "simulated.h"

namespace rehearsal {
namespace {

std::mutex engines[4][kMaxDevices];  // one copy at a time in each direction

double bandwidth(Way way, bool pinned) {
  const Settings& s = settings();
  double gibs = way == Way::H2D ? s.h2d_gibs : way == Way::D2H ? s.d2h_gibs : way == Way::D2D ? s.d2d_gibs : s.ccl_gibs;
  if (!pinned) gibs *= s.pageable_factor;
  return gibs * (1ull << 30);
}

}  // namespace

void transfer(Way way, int device, char* to, const char* from, size_t size, bool pinned) {
  std::lock_guard<std::mutex> engine(engines[static_cast<int>(way)][device]);
  const double begin = now(), rate = bandwidth(way, pinned);
  nap(settings().latency_us * 1e-6);
  const double started = now();
  // In pieces: who looks too early sees a part of it.
  constexpr size_t kPiece = 1 << 20;
  for (size_t done = 0; done < size;) {
    const size_t piece = std::min(kPiece, size - done);
    memmove(to + done, from + done, piece);
    done += piece;
    if (rate > 0) nap(started + done / rate - now());
  }
  record_copy(way, device, begin, now(), size, pinned);
}

namespace runtime {

void occupy_link(Way way, int device, size_t size, double since) {
  const double rate = bandwidth(way, true);
  const double due = since + settings().latency_us * 1e-6 + (rate > 0 ? size / rate : 0);
  nap(due - now());
}

}  // namespace runtime
}  // namespace rehearsal
