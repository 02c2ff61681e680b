// Collectives between processes: what Paddle calls, worked on by the stream's thread.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>

#include "mesh.h"

namespace rehearsal {
namespace {

constexpr size_t kIdSize = 64;

Comm* of(C_CCLComm handle) { return reinterpret_cast<Comm*>(handle); }
Stream* of(C_Stream handle) { return reinterpret_cast<Stream*>(handle); }

size_t bytes_of(size_t count, C_DataType type) {
  if (!width(type)) refuse(text("a collective of data type %d", static_cast<int>(type)));
  return count * width(type);
}

// The plugin's own address; of nothing, there is none.
char* reached(const void* pointer, size_t bytes) { return bytes ? shadow(pointer, bytes) : nullptr; }

thread_local int group_depth = 0;
struct Pending {
  Comm* comm;
  Stream* stream;
  std::vector<Part> parts;
};
thread_local std::vector<Pending> pending;

// Has the stream do the work, which returns what went wrong.
C_Status start(const char* what, Comm* comm, Stream* stream, std::function<std::string()> work) {
  const int device = stream->device();
  memory_adopt(nullptr);  // collectives have streams of their own, but their tensors come from the framework's
  const uint64_t position = stream->push([=] {
    if (failed(device)) return;
    const std::string wrong = work();
    if (wrong.empty()) return;
    fail(device, text("communicator %s, rank %d of %d, %s: ", comm->name.c_str(), comm->rank, comm->size, what) + wrong);
  });
  stream->demand(position);  // the other ranks wait for it
  return C_SUCCESS;
}

// Called with each collective: it is counted, and a forked child or a device that has failed is told so.
void begin(const char* what, Stream* stream) {
  if (forked()) refuse("a forked child has no device: start the process anew");
  if (failed(stream->device())) refuse(text("device %d: ", stream->device()) + failure(stream->device()));
  count_collective(what);
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
  if (forked()) refuse("a forked child has no device: start the process anew");
  auto comm = std::make_unique<Comm>();
  comm->name = static_cast<char*>(id->data);
  comm->rank = rank;
  comm->size = size;
  const std::string wrong = connect_mesh(comm.get());
  if (!wrong.empty()) refuse("communicator " + comm->name + text(", rank %zu of %zu, start: ", rank, size) + wrong);
  *out = reinterpret_cast<C_CCLComm>(comm.release());
  return C_SUCCESS;
}
C_Status destroy_comm(C_CCLComm comm) {
  delete of(comm);
  return C_SUCCESS;
}

C_Status reduce_to(const char* what, void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLReduceOp op, int root,
                   Comm* comm, Stream* stream) {
  begin(what, stream);
  const size_t bytes = bytes_of(count, type);
  const bool receives = root < 0 || root == comm->rank;
  char *from = reached(send_buf, bytes), *to = receives ? reached(recv_buf, bytes) : nullptr;
  return start(what, comm, stream, [=]() -> std::string {
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
    std::string wrong = exchange(what, comm, parts, stream->device());
    if (!wrong.empty() || !receives || combine(inputs, to, count, type, op)) return wrong;
    return text("cannot reduce elements of data type %d", static_cast<int>(type));
  });
}
C_Status all_reduce(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                    C_Stream stream) {
  return reduce_to("all_reduce", send_buf, recv_buf, count, type, op, -1, of(comm), of(stream));
}
C_Status reduce(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLReduceOp op, size_t root, C_CCLComm comm,
                C_Stream stream) {
  return reduce_to("reduce", send_buf, recv_buf, count, type, op, root, of(comm), of(stream));
}
C_Status broadcast(void* buf, size_t count, C_DataType type, size_t root, C_CCLComm handle, C_Stream stream) {
  Comm* comm = of(handle);
  Stream* where = of(stream);
  begin("broadcast", where);
  const size_t bytes = bytes_of(count, type);
  char* data = reached(buf, bytes);
  return start("broadcast", comm, where, [=] {
    std::vector<Part> parts;
    for (int peer = 0; peer < comm->size; ++peer) {
      if (comm->rank == static_cast<int>(root) && peer != comm->rank) parts.push_back({peer, data, bytes, true});
      if (comm->rank != static_cast<int>(root) && peer == static_cast<int>(root)) parts.push_back({peer, data, bytes, false});
    }
    return exchange("broadcast", comm, parts, where->device());
  });
}
C_Status all_gather(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLComm handle, C_Stream stream) {
  Comm* comm = of(handle);
  Stream* where = of(stream);
  begin("all_gather", where);
  const size_t bytes = bytes_of(count, type);
  char *from = reached(send_buf, bytes), *to = reached(recv_buf, bytes * comm->size);
  return start("all_gather", comm, where, [=] {
    std::vector<Part> parts;
    for (int peer = 0; peer < comm->size; ++peer) {
      parts.push_back({peer, from, bytes, true});
      parts.push_back({peer, to + peer * bytes, bytes, false});
    }
    return exchange("all_gather", comm, parts, where->device());
  });
}
C_Status reduce_scatter(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm handle,
                        C_Stream stream) {
  Comm* comm = of(handle);
  Stream* where = of(stream);
  begin("reduce_scatter", where);
  const size_t bytes = bytes_of(count, type);
  char *from = reached(send_buf, bytes * comm->size), *to = reached(recv_buf, bytes);
  return start("reduce_scatter", comm, where, [=]() -> std::string {
    std::vector<std::vector<char>> mine(comm->size, std::vector<char>(bytes));
    std::vector<const char*> inputs;
    std::vector<Part> parts;
    for (int peer = 0; peer < comm->size; ++peer) {
      parts.push_back({peer, from + peer * bytes, bytes, true});
      parts.push_back({peer, mine[peer].data(), bytes, false});
      inputs.push_back(mine[peer].data());
    }
    std::string wrong = exchange("reduce_scatter", comm, parts, where->device());
    if (!wrong.empty() || combine(inputs, to, count, type, op)) return wrong;
    return text("cannot reduce elements of data type %d", static_cast<int>(type));
  });
}

C_Status message(const char* what, void* buf, size_t count, C_DataType type, size_t peer, Comm* comm, Stream* stream,
                 bool sending) {
  begin(what, stream);
  const size_t bytes = bytes_of(count, type);
  std::vector<Part> parts{{static_cast<int>(peer), reached(buf, bytes), bytes, sending}};
  if (!group_depth) return start(what, comm, stream, [=] { return exchange(what, comm, parts, stream->device()); });
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
  for (Pending& p : now_due) start("group", p.comm, p.stream, [p] { return exchange("group", p.comm, p.parts, p.stream->device()); });
  return C_SUCCESS;
}
C_Status send_to(void* buf, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return message("send", buf, count, type, peer, of(comm), of(stream), true);
}
C_Status recv_from(void* buf, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return message("recv", buf, count, type, peer, of(comm), of(stream), false);
}
C_Status all_to_all(const void** send_buf, const size_t* send_count, const C_DataType* send_type, void** recv_buf,
                    const size_t* recv_count, const C_DataType* recv_type, size_t, size_t size, C_CCLComm handle,
                    C_Stream stream) {
  Comm* comm = of(handle);
  Stream* where = of(stream);
  begin("all_to_all", where);
  std::vector<Part> parts;
  for (size_t peer = 0; peer < size; ++peer) {
    const size_t out = bytes_of(send_count[peer], send_type[peer]), in = bytes_of(recv_count[peer], recv_type[peer]);
    parts.push_back({static_cast<int>(peer), reached(send_buf[peer], out), out, true});
    parts.push_back({static_cast<int>(peer), reached(recv_buf[peer], in), in, false});
  }
  return start("all_to_all", comm, where, [=] { return exchange("all_to_all", comm, parts, where->device()); });
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
