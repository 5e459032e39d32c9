// The tiny model on ranks that deal out rows, slots and experts, and what they compute put together
// again, to be compared with one rank.
#pragma once

#include <ATen/core/grad_mode.h>

#include "longhaul/parallel/context.h"
#include "longhaul/parallel/data_parallel.h"
#include "longhaul/parallel/expert.h"
#include "longhaul/parallel/parallel_dims.h"
#include "longhaul/parallel/plans/deepseek_v3.h"
#include "longhaul/train/global_sums.h"
#include "tests/models/tiny_model.h"
#include "tests/support/run_ranks.h"

namespace longhaul::testing {

using parallel::SequenceSplit;

struct RankLayout {
  int64_t dp = 1, cp = 1, ep = 1, tp = 1;
  SequenceSplit split = SequenceSplit::kHeadTail;
  bool fsdp = false;  // else every rank keeps whole weights, but for its share of experts and heads
  std::string reshard = "default";  // parallelism.fsdp_reshard_after_forward

  int ranks() const { return static_cast<int>(dp * cp * tp); }
  std::string text() const {
    return fmt::format("dp {} cp {} tp {} ep {} {}{}", dp, cp, tp, ep,
                       split == SequenceSplit::kHeadTail ? "head-tail" : "contiguous",
                       fsdp ? " fsdp" : "");
  }
  JobConfig config() const {
    JobConfig config;
    config.parallelism.data_parallel_shard_degree = dp;
    config.parallelism.context_parallel_degree = cp;
    config.parallelism.expert_parallel_degree = ep;
    config.parallelism.tensor_parallel_degree = tp;
    config.parallelism.fsdp_reshard_after_forward = reshard;
    return config;
  }
};

// Slots that 8 chunks divide.
constexpr int64_t kSlots = 16;

// Four rows of 16 + 2: documents over the edges of slices, padding within and at the end, slices
// without a valid slot, a row without one, and labels that are not there.
inline Rows dealt_rows() {
  const auto d = documents({5, 1, 9, 18, 3, 7, 2, 2});
  Rows rows = pack({{d[0], d[1], d[2]}, {d[3]}, {d[4], {}, d[5], d[6]}, {d[7]}}, kSlots + 2);
  rows.labels[1].narrow(0, 3, 6).fill_(-100);
  rows.positions[3].fill_(-1);
  return rows;
}

struct Job {
  v3::ModelConfig config = dealt_config();
  v3::ModelSettings settings = all_losses();
  Rows rows = dealt_rows();
  std::function<void(v3::Model&)> prepare = [](v3::Model&) {};  // a hand on the weights

  // As tiny_config(), but 8 experts, so that 8 ranks can hold one each.
  static v3::ModelConfig dealt_config() {
    auto config = tiny_config();
    config.n_routed_experts = 8;
    config.n_group = 4;
    return config;
  }
  static v3::ModelSettings all_losses() {
    auto settings = fp64_settings();
    settings.sequence_balance_loss_coeff = 0.2;
    settings.z_loss_coeff = 0.1;
    return settings;
  }
  std::unique_ptr<v3::Model> model() const {
    auto built = tiny_model(config, settings);
    prepare(*built);
    return built;
  }
};

// Of the whole batch.
struct Outcome {
  Run run;
  std::map<int64_t, at::Tensor> selected;  // keys of each query, by layer
};

inline Outcome on_one_rank(const Job& job) {
  Outcome outcome;
  v3::Decisions decisions;
  outcome.run = run(*job.model(), job.rows.batch(kSlots), &decisions);
  outcome.selected = decisions.topk_indices;
  return outcome;
}

inline void add_up(at::Tensor& x, const dtensor::Communicator& ranks) {
  x = x.detach().contiguous();
  ranks.all_reduce(x, dtensor::Reduction::kSum).wait();
}

inline at::Tensor whole_of(const at::Tensor& x) {
  const at::NoGradGuard no_grad;
  return dtensor::is_dtensor(x) ? dtensor::full_tensor(x) : x;
}

inline at::Tensor gathered(const at::Tensor& x, const dtensor::Communicator& ranks) {
  auto sizes = x.sizes().vec();
  sizes[0] *= ranks.size();
  at::Tensor all = at::empty(sizes, x.options());
  ranks.all_gather(all, x.contiguous()).wait();
  return all;
}

// One rank's end of a job.
class RankOfModel {
 public:
  RankOfModel(dtensor::World& world, const RankLayout& layout, const Job& job)
      : dims_(parallel::ParallelDims::make(layout.config(), world)), model_(job.model()) {
    parallel::apply_expert_parallel(*model_, dims_.ep);
    tensor_ = parallel::apply_tensor_parallel(*model_, dims_.tp);
    if (layout.fsdp) fsdp_ = parallel::apply_data_parallel(*model_, dims_, layout.config());
    const int64_t B = job.rows.ids.size(0) / layout.dp;
    const auto own = [&](const at::Tensor& x) { return x.narrow(0, dims_.data_rank() * B, B); };
    batch_ = Rows{own(job.rows.ids), own(job.rows.labels), own(job.rows.positions)}.batch(kSlots);
    if (layout.cp > 1) {
      const parallel::DsaContextParallel context({.group = dims_.mesh->shared_axis("cp"),
                                                  .split = layout.split,
                                                  .device = job.settings.device});
      batch_ = context.cut(batch_);
    }
    ctx_.counts.add(batch_);
    for (auto* counts : {&ctx_.counts.tokens, &ctx_.counts.labels}) {
      at::Tensor total = at::tensor(*counts);
      add_up(total, *dims_.loss);
      counts->assign(total.data_ptr<int64_t>(), total.data_ptr<int64_t>() + total.numel());
    }
    batch_ = batch_.to(job.settings.device);
    if (layout.tp > 1) batch_ = parallel::on_tensor_mesh(batch_, dims_.tp);
    ctx_.stats = &outcome_.run.stats;
    ctx_.decisions = &decisions_;
  }

