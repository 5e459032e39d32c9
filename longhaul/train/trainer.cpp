#include "longhaul/train/trainer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "longhaul/base/clock.h"
#include "longhaul/base/error.h"
#include "longhaul/dtensor/exchange.h"
#include "longhaul/models/deepseek_v3/flops.h"
#include "longhaul/optim/gradients.h"
#include "longhaul/optim/router_bias.h"
#include "longhaul/parallel/expert.h"
#include "longhaul/train/data_source.h"
#include "longhaul/train/device.h"
#include "longhaul/train/dump.h"
#include "longhaul/train/global_sums.h"
#include "longhaul/train/guard.h"
#include "longhaul/train/losses.h"
#include "longhaul/train/memory.h"
#include "longhaul/train/peak.h"
#include "longhaul/train/run_folder.h"

namespace longhaul::train {
namespace {

using deepseek_v3::IndexerStage;

// One rank measures while the others wait: side by side they would slow each other down.
double shared_peak_flops(const parallel::ParallelDims& dims,
                         const deepseek_v3::ModelSettings& settings) {
  const double own =
      dims.is_first() ? measure_peak_flops(settings.device, settings.compute_dtype) : 0;
  at::Tensor peak = at::full({1}, own, at::kDouble);
  dims.all->broadcast(peak, 0).wait();
  return peak.item<double>();
}

double sum_of(const std::map<int64_t, at::Tensor>& by_layer) {
  double sum = 0;
  for (const auto& [layer, value] : by_layer) sum += value.item<double>();
  return sum;
}

DataRequest data_of(const JobConfig& config, const ResolvedModel& resolved,
                    const parallel::ParallelDims& dims) {
  DataRequest request =
      training_data(config, resolved.shape.vocab_size, resolved.shape.num_nextn_predict_layers);
  request.row_counts = {std::filesystem::path(config.job.dump_folder) / "row_counts.txt",
                        dims.is_first()};
  if (dims.is_first()) {
    request.bad_documents = std::filesystem::path(config.job.dump_folder) / kBadDocuments;
  }
  return request;
}

// Before data parallelism, which cuts what is left.
std::unique_ptr<deepseek_v3::Model> build_on_ranks(const JobConfig& config,
                                                   const ResolvedModel& resolved, at::Device device,
                                                   const parallel::ParallelDims& dims) {
  auto model = build_model(config, resolved, device, /*on_meta=*/dims.all->size() > 1);
  parallel::apply_expert_parallel(*model, dims.ep);
  return model;
}

}  // namespace

std::unique_ptr<deepseek_v3::Model> build_model(const JobConfig& config,
                                                const ResolvedModel& resolved, at::Device device,
                                                bool on_meta) {
  auto settings = model_settings(config, device);
  settings.parameters_on_meta = on_meta;
  auto model = std::make_unique<deepseek_v3::Model>(resolved.shape, settings);
  apply_converters(config, *model);
  return model;
}

void initialize_model(deepseek_v3::Model& model, const JobConfig& config,
                      const ResolvedModel& resolved, const deepseek_v3::PartOf& part_of) {
  deepseek_v3::initialize(model, seed_of(config),
                          config.model.init_std.value_or(resolved.shape.initializer_range),
                          config.model.init_depth_scale, part_of);
}

Trainer::Trainer(const JobConfig& config, const ResolvedModel& resolved,
                 const parallel::ParallelDims& dims)
    : config_(config),
      dims_(dims),
      batch_sizes_(train::batch_sizes(config, dims.data_size())),
      device_(choose_device(config)),
      dataset_(open_data(data_of(config, resolved, dims), config)),
      context_(parallel::make_context_parallel(config, dims.mesh->shared_axis("cp"), device_)),
      model_(build_on_ranks(config, resolved, device_, dims)),
      tensor_(parallel::apply_tensor_parallel(*model_, dims.tp)),
      fsdp_(parallel::apply_data_parallel(*model_, dims, config)),
      parameters_(model_->parameters()),
      optimizer_(parameters_, adam_w_config(config)),
      schedule_(lr_schedule_options(config)),
      peak_flops_(shared_peak_flops(dims, model_->settings())),
      flops_per_step_(static_cast<double>(batch_sizes_.global) *
                      deepseek_v3::training_flops_per_sequence(resolved.shape, model_->settings(),
                                                               config.training.seq_len)) {
  initialize_model(*model_, config, resolved, part_of());
}

StepMetrics Trainer::step() {
  const int64_t step = progress_.step + 1;
  const nn::ProfileRange range("ProfilerStep#{}", step);  // the name that other tools look for
  const auto start = std::chrono::steady_clock::now();
  const bool logged = is_logged(config_, step);
  StepTimer timer(device_, logged);
  const StepData data = load_step(timer);
  const StepLosses losses = forward_backward(data, timer);

  StepMetrics metrics = measure(losses);
  metrics.step = step;
  metrics.lr = schedule_.lr(step);
  take_optimizer_step(losses.stats, timer, metrics);
  if (logged) measure_more(losses.stats, metrics);

  progress_.step = step;
  progress_.rows += static_cast<uint64_t>(batch_sizes_.global);
  progress_.tokens += data.counts.tokens[0];
  if (std::count(config_.debug.dump_steps.begin(), config_.debug.dump_steps.end(), progress_.step) >
      0) {
    dump(metrics);
  }
  clear_gradients();

  synchronize(device_);
  const double seconds = seconds_since(start);
  metrics.seconds = timer.seconds(seconds);
  metrics.tokens = progress_.tokens;
  metrics.tokens_per_second = static_cast<double>(data.counts.tokens[0]) / seconds;
  metrics.mfu = flops_per_step_ / seconds / (peak_flops_ * static_cast<double>(dims_.all->size()));
  metrics.memory_peak_bytes = peak_device_memory_bytes(device_);
  metrics.time = seconds_since_1970();
  return metrics;
}

void Trainer::take_optimizer_step(const deepseek_v3::StepStats& stats, StepTimer& timer,
                                  StepMetrics& metrics) {
  const auto part = timer.part("optimizer");
  metrics.grad_norm = optim::gradient_norm(gradient_groups(), config_.training.norm_type);
  metrics.skipped = !may_update(metrics);
  if (!metrics.skipped) update(stats, metrics.lr, metrics.grad_norm);
}

data::RowRange Trainer::rows_of_step() const {
  return data::rows_of_rank({.position = progress_.rows,
                             .global_batch_size = static_cast<uint64_t>(batch_sizes_.global),
                             .rank = static_cast<uint64_t>(dims_.data_rank()),
                             .num_ranks = static_cast<uint64_t>(dims_.data_size())});
}

std::optional<int> Trainer::rank_out_of_data() const {
  if (config_.training.repeat) return std::nullopt;
  const auto rows = rows_of_step();
  const bool has_all = dataset_->has_row(rows.first + rows.count - 1);
  const int none = dims_.all->size();
  const int64_t first = dtensor::reduce_number(*dims_.all, has_all ? none : dims_.all->rank(),
                                               dtensor::Reduction::kMin);
  return first == none ? std::nullopt : std::optional(narrow<int>(first));
}

Trainer::StepData Trainer::load_step(StepTimer& timer) const {
  const auto part = timer.part("data");
  const auto rows = rows_of_step();
  StepData data;
  for (int64_t i = 0; i < batch_sizes_.micro_batches(); ++i) {
    const uint64_t first = rows.first + static_cast<uint64_t>(i * batch_sizes_.local);
    const auto rows_of_batch = load_batch(*dataset_, first, batch_sizes_.local);
    data.micro_batches.push_back(context_ ? context_->cut(rows_of_batch) : rows_of_batch);
    data.counts.add(data.micro_batches.back());
  }
  sum_counts(data.counts, *dims_.loss);
  return data;
}

deepseek_v3::Batch Trainer::placed(const deepseek_v3::Batch& host_batch) const {
  const auto batch = host_batch.to(model_->settings().device);
  return tensor_ ? parallel::on_tensor_mesh(batch, dims_.tp) : batch;
}

bool Trainer::measures_recall(int64_t step) const {
  const int64_t every = config_.metrics.indexer_recall_freq;
  return every > 0 && (step == 1 || step % every == 0);
}

Trainer::StepLosses Trainer::forward_backward(const StepData& data, StepTimer& timer) {
  StepLosses losses;
  losses.by_tower.resize(data.counts.labels.size(), 0.0);
  deepseek_v3::ForwardContext ctx;
  ctx.counts = data.counts;
  ctx.stats = &losses.stats;
  ctx.measure_recall = measures_recall(progress_.step + 1);
  for (const auto& host_batch : data.micro_batches) {
    fsdp_->begin_pass(/*reduce_gradients=*/&host_batch == &data.micro_batches.back());
    const auto batch = placed(host_batch);  // the backward pass recomputes from it
    const Objective objective = [&] {
      const auto part = timer.part("forward");
      return compute_objective(*model_, batch, model_->forward(batch, ctx), data.counts,
                               config_.mtp.loss_weight);
    }();
    const auto part = timer.part("backward");
    // With a frozen trunk nothing is left to differentiate: the indexer's losses already were.
    if (objective.total.requires_grad()) torch::autograd::backward({objective.total}, {});
    for (size_t i = 0; i < objective.by_tower.size(); ++i) {
      losses.by_tower[i] += objective.by_tower[i].item<double>();
    }
    fsdp_->end_pass();
  }
  sum_losses(losses.by_tower, losses.stats, dims_);
  return losses;
}

void Trainer::clear_gradients() {
  for (const auto& parameter : parameters_) parameter.tensor->mutable_grad().reset();
}

// By the ranks that have different elements of them.
std::vector<optim::GradientGroup> Trainer::gradient_groups() const {
  std::vector<optim::GradientGroup> groups;
  for (const auto& parameter : parameters_) {
    const auto cut_by = fsdp_->cut_by(parameter);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& other) { return other.cut_by == cut_by; });
    if (group == groups.end()) group = groups.insert(groups.end(), {{}, cut_by});
    group->parameters.push_back(parameter);
  }
  return groups;
}

