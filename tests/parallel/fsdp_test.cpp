// Data parallelism on a toy: values and gradients against one rank, what is in memory when, and
// what is communicated when.
#include "longhaul/parallel/fsdp.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/parallel/parallel_dims.h"
#include "tests/parallel/ranks_of_model.h"
#include "tests/parallel/toy_model.h"
#include "tests/support/run_ranks.h"

namespace longhaul::testing {
namespace {

using parallel::Fsdp;
using Gradients = std::map<std::string, at::Tensor>;

// What `rank_rows[rank]` gives, a micro-batch each; the sum of outputs squared is the loss.
Gradients train(ToyModel& model, Fsdp& fsdp, const std::vector<int>& rows,
                at::ScalarType dtype = at::kDouble) {
  for (size_t i = 0; i < rows.size(); ++i) {
    fsdp.begin_pass(i + 1 == rows.size());
    const at::Tensor y = model.forward(toy_input(rows[i], dtype));
    torch::autograd::backward({y.to(at::kDouble).square().sum()}, {});
    fsdp.end_pass();
  }
  Gradients gradients;
  for (const auto& p : model.parameters()) {
    if (!p.tensor->grad().defined()) continue;
    gradients[p.name] = fsdp.whole_of(p, p.tensor->grad());
  }
  return gradients;
}

Gradients on_one_rank(const std::vector<int>& rows, at::ScalarType dtype = at::kDouble,
                      at::ScalarType kept = at::kDouble) {
  ToyModel model(3, {.dtype = kept});
  Fsdp none;
  fill(model, none);
  return train(model, none, rows, dtype);
}

void expect_equal(const Gradients& actual, const Gradients& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, value] : expected) {
    ASSERT_EQ(actual.count(name), 1u) << name;
    EXPECT_LE(relative_to_max(actual.at(name), value), tolerance) << name;
  }
}

struct Layout {
  int replicate, shard;
  bool reshard;
};

class ToyLayouts : public ::testing::TestWithParam<Layout> {};

// Up to 7 ranks share 3 and 5 rows: pieces are short or empty. Each rank has two micro-batches.
TEST_P(ToyLayouts, GradientsAreThoseOfOneRank) {
  const auto [replicate, shard, reshard] = GetParam();
  std::vector<int> all_rows;
  for (int row = 0; row < 2 * replicate * shard; ++row) all_rows.push_back(row);
  const auto expected = on_one_rank(all_rows);
  test::run_ranks(replicate * shard, [&](dtensor::World& world) {
    const auto mesh = dtensor::DeviceMesh::make(
        world, {{"dp_replicate", GetParam().replicate}, {"fsdp", GetParam().shard}});
    ToyModel model(3, {.dtype = at::kDouble, .device = at::kMeta});
    Fsdp fsdp(model.units(mesh->shared_axis("fsdp"), GetParam().reshard),
              {.replicate = mesh->shared_axis("dp_replicate"), .compute_dtype = at::kDouble});
    fill(model, fsdp);
    const auto actual = train(model, fsdp, {2 * world.rank(), 2 * world.rank() + 1});
    // Another order of the same fp64 sums.
    expect_equal(actual, expected, 1e-14);
  });
}

INSTANTIATE_TEST_SUITE_P(All, ToyLayouts,
                         ::testing::Values(Layout{1, 2, true}, Layout{1, 2, false},
                                           Layout{1, 3, true}, Layout{1, 7, true},
                                           Layout{2, 1, true}, Layout{2, 3, true},
                                           Layout{3, 2, false}),
                         [](const auto& info) {
                           return fmt::format("replicate{}_shard{}_{}", info.param.replicate,
                                              info.param.shard,
                                              info.param.reshard ? "reshard" : "keep");
                         });

