#include "longhaul/train/validation.h"

#include <ATen/ATen.h>

#include <cmath>

#include "longhaul/base/error.h"
#include "longhaul/train/data_source.h"
#include "longhaul/train/losses.h"

namespace longhaul::train {
namespace {

// Only the trunk: MTP modules are a training aid.
deepseek_v3::Batch trunk_only(deepseek_v3::Batch batch) {
  batch.towers.resize(1);
  return batch;
}

double loss_sum(const deepseek_v3::Model& model, const deepseek_v3::Batch& host_batch) {
  const auto batch = host_batch.to(model.settings().device);
  deepseek_v3::ForwardContext ctx;
  ctx.pass = deepseek_v3::Pass::kEvaluate;
  ctx.counts = {.tokens = {host_batch.towers[0].num_tokens}, .labels = {1}};  // a sum, not a mean
  const auto hidden = model.forward(batch, ctx);
  return compute_objective(model, batch, hidden, ctx.counts, 0).total.item<double>();
}

}  // namespace

ValidationResult validate(const deepseek_v3::Model& model, const data::Dataset& dataset,
                          const ValidationOptions& options) {
  const at::NoGradGuard no_grad;
  const auto rows = dataset.num_rows();
  LONGHAUL_CHECK(rows.has_value(), "validation reads one pass, the data is endless");
  double sum = 0;
  int64_t labels = 0, bytes = 0;
  bool bytes_known = true;
  const auto batch_size = static_cast<uint64_t>(options.batch_size);
  for (uint64_t first = 0, n = 0; first < *rows; first += batch_size, ++n) {
    if (options.max_batches >= 0 && n == static_cast<uint64_t>(options.max_batches)) break;
    const auto batch = trunk_only(load_batch(dataset, first, options.batch_size));
    sum += loss_sum(model, batch);
    labels += batch.towers[0].num_labels;
    for (uint64_t i = first; i < std::min(first + batch_size, *rows); ++i) {
      const auto row_bytes = dataset.label_bytes(dataset.row(i));
      bytes_known = bytes_known && row_bytes.has_value();
      bytes += row_bytes.value_or(0);
    }
  }
  ValidationResult result{.loss = sum / static_cast<double>(std::max<int64_t>(labels, 1)),
                          .labels = labels,
                          .bits_per_byte = {}};
  if (bytes_known && bytes > 0) {
    result.bits_per_byte = sum / std::log(2.0) / static_cast<double>(bytes);
  }
  return result;
}

}  // namespace longhaul::train
