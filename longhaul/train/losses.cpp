#include "longhaul/train/losses.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longhaul/nn/profile_range.h"

namespace longhaul::train {

double tower_weight(size_t tower, size_t depth, double mtp_weight) {
  return tower == 0 ? 1.0 : mtp_weight / static_cast<double>(depth);
}

Objective compute_objective(const deepseek_v3::Model& model, const deepseek_v3::Batch& batch,
                            const std::vector<at::Tensor>& hidden,
                            const deepseek_v3::GlobalCounts& counts, double mtp_weight) {
  const nn::ProfileRange range("lm_head and loss");
  Objective objective;
  for (size_t i = 0; i < hidden.size(); ++i) {
    const at::Tensor sum = model.cross_entropy(hidden[i], batch.towers[i].labels);
    const at::Tensor mean = sum / static_cast<double>(std::max<int64_t>(counts.labels[i], 1));
    objective.by_tower.push_back(mean.detach());
    const at::Tensor weighted = mean * tower_weight(i, hidden.size() - 1, mtp_weight);
    objective.total = i == 0 ? mean : objective.total + weighted;
  }
  return objective;
}

}  // namespace longhaul::train
