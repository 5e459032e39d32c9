#include "longhaul/train/global_sums.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longhaul/parallel/collectives.h"

namespace longhaul::train {
namespace {

using deepseek_v3::StepStats;

// The values of several vectors through one collective.
template <typename T>
void sum_values(std::vector<T>& values, const dtensor::Communicator& group) {
  at::Tensor sums = at::tensor(values);
  group.all_reduce(sums, dtensor::Reduction::kSum).wait();
  std::copy_n(sums.template const_data_ptr<T>(), values.size(), values.begin());
}

std::vector<std::map<int64_t, at::Tensor>*> losses_of(StepStats& stats) {
  return {&stats.indexer_loss, &stats.indexer_recall, &stats.balance_loss, &stats.z_loss};
}

void sum_expert_counts(std::map<int64_t, at::Tensor>& by_layer,
                       const dtensor::Communicator& group) {
  if (by_layer.empty()) return;
  std::vector<at::Tensor> counts;
  for (const auto& [layer, counts_E] : by_layer) counts.push_back(counts_E);
  at::Tensor all = at::stack(counts);
  group.all_reduce(all, dtensor::Reduction::kSum).wait();
  int64_t i = 0;
  for (auto& [layer, counts_E] : by_layer) counts_E = all[i++];
}

}  // namespace

void sum_counts(deepseek_v3::GlobalCounts& counts, const dtensor::Communicator& group) {
  if (group.size() == 1) return;
  std::vector<int64_t> values = counts.tokens;
  values.insert(values.end(), counts.labels.begin(), counts.labels.end());
  sum_values(values, group);
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(counts.tokens.size());
  counts.tokens.assign(values.begin(), middle);
  counts.labels.assign(middle, values.end());
}

void sum_losses(std::vector<double>& by_tower, StepStats& stats,
                const parallel::ParallelDims& dims) {
  if (dims.all->size() == 1) return;
  std::vector<double> values;
  const bool counts = dims.tp->axis("tp").rank() == 0;
  for (const double loss : by_tower) values.push_back(counts ? loss : 0);
  for (const auto* losses : losses_of(stats)) {
    for (const auto& [layer, loss] : *losses) {
      values.push_back(parallel::own_term(loss, "a recorded loss").item<double>());
    }
  }
  sum_values(values, *dims.all);
  auto next = values.begin();
  for (auto& loss : by_tower) loss = *next++;
  for (auto* losses : losses_of(stats)) {
    for (auto& [layer, loss] : *losses) loss = at::scalar_tensor(*next++, at::kDouble);
  }
  sum_expert_counts(stats.expert_counts, *dims.all);
}

}  // namespace longhaul::train
