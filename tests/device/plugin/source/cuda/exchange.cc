// Messages between ranks from device to device, through CUDA's memory and events of other processes. Each rank has a
// buffer that the others can read: it copies there what it sends, and they copy from there. (NCCL would refuse two ranks
// on one card.) An allocation of its own, and not the tensors: what a tensor had may be given to another while a peer
// still knows it.
#include <algorithm>
#include <cstring>

#include "../mesh.h"
#include "cuda.h"

namespace rehearsal::runtime {
namespace {

constexpr size_t kRoom = 32 << 20;

struct Hello {  // what a rank sends to each other one when the group is made
  cudaIpcMemHandle_t memory;
  cudaIpcEventHandle_t ready, taken;
  bool ok;
};
struct Side {  // of a rank: its buffer, when that is filled, and when it has copied what others sent
  char* room = nullptr;
  cudaEvent_t ready = nullptr, taken = nullptr;
};
struct Note {  // a piece of a message lies in the sender's buffer
  uint64_t offset, size;
};

struct Group {
  int device = 0;
  std::vector<Side> sides;  // by rank
  int rank = 0;
  cudaEvent_t free = nullptr;  // since when this rank's buffer can be filled again, whichever stream used it last
  ~Group() {
    if (forked() || failed(device)) return;  // a child has no device; of a peer that is gone nothing ever comes
    cudaDeviceSynchronize();  // by then the peers have read this rank's buffer: its streams have waited for them
    for (int r = 0; r < static_cast<int>(sides.size()); ++r) {
      if (sides[r].room && r != rank) cudaIpcCloseMemHandle(sides[r].room);
      if (sides[r].room && r == rank) cudaFree(sides[r].room);
      for (cudaEvent_t event : {sides[r].ready, sides[r].taken})
        if (event) cudaEventDestroy(event);
    }
    if (free) cudaEventDestroy(free);
  }
};

Hello export_side(Side* mine) {
  constexpr unsigned kFlags = cudaEventDisableTiming | cudaEventInterprocess;
  Hello hello{};
  void* room = nullptr;
  hello.ok = went_well(cudaMalloc(&room, kRoom)) && went_well(cudaEventCreateWithFlags(&mine->ready, kFlags)) &&
             went_well(cudaEventCreateWithFlags(&mine->taken, kFlags)) &&
             went_well(cudaIpcGetMemHandle(&hello.memory, room)) &&
             went_well(cudaIpcGetEventHandle(&hello.ready, mine->ready)) &&
             went_well(cudaIpcGetEventHandle(&hello.taken, mine->taken));
  mine->room = static_cast<char*>(room);
  return hello;
}

bool import_side(const Hello& hello, Side* side) {
  void* room = nullptr;
  const bool ok = hello.ok && went_well(cudaIpcOpenMemHandle(&room, hello.memory, cudaIpcMemLazyEnablePeerAccess)) &&
                  went_well(cudaIpcOpenEventHandle(&side->ready, hello.ready)) &&
                  went_well(cudaIpcOpenEventHandle(&side->taken, hello.taken));
  side->room = static_cast<char*>(room);
  return ok;
}

// One value from each rank to each other one.
template <typename T>
std::vector<T> all_of(Comm* comm, T mine) {
  std::vector<T> all(comm->size, mine);
  std::vector<Part> parts;
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank) continue;
    parts.push_back({peer, reinterpret_cast<char*>(&mine), sizeof(T), true});
    parts.push_back({peer, reinterpret_cast<char*>(&all[peer]), sizeof(T), false});
  }
  const std::string wrong = swap_messages(comm, parts);
  if (!wrong.empty()) refuse("communicator " + comm->name + ", start: " + wrong);
  return all;
}

