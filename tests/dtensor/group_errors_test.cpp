// What a rank is told when a collective cannot be: wrong arguments, ranks that disagree, fail or
// never come.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "longhaul/dtensor/fake_backend.h"
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
using test::error_of;
using test::Transport;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Rank 5 in a group of three that does not exist: arguments are checked before anything moves.
class Arguments : public ::testing::Test {
 protected:
  World world_ = World::fake(5, 8);
  Communicator group_ = world_.make_group("tp", {3, 5, 7});
  Tensor four_ = at::zeros({4}), twelve_ = at::zeros({12});

  template <typename Action>
  void expect_error(Action&& action, const std::string& operation, const std::string& text) {
    EXPECT_THAT(error_of<Error>(action),
                AllOf(HasSubstr("rank 5: " + operation + " on axis tp"), HasSubstr(text)));
    EXPECT_TRUE(world_.log().records().empty()) << "a collective that never started is logged";
  }
};

TEST_F(Arguments, Sizes) {
  expect_error([&] { (void)group_.all_gather(four_, four_); }, "all_gather",
               "output has 4 elements, expected 12 = 3 ranks x 4 of the input");
  expect_error([&] { (void)group_.reduce_scatter(four_, four_, Reduction::kSum); },
               "reduce_scatter", "input has 4 elements, expected 12 = 3 ranks x 4 of the output");
}

TEST_F(Arguments, Rows) {
  expect_error(
      [&] {
        (void)group_.all_to_all(four_, four_, {1, 3}, {1, 1, 2});
      },
      "all_to_all", "output_rows has 2 entries, expected one a rank, 3");
  expect_error(
      [&] {
        (void)group_.all_to_all(four_, four_, {1, 1, 2}, {1, 1, 3});
      },
      "all_to_all", "input_rows sum to 5, but input has 4 rows");
  expect_error(
      [&] {
        (void)group_.all_to_all(four_, four_, {1, 5, -2}, {1, 1, 2});
      },
      "all_to_all", "negative entry -2");
  Tensor wide = at::zeros({4, 2}), scalar = at::zeros({});
  expect_error(
      [&] {
        (void)group_.all_to_all(wide, four_, {1, 1, 2}, {1, 1, 2});
      },
      "all_to_all", "output is 4 x 2, input is 4; their dims after the first must agree");
  expect_error(
      [&] {
        (void)group_.all_to_all(scalar, four_, {1, 0, 0}, {1, 1, 2});
      },
      "all_to_all", "output is a scalar");
}

TEST_F(Arguments, Dtypes) {
  Tensor complex = at::zeros({2}, at::kComplexFloat), whole = at::zeros({2}, at::kInt);
  Tensor flags = at::zeros({2}, at::kBool);
  expect_error([&] { (void)group_.broadcast(complex, 0); }, "broadcast",
               "dtype ComplexFloat; expected fp64, fp32");
  expect_error([&] { (void)group_.all_gather(twelve_, at::zeros({4}, at::kInt)); }, "all_gather",
               "output is Float on cpu, input is Int on cpu; they must agree");
  expect_error([&] { (void)group_.all_reduce(whole, Reduction::kAvg); }, "all_reduce",
               "an average of Int");
  expect_error([&] { (void)group_.all_reduce(flags, Reduction::kSum); }, "all_reduce",
               "a sum of bool");
}

TEST_F(Arguments, Layout) {
  Tensor transposed = at::zeros({2, 6}).t(), none;
  expect_error([&] { (void)group_.all_reduce(transposed, Reduction::kSum); }, "all_reduce",
               "(6 x 2) is not contiguous; call contiguous()");
  expect_error([&] { (void)group_.all_reduce(none, Reduction::kSum); }, "all_reduce",
               "is undefined");
  expect_error([&] { (void)group_.broadcast(four_, 3); }, "broadcast",
               "root 3 is not a rank of a group of 3");
}

TEST_F(Arguments, Groups) {
  const std::string expected = "expected distinct ranks of 0 to 7, this one among them";
  for (const std::vector<int>& ranks : {std::vector<int>{}, {0, 1}, {5, 5}, {5, 8}, {-1, 5}}) {
    EXPECT_THAT(error_of<Error>([&] { world_.make_group("ep", ranks); }),
                AllOf(HasSubstr("rank 5: the group of axis ep"), HasSubstr(expected)));
  }
  EXPECT_THAT(error_of<Error>([] { World::fake(4, 4); }),
              HasSubstr("rank 4 is not in a world of 4"));
  EXPECT_THAT(error_of<Error>([&] { group_.set_timeout(milliseconds(0)); }),
              HasSubstr("must be positive"));
}

// A transport of a device that, like NCCL, has one limit for all collectives.
struct LimitedBackend : c10d::Backend {
  LimitedBackend() : Backend(0, 2) {}
  const std::string getBackendName() const override { return "limited"; }
  void setTimeout(milliseconds timeout) override { limit = timeout; }
  milliseconds limit{0};
};

