// Plans of tensor parallelism: what they must name and may not ask for, and what single styles
// compute, communicate and sum.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/parallel/parameter_group.h"
#include "tests/parallel/collective_counts.h"
#include "tests/parallel/ranks_of_model.h"
#include "tests/parallel/toy_model.h"

namespace longhaul::testing {
namespace {

using dtensor::CollectiveKind;
using dtensor::Placement;
using parallel::kSequence;
using parallel::kWhole;
using ::testing::HasSubstr;

// On the first of two ranks that do not communicate.
dtensor::Mesh lone_mesh(dtensor::World& world) {
  return parallel::ParallelDims::make(RankLayout{.tp = 2}.config(), world).tp;
}

// What is wrong with a plan for this model.
std::string complaint(nn::Module& model, const parallel::TensorPlan& plan) {
  dtensor::World world = dtensor::World::fake(0, 2);
  return message_of([&] { parallel::TensorParallel(model, plan, lone_mesh(world)); });
}

std::unique_ptr<v3::Model> meta_model(const v3::ModelConfig& config, v3::ModelSettings settings,
                                      const v3::ModelPart& part = {}) {
  settings.device = at::kMeta;
  return std::make_unique<v3::Model>(config, settings, part);
}

// A module of a new kind in the model must be in the plan, too.
TEST(TensorPlan, NamesEveryModuleWithParameters) {
  const auto model = meta_model(tiny_config(), fp64_settings());
  auto plan = parallel::deepseek_v3_plan(*model);
  std::erase_if(plan, [](const auto& entry) { return entry.module == "enorm"; });
  EXPECT_THAT(complaint(*model, plan),
              AllOf(HasSubstr("no entry for \"model.layers.2.enorm\""), HasSubstr("enorm.weight")));
}

// Without parameters it would be missed by nobody.
TEST(TensorPlan, EveryEntryNamesAModule) {
  const auto model = meta_model(tiny_config(), fp64_settings());
  auto plan = parallel::deepseek_v3_plan(*model);
  plan.push_back({"mlp.shared_expert", parallel::prepare_module_input(kWhole)});
  EXPECT_THAT(complaint(*model, plan), HasSubstr("no module's name ends in \"mlp.shared_expert\""));
}

TEST(TensorPlan, FitsModelsThatLackParts) {
  const auto expect_fits = [](const v3::ModelConfig& config, const v3::ModelSettings& settings,
                              const v3::ModelPart& part = {}) {
    const auto model = meta_model(config, settings, part);
    EXPECT_EQ(complaint(*model, parallel::deepseek_v3_plan(*model)), "");
  };
  auto no_latent = tiny_config(), no_indexer = tiny_config(), no_shared = tiny_config(),
       no_dense = tiny_config(), no_experts = tiny_config(), no_mtp = tiny_config();
  no_latent.q_lora_rank = 0;
  no_indexer.index_n_heads = 0;
  no_shared.n_shared_experts = 0;
  no_dense.first_k_dense_replace = 0;
  no_experts.first_k_dense_replace = 4;
  no_mtp.num_nextn_predict_layers = 0;
  for (const auto& config :
       {tiny_config(), no_latent, no_indexer, no_shared, no_dense, no_experts, no_mtp}) {
    expect_fits(config, fp64_settings());
  }
  auto own_norm = fp64_settings();
  own_norm.mtp_own_norm = true;
  expect_fits(tiny_config(), own_norm);
  for (const v3::ModelPart& part :
       {v3::ModelPart{0, 0, true, false}, v3::ModelPart{0, 1, true, false},
        v3::ModelPart{1, 2, false, false}, v3::ModelPart{2, 2, false, true}}) {
    SCOPED_TRACE(fmt::format("layers {} to {}", part.first_layer, part.end_layer));
    expect_fits(tiny_config(), fp64_settings(), part);
    expect_fits(no_mtp, fp64_settings(), part);
  }
}

// Every rank would have the whole gradient, and their sum would be twice that.
TEST(TensorPlan, RefusesNoParallelOnWholeInputs) {
  const auto complaint_of = [](const parallel::ParallelStyle& around) {
    ToyModel model(1);
    return complaint(
        model,
        {{"blocks.0", around}, {"up", parallel::no_parallel()}, {"down", parallel::no_parallel()}});
  };
  EXPECT_THAT(complaint_of(parallel::sequence_parallel()),
              AllOf(HasSubstr("\"blocks.0.up\" is no_parallel()"),
                    HasSubstr("2 ranks would add up the same gradient")));
  auto whole = parallel::prepare_module_input_output(kWhole, kWhole);
  auto cut = parallel::prepare_module_input_output(kSequence, kSequence);
  whole.plain_parameters = cut.plain_parameters = true;
  EXPECT_THAT(complaint_of(whole), HasSubstr("2 ranks would add up the same gradient"));
  EXPECT_EQ(complaint_of(cut), "");
}

// A result that every rank has is handed on in slices.
TEST(ParallelStyle, PrepareModuleOutput) {
  const at::Tensor x = normal({2, 6, ToyBlock::kWidth}, 3).to(at::kDouble);
  ToyModel single(1);
  parallel::Fsdp none;
  fill(single, none);
  const at::Tensor expected = single.forward(x);
  test::run_ranks(2, [&](dtensor::World& world) {
    const auto dims = parallel::ParallelDims::make(RankLayout{.tp = 2}.config(), world);
    ToyModel model(1);
    fill(model, none);
    const parallel::TensorParallel applied(
        model,
        {{"blocks.0", parallel::prepare_module_output(kSequence)},
         {"up", parallel::colwise_parallel()},
         {"down", parallel::rowwise_parallel(kWhole)}},
        dims.tp);
    const at::Tensor y = model.forward(dtensor::from_local(x, dims.tp, {kWhole}));
    EXPECT_EQ(dtensor::spec_of(y).placements[0], kSequence);
    EXPECT_EQ(dtensor::local_of(y).size(1), 3);
    EXPECT_LE(relative_to_max(dtensor::full_tensor(y), expected), 1e-13);
  });
}

class Projection : public nn::Module {
 public:
  Projection() : o_proj(4, 6, {.dtype = at::kDouble}) {
    add_child("o_proj", o_proj);
    const at::NoGradGuard no_grad;
    nn::fill_normal(o_proj.weight, CounterRng(3, "o_proj"), 1);
  }
  nn::Linear o_proj;
};

// Sequence parallelism needs two collectives of a row-wise weight: the terms of y are summed into
// slices (reduce-scatter), and dY's slices are put together (all-gather), once for both dX = dY W,
// in columns as X is, and dW = dY^T X, cut as W is. Nothing else moves.
TEST(ParallelStyle, RowwiseCommunicatesOnceInEachPass) {
  const at::Tensor x = normal({2, 8, 4}, 1).to(at::kDouble),
                   dy = normal({2, 8, 6}, 2).to(at::kDouble);
  Projection single;
  const at::Tensor leaf = x.clone().requires_grad_();
  torch::autograd::backward({single.o_proj.forward(leaf)}, {dy});
  test::run_ranks(2, [&](dtensor::World& world) {
    const auto dims = parallel::ParallelDims::make(RankLayout{.tp = 2}.config(), world);
    Projection model;
    const parallel::TensorParallel applied(model, {{"o_proj", parallel::rowwise_parallel()}},
                                           dims.tp);
    at::Tensor own_x = dtensor::distribute(x, dims.tp, {Placement::shard(2)}).requires_grad_();
    Counts expected = counts_on(world, "tp");
    for (auto& [kind, count] : expected) count = 0;
    Counts forward = expected, backward = expected;
    forward[CollectiveKind::kReduceScatter] = backward[CollectiveKind::kAllGather] = 1;

    world.log().clear();
    const at::Tensor y = model.o_proj.forward(own_x);
    EXPECT_EQ(counts_on(world, "tp"), forward);
    world.log().clear();
    torch::autograd::backward({y}, {dtensor::distribute(dy, dims.tp, {kSequence})});
    EXPECT_EQ(counts_on(world, "tp"), backward);
    for (const auto& record : world.log().records()) {
      EXPECT_EQ(record.bytes, 2 * 4 * 6 * 8) << "the rank's slice of dY";
    }

    const at::Tensor dx = own_x.grad(), dw = model.o_proj.weight.grad();
    EXPECT_EQ(dtensor::spec_of(dx).placements[0], Placement::shard(2));
    EXPECT_EQ(dtensor::spec_of(dw).placements[0], Placement::shard(1));
    EXPECT_LE(relative_to_max(dtensor::full_tensor(dx), leaf.grad()), 1e-13);
    EXPECT_LE(relative_to_max(dtensor::full_tensor(dw), single.o_proj.weight.grad()), 1e-13);
  });
}

// Of the reductions only a sum has terms; a maximum's would be added up.
TEST(ParameterGroup, GradientsOfOtherReductionsThanSumsAreErrors) {
  using dtensor::Reduction;
  for (const auto reduction :
       {Reduction::kSum, Reduction::kAvg, Reduction::kMax, Reduction::kMin}) {
    test::run_ranks(2, [&](dtensor::World& world) {
      const auto dims = parallel::ParallelDims::make(RankLayout{.tp = 2}.config(), world);
      at::Tensor weight =
          dtensor::distribute(at::ones({4, 3}, at::kDouble), dims.tp, {kWhole}).requires_grad_();
      parallel::ParameterGroup group(
          {{"norm.weight", &weight, nn::Init::kOnes}},
          {.shard = dims.tokens, .replicate = dims.mesh->shared_axis("dp_replicate")});
      group.unshard();
      const at::Tensor term = at::ones({4, 3}, at::kDouble);
      weight.mutable_grad() = dtensor::from_local(term, dims.tp, {Placement::partial(reduction)});
      if (reduction != Reduction::kSum) {
        EXPECT_THAT(
            message_of([&] { group.start_reduction(); }),
            AllOf(HasSubstr("the gradient of norm.weight is Partial("), HasSubstr("axis tp")));
        return;
      }
      group.start_reduction();
      while (group.advance_reduction()) {
      }
      group.reshard();
      EXPECT_TRUE(at::equal(weight.grad(), at::full({2, 3}, 2, at::kDouble)));
    });
  }
}

}  // namespace
}  // namespace longhaul::testing
