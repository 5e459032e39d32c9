// A shard filled alone equals the same part of the whole.
#include "longhaul/nn/init.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "tests/support/tensors.h"

namespace longhaul::testing {
namespace {

const CounterRng kRng(3, "model.layers.0.mlp.up_proj.weight");

at::Tensor whole(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  at::Tensor x = at::zeros(sizes, dtype);
  nn::fill_normal(x, kRng, 0.5);
  return x;
}

TEST(FillNormal, IsStdTimesTheStreamsNormals) {
  const auto x = whole({3, 5}, at::kDouble);
  for (int64_t i = 0; i < 15; ++i) {
    EXPECT_EQ(x.view(-1)[i].item<double>(), 0.5 * kRng.normal(i));
  }
}

struct Cut {
  std::vector<int64_t> sizes, shard, offsets;
};

TEST(FillNormal, ShardsEqualTheirPartOfTheWhole) {
  const Cut cuts[] = {
      {{11}, {4}, {0}},
      {{11}, {4}, {7}},
      {{7, 5}, {2, 5}, {3, 0}},  // rows, as FSDP cuts
      {{7, 5}, {7, 2}, {0, 3}},  // columns, as a row-wise linear cuts
      {{7, 5}, {3, 2}, {4, 1}},
      {{4, 3, 5}, {2, 3, 5}, {2, 0, 0}},  // experts
      {{4, 3, 5}, {4, 1, 5}, {0, 2, 0}},
      {{4, 3, 5}, {2, 2, 3}, {1, 1, 2}},
      {{4, 3, 5}, {1, 1, 1}, {3, 2, 4}},
  };
  for (const auto& [sizes, shard_sizes, offsets] : cuts) {
    at::Tensor shard = at::zeros(shard_sizes);
    nn::fill_normal(shard, kRng, 0.5, {sizes, offsets});
    at::Tensor expected = whole(sizes);
    for (size_t d = 0; d < sizes.size(); ++d) {
      expected = expected.narrow(static_cast<int64_t>(d), offsets[d], shard_sizes[d]);
    }
    EXPECT_TRUE(at::equal(shard, expected)) << ::testing::PrintToString(offsets);
  }
}

TEST(FillNormal, PiecesMakeTheWhole) {
  std::vector<at::Tensor> pieces;
  for (const auto& [begin, rows] : {std::pair{0, 3}, std::pair{3, 3}, std::pair{6, 1}}) {
    pieces.push_back(at::zeros({rows, 5}));
    nn::fill_normal(pieces.back(), kRng, 0.5, {{7, 5}, {begin, 0}});
  }
  EXPECT_TRUE(at::equal(at::cat(pieces), whole({7, 5})));
}

TEST(FillNormal, StridedShardsAndEmptyOnes) {
  at::Tensor columns = at::zeros({5, 7}).t();
  nn::fill_normal(columns, kRng, 0.5);
  EXPECT_TRUE(at::equal(columns, whole({7, 5})));
  at::Tensor none = at::zeros({0, 5});
  EXPECT_NO_THROW(nn::fill_normal(none, kRng, 0.5, {{7, 5}, {7, 0}}));
}

TEST(FillNormal, ThreadsAndDtypesDoNotMatter) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  const auto two = whole({100, 33});
  at::set_num_threads(1);
  const auto one = whole({100, 33});
  at::set_num_threads(before);
  EXPECT_TRUE(at::equal(one, two));
  EXPECT_TRUE(
      at::equal(whole({9, 4}, at::kBFloat16), whole({9, 4}, at::kDouble).to(at::kBFloat16)));
}

TEST(FillNormal, DimensionsThatDiffer) {
  at::Tensor shard = at::zeros({2, 5});
  EXPECT_THROW(nn::fill_normal(shard, kRng, 0.5, {{7}, {0}}), Error);
  at::Tensor scalar = at::zeros({});
  EXPECT_THROW(nn::fill_normal(scalar, kRng, 0.5), Error);
}

}  // namespace
}  // namespace longhaul::testing