deepseek_v3::PartOf Trainer::part_of() const {
  return [this](const nn::NamedParameter& parameter) { return fsdp_->part_of(parameter); };
}

ValidationResult Trainer::validate(const data::Dataset& dataset, const ValidationOptions& options) {
  return train::validate(*model_, dataset, options, {dims_, *fsdp_, context_.get()});
}

StepMetrics Trainer::measure(const StepLosses& losses) const {
  StepMetrics metrics;
  metrics.lm_loss = losses.by_tower[0];
  const size_t depth = losses.by_tower.size() - 1;
  for (size_t k = 0; k <= depth; ++k) {
    metrics.loss += tower_weight(k, depth, config_.mtp.loss_weight) * losses.by_tower[k];
    if (k > 0) metrics.mtp_loss += losses.by_tower[k] / static_cast<double>(depth);
  }
  for (const auto& [layer, value] : losses.stats.indexer_loss) {
    metrics.indexer_loss_per_layer.push_back(value.item<double>());
    metrics.loss += config_.dsa.indexer_loss_coeff * metrics.indexer_loss_per_layer.back();
    metrics.indexer_loss += metrics.indexer_loss_per_layer.back();
  }
  metrics.indexer_loss /=
      static_cast<double>(std::max<size_t>(metrics.indexer_loss_per_layer.size(), 1));
  for (const auto& [layer, value] : losses.stats.indexer_recall) {
    metrics.indexer_recall_per_layer.push_back(value.item<double>());
  }
  metrics.balance_loss = sum_of(losses.stats.balance_loss);
  metrics.z_loss = sum_of(losses.stats.z_loss);
  metrics.loss += metrics.balance_loss + metrics.z_loss;
  return metrics;
}

