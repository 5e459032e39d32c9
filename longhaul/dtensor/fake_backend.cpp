#include "longhaul/dtensor/fake_backend.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace longhaul::dtensor {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

class DoneWork : public c10d::Work {
 public:
  DoneWork() { finish(); }
};

class FakeBackend : public c10d::Backend {
 public:
  FakeBackend(int rank, int size) : Backend(rank, size), done_(c10::make_intrusive<DoneWork>()) {}

  const std::string getBackendName() const override { return "fake"; }

  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override { return done_; }
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override { return done_; }
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override {
    return done_;
  }
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&,
                               const c10d::ReduceScatterOptions&) override {
    return done_;
  }
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override {
    return done_;
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done_; }

 private:
  WorkPtr done_;  // the same for all: it never changes
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_fake_backend(int rank, int size) {
  return c10::make_intrusive<FakeBackend>(rank, size);
}

}  // namespace longhaul::dtensor
