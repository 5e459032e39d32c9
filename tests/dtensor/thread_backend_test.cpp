// What ranks as threads promise beyond right values: the same bits whoever comes when, bf16 rounded
// once, progress without anybody waiting, and a link as slow as asked for.
#include "longhaul/dtensor/thread_backend.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cmath>
#include <limits>

#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

namespace longhaul {
namespace {

using at::Tensor;
using dtensor::Communicator;
using dtensor::Reduction;
using dtensor::World;

// The sum that the ranks must find: in rank order, in fp32 or wider, rounded once.
Tensor sum_in_order(const std::vector<Tensor>& inputs) {
  const auto wide = inputs[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor total = inputs[0].to(wide);
  for (size_t rank = 1; rank < inputs.size(); ++rank) total = total + inputs[rank].to(wide);
  return total.to(inputs[0].scalar_type());
}

TEST(ThreadBackend, SumsHaveTheSameBitsInAnyOrderOfArrival) {
  constexpr int kSize = 5;
  constexpr int64_t kCount = 4099;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    std::vector<Tensor> inputs;
    for (int rank = 0; rank < kSize; ++rank) {
      inputs.push_back(testing::normal({kCount}, rank + 1, 1.0, dtype));
    }
    const Tensor expected = sum_in_order(inputs);
    for (int start = 0; start < kSize; ++start) {
      std::atomic<int> turn{0};  // the ranks start in the order start, start + 1, ...
      test::run_ranks(kSize, [&](World& world) {
        const Communicator group = world.make_group("dp", {0, 1, 2, 3, 4});
        const int place = (world.rank() - start + kSize) % kSize;
        Tensor tensor = inputs[world.rank()].clone();
        for (int now; (now = turn) != place;) turn.wait(now);
        auto pending = group.all_reduce(tensor, Reduction::kSum);
        ++turn;
        turn.notify_all();
        pending.wait();
        EXPECT_TRUE(at::equal(tensor, expected)) << c10::toString(dtype) << ", first " << start;
      });
    }
  }
}

// 256 + 1 is 256 in bf16: added one by one in it, all the ones would be lost.
TEST(ThreadBackend, Bf16IsSummedInFp32) {
  test::run_ranks(8, [](World& world) {
    const Communicator group = world.make_group("dp", {0, 1, 2, 3, 4, 5, 6, 7});
    Tensor sum = at::full({3}, world.rank() == 0 ? 256 : 1, at::kBFloat16);
    group.all_reduce(sum, Reduction::kSum).wait();
    EXPECT_EQ(sum[2].item<double>(), 264);  // 263 rounded to 8 bits
  });
}

// 263 / 3 = 87.67 is 87.5 in bf16. A sum rounded to 264 first would give 88.
TEST(ThreadBackend, Bf16AveragesAreRoundedOnce) {
  test::run_ranks(3, [](World& world) {
    const Communicator group = world.make_group("dp", {0, 1, 2});
    Tensor average = at::full({3}, std::array{256, 6, 1}[world.rank()], at::kBFloat16);
    group.all_reduce(average, Reduction::kAvg).wait();
    EXPECT_EQ(average[2].item<double>(), 87.5);
  });
}

TEST(ThreadBackend, NotANumberIsNeverLost) {
  test::run_ranks(3, [](World& world) {
    const Communicator group = world.make_group("dp", {0, 1, 2});
    for (int bad = 0; bad < 3; ++bad) {
      for (const Reduction reduction : {Reduction::kSum, Reduction::kMax, Reduction::kMin}) {
        const double own =
            world.rank() == bad ? std::numeric_limits<double>::quiet_NaN() : world.rank();
        Tensor tensor = at::full({1}, own, at::kFloat);
        group.all_reduce(tensor, reduction).wait();
        EXPECT_TRUE(std::isnan(tensor.item<double>())) << "NaN of rank " << bad;
      }
    }
  });
}

TEST(ThreadBackend, DataMovesWhileNobodyWaits) {
  constexpr int kSize = 3;
  std::barrier started(kSize);
  test::run_ranks(kSize, [&](World& world) {
    const Communicator group = world.make_group("dp", {0, 1, 2});
    const Tensor input = at::full({1000}, world.rank() + 1, at::kInt);
    Tensor output = at::zeros({3000}, at::kInt);
    auto pending = group.all_gather(output, input);
    started.arrive_and_wait();
    EXPECT_TRUE(pending.is_done());
    EXPECT_EQ(output.sum().item<int64_t>(), 6000);
    started.arrive_and_wait();
    pending.wait();
  });
}

// Lower bounds only: a loaded machine makes them no less true.
TEST(ThreadBackend, ASlowLinkTakesItsTimeOneCollectiveAfterTheOther) {
  const test::RankOptions options{.link = {.latency_ms = 20, .bytes_per_second = 1e6}};
  test::run_ranks(
      2,
      [](World& world) {
        const Communicator group = world.make_group("dp", {0, 1});
        Tensor first = at::full({10'000}, 1, at::kByte), second = first.clone();
        auto one = group.all_reduce(first, Reduction::kSum);
        auto two = group.all_reduce(second, Reduction::kSum);
        two.wait();
        EXPECT_TRUE(one.is_done());
        one.wait();
        const auto records = world.log().records();
        // 20 ms + 10 kB / (1 MB/s) each.
        EXPECT_GE(records[1].end_ns - records[0].start_ns, 60'000'000);
        EXPECT_EQ(second.sum().item<int64_t>(), 20'000);
      },
      options);
}

// A group's tensors are let go at the end of the collective, not when the last rank has waited.
TEST(ThreadBackend, HoldsNoTensorLongerThanItMust) {
  std::barrier waited(2);
  test::run_ranks(2, [&](World& world) {
    const Communicator group = world.make_group("dp", {0, 1});
    Tensor tensor = at::ones({4});
    auto pending = group.all_reduce(tensor, Reduction::kSum);
    if (world.rank() == 0) {
      pending.wait();
      EXPECT_EQ(tensor.storage().use_count(), 1u);
    }
    waited.arrive_and_wait();
    pending.wait();
  });
}

}  // namespace
}  // namespace longhaul
