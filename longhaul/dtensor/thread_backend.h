// A c10d backend for ranks that are threads of one process and share its memory: data goes straight
// from the tensors of one rank to those of another. Results have the same bits on every rank and in
// every run: a reduction takes the ranks in order, in the tensor's dtype, bf16 and fp16 in fp32
// with one rounding at the end. CPU tensors only.
//
// The rank that comes last to a collective moves the data, helped by those that wait for it
// already; so a rank that computes meanwhile finds it done.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Backend;
}  // namespace c10d

namespace longhaul::dtensor {

// For tests: each collective of a group ends `latency_ms` plus the time for its bytes (the largest
// input or output of a rank) after the last rank came and the group's collective before it ended.
struct SlowLink {
  double latency_ms = 0;
  double bytes_per_second = 0;  // 0: no limit
};

struct ThreadRendezvous;

// Where the rank threads meet. One object for all of them; it may end before their groups do.
class ThreadGroup {
 public:
  explicit ThreadGroup(int size, SlowLink link = {});

  int size() const;
  // Says that the global rank `rank` is lost: all collectives, those under way and all later ones,
  // fail on all ranks with a text that names it and `message`. The first call counts.
  void abort(int rank, const std::string& message);
  // The calling rank's end of the group `name` of `global_ranks`, whose rank_in_group-th it is.
  // Does not wait for the others. A name stands for one group at a time.
  c10::intrusive_ptr<c10d::Backend> join(const std::string& name,
                                         const std::vector<int>& global_ranks, int rank_in_group);

 private:
  std::shared_ptr<ThreadRendezvous> state_;
};

}  // namespace longhaul::dtensor