// The pieces of messages that fit into the buffers, in rounds, until all are through. Returns what went wrong.
std::string exchange_pieces(Comm* comm, const Group& group, Stream* stream, const std::vector<Part>& parts) {
  std::vector<Part> outgoing, incoming;
  for (const Part& part : parts)
    if (part.peer != comm->rank && part.size) (part.sending ? outgoing : incoming).push_back(part);
  const size_t quota = kRoom / std::max<size_t>(outgoing.size(), 1) / 256 * 256;
  const Side& mine = group.sides[comm->rank];
  CUDA_CALL(cudaStreamWaitEvent(stream->handle, group.free, 0));
  while (!outgoing.empty() || !incoming.empty()) {
    std::vector<Note> given(outgoing.size()), got(incoming.size());
    char done = 0;
    std::vector<char> over(outgoing.size()), gone(incoming.size());
    std::vector<Part> notes, receipts, ends;
    for (size_t i = 0; i < outgoing.size(); ++i) {
      given[i] = {i * quota, std::min(quota, outgoing[i].size)};
      CUDA_CALL(cudaMemcpyAsync(mine.room + given[i].offset, outgoing[i].data, given[i].size, cudaMemcpyDeviceToDevice,
                                stream->handle));
      notes.push_back({outgoing[i].peer, reinterpret_cast<char*>(&given[i]), sizeof(Note), true});
      receipts.push_back({outgoing[i].peer, &over[i], 1, false});
      ends.push_back({outgoing[i].peer, &done, 1, true});
    }
    CUDA_CALL(cudaEventRecord(mine.ready, stream->handle));
    for (size_t i = 0; i < incoming.size(); ++i)
      notes.push_back({incoming[i].peer, reinterpret_cast<char*>(&got[i]), sizeof(Note), false});
    std::string wrong = swap_messages(comm, notes);
    if (!wrong.empty()) return wrong;
    for (size_t i = 0; i < incoming.size(); ++i) {
      const Side& theirs = group.sides[incoming[i].peer];
      if (got[i].size > incoming[i].size || got[i].offset + got[i].size > kRoom) return "a rank sends more than was asked for";
      CUDA_CALL(cudaStreamWaitEvent(stream->handle, theirs.ready, 0));
      CUDA_CALL(cudaMemcpyAsync(incoming[i].data, theirs.room + got[i].offset, got[i].size, cudaMemcpyDeviceToDevice,
                                stream->handle));
      receipts.push_back({incoming[i].peer, &done, 1, true});
      ends.push_back({incoming[i].peer, &gone[i], 1, false});
    }
    CUDA_CALL(cudaEventRecord(mine.taken, stream->handle));
    wrong = swap_messages(comm, receipts);  // a peer has recorded that it has taken, so it can be waited for
    if (!wrong.empty()) return wrong;
    for (const Part& part : outgoing) CUDA_CALL(cudaStreamWaitEvent(stream->handle, group.sides[part.peer].taken, 0));
    wrong = swap_messages(comm, ends);  // no event is recorded again that a peer has not begun to wait for
    if (!wrong.empty()) return wrong;
    const auto advance = [](std::vector<Part>& all, const std::vector<Note>& moved) {
      for (size_t i = 0; i < all.size(); ++i) {
        all[i].data += moved[i].size;
        all[i].size -= moved[i].size;
      }
      all.erase(std::remove_if(all.begin(), all.end(), [](const Part& part) { return !part.size; }), all.end());
    };
    advance(outgoing, given);
    advance(incoming, got);
  }
  CUDA_CALL(cudaEventRecord(group.free, stream->handle));
  return "";
}

}  // namespace

void prepare_group(Comm* comm) {
  auto group = std::make_shared<Group>();
  group->device = current_device();
  group->rank = comm->rank;
  group->sides.resize(comm->size);
  const std::vector<Hello> hellos = all_of(comm, export_side(&group->sides[comm->rank]));
  bool ok = hellos[comm->rank].ok && went_well(cudaEventCreateWithFlags(&group->free, cudaEventDisableTiming));
  for (int peer = 0; peer < comm->size; ++peer)
    if (peer != comm->rank) ok = import_side(hellos[peer], &group->sides[peer]) && ok;
  const std::vector<char> verdicts = all_of(comm, static_cast<char>(ok));
  if (std::count(verdicts.begin(), verdicts.end(), 1) == comm->size) comm->on_device = group;
}

bool exchange_on_device(const char* what, Comm* comm, Stream* stream, const std::vector<Part>& parts) {
  const auto group = std::static_pointer_cast<Group>(comm->on_device);
  if (!group) return false;
  if (group->device != stream->device) refuse("a collective on another device than its group was made on");
  use(stream->device);
  const double begin = now();
  std::vector<const Part*> sent, received;  // of this rank to itself
  for (const Part& part : parts)
    if (part.peer == comm->rank && part.size) (part.sending ? sent : received).push_back(&part);
  if (sent.size() != received.size()) refuse("a rank sends to itself what it does not receive");
  for (size_t i = 0; i < sent.size(); ++i) {
    if (sent[i]->data == received[i]->data) continue;
    CUDA_CALL(cudaMemcpyAsync(received[i]->data, sent[i]->data, std::min(sent[i]->size, received[i]->size),
                              cudaMemcpyDeviceToDevice, stream->handle));
  }
  const std::string wrong = exchange_pieces(comm, *group, stream, parts);
  if (!wrong.empty()) {
    fail(stream->device, text("communicator %s, rank %d of %d, %s: ", comm->name.c_str(), comm->rank, comm->size, what) + wrong);
  } else {
    origin() = {stream->number, caller()};
    record_collective(what, stream->device, begin, now(), bytes_to_others(comm, parts));
  }
  return true;
}

}  // namespace rehearsal::runtime
