// Sockets between the ranks of a communicator, in the abstract namespace: nothing is left in the file system.
#include "mesh.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace rehearsal {
namespace {

int patience_ms() { return static_cast<int>(settings().patience_s * 1000); }

sockaddr_un place(const std::string& id, int rank, socklen_t* length) {
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::string name = "rehearsal/" + id + "/" + std::to_string(rank);
  memcpy(at.sun_path + 1, name.data(), name.size());
  *length = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  return at;
}

bool whole(int fd, void* data, size_t size, bool sending) {
  char* at = static_cast<char*>(data);
  while (size) {
    ssize_t n = sending ? send(fd, at, size, MSG_NOSIGNAL) : recv(fd, at, size, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    size -= n;
  }
  return true;
}

// The ranks among `who`, for an error.
std::string ranks(const std::vector<int>& who) {
  std::string all = who.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < who.size(); ++i) all += (i ? ", " : "") + std::to_string(who[i]);
  return all;
}

std::string silent(const std::vector<int>& who) {
  return ranks(who) + text(" said nothing for %g seconds (setting patience_s)", settings().patience_s.load());
}

int connect_to(Comm* comm, int peer) {
  socklen_t length;
  sockaddr_un there = place(comm->name, peer, &length);
  for (const double until = now() + settings().patience_s; now() < until; nap(0.005)) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!connect(fd, reinterpret_cast<sockaddr*>(&there), length)) return fd;
    close(fd);
  }
  return -1;
}

// Messages with each peer that are still to be moved.
struct Queues {
  std::vector<std::deque<Part>> out, in;
  explicit Queues(int size) : out(size), in(size) {}
  short wanted(int peer) {
    while (!out[peer].empty() && !out[peer].front().size) out[peer].pop_front();
    while (!in[peer].empty() && !in[peer].front().size) in[peer].pop_front();
    return (out[peer].empty() ? 0 : POLLOUT) | (in[peer].empty() ? 0 : POLLIN);
  }
};

// Moves what can be moved now in one direction. False: the peer has gone.
bool advance(int fd, Part& part) {
  const ssize_t n = part.sending ? send(fd, part.data, part.size, MSG_NOSIGNAL | MSG_DONTWAIT)
                                 : recv(fd, part.data, part.size, MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
  if (n > 0) {
    part.data += n;
    part.size -= n;
  }
  return true;
}

}  // namespace

Comm::~Comm() {
  for (int fd : sockets)
    if (fd >= 0) close(fd);
}

std::string connect_mesh(Comm* comm) {
  comm->sockets.assign(comm->size, -1);
  socklen_t length;
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un here = place(comm->name, comm->rank, &length);
  if (bind(listener, reinterpret_cast<sockaddr*>(&here), length) || listen(listener, comm->size)) {
    close(listener);
    return std::string("no socket: ") + strerror(errno);
  }
  std::string wrong;
  for (int peer = 0; peer < comm->rank && wrong.empty(); ++peer) {
    const int fd = comm->sockets[peer] = connect_to(comm, peer);
    int32_t rank = comm->rank;
    if (fd < 0) wrong = silent({peer});
    else if (!whole(fd, &rank, sizeof rank, true)) wrong = ranks({peer}) + " has closed the connection";
  }
  for (int left = comm->size - 1 - comm->rank; left > 0 && wrong.empty(); --left) {
    pollfd ready{listener, POLLIN, 0};
    if (poll(&ready, 1, patience_ms()) <= 0) {
      std::vector<int> missing;
      for (int peer = comm->rank + 1; peer < comm->size; ++peer)
        if (comm->sockets[peer] < 0) missing.push_back(peer);
      wrong = silent(missing);
      break;
    }
    int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    int32_t rank = -1;
    if (!whole(fd, &rank, sizeof rank, false) || rank < 0 || rank >= comm->size) {
      close(fd);
      wrong = "a peer has closed the connection before it said its rank";
    } else {
      comm->sockets[rank] = fd;
    }
  }
  close(listener);
  for (int fd : comm->sockets)
    if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  return wrong;
}

size_t bytes_to_others(const Comm* comm, const std::vector<Part>& parts) {
  size_t bytes = 0;
  for (const Part& part : parts)
    if (part.sending && part.peer != comm->rank) bytes += part.size;
  return bytes;
}

std::string swap_messages(Comm* comm, std::vector<Part> parts) {
  std::lock_guard<std::mutex> lock(comm->mutex);
  Queues queues(comm->size);
  for (const Part& part : parts) (part.sending ? queues.out : queues.in)[part.peer].push_back(part);
  auto &mine = queues.out[comm->rank], &own = queues.in[comm->rank];
  if (mine.size() != own.size()) return "a rank sends to itself what it does not receive";
  for (size_t i = 0; i < mine.size(); ++i) memmove(own[i].data, mine[i].data, std::min(own[i].size, mine[i].size));
  mine.clear();
  own.clear();
  for (;;) {
    std::vector<pollfd> waits;
    std::vector<int> who;
    for (int peer = 0; peer < comm->size; ++peer) {
      if (short events = queues.wanted(peer)) {
        waits.push_back({comm->sockets[peer], events, 0});
        who.push_back(peer);
      }
    }
    if (waits.empty()) return "";
    const int ready = poll(waits.data(), waits.size(), patience_ms());
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return silent(who);
    for (size_t i = 0; i < waits.size(); ++i) {
      for (bool sending : {true, false}) {
        auto& queue = (sending ? queues.out : queues.in)[who[i]];
        if (queue.empty() || !(waits[i].revents & (sending ? POLLOUT : POLLIN | POLLHUP | POLLERR))) continue;
        if (!advance(waits[i].fd, queue.front())) return ranks({who[i]}) + " has closed the connection: its process has ended";
      }
    }
  }
}

std::string exchange(const char* what, Comm* comm, std::vector<Part> parts, int device) {
  const double begin = now();
  const size_t bytes = bytes_to_others(comm, parts);
  const std::string wrong = swap_messages(comm, std::move(parts));
  if (!wrong.empty()) return wrong;
  runtime::occupy_link(Way::CCL, device, bytes, begin);
  record_collective(what, device, begin, now(), bytes);
  return "";
}

}  // namespace rehearsal
