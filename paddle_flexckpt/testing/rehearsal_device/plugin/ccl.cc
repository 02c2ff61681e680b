// Collectives between processes: a mesh of local sockets for each communicator, worked on by the stream's thread.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <type_traits>

#include "rehearsal.h"

namespace rehearsal {
namespace {

constexpr size_t kIdSize = 64;
constexpr int kPatienceMs = 300000;

struct Comm {
  std::string name;
  int rank = 0, size = 1;
  std::vector<int> sockets;  // by peer; -1 for itself
  std::mutex mutex;          // one exchange at a time
  ~Comm() {
    for (int fd : sockets)
      if (fd >= 0) close(fd);
  }
};

struct Part {  // one message: to or from a peer
  int peer;
  char* data;
  size_t size;
  bool sending;
};

sockaddr_un place(const std::string& id, int rank, socklen_t* length) {
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::string name = "rehearsal/" + id + "/" + std::to_string(rank);
  memcpy(at.sun_path + 1, name.data(), name.size());  // an abstract name: nothing is left in the file system
  *length = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  return at;
}

bool whole(int fd, void* data, size_t size, bool sending) {
  char* at = static_cast<char*>(data);
  while (size) {
    ssize_t n = sending ? send(fd, at, size, MSG_NOSIGNAL) : recv(fd, at, size, 0);
    if (n <= 0) return false;
    at += n;
    size -= n;
  }
  return true;
}

bool connect_mesh(Comm* comm) {
  comm->sockets.assign(comm->size, -1);
  socklen_t length;
  int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un here = place(comm->name, comm->rank, &length);
  if (bind(listener, reinterpret_cast<sockaddr*>(&here), length) || listen(listener, comm->size)) {
    perror("rehearsal: bind");
    return false;
  }
  for (int peer = 0; peer < comm->rank; ++peer) {
    sockaddr_un there = place(comm->name, peer, &length);
    int fd = -1;
    for (double until = now() + kPatienceMs / 1000.0;;) {
      fd = socket(AF_UNIX, SOCK_STREAM, 0);
      if (!connect(fd, reinterpret_cast<sockaddr*>(&there), length)) break;
      close(fd);
      fd = -1;
      if (now() > until) return false;
      usleep(5000);
    }
    int32_t rank = comm->rank;
    if (!whole(fd, &rank, sizeof rank, true)) return false;
    comm->sockets[peer] = fd;
  }
  for (int left = comm->size - 1 - comm->rank; left > 0; --left) {
    pollfd ready{listener, POLLIN, 0};
    if (poll(&ready, 1, kPatienceMs) <= 0) return false;
    int fd = accept(listener, nullptr, nullptr);
    int32_t rank = -1;
    if (!whole(fd, &rank, sizeof rank, false) || rank < 0 || rank >= comm->size) return false;
    comm->sockets[rank] = fd;
  }
  close(listener);
  for (int fd : comm->sockets)
    if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  return true;
}

// All messages at once; those with one peer in their order. False where a peer has gone or says nothing for long.
bool exchange(Comm* comm, std::vector<Part> parts, int device) {
  std::lock_guard<std::mutex> lock(comm->mutex);
  const double begin = now();
  size_t bytes = 0;
  std::vector<std::deque<Part>> out(comm->size), in(comm->size);
  for (const Part& part : parts) {
    if (part.sending && part.peer != comm->rank) bytes += part.size;
    (part.sending ? out : in)[part.peer].push_back(part);
  }
  auto& mine = out[comm->rank];
  for (Part& to : in[comm->rank]) {
    if (mine.empty()) return false;
    memmove(to.data, mine.front().data, std::min(to.size, mine.front().size));
    mine.pop_front();
  }
  mine.clear();
  in[comm->rank].clear();
  for (;;) {
    std::vector<pollfd> waits;
    std::vector<int> who;
    for (int peer = 0; peer < comm->size; ++peer) {
      while (!out[peer].empty() && !out[peer].front().size) out[peer].pop_front();
      while (!in[peer].empty() && !in[peer].front().size) in[peer].pop_front();
      short events = (out[peer].empty() ? 0 : POLLOUT) | (in[peer].empty() ? 0 : POLLIN);
      if (events) {
        waits.push_back({comm->sockets[peer], events, 0});
        who.push_back(peer);
      }
    }
    if (waits.empty()) break;
    if (poll(waits.data(), waits.size(), kPatienceMs) <= 0) return false;
    for (size_t i = 0; i < waits.size(); ++i) {
      for (bool sending : {true, false}) {
        auto& queue = (sending ? out : in)[who[i]];
        if (queue.empty() || !(waits[i].revents & (sending ? POLLOUT : POLLIN | POLLHUP | POLLERR))) continue;
        Part& part = queue.front();
        ssize_t n = sending ? send(waits[i].fd, part.data, part.size, MSG_NOSIGNAL | MSG_DONTWAIT)
                            : recv(waits[i].fd, part.data, part.size, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
        if (n > 0) {
          part.data += n;
          part.size -= n;
        }
      }
    }
  }
  occupy(Way::CCL, device, bytes, begin);
  Counter& c = counter(Way::CCL);
  ++c.calls;
  c.bytes += bytes;
  const double end = now();
  c.nanoseconds += static_cast<uint64_t>((end - begin) * 1e9);
  record_span("ccl", device, begin, end, bytes);
  return true;
}

// ---- element types ----

size_t width(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case UINT16: case INT16: case FLOAT16: case BFLOAT16: return 2;
    case UINT32: case INT32: case FLOAT32: return 4;
    case UINT64: case INT64: case FLOAT64: case COMPLEX64: return 8;
    case COMPLEX128: return 16;
    default: return 0;
  }
}

struct Brain {  // bfloat16
  uint16_t bits;
  operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  Brain(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = value != value ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
};

template <typename T, typename Wide>
void combine(std::vector<const char*> inputs, char* output, size_t count, C_CCLReduceOp op) {
  for (size_t i = 0; i < count; ++i) {
    Wide value = static_cast<Wide>(reinterpret_cast<const T*>(inputs[0])[i]);
    for (size_t k = 1; k < inputs.size(); ++k) {
      const Wide other = static_cast<Wide>(reinterpret_cast<const T*>(inputs[k])[i]);
      switch (op) {
        case MAX: value = value < other ? other : value; break;
        case MIN: value = other < value ? other : value; break;
        case PRODUCT: value = value * other; break;
        default: value = value + other;
      }
    }
    if (op == AVG) value = value / static_cast<Wide>(inputs.size());
    reinterpret_cast<T*>(output)[i] = static_cast<T>(value);
  }
}

bool combine_typed(const std::vector<const char*>& inputs, char* output, size_t count, C_DataType type, C_CCLReduceOp op) {
  switch (type) {
    case BOOL: combine<bool, int>(inputs, output, count, op); return true;
    case UINT8: combine<uint8_t, uint8_t>(inputs, output, count, op); return true;
    case INT8: combine<int8_t, int8_t>(inputs, output, count, op); return true;
    case INT16: combine<int16_t, int16_t>(inputs, output, count, op); return true;
    case INT32: combine<int32_t, int32_t>(inputs, output, count, op); return true;
    case INT64: combine<int64_t, int64_t>(inputs, output, count, op); return true;
    case FLOAT16: combine<_Float16, float>(inputs, output, count, op); return true;
    case BFLOAT16: combine<Brain, float>(inputs, output, count, op); return true;
    case FLOAT32: combine<float, float>(inputs, output, count, op); return true;
    case FLOAT64: combine<double, double>(inputs, output, count, op); return true;
    default: return false;
  }
}

// ---- what Paddle calls ----

Comm* of(C_CCLComm handle) { return reinterpret_cast<Comm*>(handle); }

thread_local int group_depth = 0;
struct Pending {
  Comm* comm;
  Stream* stream;
  std::vector<Part> parts;
};
thread_local std::vector<Pending> pending;

C_Status start(Comm* comm, Stream* stream, std::function<bool()> work) {
  const int device = stream->device();
  stream->push([=] {
    if (!failed(device) && !work()) fail(device, "communicator " + comm->name + ": a peer has gone, or wrong arguments");
  });
  return C_SUCCESS;
}

C_Status get_comm_name(C_CCLComm comm, char* name) {
  snprintf(name, 128, "rehearsal-%s", of(comm)->name.c_str());
  return C_SUCCESS;
}
C_Status get_unique_id_size(size_t* size) {
  *size = kIdSize;
  return C_SUCCESS;
}
C_Status get_unique_id(C_CCLRootId* id) {
  std::random_device random;
  memset(id->data, 0, id->sz);
  snprintf(static_cast<char*>(id->data), id->sz, "%d-%08x%08x", getpid(), random(), random());
  return C_SUCCESS;
}
C_Status comm_init_rank(size_t size, C_CCLRootId* id, size_t rank, C_CCLComm* out) {
  if (forked()) return C_INTERNAL_ERROR;
  auto* comm = new Comm;
  comm->name = static_cast<char*>(id->data);
  comm->rank = rank;
  comm->size = size;
  if (!connect_mesh(comm)) return C_INTERNAL_ERROR;
  *out = reinterpret_cast<C_CCLComm>(comm);
  return C_SUCCESS;
}
C_Status destroy_comm(C_CCLComm comm) {
  delete of(comm);
  return C_SUCCESS;
}

C_Status reduce_to(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLReduceOp op, int root, Comm* comm,
                   Stream* stream) {
  const size_t bytes = count * width(type);
  char* from = shadow(send_buf, bytes);
  const bool receives = root < 0 || root == comm->rank;
  char* to = receives ? shadow(recv_buf, bytes) : nullptr;
  if (!from || (receives && !to)) return C_ERROR;
  return start(comm, stream, [=] {
    std::vector<std::vector<char>> others(receives ? comm->size : 0);
    std::vector<const char*> inputs(others.size(), from);
    std::vector<Part> parts;
    for (int peer = 0; peer < comm->size; ++peer) {
      if (peer == comm->rank) continue;
      if (root < 0 || peer == root) parts.push_back({peer, from, bytes, true});
      if (receives) {
        others[peer].resize(bytes);
        inputs[peer] = others[peer].data();
        parts.push_back({peer, others[peer].data(), bytes, false});
      }
    }
    if (!exchange(comm, parts, stream->device())) return false;
    return !receives || combine_typed(inputs, to, count, type, op);
  });
}
C_Status all_reduce(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm, C_Stream stream) {
  return reduce_to(send_buf, recv_buf, count, type, op, -1, of(comm), reinterpret_cast<Stream*>(stream));
}
C_Status reduce(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLReduceOp op, size_t root, C_CCLComm comm, C_Stream stream) {
  return reduce_to(send_buf, recv_buf, count, type, op, root, of(comm), reinterpret_cast<Stream*>(stream));
}
C_Status broadcast(void* buf, size_t count, C_DataType type, size_t root, C_CCLComm handle, C_Stream stream) {
  Comm* comm = of(handle);
  const size_t bytes = count * width(type);
  char* data = shadow(buf, bytes);
  if (!data) return C_ERROR;
  auto* where = reinterpret_cast<Stream*>(stream);
  return start(comm, where, [=] {
    std::vector<Part> parts;
    if (comm->rank != static_cast<int>(root)) parts.push_back({static_cast<int>(root), data, bytes, false});
    else
      for (int peer = 0; peer < comm->size; ++peer)
        if (peer != comm->rank) parts.push_back({peer, data, bytes, true});
    return exchange(comm, parts, where->device());
  });
}
C_Status all_gather(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLComm handle, C_Stream stream) {
  Comm* comm = of(handle);
  const size_t bytes = count * width(type);
  char *from = shadow(send_buf, bytes), *to = shadow(recv_buf, bytes * comm->size);
  if (!from || !to) return C_ERROR;
  auto* where = reinterpret_cast<Stream*>(stream);
  return start(comm, where, [=] {
    std::vector<Part> parts;
    for (int peer = 0; peer < comm->size; ++peer) {
      parts.push_back({peer, from, bytes, true});
      parts.push_back({peer, to + peer * bytes, bytes, false});
    }
    return exchange(comm, parts, where->device());
  });
}
C_Status reduce_scatter(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm handle, C_Stream stream) {
  Comm* comm = of(handle);
  const size_t bytes = count * width(type);
  char *from = shadow(send_buf, bytes * comm->size), *to = shadow(recv_buf, bytes);
  if (!from || !to) return C_ERROR;
  auto* where = reinterpret_cast<Stream*>(stream);
  return start(comm, where, [=] {
    std::vector<std::vector<char>> mine(comm->size, std::vector<char>(bytes));
    std::vector<const char*> inputs;
    std::vector<Part> parts;
    for (int peer = 0; peer < comm->size; ++peer) {
      parts.push_back({peer, from + peer * bytes, bytes, true});
      parts.push_back({peer, mine[peer].data(), bytes, false});
      inputs.push_back(mine[peer].data());
    }
    return exchange(comm, parts, where->device()) && combine_typed(inputs, to, count, type, op);
  });
}

C_Status message(void* buf, size_t count, C_DataType type, size_t peer, Comm* comm, Stream* stream, bool sending) {
  const size_t bytes = count * width(type);
  char* data = bytes ? shadow(buf, bytes) : nullptr;
  if (bytes && !data) return C_ERROR;
  std::vector<Part> parts{{static_cast<int>(peer), data, bytes, sending}};
  if (!group_depth) return start(comm, stream, [=] { return exchange(comm, parts, stream->device()); });
  for (Pending& p : pending)
    if (p.comm == comm && p.stream == stream) {
      p.parts.push_back(parts[0]);
      return C_SUCCESS;
    }
  pending.push_back({comm, stream, parts});
  return C_SUCCESS;
}
C_Status group_start() {
  ++group_depth;
  return C_SUCCESS;
}
C_Status group_end() {
  if (--group_depth) return C_SUCCESS;
  std::vector<Pending> now_due;
  now_due.swap(pending);
  for (Pending& p : now_due) {
    start(p.comm, p.stream, [p] { return exchange(p.comm, p.parts, p.stream->device()); });
  }
  return C_SUCCESS;
}
C_Status send_to(void* buf, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return message(buf, count, type, peer, of(comm), reinterpret_cast<Stream*>(stream), true);
}
C_Status recv_from(void* buf, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return message(buf, count, type, peer, of(comm), reinterpret_cast<Stream*>(stream), false);
}
C_Status all_to_all(const void** send_buf, const size_t* send_count, const C_DataType* send_type, void** recv_buf,
                    const size_t* recv_count, const C_DataType* recv_type, size_t, size_t size, C_CCLComm handle,
                    C_Stream stream) {
  std::vector<Part> parts;
  for (size_t peer = 0; peer < size; ++peer) {
    const size_t out = send_count[peer] * width(send_type[peer]), in = recv_count[peer] * width(recv_type[peer]);
    char* from = out ? shadow(send_buf[peer], out) : nullptr;
    char* to = in ? shadow(recv_buf[peer], in) : nullptr;
    if ((out && !from) || (in && !to)) return C_ERROR;
    parts.push_back({static_cast<int>(peer), from, out, true});
    parts.push_back({static_cast<int>(peer), to, in, false});
  }
  Comm* comm = of(handle);
  auto* where = reinterpret_cast<Stream*>(stream);
  return start(comm, where, [=] { return exchange(comm, parts, where->device()); });
}

}  // namespace

void fill_ccl(C_DeviceInterface* t) {
  t->xccl_get_comm_name = get_comm_name;
  t->xccl_get_unique_id_size = get_unique_id_size;
  t->xccl_get_unique_id = get_unique_id;
  t->xccl_comm_init_rank = comm_init_rank;
  t->xccl_destroy_comm = destroy_comm;
  t->xccl_all_reduce = all_reduce;
  t->xccl_broadcast = broadcast;
  t->xccl_reduce = reduce;
  t->xccl_all_gather = all_gather;
  t->xccl_reduce_scatter = reduce_scatter;
  t->xccl_group_start = group_start;
  t->xccl_group_end = group_end;
  t->xccl_send = send_to;
  t->xccl_recv = recv_from;
  t->xccl_all_to_all = all_to_all;
}

}  // namespace rehearsal
