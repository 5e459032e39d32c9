// Every collective over every transport, group size and dtype against values worked out by hand
// here, element by element.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/run_ranks.h"

namespace longhaul {
namespace {

using at::Tensor;
using dtensor::Communicator;
using dtensor::Reduction;
using dtensor::World;
using test::Transport;

constexpr std::array kDtypes = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf,
                                at::kLong,   at::kInt,   at::kByte,     at::kBool};

// A tensor whose element i is value(i), a small whole number that every dtype holds exactly.
Tensor filled(int64_t count, at::ScalarType dtype, const std::function<int64_t(int64_t)>& value) {
  Tensor tensor = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) tensor.data_ptr<int64_t>()[i] = value(i);
  return tensor.to(dtype);
}

void expect_equal(const Tensor& actual, const Tensor& expected, const std::string& what) {
  EXPECT_TRUE(at::equal(actual, expected))
      << what << ": got " << actual << ", expected " << expected;
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

class Collectives : public testing::TestWithParam<std::tuple<Transport, int>> {
 protected:
  int size() const { return std::get<1>(GetParam()); }
  // body(the group of all ranks, dtype, name of the dtype)
  void for_each_dtype(const std::function<void(Communicator&, at::ScalarType)>& body) {
    test::run_ranks(
        size(),
        [&](World& world) {
          Communicator group = world.make_group("all", all_ranks(size()));
          for (const auto dtype : kDtypes) {
            SCOPED_TRACE(fmt::format("{}, rank {}", c10::toString(dtype), world.rank()));
            body(group, dtype);
          }
        },
        {.transport = std::get<0>(GetParam())});
  }
};

INSTANTIATE_TEST_SUITE_P(All, Collectives,
                         testing::Combine(testing::Values(Transport::kThreads, Transport::kGloo),
                                          testing::Values(1, 2, 3, 4, 8)),
                         [](const auto& info) {
                           return fmt::format("{}_{}", test::name_of(std::get<0>(info.param)),
                                              std::get<1>(info.param));
                         });

// Element i of rank r, also of what is sent to rank t: distinct within a test, at most 127.
int64_t value_of(int64_t rank, int64_t i) { return 1 + rank * 7 + i % 7; }

TEST_P(Collectives, AllGather) {
  for_each_dtype([&](Communicator& group, at::ScalarType dtype) {
    for (const int64_t count : {0, 1, 5}) {
      const Tensor input =
          filled(count, dtype, [&](int64_t i) { return value_of(group.rank(), i); });
      Tensor output = at::zeros({count * group.size()}, dtype);
      group.all_gather(output, input).wait();
      expect_equal(
          output,
          filled(count * group.size(), dtype,
                 [&](int64_t i) { return value_of(i / std::max<int64_t>(count, 1), i % count); }),
          "all_gather");
    }
  });
}

TEST_P(Collectives, AllGatherFromItsOwnOutput) {
  for_each_dtype([&](Communicator& group, at::ScalarType dtype) {
    Tensor output = at::zeros({3 * group.size(), 2}, dtype);
    Tensor own = output.narrow(0, 3 * group.rank(), 3);
    own.copy_(filled(6, dtype, [&](int64_t i) { return value_of(group.rank(), i); }).view({3, 2}));
    group.all_gather(output, own).wait();
    expect_equal(output.view(-1),
                 filled(6 * group.size(), dtype, [&](int64_t i) { return value_of(i / 6, i % 6); }),
                 "all_gather in place");
  });
}

// The reduction of value(r) over the ranks r.
int64_t reduced(int size, Reduction reduction, const std::function<int64_t(int)>& value) {
  int64_t total = value(0);
  for (int rank = 1; rank < size; ++rank) {
    if (reduction == Reduction::kMax) {
      total = std::max(total, value(rank));
    } else if (reduction == Reduction::kMin) {
      total = std::min(total, value(rank));
    } else {
      total += value(rank);
    }
  }
  return total;
}

// Ranks' values in no order and small: the sum over 8 ranks is at most 8 * 15, exact in bf16.
int64_t mixed_value(int rank, int64_t i) { return (rank * 5 + i * 3) % 16; }

bool knows(at::ScalarType dtype, Reduction reduction) {
  if (dtype == at::kBool) return reduction == Reduction::kMax || reduction == Reduction::kMin;
  return reduction != Reduction::kAvg || at::isFloatingType(dtype);
}

constexpr std::array kReductions = {Reduction::kSum, Reduction::kAvg, Reduction::kMax,
                                    Reduction::kMin};

// What `count` elements from `begin` reduce to. The average of whole numbers is rounded once from
// fp64, as a division of the exact sum in any of these dtypes is.
Tensor expected_reduction(int size, at::ScalarType dtype, Reduction reduction, int64_t begin,
                          int64_t count) {
  Tensor total = filled(count, at::kLong, [&](int64_t i) {
    return reduced(size, reduction, [&](int rank) {
      const int64_t value = mixed_value(rank, begin + i);
      return dtype == at::kBool ? value % 2 : value;
    });
  });
  if (reduction == Reduction::kAvg) total = total.to(at::kDouble) / size;
  return total.to(dtype);
}

Tensor mixed(int rank, int64_t count, at::ScalarType dtype) {
  return filled(count, dtype, [&](int64_t i) {
    const int64_t value = mixed_value(rank, i);
    return dtype == at::kBool ? value % 2 : value;
  });
}

TEST_P(Collectives, AllReduce) {
  for_each_dtype([&](Communicator& group, at::ScalarType dtype) {
    for (const Reduction reduction : kReductions) {
      if (!knows(dtype, reduction)) continue;
      for (const int64_t count : {0, 1, 7, 3000}) {
        Tensor tensor = mixed(group.rank(), count, dtype);
        group.all_reduce(tensor, reduction).wait();
        expect_equal(tensor, expected_reduction(group.size(), dtype, reduction, 0, count),
                     "all_reduce");
      }
    }
  });
}

TEST_P(Collectives, ReduceScatter) {
  for_each_dtype([&](Communicator& group, at::ScalarType dtype) {
    for (const Reduction reduction : kReductions) {
      if (!knows(dtype, reduction)) continue;
      for (const int64_t count : {0, 1, 1100}) {
        const Tensor input = mixed(group.rank(), count * group.size(), dtype);
        Tensor output = at::zeros({count}, dtype);
        group.reduce_scatter(output, input, reduction).wait();
        expect_equal(
            output, expected_reduction(group.size(), dtype, reduction, count * group.rank(), count),
            "reduce_scatter");
        expect_equal(input, mixed(group.rank(), count * group.size(), dtype), "its input");
      }
    }
  });
}

// Rows from rank `from` to rank `to`: uneven, with zeros, and nothing from or to the last rank of
// three or more.
int64_t rows_between(int size, int from, int to) {
  if (size > 2 && (from == size - 1 || to == size - 1)) return 0;
  return (from * 2 + to) % 3;
}

TEST_P(Collectives, AllToAll) {
  for_each_dtype([&](Communicator& group, at::ScalarType dtype) {
    const int size = group.size(), rank = group.rank();
    std::vector<int64_t> to_others, from_others;
    std::vector<Tensor> sent, expected;
    const auto rows = [&](int from, int to) {
      return filled(2 * rows_between(size, from, to), dtype,
                    [&](int64_t i) { return (from * 11 + to * 3 + i) % 128; })
          .view({-1, 2});
    };
    for (int other = 0; other < size; ++other) {
      to_others.push_back(rows_between(size, rank, other));
      from_others.push_back(rows_between(size, other, rank));
      sent.push_back(rows(rank, other));
      expected.push_back(rows(other, rank));
    }
    const Tensor input = at::cat(sent), wanted = at::cat(expected);
    Tensor output = at::zeros_like(wanted);
    group.all_to_all(output, input, from_others, to_others).wait();
    expect_equal(output, wanted, "all_to_all");
  });
}

TEST_P(Collectives, AllToAllOfNothingAtAll) {
  for_each_dtype([&](Communicator& group, at::ScalarType dtype) {
    const std::vector<int64_t> none(group.size(), 0);
    Tensor output = at::empty({0, 4}, dtype);
    group.all_to_all(output, at::empty({0, 4}, dtype), none, none).wait();
    const std::vector<int64_t> one(group.size(), 1);
    Tensor without_columns = at::empty({group.size(), 0}, dtype);
    group.all_to_all(without_columns, without_columns.clone(), one, one).wait();
  });
}

TEST_P(Collectives, Broadcast) {
  for_each_dtype([&](Communicator& group, at::ScalarType dtype) {
    for (int root = 0; root < group.size(); ++root) {
      for (const int64_t count : {0, 1, 6}) {
        Tensor tensor = filled(count, dtype, [&](int64_t i) { return value_of(group.rank(), i); });
        group.broadcast(tensor, root).wait();
        expect_equal(tensor, filled(count, dtype, [&](int64_t i) { return value_of(root, i); }),
                     "broadcast");
      }
    }
  });
}

// Nobody leaves a barrier before all have come.
TEST_P(Collectives, Barrier) {
  std::atomic<int> arrived{0};
  test::run_ranks(size(),
                  [&](World& world) {
                    const Communicator group = world.make_group("all", all_ranks(size()));
                    for (int round = 1; round <= 3; ++round) {
                      ++arrived;
                      group.barrier();
                      EXPECT_GE(arrived, round * size());
                    }
                  },
                  {.transport = std::get<0>(GetParam())});
}

// Several under way at once, waited for in the other order.
TEST_P(Collectives, ManyAtOnce) {
  for_each_dtype([&](Communicator& group, at::ScalarType dtype) {
    constexpr int kMany = 6;
    std::vector<Tensor> inputs, outputs;
    std::vector<dtensor::Pending> pending;
    for (int k = 0; k < kMany; ++k) {
      inputs.push_back(filled(k + 1, dtype, [&](int64_t i) { return value_of(group.rank(), i); }));
      outputs.push_back(at::zeros({(k + 1) * group.size()}, dtype));
    }
    for (int k = 0; k < kMany; ++k) pending.push_back(group.all_gather(outputs[k], inputs[k]));
    for (int k = kMany - 1; k >= 0; --k) {
      pending[k].wait();
      expect_equal(outputs[k],
                   filled((k + 1) * group.size(), dtype,
                          [&](int64_t i) { return value_of(i / (k + 1), i % (k + 1)); }),
                   "all_gather among others");
    }
  });
}

// Rows and columns of a 2 x 2 mesh, at the same time and with the same shapes.
TEST(SubGroups, DoNotMix) {
  for (const Transport transport : {Transport::kThreads, Transport::kGloo}) {
    test::run_ranks(4,
                    [&](World& world) {
                      const int row = world.rank() / 2, column = world.rank() % 2;
                      const Communicator along_row = world.make_group("x", {row * 2, row * 2 + 1});
                      const Communicator along_column = world.make_group("y", {column, column + 2});
                      const Communicator again = world.make_group("x", {row * 2, row * 2 + 1});
                      Tensor a = at::full({1}, world.rank()), b = a.clone(), c = a.clone();
                      auto first = along_row.all_reduce(a, Reduction::kSum);
                      auto second = along_column.all_reduce(b, Reduction::kSum);
                      again.all_reduce(c, Reduction::kMax).wait();
                      second.wait();
                      first.wait();
                      EXPECT_EQ(a.item<int64_t>(), row * 4 + 1);
                      EXPECT_EQ(b.item<int64_t>(), column * 2 + 2);
                      EXPECT_EQ(c.item<int64_t>(), row * 2 + 1);
                    },
                    {.transport = transport});
  }
}

// The group's order is the order given, not that of the global ranks.
TEST(SubGroups, RanksStandInTheOrderGiven) {
  test::run_ranks(3, [](World& world) {
    const Communicator group = world.make_group("pp", {2, 0, 1});
    EXPECT_EQ(group.rank(), (world.rank() + 1) % 3);
    EXPECT_EQ(group.global_rank(), world.rank());
    Tensor output = at::zeros({3}, at::kLong);
    group.all_gather(output, at::full({1}, world.rank())).wait();
    expect_equal(output, at::tensor({2, 0, 1}, at::kLong), "all_gather");
  });
}

}  // namespace
}  // namespace longhaul