  void begin_pass() {
    if (fsdp_) fsdp_->begin_pass(/*reduce_gradients=*/true);
  }
  void end_pass() {
    if (fsdp_) fsdp_->end_pass();
  }
  void forward() {
    begin_pass();
    losses_ = forward_losses(*model_, batch_, ctx_);
  }
  void backward() {
    testing::backward(losses_.total);
    end_pass();
  }

  // All ranks' share together.
  Outcome outcome() {
    at::Tensor total = whole_of(losses_.total.detach()).clone();
    add_up(total, *dims_.loss);
    outcome_.run.total = total.item<double>();
    outcome_.run.by_tower = losses_.by_tower;
    train::sum_losses(outcome_.run.by_tower, outcome_.run.stats, dims_);
    for (const auto& [layer, own] : decisions_.topk_indices) {
      const auto slice = whole_of(own);
      const auto keys = batch_.cut ? batch_.cut->gather(slice) : slice;
      outcome_.selected[layer] = gathered(keys, *dims_.dp);
    }
    collect_gradients();
    return outcome_;
  }

  const parallel::ParallelDims& dims() const { return dims_; }
  parallel::Fsdp& fsdp() { return *fsdp_; }
  const v3::Batch& batch() const { return batch_; }
  v3::Model& model() { return *model_; }
  v3::ForwardContext& context() { return ctx_; }
  const v3::StepStats& stats() const { return outcome_.run.stats; }

 private:
  void collect_gradients() {
    for (const auto& parameter : model_->parameters()) {
      at::Tensor gradient = parameter.tensor->grad();
      if (!gradient.defined()) continue;
      if (fsdp_) {
        gradient = fsdp_->whole_of(parameter, gradient);
      } else if (v3::is_routed_expert(parameter.name)) {
        gradient = dtensor::is_dtensor(gradient) ? dtensor::local_of(gradient) : gradient;
        add_up(gradient, *dims_.efsdp);
        gradient = gathered(gradient, *dims_.ep);
      } else {
        gradient = whole_of(gradient);
        add_up(gradient, v3::is_router(parameter.name) ? *dims_.tokens : *dims_.loss);
      }
      for (auto& [name, view] : v3::hf_views(parameter.name, gradient)) {
        outcome_.run.gradients[name] = view;
      }
    }
  }

  parallel::ParallelDims dims_;
  std::unique_ptr<v3::Model> model_;
  std::unique_ptr<parallel::TensorParallel> tensor_;
  std::unique_ptr<parallel::Fsdp> fsdp_;
  v3::Batch batch_;
  v3::ForwardContext ctx_;
  v3::Decisions decisions_;
  Losses losses_;
  Outcome outcome_;
};

// As rank 0 sees it.
inline Outcome on_ranks(const RankLayout& layout, const Job& job,
                        const test::RankOptions& options = {}) {
  Outcome result;
  const auto body = [&](dtensor::World& world) {
    RankOfModel rank(world, layout, job);
    rank.forward();
    rank.backward();
    const Outcome outcome = rank.outcome();
    if (world.rank() == 0) result = outcome;
  };
  test::run_ranks(layout.ranks(), body, options);
  return result;
}

// Losses, statistics, selected keys and every gradient; gradients as shares of each tensor's
// maximum. In fp64 only the order of sums differs.
inline void expect_same(const Outcome& actual, const Outcome& expected, double tolerance) {
  const auto& [a, e] = std::tie(actual.run, expected.run);
  EXPECT_NEAR(a.total, e.total, tolerance);
  ASSERT_EQ(a.by_tower.size(), e.by_tower.size());
  for (size_t i = 0; i < e.by_tower.size(); ++i) {
    EXPECT_NEAR(a.by_tower[i], e.by_tower[i], tolerance) << "tower " << i;
  }
  for (const auto part : {&v3::StepStats::indexer_loss, &v3::StepStats::balance_loss,
                          &v3::StepStats::z_loss, &v3::StepStats::expert_counts}) {
    ASSERT_EQ((a.stats.*part).size(), (e.stats.*part).size());
    for (const auto& [layer, value] : e.stats.*part) {
      const auto difference = ((a.stats.*part).at(layer) - value).abs().max();
      EXPECT_LT(difference.item<double>(), tolerance) << "layer " << layer;
    }
  }
  ASSERT_EQ(actual.selected.size(), expected.selected.size());
  for (const auto& [layer, keys] : expected.selected) {
    EXPECT_TRUE(at::equal(actual.selected.at(layer), keys)) << "layer " << layer;
  }
  EXPECT_FALSE(e.gradients.empty());
  EXPECT_THAT(differing(a.gradients, e.gradients, tolerance), ::testing::IsEmpty());
}

}  // namespace longhaul::testing
