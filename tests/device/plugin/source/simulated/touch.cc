// Accesses of the host to device memory. A fault in a device's range of addresses opens the allocation for a moment: the
// host reads poison there, what it writes is lost. Python's main thread then gets an exception that names the tensor, and
// the range is closed again.
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "simulated.h"

namespace rehearsal {
namespace {

constexpr size_t kPage = 4096, kWindow = 1 << 20;
constexpr int kMost = 1024, kPoison = 0xfb;

struct Opened {
  Touched what;
  uintptr_t begin, end;  // what is open of it
  bool main_thread;
  bool told;
};
// Handlers of signals must not allocate, nor wait for a lock that the interrupted code may have: nothing here does either.
std::atomic_flag busy = ATOMIC_FLAG_INIT;
Opened opened[kMost];
int opened_count = 0;
std::atomic<bool> scheduled{false};
struct sigaction previous;
std::atomic<int> passed{0};

struct Guard {
  Guard() {
    while (busy.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Guard() { busy.clear(std::memory_order_release); }
};

bool in_main_thread() { return static_cast<pid_t>(syscall(SYS_gettid)) == getpid(); }

void describe(const Touched& t, char* out, size_t size) {
  snprintf(out, size, "the host has touched device memory: address %#zx of device %d, in %s of %zu bytes at %#zx%s%s", t.address,
           t.device, !t.known ? "no allocation: a page" : t.freed ? "a freed allocation" : "an allocation", t.size, t.begin,
           *t.origin ? (t.freed ? ", freed at " : ", allocated at ") : "", t.origin);
}

void close_all() {
  for (int i = 0; i < opened_count; ++i) {
    void* at = reinterpret_cast<void*>(opened[i].begin);
    madvise(at, opened[i].end - opened[i].begin, MADV_DONTNEED);
    mprotect(at, opened[i].end - opened[i].begin, PROT_NONE);
  }
  opened_count = 0;
}

int deliver(void*) {
  scheduled = false;
  char why[1024] = "the host has touched device memory";
  {
    Guard guard;
    if (!opened_count) return 0;
    describe(opened[0].what, why, sizeof why);
  }
  const int outcome = python_report(why);
  Guard guard;
  close_all();
  return outcome;
}

// Opens what holds the address. False: it is not an address of a device, or there are too many.
bool admit(uintptr_t address) {
  Touched met{};
  if (!memory_find(address, &met)) return false;
  const uintptr_t block_end = (met.begin + std::max<size_t>(met.size, 1) + kPage - 1) / kPage * kPage;
  const uintptr_t begin = address / kPage * kPage, end = std::min(begin + kWindow, block_end);
  bool fresh = false;
  {
    Guard guard;
    Opened* known = std::find_if(opened, opened + opened_count, [&](const Opened& o) { return o.what.begin == met.begin; });
    fresh = known == opened + opened_count;
    if (fresh) {
      if (opened_count == kMost) return false;
      opened[opened_count++] = {met, begin, end, in_main_thread(), false};
      ++tally().host_touches;
    } else {
      known->begin = std::min(known->begin, begin);
      known->end = std::max(known->end, end);
    }
  }
  void* at = reinterpret_cast<void*>(begin);
  mprotect(at, end - begin, PROT_READ | PROT_WRITE);
  memset(at, kPoison, end - begin);
  if (!fresh) return true;
  if (!in_main_thread()) {  // the exception comes in the main thread: say here where it was
    char line[1200] = "rehearsal: in a thread that is not the main one: ";
    describe(met, line + strlen(line), sizeof line - strlen(line) - 1);
    strcat(line, "\n");
    if (write(STDERR_FILENO, line, strlen(line)) > 0) python_dump_threads(STDERR_FILENO);
  }
  if (!scheduled.exchange(true) && !python_interrupt(deliver)) scheduled = false;
  return true;
}

void on_fault(int number, siginfo_t* info, void*) {
  const int kept = errno;
  const bool sent = info->si_code <= 0;  // by kill() and the like, and not by an access
  if (sent || !admit(reinterpret_cast<uintptr_t>(info->si_addr))) {
    // Not ours. The instruction runs again, and the fault goes to the handler before this one; to none, if that one
    // hands it back.
    struct sigaction otherwise {};
    otherwise.sa_handler = SIG_DFL;
    sigaction(number, passed++ ? &otherwise : &previous, nullptr);
    if (sent) raise(number);
  }
  errno = kept;
}

}  // namespace

void touch_watch() {
  if (passed) return;
  struct sigaction now_set;
  sigaction(SIGSEGV, nullptr, &now_set);
  if ((now_set.sa_flags & SA_SIGINFO) && now_set.sa_sigaction == on_fault) return;
  // Whoever came later is asked after this one.
  struct sigaction mine {};
  mine.sa_sigaction = on_fault;
  mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&mine.sa_mask);
  previous = now_set;
  sigaction(SIGSEGV, &mine, nullptr);
}

}  // namespace rehearsal

// What is to be told of the open allocations, as JSON, each once.
REHEARSAL_EXPORT int rehearsal_touches(char* out, size_t size) {
  using namespace rehearsal;
  std::string all = "[";
  Guard guard;
  for (int i = 0; i < opened_count; ++i) {
    if (opened[i].told) continue;
    opened[i].told = true;
    const Touched& t = opened[i].what;
    all += text("%s{\"device\": %d, \"address\": %zu, \"begin\": %zu, \"nbytes\": %zu, \"freed\": %s, \"known\": %s, "
                "\"main_thread\": %s, \"origin\": \"%s\"}",
                all.size() > 1 ? ", " : "", t.device, t.address, t.begin, t.size, t.freed ? "true" : "false",
                t.known ? "true" : "false", opened[i].main_thread ? "true" : "false", t.origin);
  }
  all += "]";
  if (all.size() + 1 > size) return -1;
  memcpy(out, all.c_str(), all.size() + 1);
  return 0;
}