// bf16 weights are gathered, the exact bias as it is; gradients are summed in fp32. On one rank the
// layers cast the weights themselves, so the passes are the same bit for bit.
TEST(Fsdp, MixedPrecisionIsThatOfOneRank) {
  const auto expected = on_one_rank({0, 1}, at::kBFloat16, at::kFloat);
  test::run_ranks(2, [&](dtensor::World& world) {
    const auto mesh = dtensor::DeviceMesh::make(world, {{"dp_replicate", 1}, {"fsdp", 2}});
    ToyModel model(3, {.dtype = at::kFloat});
    Fsdp fsdp(model.units(mesh->shared_axis("fsdp")),
              {.replicate = mesh->shared_axis("dp_replicate"), .compute_dtype = at::kBFloat16});
    fill(model, fsdp);
    const auto actual = train(model, fsdp, {world.rank()}, at::kBFloat16);
    for (const auto& [name, value] : actual) EXPECT_EQ(value.scalar_type(), at::kFloat) << name;
    // One fp32 addition, the same on both sides.
    expect_equal(actual, expected, 0);
    // Bytes of a rank's pieces in bf16, of the bias in fp32, rounded up to 16: 3 x 3, 2 x 5, 2.
    EXPECT_EQ(world.log().records().front().bytes, 32 + 32 + 16);
  });
}

TEST(Fsdp, FrozenParametersAreGatheredAndHaveNoGradient) {
  test::run_ranks(2, [&](dtensor::World& world) {
    const auto mesh = dtensor::DeviceMesh::make(world, {{"dp_replicate", 1}, {"fsdp", 2}});
    ToyModel model(3);
    for (auto& p : model.parameters()) {
      p.tensor->set_requires_grad(p.name.find("up.weight") != std::string::npos);
    }
    Fsdp fsdp(model.units(mesh->shared_axis("fsdp")),
              {.replicate = mesh->shared_axis("dp_replicate"), .compute_dtype = at::kDouble});
    fill(model, fsdp);
    const auto actual = train(model, fsdp, {world.rank()});
    auto expected = on_one_rank({0, 1});
    std::erase_if(expected, [](const auto& entry) {
      return entry.first.find("up.weight") == std::string::npos;
    });
    expect_equal(actual, expected, 1e-14);
  });
}

// The bytes that parameters of a block take: nothing while other blocks compute.
int64_t resident_bytes(const nn::Module& module) {
  int64_t bytes = 0;
  for (const auto& p : module.parameters()) {
    bytes += static_cast<int64_t>(p.tensor->storage().nbytes());
  }
  return bytes;
}

TEST(Fsdp, OnlyTheBlockThatComputesIsWhole) {
  constexpr int64_t kWhole = 8 * (5 * 3 + 3 * 5 + 3);
  test::run_ranks(4, [&](dtensor::World& world) {
    const auto mesh = dtensor::DeviceMesh::make(world, {{"dp_replicate", 1}, {"fsdp", 4}});
    ToyModel model(4);
    Fsdp fsdp(model.units(mesh->shared_axis("fsdp")),
              {.replicate = mesh->shared_axis("dp_replicate"), .compute_dtype = at::kDouble});
    fill(model, fsdp);
    for (const auto& computing : model.blocks) {
      computing->on_compute = [&](const ToyBlock& self) {
        for (const auto& block : model.blocks) {
          EXPECT_EQ(resident_bytes(*block) == kWhole, block.get() == &self);
        }
      };
    }
    train(model, fsdp, {world.rank()});
    for (const auto& block : model.blocks) EXPECT_LT(resident_bytes(*block), kWhole);
  });
}