void Trainer::measure_more(const deepseek_v3::StepStats& stats, StepMetrics& metrics) const {
  for (const auto& [layer, counts_E] : stats.expert_counts) {
    const at::Tensor host = counts_E.cpu().contiguous();
    const auto* counts = host.const_data_ptr<int64_t>();
    metrics.expert_load[layer].assign(counts, counts + host.numel());
  }
  metrics.memory = measure_memory(parameters_, model_->buffers(), optimizer_, device_);
}

bool Trainer::may_update(const StepMetrics& metrics) const {
  const bool finite = std::isfinite(metrics.loss) && std::isfinite(metrics.grad_norm);
  const bool sound = finite && router_biases_are_finite(*model_);
  if (dtensor::reduce_number(*dims_.all, sound, dtensor::Reduction::kMin) == 1) return true;
  const std::string what =
      fmt::format("step {}: loss {} (lm {}, indexer {}), gradient norm {}", metrics.step,
                  metrics.loss, metrics.lm_loss, metrics.indexer_loss, metrics.grad_norm);
  // No later step can be finite then, so skipping would only burn time.
  if (const std::string name = find_nonfinite(*model_, *dims_.all); !name.empty()) {
    throw StepRefused(fmt::format(
        "{}: {} holds values that are not finite, and nothing was updated; go on from other "
        "weights: an older checkpoint (checkpoint.load_step) or a sound checkpoint."
        "initial_load_path, and with a lower optimizer.lr",
        what, name));
  }
  if (config_.training.nonfinite == "skip") return false;
  throw StepRefused(fmt::format(
      "{}: not finite, and nothing was updated; lower optimizer.lr, look at rows {} to {} of the "
      "data, or set training.nonfinite = \"skip\"",
      what, progress_.rows, progress_.rows + static_cast<uint64_t>(batch_sizes_.global) - 1));
}

void Trainer::update(const deepseek_v3::StepStats& stats, double lr, double grad_norm) {
  const auto stage = deepseek_v3::stage_of(model_->config(), model_->settings());
  if (stage != IndexerStage::kDenseWarmup) update_router_biases(stats);
  optimizer_.step(lr, optim::clip_factor(grad_norm, config_.training.max_norm));
}

void Trainer::update_router_biases(const deepseek_v3::StepStats& stats) {
  for (auto& [layer, router] : model_->routers()) {
    const auto counts = stats.expert_counts.find(layer);
    if (!router->bias().defined() || counts == stats.expert_counts.end()) continue;
    optim::update_router_bias(router->bias(), counts->second, config_.moe.bias_update_speed,
                              config_.moe.bias_update_zero_mean);
  }
}

void Trainer::dump(const StepMetrics& metrics) const {
  dump_step(std::filesystem::path(config_.job.dump_folder) / "dump", *model_, *fsdp_, metrics,
            dims_.is_first());
}

}  // namespace longhaul::train
