// What the plugin asks of the Python it runs in, found at run time: it is not linked against any.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "rehearsal.h"

namespace rehearsal {
namespace {

struct Python {
  int (*add_pending_call)(int (*)(void*), void*);
  void* (*import)(const char*);
  void* (*call_method)(void*, const char*, const char*, ...);
  void (*release)(void*);
  void (*clear_error)();
  void (*set_error)(void*, const char*);
  void** runtime_error;
  void* (*thread_state)();
  const char* (*dump_threads)(int, void*, void*);
  void (*dump)(int, void*);
};
Python python{};
const std::string framework = REHEARSAL_FRAMEWORK "/";  // the directory of the paddle package

template <typename F>
void find(F*& function, const char* name) {
  function = reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
}

bool skipped(const std::string& file) {
  return file.compare(0, framework.size(), framework) == 0 || file.find("/tests/device/plugin/") != std::string::npos ||
         file.empty() || file[0] == '<';
}

// The first line of a dumped traceback that is not skipped, as file:line.
std::string innermost(const std::string& dumped) {
  static const std::string opening = "  File \"", middle = "\", line ";
  for (size_t at = 0; (at = dumped.find(opening, at)) != std::string::npos;) {
    at += opening.size();
    const size_t name_end = dumped.find(middle, at), line_end = dumped.find('\n', at);
    if (name_end == std::string::npos || name_end > line_end) continue;
    const std::string file = dumped.substr(at, name_end - at);
    const size_t number = name_end + middle.size();
    if (!skipped(file)) return file + ":" + dumped.substr(number, dumped.find(' ', number) - number);
  }
  return "";
}

const char* interned(const std::string& line) {
  static std::mutex mutex;
  static auto* const all = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return all->insert(line).first->c_str();
}

}  // namespace

void python_initialize() {
  find(python.add_pending_call, "Py_AddPendingCall");
  find(python.import, "PyImport_ImportModule");
  find(python.call_method, "PyObject_CallMethod");
  find(python.release, "Py_DecRef");
  find(python.clear_error, "PyErr_Clear");
  find(python.set_error, "PyErr_SetString");
  find(python.runtime_error, "PyExc_RuntimeError");
  find(python.thread_state, "PyGILState_GetThisThreadState");
  find(python.dump_threads, "_Py_DumpTracebackThreads");
  find(python.dump, "_Py_DumpTraceback");
}

const char* caller() {
  if (!settings().trace || !python.dump || !python.thread_state) return "";
  void* state = python.thread_state();
  if (!state) return "";
  // Python's own writer of tracebacks needs no lock of the interpreter: Paddle gives that up around most of its work.
  struct Scratch {
    int file = memfd_create("rehearsal", MFD_CLOEXEC);
    ~Scratch() { close(file); }
  };
  thread_local Scratch scratch;
  if (scratch.file < 0 || ftruncate(scratch.file, 0) || lseek(scratch.file, 0, SEEK_SET)) return "";
  python.dump(scratch.file, state);
  std::string dumped(lseek(scratch.file, 0, SEEK_CUR), '\0');
  if (pread(scratch.file, &dumped[0], dumped.size(), 0) != static_cast<ssize_t>(dumped.size())) return "";
  return interned(innermost(dumped));
}

bool python_interrupt(int (*callback)(void*)) {
  return python.add_pending_call && !python.add_pending_call(callback, nullptr);
}

int python_report(const char* otherwise) {
  void* module = python.import("tests.device.plugin.touches");
  if (module) {
    void* result = python.call_method(module, "report", nullptr);
    python.release(module);
    if (!result) return -1;
    python.release(result);
    return 0;
  }
  python.clear_error();  // the package is not there; the text is
  python.set_error(*python.runtime_error, otherwise);
  return -1;
}

void python_dump_threads(int descriptor) {
  if (python.dump_threads && python.thread_state) python.dump_threads(descriptor, nullptr, python.thread_state());
}

}  // namespace rehearsal
