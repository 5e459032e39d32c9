#include "longhaul/parallel/expert.h"

#include <ATen/ATen.h>

#include "longhaul/dtensor/dtensor.h"
#include "longhaul/ops/moe_token_permute/moe_token_permute.h"
#include "longhaul/ops/saved_results.h"
#include "longhaul/parallel/collectives.h"

namespace longhaul::parallel {
namespace {

using at::Tensor;

// counts [ranks, experts of a rank] on the host: the rows for each rank.
std::vector<int64_t> rows_by_rank(const Tensor& counts) {
  const Tensor rows = counts.sum(1);
  return {rows.const_data_ptr<int64_t>(), rows.const_data_ptr<int64_t>() + rows.numel()};
}

class ExchangedExperts : public deepseek_v3::ExpertExchange {
 public:
  explicit ExchangedExperts(Group group) : group_(std::move(group)) {}

  Tensor held(const Tensor& weights) const override { return dtensor::to_local(weights); }

  Tensor compute(const Tensor& rows_MD, const Tensor& counts_E,
                 const Compute& compute_held) const override {
    const Routes routes = plan(counts_E, rows_MD.size(0));
    const Tensor arrived = all_to_all_rows(rows_MD.narrow(0, 0, routes.num_sent), routes.sent,
                                           routes.received, group_);
    // From source by source to expert by expert, and back.
    const Tensor& order = routes.by_expert.order;
    const Tensor inverse = routes.by_expert.inverse.view(-1);
    const Tensor computed =
        compute_held(permute_rows(arrived, order, inverse), routes.by_expert.counts_E);
    const Tensor returned = all_to_all_rows(permute_rows(computed, inverse, order), routes.received,
                                            routes.sent, group_);
    const int64_t nowhere = rows_MD.size(0) - routes.num_sent;
    return nowhere == 0 ? returned : at::constant_pad_nd(returned, {0, 0, 0, nowhere});
  }

 private:
  // Of the rows with an expert.
  struct Routes {
    std::vector<int64_t> sent, received;  // rows by rank
    int64_t num_sent;
    ops::TokenOrder by_expert;  // of the rows that arrive, stable: by expert, then source
  };

  // Waits for the counts: how much to send must be known on the host.
  Routes plan(const Tensor& counts_E, int64_t num_rows) const {
    const int64_t ranks = group_->size(), E = counts_E.size(0) / ranks;
    const Tensor own = counts_E.view({ranks, E});
    const Tensor theirs = ops::saved_or_computed({.op = "all_to_all"}, [&] {
      Tensor arrived = at::empty_like(own);
      const std::vector<int64_t> one_each(static_cast<size_t>(ranks), 1);
      group_->all_to_all(arrived, own, one_each, one_each).wait();
      return arrived;
    });
    if (counts_E.is_meta()) return balanced(counts_E, num_rows);
    const Tensor own_host = own.cpu(), theirs_host = theirs.cpu();
    const Tensor expert_of_row =
        at::repeat_interleave(at::arange(E, theirs_host.options()).repeat({ranks}),
                              theirs_host.view(-1))
            .to(counts_E.device());
    return {.sent = rows_by_rank(own_host),
            .received = rows_by_rank(theirs_host),
            .num_sent = own_host.sum().item<int64_t>(),
            .by_expert = ops::sort_by_expert(expert_of_row.unsqueeze(1), E)};
  }

  // On the Meta device, where counts have no values: all rows have an expert, and each rank has as
  // many rows for each other.
  Routes balanced(const Tensor& counts_E, int64_t num_rows) const {
    const int64_t ranks = group_->size();
    Routes routes = {.sent = {}, .received = {}, .num_sent = num_rows, .by_expert = {}};
    for (int64_t rank = 0; rank < ranks; ++rank) {
      routes.sent.push_back(dtensor::slice_of(num_rows, ranks, rank).length);
    }
    const int64_t from_each = routes.sent[static_cast<size_t>(group_->rank())];
    routes.received.assign(static_cast<size_t>(ranks), from_each);
    routes.by_expert = ops::sort_by_expert(at::empty({ranks * from_each, 1}, counts_E.options()),
                                           counts_E.size(0) / ranks);
    return routes;
  }

  Group group_;
};

}  // namespace

void check_expert_parallel(const deepseek_v3::ModelConfig& config, int64_t ranks) {
  if (config.n_routed_experts % ranks == 0) return;
  fail_user(
      "parallelism.expert_parallel_degree {} does not divide the model's {} routed experts; set it "
      "to a divisor of them",
      ranks, config.n_routed_experts);
}

void apply_expert_parallel(deepseek_v3::Model& model, const Group& group) {
  const int64_t ranks = group->size();
  check_expert_parallel(model.config(), ranks);
  if (ranks == 1) return;
  const auto mesh = std::make_shared<const dtensor::DeviceMesh>(std::vector{group});
  const auto exchange = std::make_shared<ExchangedExperts>(group);
  for (auto* experts : model.experts()) {
    experts->set_exchange(exchange);
    for (const auto& parameter : experts->parameters()) {
      const bool trains = parameter.tensor->requires_grad();
      *parameter.tensor =
          dtensor::distribute(parameter.tensor->detach(), mesh, {dtensor::Placement::shard(0)});
      parameter.tensor->set_requires_grad(trains);
    }
  }
}

}  // namespace longhaul::parallel
