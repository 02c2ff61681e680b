// Collectives between processes, as Paddle calls them.
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

// Where the work finds the bytes; of nothing, there is no address.
char* reached(const void* pointer, size_t bytes) { return bytes ? runtime::seen_by_work(pointer, bytes) : nullptr; }
char* bytes_at(const void* pointer) { return static_cast<char*>(const_cast<void*>(pointer)); }

thread_local int group_depth = 0;
struct Pending {
  Comm* comm;
  Stream* stream;
  std::vector<Part> parts;
};
thread_local std::vector<Pending> pending;

// Has the stream do the work, which returns what went wrong.
C_Status start(const char* what, Comm* comm, Stream* stream, std::function<std::string()> work) {
  runtime::launch_collective(stream, [=]() -> std::string {
    const std::string wrong = work();
    if (wrong.empty()) return wrong;
    return text("communicator %s, rank %d of %d, %s: ", comm->name.c_str(), comm->rank, comm->size, what) + wrong;
  });
  return C_SUCCESS;
}

// Has the stream exchange messages that lie on the device.
C_Status start_exchange(const char* what, Comm* comm, Stream* stream, std::vector<Part> parts) {
  if (runtime::exchange_on_device(what, comm, stream, parts)) return C_SUCCESS;
  const Work scope;
  for (Part& part : parts) part.data = reached(part.data, part.size);
  const int device = runtime::device_of(stream);
  return start(what, comm, stream, [=] { return exchange(what, comm, parts, device); });
}

// Called with each collective: it is counted, and a forked child or a device that has failed is told so.
void begin(const char* what, Stream* stream) {
  check_process();
  check_device(runtime::device_of(stream));
  count_collective(what);
  current_kernel() = what;
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
  check_process();
  auto comm = std::make_unique<Comm>();
  comm->name = static_cast<char*>(id->data);
  comm->rank = rank;
  comm->size = size;
  const std::string wrong = connect_mesh(comm.get());
  if (!wrong.empty()) refuse("communicator " + comm->name + text(", rank %zu of %zu, start: ", rank, size) + wrong);
  runtime::prepare_group(comm.get());
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
  const int device = runtime::device_of(stream);
  const Work scope;
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
    std::string wrong = exchange(what, comm, parts, device);
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
  begin("broadcast", of(stream));
  const size_t bytes = bytes_of(count, type);
  const int source = static_cast<int>(root);
  std::vector<Part> parts;
  for (int peer = 0; peer < comm->size; ++peer) {
    if (comm->rank == source && peer != source) parts.push_back({peer, bytes_at(buf), bytes, true});
    if (comm->rank != source && peer == source) parts.push_back({peer, bytes_at(buf), bytes, false});
  }
  return start_exchange("broadcast", comm, of(stream), parts);
}
C_Status all_gather(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLComm handle, C_Stream stream) {
  Comm* comm = of(handle);
  begin("all_gather", of(stream));
  const size_t bytes = bytes_of(count, type);
  std::vector<Part> parts;
  for (int peer = 0; peer < comm->size; ++peer) {
    parts.push_back({peer, bytes_at(send_buf), bytes, true});
    parts.push_back({peer, bytes_at(recv_buf) + peer * bytes, bytes, false});
  }
  return start_exchange("all_gather", comm, of(stream), parts);
}
C_Status reduce_scatter(void* send_buf, void* recv_buf, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm handle,
                        C_Stream stream) {
  Comm* comm = of(handle);
  Stream* where = of(stream);
  begin("reduce_scatter", where);
  const size_t bytes = bytes_of(count, type);
  const int device = runtime::device_of(where);
  const Work scope;
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
    std::string wrong = exchange("reduce_scatter", comm, parts, device);
    if (!wrong.empty() || combine(inputs, to, count, type, op)) return wrong;
    return text("cannot reduce elements of data type %d", static_cast<int>(type));
  });
}

C_Status message(const char* what, void* buf, size_t count, C_DataType type, size_t peer, Comm* comm, Stream* stream,
                 bool sending) {
  begin(what, stream);
  const size_t bytes = bytes_of(count, type);
  const std::vector<Part> parts{{static_cast<int>(peer), bytes_at(buf), bytes, sending}};
  if (!group_depth) return start_exchange(what, comm, stream, parts);
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
  for (Pending& p : now_due) start_exchange("group", p.comm, p.stream, p.parts);
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
  begin("all_to_all", of(stream));
  std::vector<Part> parts;
  for (size_t peer = 0; peer < size; ++peer) {
    const size_t out = bytes_of(send_count[peer], send_type[peer]), in = bytes_of(recv_count[peer], recv_type[peer]);
    parts.push_back({static_cast<int>(peer), bytes_at(send_buf[peer]), out, true});
    parts.push_back({static_cast<int>(peer), bytes_at(recv_buf[peer]), in, false});
  }
  return start_exchange("all_to_all", comm, of(stream), parts);
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
