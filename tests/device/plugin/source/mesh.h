// A communicator: a mesh of local sockets between its ranks, and the exchange of messages over it.
#pragma once
#include <mutex>
#include <string>
#include <vector>

#include "rehearsal.h"

namespace rehearsal {

struct Comm {
  std::string name;
  int rank = 0, size = 1;
  std::vector<int> sockets;  // by peer; -1 for itself
  std::mutex mutex;          // one exchange at a time
  std::shared_ptr<void> on_device;  // what the runtime has made for it, if anything
  ~Comm();
};

struct Part {  // one message: to or from a peer
  int peer;
  char* data;
  size_t size;
  bool sending;
};

// Both return what went wrong, or an empty text.
std::string connect_mesh(Comm* comm);
// All messages at once; those with one peer in their order. Nothing is counted.
std::string swap_messages(Comm* comm, std::vector<Part> parts);
size_t bytes_to_others(const Comm* comm, const std::vector<Part>& parts);
// The same, counted as a collective.
std::string exchange(const char* what, Comm* comm, std::vector<Part> parts, int device);

// reductions.cc
size_t width(C_DataType type);  // of an element, in bytes
bool combine(const std::vector<const char*>& inputs, char* output, size_t count, C_DataType type, C_CCLReduceOp op);

}  // namespace rehearsal