// On a slow link the gather of the next block must be on its way while a block computes.
TEST(Fsdp, TheNextBlockIsGatheredWhileOneComputes) {
  const test::RankOptions slow{.link = {.latency_ms = 2}};
  test::run_ranks(
      2,
      [&](dtensor::World& world) {
        const auto mesh = dtensor::DeviceMesh::make(world, {{"dp_replicate", 1}, {"fsdp", 2}});
        ToyModel model(4);
        Fsdp fsdp(model.units(mesh->shared_axis("fsdp")),
                  {.replicate = mesh->shared_axis("dp_replicate"), .compute_dtype = at::kDouble});
        fill(model, fsdp);
        std::vector<int64_t> ends;
        for (const auto& block : model.blocks) {
          block->on_end = [&](const ToyBlock&) {
            ends.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(
                               std::chrono::steady_clock::now().time_since_epoch())
                               .count());
          };
        }
        world.log().clear();
        train(model, fsdp, {world.rank()});

        std::vector<dtensor::CollectiveRecord> gathers, scatters;
        for (const auto& record : world.log().records()) {
          if (record.kind == dtensor::CollectiveKind::kAllGather) gathers.push_back(record);
          if (record.kind == dtensor::CollectiveKind::kReduceScatter) scatters.push_back(record);
        }
        // Blocks 0 to 3 forwards, 3 to 0 backwards; then the test's own, of 12 gradients.
        ASSERT_EQ(gathers.size(), 8u + 12u);
        ASSERT_EQ(scatters.size(), 4u);
        ASSERT_EQ(ends.size(), 4u);
        for (size_t block = 0; block + 1 < 4; ++block) {
          EXPECT_LT(gathers[block + 1].start_ns, ends[block]) << "forward, block " << block;
        }
        // Backwards: a block's gradients are scattered when its pass is over, and by then the
        // gather of the block before it has begun.
        for (size_t i = 0; i + 1 < 4; ++i) {
          EXPECT_LT(gathers[4 + i + 1].start_ns, scatters[i].start_ns)
              << "backward, block " << 3 - i;
          // It goes on while the next block computes: its end is seen after the next has started.
          EXPECT_GT(scatters[i].end_ns, gathers[4 + i + 1].end_ns);
        }
      },
      slow);
}

// All-gathers of weights in the two passes of a model.
struct Gathers {
  int64_t forward = 0, backward = 0;
  bool operator==(const Gathers&) const = default;
};
void PrintTo(const Gathers& gathers, std::ostream* out) {
  *out << gathers.forward << " forwards, " << gathers.backward << " backwards";
}

Gathers gathers_of_model(const std::string& reshard) {
  Gathers found;
  test::run_ranks(2, [&](dtensor::World& world) {
    RankOfModel rank(world, {.dp = 2, .fsdp = true, .reshard = reshard}, Job());
    const auto gathers = [&] {
      int64_t count = 0;
      for (const auto& record : world.log().records()) {
        count += record.kind == dtensor::CollectiveKind::kAllGather ? 1 : 0;
      }
      world.log().clear();
      return count;
    };
    world.log().clear();
    rank.forward();
    const int64_t forward = gathers();
    rank.backward();
    const int64_t backward = gathers();
    if (world.rank() == 0) found = {forward, backward};
  });
  return found;
}

// A dense block takes one collective, three with experts (two of them MTP modules) two each; the
// embedding one, and one the last norm with the output head. Three towers come to these, "always"
// each time anew, and to norm and head apart.
TEST(Fsdp, ReshardAfterForwardSaysWhatIsGatheredAgain) {
  EXPECT_EQ(gathers_of_model("never"), (Gathers{7 + 2, 0}));
  EXPECT_EQ(gathers_of_model("default"), (Gathers{7 + 2, 7}));
  EXPECT_EQ(gathers_of_model("always"), (Gathers{7 + 3 * 3, 7 + 1}));
}

TEST(Fsdp, PartsAndWholes) {
  test::run_ranks(3, [&](dtensor::World& world) {
    const auto mesh = dtensor::DeviceMesh::make(world, {{"dp_replicate", 1}, {"fsdp", 3}});
    ToyModel model(1);
    Fsdp fsdp(model.units(mesh->shared_axis("fsdp")),
              {.replicate = mesh->shared_axis("dp_replicate"), .compute_dtype = at::kDouble});
    fill(model, fsdp);
    const auto up = model.parameters()[1];
    ASSERT_EQ(up.name, "blocks.0.up.weight");
    const auto part = fsdp.part_of(up);
    EXPECT_EQ(part.global_sizes, (std::vector<int64_t>{5, 3}));
    EXPECT_EQ(part.offsets, (std::vector<int64_t>{2 * world.rank(), 0}));
    EXPECT_EQ(up.tensor->sizes(), (at::IntArrayRef{world.rank() == 2 ? 1 : 2, 3}));
    at::Tensor whole = at::empty({5, 3}, at::kDouble);
    nn::fill_normal(whole, CounterRng(3, up.name), 0.7);
    EXPECT_TRUE(at::equal(fsdp.whole_of(up, *up.tensor), whole));
    EXPECT_EQ(fsdp.cut_by(up).size(), 1u);
  });
}

}  // namespace
}  // namespace longhaul::testing
