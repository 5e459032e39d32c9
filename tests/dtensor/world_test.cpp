// Who the ranks are, groups and time limits.
#include "longhaul/dtensor/world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tests/support/run_ranks.h"
#include "tests/support/temp_folder.h"

namespace longhaul {
namespace {

using at::Tensor;
using dtensor::CollectiveError;
using dtensor::Communicator;
using dtensor::Reduction;
using dtensor::World;
using std::chrono::milliseconds;

TEST(World, OfOneRank) {
  World world = World::single();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.backend(), "single");
  const Communicator group = world.make_group("tp", {0});
  EXPECT_EQ(group.size(), 1);
  EXPECT_EQ(group.axis(), "tp");
  const Tensor input = at::arange(6).view({3, 2});
  Tensor output = at::zeros_like(input);
  group.all_to_all(output, input, {3}, {3}).wait();
  EXPECT_TRUE(at::equal(output, input));
  output.zero_();
  group.reduce_scatter(output, input, Reduction::kSum).wait();
  EXPECT_TRUE(at::equal(output, input));
}

TEST(World, KnowsItsRankAndTransport) {
  for (const auto transport : {test::Transport::kThreads, test::Transport::kGloo}) {
    std::atomic<int> sum{0};
    test::run_ranks(3,
                    [&](World& world) {
                      EXPECT_EQ(world.size(), 3);
                      EXPECT_EQ(world.backend(), test::name_of(transport));
                      EXPECT_EQ(at::get_num_threads(), 1);
                      sum += 1 << world.rank();
                    },
                    {.transport = transport});
    EXPECT_EQ(sum, 7);
  }
}

// Autograd sees no collective, whatever moved the data.
TEST(World, CollectivesLeaveVersionCountersAlone) {
  for (const auto transport : {test::Transport::kThreads, test::Transport::kGloo}) {
    test::run_ranks(2,
                    [](World& world) {
                      const Communicator group = world.make_group("dp", {0, 1});
                      Tensor tensor = at::ones({2}).requires_grad_();
                      const auto version = tensor._version();
                      group.all_reduce(tensor, Reduction::kAvg).wait();
                      group.broadcast(tensor, 1).wait();
                      EXPECT_EQ(tensor._version(), version);
                      EXPECT_FALSE(tensor.grad_fn());
                    },
                    {.transport = transport});
  }
}

TEST(World, ATimeLimitHoldsForGroupsThatAreThere) {
  test::run_ranks(2, [](World& world) {
    const Communicator group = world.make_group("dp", {0, 1});
    world.set_timeout(milliseconds(30));
    const Communicator later = world.make_group("dp", {0, 1});
    if (world.rank() == 1) return;
    for (const Communicator& each : {group, later}) {
      EXPECT_THAT(test::error_of<CollectiveError>([&] { each.barrier(); }),
                  ::testing::HasSubstr("rank 1 did not arrive within 30 ms"));
    }
  });
}

TEST(World, AGroupThatDoesNotFormIsNamed) {
  const std::string error = test::error_of<Error>([] {
    test::run_ranks(2,
                    [](World& world) {
                      if (world.rank() == 0) world.make_group("ep", {0, 1});
                    },
                    {.transport = test::Transport::kGloo, .timeout = milliseconds(300)});
  });
  EXPECT_THAT(error, ::testing::HasSubstr("the group of axis ep (ranks 0, 1) did not form"));
}

// As the store of a rank 0 that is stopped: it takes the question and never answers.
class SilentStore : public c10d::Store {
 public:
  c10::intrusive_ptr<Store> clone() override { return c10::make_intrusive<SilentStore>(); }
  void set(const std::string&, const std::vector<uint8_t>&) override { wait_for_ever(); }
  std::vector<uint8_t> get(const std::string&) override { wait_for_ever(); }
  int64_t add(const std::string&, int64_t) override { wait_for_ever(); }
  bool deleteKey(const std::string&) override { wait_for_ever(); }
  bool check(const std::vector<std::string>&) override { wait_for_ever(); }
  int64_t getNumKeys() override { wait_for_ever(); }
  void wait(const std::vector<std::string>&) override { wait_for_ever(); }
  void wait(const std::vector<std::string>&, const milliseconds&) override { wait_for_ever(); }

 private:
  [[noreturn]] static void wait_for_ever() {
    while (true) ::pause();
  }
};

TEST(World, AStoreThatDoesNotAnswerHoldsNoGroupUpForEver) {
  World world = World::gloo_threads(c10::make_intrusive<SilentStore>(), 1, 2);
  world.set_timeout(milliseconds(100));
  EXPECT_THAT(test::error_of<CollectiveError>([&] {
                world.make_group("ep", {0, 1});
              }),
              ::testing::AllOf(
                  ::testing::HasSubstr(
                      "rank 1: the group of axis ep (ranks 0, 1) did not form: nothing was heard"),
                  ::testing::HasSubstr("rank 0 of all ranks may hang")));
}

TEST(World, RanksMustAgreeOnWhoIsInAGroup) {
  dtensor::ThreadGroup group(3);
  (void)group.join("a", {0, 1}, 0);
  const auto held = group.join("b", {0, 1}, 0);
  EXPECT_THAT(test::error_of<Error>([&] {
                group.join("b", {0, 2}, 1);
              }),
              ::testing::HasSubstr("group b is of ranks 0, 1 for one rank and 0, 2 for 2"));
}

}  // namespace
}  // namespace longhaul
