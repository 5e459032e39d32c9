// Activation checkpointing: whichever blocks are computed again and whatever is saved of them, the
// losses, statistics and gradients are bit for bit those of a model that keeps everything; it takes
// less memory, and runs again what is not saved and nothing else.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include "tests/models/tiny_model.h"
#include "tests/support/observed_calls.h"

namespace longhaul::testing {
namespace {

using ::testing::IsEmpty;
using v3::Recomputation;

const Recomputation kNone = {};
const Recomputation kFull = {.every = 1};
const Recomputation kEverySecond = {.every = 2};
// What a job file gets without asking.
const Recomputation kByOperator = {
    .every = 1,
    .saved_operators = {"linear", "flash_attention", "sparse_flash_attention", "all_to_all",
                        "reduce_scatter"},
    .unsaved_linears = {"mlp.gate"}};

Recomputation saving(const std::vector<std::string>& operators) {
  return {.every = 1, .saved_operators = operators};
}

const std::vector<std::pair<std::string, Recomputation>> kModes = {
    {"full", kFull},
    {"every second", kEverySecond},
    {"every third", {.every = 3}},
    {"by operator", kByOperator},
    {"all operators", saving(ops::savable_operators())},
    {"experts' products", saving({"grouped_matmul"})},
};

struct Case {
  ops::Kernel kernel = ops::Kernel::kFused;
  v3::IndexerStage stage = v3::IndexerStage::kSparse;
  v3::MlaForm form = v3::MlaForm::kAbsorbed;
};

std::unique_ptr<v3::Model> model_of(const Case& setup, const Recomputation& recompute) {
  auto settings = fp64_settings();
  settings.sequence_balance_loss_coeff = settings.z_loss_coeff = 0.1;
  if (setup.kernel == ops::Kernel::kFused)
    settings.param_dtype = settings.compute_dtype = at::kFloat;
  settings.stage = setup.stage;
  settings.mla_form = setup.form;
  settings.recompute = recompute;
  auto model = tiny_model(tiny_config(), settings);
  for (const auto& slot : model->kernels()) *slot.kernel = setup.kernel;
  return model;
}

void expect_equal(const Run& actual, const Run& expected) {
  EXPECT_EQ(actual.total, expected.total);
  EXPECT_EQ(actual.by_tower, expected.by_tower);
  EXPECT_EQ(actual.gradients.size(), expected.gradients.size());
  EXPECT_THAT(differing(actual.gradients, expected.gradients, 0.0), IsEmpty());
  for (const auto part : {&v3::StepStats::indexer_loss, &v3::StepStats::balance_loss,
                          &v3::StepStats::z_loss, &v3::StepStats::expert_counts}) {
    ASSERT_EQ((actual.stats.*part).size(), (expected.stats.*part).size());
    for (const auto& [layer, value] : expected.stats.*part) {
      EXPECT_TRUE(at::equal((actual.stats.*part).at(layer), value)) << layer;
    }
  }
}

TEST(ActivationCheckpoint, ChangesNoNumber) {
  using ops::Kernel, v3::IndexerStage, v3::MlaForm;
  for (const Case& setup :
       {Case{}, Case{.form = MlaForm::kExpanded}, Case{.stage = IndexerStage::kOff},
        Case{.stage = IndexerStage::kDenseWarmup}, Case{.kernel = Kernel::kReference},
        Case{.kernel = Kernel::kReference, .form = MlaForm::kExpanded},
        Case{.kernel = Kernel::kReference, .stage = IndexerStage::kOff}}) {
    const auto batch = tiny_batch();
    const auto expected = run(*model_of(setup, kNone), batch);
    for (const auto& [name, recompute] : kModes) {
      SCOPED_TRACE(name);
      expect_equal(run(*model_of(setup, recompute), batch), expected);
    }
  }
}

// Counted from 1, the MTP modules last.
TEST(ActivationCheckpoint, EveryNthBlock) {
  const auto covered = [](int64_t every) {
    std::vector<int64_t> layers;
    for (int64_t layer = 0; layer < 6; ++layer) {
      if (Recomputation{.every = every}.covers(layer)) layers.push_back(layer);
    }
    return layers;
  };
  using Layers = std::vector<int64_t>;
  EXPECT_EQ(covered(0), Layers{});
  EXPECT_EQ(covered(1), (Layers{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(covered(2), (Layers{1, 3, 5}));
  EXPECT_EQ(covered(4), Layers{3});
}

// What lives between the passes, and what each pass runs.
struct Cost {
  int64_t bytes;
  std::map<std::string, int64_t> forward, backward;
};

Cost cost_of(const Recomputation& recompute) {
  const auto model = model_of({}, recompute);
  const auto batch = tiny_batch();
  v3::ForwardContext ctx;
  ctx.counts.add(batch);
  const auto counts = [](const OperatorCalls& calls) {
    std::map<std::string, int64_t> result = {{"products", calls.products()}};
    for (const char* op : {"sparse_flash_attention", "lightning_indexer", "grouped_matmul",
                           "moe_gating_top_k", "rotary_mul"}) {
      result[op] = calls.of(std::string("longhaul::") + op);
    }
    return result;
  };
  Cost cost;
  const LiveBytes live;
  at::Tensor total;
  {
    const OperatorCalls calls;
    total = forward_losses(*model, batch, ctx).total;
    cost.forward = counts(calls);
  }
  cost.bytes = live.now();
  const OperatorCalls calls;
  backward(total);
  cost.backward = counts(calls);
  return cost;
}

TEST(ActivationCheckpoint, TakesLessMemory) {
  const int64_t none = cost_of(kNone).bytes, by_operator = cost_of(kByOperator).bytes,
                full = cost_of(kFull).bytes, second = cost_of(kEverySecond).bytes;
  EXPECT_GT(none, by_operator);
  EXPECT_GT(by_operator, full);
  EXPECT_GT(none, second);
  EXPECT_GT(second, full);
  EXPECT_GT(cost_of(saving(ops::savable_operators())).bytes, by_operator);
  EXPECT_LT(full, none / 2);
}

TEST(ActivationCheckpoint, RunsAgainWhatIsNotSaved) {
  const Cost none = cost_of(kNone);
  ASSERT_EQ(none.forward.at("sparse_flash_attention"), 4);
  ASSERT_EQ(none.forward.at("grouped_matmul"), 9) << "three for each of three layers";
  // Calls that the backward pass has beyond its own.
  const auto again = [&](const Recomputation& recompute, const std::string& op) {
    const Cost cost = cost_of(recompute);
    EXPECT_EQ(cost.forward, none.forward);
    return cost.backward.at(op) - none.backward.at(op);
  };
  const Recomputation experts = saving({"grouped_matmul"});
  EXPECT_EQ(again(kFull, "sparse_flash_attention"), 4);
  EXPECT_EQ(again(kEverySecond, "sparse_flash_attention"), 2);
  EXPECT_EQ(again(kByOperator, "sparse_flash_attention"), 0);
  EXPECT_EQ(again(experts, "sparse_flash_attention"), 4);
  EXPECT_EQ(again(kFull, "grouped_matmul"), 9);
  EXPECT_EQ(again(kByOperator, "grouped_matmul"), 9);
  EXPECT_EQ(again(experts, "grouped_matmul"), 0);
  EXPECT_EQ(again(kByOperator, "rotary_mul"), again(kFull, "rotary_mul"));
  EXPECT_GT(again(kFull, "rotary_mul"), 0);

  // Twelve products a block (three projections, three of the indexer, two by head around the
  // attention, the output, three of the MLP), eh_proj in MTP modules, and routers in three blocks.
  // Saved are five of a block: every second one that is neither by head nor has a weight of the
  // router's sizes [6, 12], as q_a_proj has here.
  EXPECT_EQ(again(kFull, "products"), 2 * 12 + 2 * 13 + 3);
  EXPECT_EQ(again(kByOperator, "products"), 2 * 7 + 2 * 8 + 3);
  EXPECT_EQ(again(saving({"linear_by_head"}), "products"), 2 * 10 + 2 * 11 + 3);
  Recomputation with_router = kByOperator;
  with_router.unsaved_linears = {};
  EXPECT_NE(again(with_router, "products"), again(kByOperator, "products"));
}

// Keys are chosen once in any mode, and experts too: their gating runs again, without a choice.
TEST(ActivationCheckpoint, ChoicesAreMadeOnce) {
  for (const auto& [name, recompute] : kModes) {
    SCOPED_TRACE(name);
    const Cost cost = cost_of(recompute);
    EXPECT_EQ(cost.forward.at("lightning_indexer"), 4);
    EXPECT_EQ(cost.backward.at("lightning_indexer"), 0);
  }
  // As if the recomputation's last bits were others: by now the router and the indexer would choose
  // something else.
  for (const auto& [name, recompute] : kModes) {
    SCOPED_TRACE(name);
    const auto model = model_of({}, recompute);
    const auto batch = tiny_batch();
    std::map<std::string, std::vector<at::Tensor>> seen;  // by value and layer
    v3::ForwardContext ctx;
    ctx.counts.add(batch);
    ctx.probe = [&](const std::string& value, int64_t layer, const at::Tensor& x) {
      if (value == "router_experts" || value == "topk_indices") {
        seen[value + std::to_string(layer)].push_back(x.clone());
      }
    };
    const auto total = forward_losses(*model, batch, ctx).total;
    {
      const at::NoGradGuard no_grad;
      for (const auto& [layer, router] : model->routers()) {
        router->bias().copy_(normal(router->bias().sizes(), layer, 10.0));
      }
    }
    backward(total);
    int64_t twice = 0;
    for (const auto& [value, passes] : seen) {
      if (passes.size() == 1) continue;
      ++twice;
      EXPECT_TRUE(at::equal(passes.at(1), passes.at(0))) << value;
    }
    const int64_t blocks = 4 / recompute.every;
    EXPECT_GE(twice, blocks) << "keys in each, experts in some";
  }
}

TEST(ActivationCheckpoint, ProductsByTheNameOfTheirModule) {
  const auto model = tiny_model();
  const auto names = [&](const std::string& name) {
    std::vector<std::string> found;
    for (const auto& weight : v3::block_linears(*model, name)) found.push_back(weight.name);
    return found;
  };
  using ::testing::ElementsAre;
  EXPECT_THAT(names("mlp.gate"),
              ElementsAre("model.layers.1.mlp.gate.weight", "model.layers.2.mlp.gate.weight",
                          "model.layers.3.mlp.gate.weight"));
  EXPECT_THAT(names("layers.0.mlp.up_proj"), ElementsAre("model.layers.0.mlp.up_proj.weight"));
  EXPECT_THAT(names("embed_tokens"), IsEmpty());
  EXPECT_THAT(names("experts"), IsEmpty()) << "grouped products are not linear";
  EXPECT_THAT(names("input_layernorm"), IsEmpty());
}

}  // namespace
}  // namespace longhaul::testing
