// Tensor and data parallelism on parts of a model, of which the first has no head and the others no
// embedding of their own: together they give the numbers of the whole on one rank.
#include <gmock/gmock.h>

#include "tests/models/model_parts.h"
#include "tests/parallel/ranks_of_model.h"

namespace longhaul::testing {
namespace {

// Two rows, whose slots two ranks can share.
constexpr int64_t kPartSlots = 14;

Rows rows_of_parts() {
  const auto d = documents({5, 1, 8, 2, 3, 7});
  return pack({{d[0], d[1], {}, d[2]}, {d[3], {}, d[4], d[5]}}, kPartSlots + 2);
}

v3::ModelSettings settings_of_parts() {
  auto settings = fp64_settings();
  settings.sequence_balance_loss_coeff = 0.2;
  return settings;
}

// One rank's end of the parts, which follow each other on it.
class RankOfParts {
 public:
  RankOfParts(dtensor::World& world, const RankLayout& layout, const std::vector<int64_t>& cuts)
      : dims_(parallel::ParallelDims::make(layout.config(), world)),
        parts_(build(parts_at(cuts), settings_of_parts())) {
    for (auto& part : parts_) {
      parallel::apply_expert_parallel(*part, dims_.ep);
      tensor_.push_back(parallel::apply_tensor_parallel(*part, dims_.tp));
      fsdp_.push_back(parallel::apply_data_parallel(*part, dims_, layout.config()));
    }
  }

  Run run() {
    Run result;
    v3::ForwardContext ctx;
    const auto batch = own_batch();
    ctx.counts.add(batch);
    train::sum_counts(ctx.counts, *dims_.loss);
    ctx.stats = &result.stats;
    for (auto& fsdp : fsdp_) fsdp->begin_pass(/*reduce_gradients=*/true);
    const auto placed = tensor_[0] ? parallel::on_tensor_mesh(batch, dims_.tp) : batch;
    result.by_tower = forward_backward(parts_, placed, ctx).by_tower;
    for (auto& fsdp : fsdp_) fsdp->end_pass();
    train::sum_losses(result.by_tower, result.stats, dims_);
    collect_gradients(result.gradients);
    return result;
  }

 private:
  v3::Batch own_batch() const {
    const Rows rows = rows_of_parts();
    const int64_t B = rows.ids.size(0) / dims_.data_size();
    const auto own = [&](const at::Tensor& x) { return x.narrow(0, dims_.data_rank() * B, B); };
    return Rows{own(rows.ids), own(rows.labels), own(rows.positions)}.batch(kPartSlots);
  }

  void collect_gradients(Tensors& gradients) const {
    for (size_t i = 0; i < parts_.size(); ++i) {
      for (const auto& parameter : parts_[i]->parameters()) {
        if (!parameter.tensor->grad().defined()) continue;
        const auto whole = fsdp_[i]->whole_of(parameter, parameter.tensor->grad());
        for (auto& [name, view] : v3::hf_views(parameter.name, whole)) {
          add_gradient(gradients, name, view);
        }
      }
    }
  }

  parallel::ParallelDims dims_;
  Parts parts_;
  std::vector<std::unique_ptr<parallel::TensorParallel>> tensor_;
  std::vector<std::unique_ptr<parallel::Fsdp>> fsdp_;
};

TEST(PartsOnRanks, GiveTheNumbersOfTheWhole) {
  const auto expected =
      run(*tiny_model(three_layers(), settings_of_parts()), rows_of_parts().batch(kPartSlots));
  for (const auto& cuts : std::vector<std::vector<int64_t>>{{2}, {0, 3}}) {
    for (const RankLayout& layout :
         {RankLayout{.tp = 2}, RankLayout{.dp = 2}, RankLayout{.dp = 2, .ep = 2, .tp = 2}}) {
      SCOPED_TRACE(fmt::format("{}, {} parts", layout.text(), cuts.size() + 1));
      longhaul::testing::Run actual;
      test::run_ranks(layout.ranks(), [&](dtensor::World& world) {
        RankOfParts rank(world, layout, cuts);
        const auto result = rank.run();
        if (world.rank() == 0) actual = result;
      });
      ASSERT_EQ(actual.by_tower.size(), expected.by_tower.size());
      for (size_t i = 0; i < expected.by_tower.size(); ++i) {
        EXPECT_NEAR(actual.by_tower[i], expected.by_tower[i], 1e-11) << "tower " << i;
      }
      EXPECT_FALSE(expected.gradients.empty());
      EXPECT_THAT(differing(actual.gradients, expected.gradients, 1e-11), ::testing::IsEmpty());
      for (const auto& [layer, counts] : expected.stats.expert_counts) {
        EXPECT_TRUE(at::equal(actual.stats.expert_counts.at(layer), counts)) << layer;
      }
    }
  }
}

}  // namespace
}  // namespace longhaul::testing
