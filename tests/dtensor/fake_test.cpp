// One process as any rank of a world that does not exist.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <numeric>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "longhaul/dtensor/dtensor.h"
#include "longhaul/dtensor/fake_backend.h"
#include "longhaul/dtensor/world.h"
#include "longhaul/ops/distributed.h"

namespace longhaul {
namespace {

using at::Tensor;
using dtensor::CollectiveKind;
using dtensor::Communicator;
using dtensor::Placement;
using dtensor::Reduction;
using dtensor::World;

std::vector<int> ranks_of(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

TEST(Fake, LeavesOutputsAsTheyAre) {
  World world = World::fake(37, 128);
  const Communicator group = world.make_group("dp", ranks_of(128));
  EXPECT_EQ(group.rank(), 37);
  EXPECT_EQ(group.size(), 128);
  Tensor part = at::full({2}, 3.0), whole = at::full({256}, 5.0);
  group.all_gather(whole, part).wait();
  group.all_reduce(part, Reduction::kAvg).wait();
  group.reduce_scatter(part, whole, Reduction::kAvg).wait();
  group.broadcast(part, 0).wait();
  const std::vector<int64_t> rows(128, 2);
  group.all_to_all(whole, whole.clone(), rows, rows).wait();
  group.barrier();
  EXPECT_TRUE(at::equal(part, at::full({2}, 3.0)));
  EXPECT_TRUE(at::equal(whole, at::full({256}, 5.0)));
  EXPECT_EQ(world.log().records().size(), 6u);
}

TEST(Fake, TakesMetaTensors) {
  World world = World::fake(1, 4);
  const Communicator group = world.make_group("tp", ranks_of(4));
  const auto meta = at::TensorOptions().device(at::kMeta).dtype(at::kBFloat16);
  Tensor part = at::empty({1024, 7168}, meta), whole = at::empty({4096, 7168}, meta);
  group.all_gather(whole, part).wait();
  group.reduce_scatter(part, whole, Reduction::kAvg).wait();
  group.all_reduce(part, Reduction::kSum).wait();
  Tensor rows = at::empty({5, 7168}, meta);
  group.all_to_all(rows, part, {0, 5, 0, 0}, {1024, 0, 0, 0}).wait();
  Tensor flags = at::empty({8}, meta.dtype(at::kBool));
  group.broadcast(flags, 3).wait();
  EXPECT_EQ(world.log().total(CollectiveKind::kAllGather, "tp").bytes, 1024 * 7168 * 2);
  EXPECT_EQ(world.log().records().size(), 5u);
}

// On the Meta device, too, whatever stands beside a DTensor: numbers, and what our own operators
// take as they are. A rank of many is planned so.
TEST(Fake, ADTensorOfMetaPartsBesidePlainMetaTensors) {
  World world = World::fake(1, 2);
  const auto mesh = dtensor::DeviceMesh::make(world, {{"tp", 2}});
  const auto meta = at::TensorOptions().device(at::kMeta).dtype(at::kFloat);
  const Tensor x = dtensor::distribute(at::empty({4, 6}, meta), mesh, {Placement::shard(0)});
  const Tensor number = at::empty({}, meta);
  for (const Tensor& y : {x * number, number + x, at::maximum(x, number)}) {
    ASSERT_TRUE(dtensor::is_dtensor(y));
    EXPECT_EQ(dtensor::local_of(y).sizes(), (at::IntArrayRef{2, 6}));
    EXPECT_TRUE(dtensor::local_of(y).is_meta());
  }
  const Tensor ids = at::empty({3, 2}, meta.dtype(at::kLong));
  const Tensor rows = ops::distributed<Tensor(const Tensor&, const Tensor&)>("embedding")
                          .call(x.detach().set_requires_grad(true), ids);
  ASSERT_TRUE(dtensor::is_dtensor(rows));
  EXPECT_TRUE(dtensor::spec_of(rows).placements[0].is_partial());
  EXPECT_TRUE(rows.requires_grad());
}

// Ends at once and counts.
class CountingBackend : public c10d::Backend {
 public:
  CountingBackend() : Backend(/*rank=*/0, /*size=*/2) {}
  const std::string getBackendName() const override { return "counting"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    ++calls;
    return dtensor::make_fake_backend(0, 2)->allreduce(tensors, options);
  }
  int calls = 0;
};

TEST(Transports, AreChosenByTheTensorsDevice) {
  const auto host = c10::make_intrusive<CountingBackend>();
  const auto device = c10::make_intrusive<CountingBackend>();
  dtensor::CollectiveLog log;
  const Communicator both(host, device, "dp", {0, 1}, log);
  Tensor here = at::zeros({2}), there = at::empty({2}, at::device(at::kMeta));
  both.all_reduce(here, Reduction::kSum).wait();
  EXPECT_EQ(host->calls, 1);
  EXPECT_EQ(device->calls, 0);
  both.all_reduce(there, Reduction::kSum).wait();
  EXPECT_EQ(host->calls, 1);
  EXPECT_EQ(device->calls, 1);
  const Communicator one(host, {}, "dp", {0, 1}, log);
  one.all_reduce(there, Reduction::kSum).wait();
  EXPECT_EQ(host->calls, 2);
}

}  // namespace
}  // namespace longhaul
