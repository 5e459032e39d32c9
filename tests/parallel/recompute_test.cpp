// Activation checkpointing on ranks: whatever is recomputed, and whatever is saved of it, a layout
// computes bit for bit what it computes with all activations kept; saved collectives run once.
#include <gmock/gmock.h>

#include "longhaul/ops/saved_results.h"
#include "tests/parallel/layout_harness.h"
#include "tests/parallel/ranks_of_model.h"

namespace longhaul::testing {
namespace {

using dtensor::CollectiveKind;

const Overrides kKept = {"--activation_checkpoint.mode", "none"};
const Overrides kFull = {"--activation_checkpoint.mode", "full"};

Overrides selective(const std::string& option, const std::string& saved = "") {
  Overrides words = {"--activation_checkpoint.mode", "selective",
                     "--activation_checkpoint.selective_ac_option", option};
  if (!saved.empty()) {
    words.insert(words.end(), {"--activation_checkpoint.op_sac_save_list", saved});
  }
  return words;
}

Overrides joined(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class RecomputeOnRanks : public ::testing::TestWithParam<Layout> {
 protected:
  static Overrides all_operators() {
    return selective("op", fmt::format("{}", fmt::join(ops::savable_operators(), ",")));
  }
  static void expect_no_difference(const Overrides& job, const std::vector<Overrides>& modes) {
    const auto expected = LayoutJob().run(GetParam(), joined(job, kKept));
    for (const auto& mode : modes) {
      SCOPED_TRACE(fmt::format("{}", fmt::join(mode, " ")));
      expect_identical(LayoutJob().run(GetParam(), joined(job, mode)), expected);
    }
  }
};

TEST_P(RecomputeOnRanks, ChangesNoBitWithReferenceOperators) {
  expect_no_difference({}, {kFull, all_operators()});
}

TEST_P(RecomputeOnRanks, ChangesNoBitWithFusedOperators) {
  expect_no_difference({"--training.dtype", "float32", "--model.converters",
                        "dsa,rms_norm,rope,permute,gmm,cross_entropy"},
                       {kFull, selective("2"), selective("op"), all_operators()});
}

INSTANTIATE_TEST_SUITE_P(All, RecomputeOnRanks,
                         ::testing::Values(Layout{}, Layout{.dp_shard = 2}, Layout{.tp = 2},
                                           Layout{.cp = 2}, Layout{.dp_shard = 2, .ep = 2},
                                           Layout{.dp_shard = 2, .cp = 2, .tp = 2, .ep = 4}),
                         [](const auto& info) { return info.param.name(); });

// Collectives of each kind that the backward pass runs, as rank 0 counts them.
std::map<CollectiveKind, int64_t> collectives_of_backward(const RankLayout& layout,
                                                          const char* axis,
                                                          const v3::Recomputation& recompute) {
  Job job;
  job.config.num_attention_heads = 4;
  job.settings.recompute = recompute;
  std::map<CollectiveKind, int64_t> counted;
  test::run_ranks(layout.ranks(), [&](dtensor::World& world) {
    RankOfModel rank(world, layout, job);
    rank.forward();
    world.log().clear();
    rank.backward();
    if (world.rank() != 0) return;
    for (const auto kind :
         {CollectiveKind::kAllToAll, CollectiveKind::kAllGather, CollectiveKind::kReduceScatter}) {
      counted[kind] = static_cast<int64_t>(world.log().total(kind, axis).count);
    }
  });
  return counted;
}

// What is saved is not sent again: as many collectives as without recomputation.
void expect_sent_once(const RankLayout& layout, const char* axis, CollectiveKind kind,
                      const std::string& op) {
  const auto calls = [&](const v3::Recomputation& recompute) {
    return collectives_of_backward(layout, axis, recompute).at(kind);
  };
  const int64_t none = calls({});
  EXPECT_EQ(calls({.every = 1, .saved_operators = {op}}), none) << op;
  EXPECT_GT(calls({.every = 1}), none) << op;
  EXPECT_GT(calls({.every = 1, .saved_operators = {"linear"}}), none) << op;
}

TEST(RecomputeOnRanks, SavedCollectivesRunOnce) {
  expect_sent_once({.dp = 2, .ep = 2}, "ep", CollectiveKind::kAllToAll, "all_to_all");
  expect_sent_once({.cp = 2}, "cp", CollectiveKind::kAllGather, "all_gather");
  expect_sent_once({.tp = 2}, "tp", CollectiveKind::kReduceScatter, "reduce_scatter");
}

// Three all-to-alls for each of three layers with experts: counts, rows and results.
TEST(RecomputeOnRanks, TheExchangeOfRows) {
  const auto calls = [&](const v3::Recomputation& recompute) {
    return collectives_of_backward({.dp = 2, .ep = 2}, "ep", recompute)
        .at(CollectiveKind::kAllToAll);
  };
  EXPECT_EQ(calls({}), 2 * 3);
  EXPECT_EQ(calls({.every = 1}), (2 + 3) * 3);
  EXPECT_EQ(calls({.every = 2}), 2 * 3 + 3 * 2) << "blocks 1 and 3 of 0 to 3";
}

}  // namespace
}  // namespace longhaul::testing