TEST(Limits, TheTransportOfADeviceIsGivenThem) {
  const auto device = c10::make_intrusive<LimitedBackend>();
  dtensor::CollectiveLog log;
  Communicator group(dtensor::make_fake_backend(0, 2), device, "tp", {0, 1}, log);
  for (const milliseconds limit : {milliseconds(300), milliseconds(70)}) {
    group.set_timeout(limit);
    EXPECT_EQ(device->limit, limit);
  }
}

// The error of each rank; every rank must have one.
std::vector<std::string> errors_of_ranks(int size,
                                         const std::function<void(World&, Communicator&)>& body,
                                         const test::RankOptions& options = {}) {
  std::vector<std::string> errors(size);
  std::vector<int> ranks(size);
  for (int rank = 0; rank < size; ++rank) ranks[rank] = rank;
  std::barrier all_failed(size);  // a rank that ended earlier would close its connections
  test::run_ranks(
      size,
      [&](World& world) {
        Communicator group = world.make_group("cp", ranks);
        errors[world.rank()] = error_of<CollectiveError>([&] { body(world, group); });
        all_failed.arrive_and_wait();
      },
      options);
  return errors;
}

TEST(Disagreement, BothOperationsAreNamed) {
  const auto errors = errors_of_ranks(2, [](World& world, Communicator& group) {
    Tensor tensor = at::zeros({6});
    if (world.rank() == 0) {
      group.all_reduce(tensor, Reduction::kMax).wait();
    } else {
      group.broadcast(tensor, 1).wait();
    }
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THAT(errors[rank], AllOf(HasSubstr(fmt::format("rank {}: ", rank)),
                                    HasSubstr("#1 on axis cp (ranks 0, 1) failed"),
                                    HasSubstr("rank 0 called all_reduce (max) of 6 float32"),
                                    HasSubstr("rank 1 called broadcast from 1 of 6 float32")));
  }
}

TEST(Disagreement, SizesDtypesAndReductionsAreNamed) {
  const auto disagree = [](const Tensor& of_0, const Tensor& of_1, Reduction reduction_of_1) {
    return errors_of_ranks(2, [&](World& world, Communicator& group) {
      Tensor tensor = world.rank() == 0 ? of_0 : of_1;
      group.all_reduce(tensor, world.rank() == 0 ? Reduction::kSum : reduction_of_1).wait();
    })[0];
  };
  EXPECT_THAT(disagree(at::zeros({6}), at::zeros({7}), Reduction::kSum),
              AllOf(HasSubstr("of 6 float32"), HasSubstr("of 7 float32")));
  EXPECT_THAT(disagree(at::zeros({6}), at::zeros({6}, at::kDouble), Reduction::kSum),
              AllOf(HasSubstr("of 6 float32"), HasSubstr("of 6 float64")));
  EXPECT_THAT(disagree(at::zeros({6}), at::zeros({6}), Reduction::kMin),
              AllOf(HasSubstr("(sum) of 6"), HasSubstr("(min) of 6")));
}

TEST(Disagreement, RowsOfAnAllToAllAreNamed) {
  const auto errors = errors_of_ranks(2, [](World& world, Communicator& group) {
    Tensor input = at::zeros({5, 2}), output = at::zeros({world.rank() == 0 ? 3 : 5, 2});
    // Rank 0 sends 4 rows of 2 to rank 1, which expects 3.
    if (world.rank() == 0) {
      group.all_to_all(output, input, {1, 2}, {1, 4}).wait();
    } else {
      group.all_to_all(output, input, {3, 2}, {3, 2}).wait();
    }
  });
  EXPECT_THAT(errors[1], HasSubstr("rank 0 sends 8 elements to rank 1, which expects 6"));
  EXPECT_EQ(errors[0].substr(6), errors[1].substr(6));
}

TEST(Disagreement, TheGroupGoesOnAfterIt) {
  test::run_ranks(2, [](World& world) {
    const Communicator group = world.make_group("cp", {0, 1});
    Tensor tensor = at::ones({2 + world.rank()}), same = at::ones({2});
    error_of<CollectiveError>([&] { group.all_reduce(tensor, Reduction::kSum).wait(); });
    group.all_reduce(same, Reduction::kSum).wait();
    EXPECT_EQ(same.sum().item<double>(), 4);
    EXPECT_EQ(world.log().records().at(0).end_ns, 0) << "a failure has no end";
  });
}

TEST(Absence, ThreadsNameWhoIsMissing) {
  const auto errors = errors_of_ranks(4, [](World& world, Communicator& group) {
    group.set_timeout(milliseconds(50));
    if (world.rank() == 1 || world.rank() == 3) throw CollectiveError("stayed away");
    group.barrier();
  });
  for (const int rank : {0, 2}) {
    EXPECT_THAT(errors[rank], HasSubstr(fmt::format("rank {}: barrier #1 on axis cp", rank)));
    EXPECT_THAT(errors[rank], HasSubstr("ranks 1, 3 did not arrive within 50 ms"));
  }
}

TEST(Absence, ALatecomerIsToldToo) {
  std::barrier gave_up(2);
  const auto errors = errors_of_ranks(2, [&](World& world, Communicator& group) {
    group.set_timeout(milliseconds(20));
    if (world.rank() == 1) gave_up.arrive_and_wait();
    try {
      group.barrier();
    } catch (...) {
      if (world.rank() == 0) gave_up.arrive_and_wait();
      throw;
    }
  });
  EXPECT_THAT(errors[1], HasSubstr("rank 1 did not arrive within 20 ms"));
}

TEST(Absence, GlooNamesTheOperationAndWhoIsSilent) {
  const auto errors = errors_of_ranks(3,
                                      [](World& world, Communicator& group) {
                                        Tensor tensor = at::ones({1000});
                                        group.all_reduce(tensor, Reduction::kSum).wait();
                                        group.set_timeout(milliseconds(200));
                                        if (world.rank() == 2) throw CollectiveError("stayed away");
                                        group.all_reduce(tensor, Reduction::kSum).wait();
                                      },
                                      {.transport = Transport::kGloo});
  for (const int rank : {0, 1}) {
    EXPECT_THAT(errors[rank],
                AllOf(HasSubstr(fmt::format("rank {}: all_reduce #2 on axis cp", rank)),
                      HasSubstr("nothing was heard of rank 2"), Not(HasSubstr("frame #"))));
  }
}

TEST(Absence, GlooNamesWhoIsElsewhere) {
  const auto errors = errors_of_ranks(
      2,
      [](World& world, Communicator& group) {
        group.set_timeout(milliseconds(200));
        Tensor tensor = at::ones({1000});
        if (world.rank() == 0) {
          group.barrier();
        } else {
          (void)group.all_to_all(tensor, tensor.clone(), {500, 500}, {500, 500}).wait();
        }
      },
      {.transport = Transport::kGloo});
  EXPECT_THAT(errors[0], HasSubstr("all ranks report; rank 1 failed in all_to_all #1"));
  EXPECT_THAT(errors[1], HasSubstr("all ranks report; rank 0 failed in barrier #1"));
}

// However the others hear of it, the cause is what run_ranks throws.
TEST(Failure, TheFirstCauseIsThrown) {
  for (const Transport transport : {Transport::kThreads, Transport::kGloo}) {
    const std::string error = error_of<Error>([&] {
      test::run_ranks(4,
                      [](World& world) {
                        const Communicator group = world.make_group("dp", {0, 1, 2, 3});
                        if (world.rank() == 2) throw std::runtime_error("the disk is full");
                        group.barrier();
                      },
                      {.transport = transport});
    });
    EXPECT_EQ(error, "rank 2: the disk is full") << test::name_of(transport);
  }
}

TEST(Failure, OthersAreTold) {
  std::vector<std::string> errors(3);
  error_of<Error>([&] {
    test::run_ranks(3, [&](World& world) {
      const Communicator group = world.make_group("dp", {0, 1, 2});
      if (world.rank() == 1) throw std::runtime_error("boom");
      errors[world.rank()] = error_of<CollectiveError>([&] {
        for (;;) group.barrier();
      });
    });
  });
  for (const int rank : {0, 2}) EXPECT_THAT(errors[rank], HasSubstr("rank 1 failed: boom"));
}

// A collective under way when an exception takes its rank must not keep that rank until the time
// limit: the other rank comes only after the unwinding.
TEST(Failure, APendingCollectiveIsGivenUp) {
  std::barrier unwound(2);
  const std::string error = error_of<Error>([&] {
    test::run_ranks(2, [&](World& world) {
      const Communicator group = world.make_group("dp", {0, 1});
      Tensor tensor = at::ones({3});
      if (world.rank() == 0) {
        try {
          auto pending = group.all_reduce(tensor, Reduction::kSum);
          throw std::runtime_error("boom");
        } catch (const std::runtime_error&) {
          unwound.arrive_and_wait();
          throw;
        }
      }
      unwound.arrive_and_wait();
      EXPECT_THAT(
          error_of<CollectiveError>([&] { group.all_reduce(tensor, Reduction::kSum).wait(); }),
          HasSubstr("rank 0 gave it up"));
    });
  });
  EXPECT_EQ(error, "rank 0: boom");
}

TEST(Failure, ThreadsRefuseOtherDevices) {
  const auto errors = errors_of_ranks(2, [](World&, Communicator& group) {
    Tensor meta = at::empty({2}, at::TensorOptions().device(at::kMeta));
    (void)group.all_reduce(meta, Reduction::kSum);
  });
  EXPECT_THAT(errors[0], HasSubstr("ranks as threads exchange CPU tensors, got meta"));
}

}  // namespace
}  // namespace longhaul
