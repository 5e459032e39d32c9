#include "longhaul/train/validation.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

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

struct Sums {
  double loss = 0;
  int64_t labels = 0, bytes = 0;
  bool bytes_known = true;
};

// The rows that one of several ranks reads: of each `ranks` batches the rank-th.
Sums sum_up(const deepseek_v3::Model& model, const data::Dataset& dataset,
            const ValidationOptions& options, uint64_t rank, uint64_t ranks, parallel::Fsdp& fsdp,
            const parallel::ContextParallel* context) {
  const at::NoGradGuard no_grad;
  Sums sums;
  const auto batch_size = static_cast<uint64_t>(options.batch_size);
  for (uint64_t step = 0; dataset.has_row(step * batch_size * ranks); ++step) {
    if (options.max_batches >= 0 && step == static_cast<uint64_t>(options.max_batches)) break;
    const uint64_t first = (step * ranks + rank) * batch_size;
    auto batch = trunk_only(load_batch(dataset, first, options.batch_size));
    if (context) batch = context->cut(batch);
    fsdp.begin_pass(/*reduce_gradients=*/false);
    sums.loss += loss_sum(model, batch);
    fsdp.end_pass();
    sums.labels += batch.towers[0].num_labels;
    for (uint64_t i = first; i < first + batch_size && dataset.has_row(i); ++i) {
      const auto row_bytes = dataset.label_bytes(dataset.row(i));
      sums.bytes_known = sums.bytes_known && row_bytes.has_value();
      sums.bytes += row_bytes.value_or(0);
    }
  }
  return sums;
}

ValidationResult result_of(const Sums& sums) {
  ValidationResult result{
      .loss = sums.loss / static_cast<double>(std::max<int64_t>(sums.labels, 1)),
      .labels = sums.labels,
      .bits_per_byte = {}};
  if (sums.bytes_known && sums.bytes > 0) {
    result.bits_per_byte = sums.loss / std::log(2.0) / static_cast<double>(sums.bytes);
  }
  return result;
}

}  // namespace

ValidationResult validate(const deepseek_v3::Model& model, const data::Dataset& dataset,
                          const ValidationOptions& options) {
  parallel::Fsdp whole_model;
  return result_of(sum_up(model, dataset, options, 0, 1, whole_model, nullptr));
}

ValidationResult validate(const deepseek_v3::Model& model, const data::Dataset& dataset,
                          const ValidationOptions& options, const RanksOfModel& ranks) {
  const auto& dims = ranks.dims;
  Sums sums = sum_up(model, dataset, options, static_cast<uint64_t>(dims.data_rank()),
                     static_cast<uint64_t>(dims.data_size()), ranks.fsdp, ranks.context);
  if (dims.loss->size() == 1) return result_of(sums);
  at::Tensor loss = at::full({1}, sums.loss, at::kDouble);
  at::Tensor counts = at::tensor({sums.labels, sums.bytes, int64_t{!sums.bytes_known}});
  dims.loss->all_reduce(loss, dtensor::Reduction::kSum).wait();
  dims.loss->all_reduce(counts, dtensor::Reduction::kSum).wait();
  return result_of({.loss = loss.item<double>(),
                    .labels = counts[0].item<int64_t>(),
                    // All ranks that share a row have counted its bytes.
                    .bytes = counts[1].item<int64_t>() / dims.degrees.cp,
                    .bytes_known = counts[2].item<int64_t>() == 0});
}

}  // namespace longhaul::train
