#include "longhaul/train/results/step_writer.h"

#include <fmt/format.h>

#include <cmath>

#include "longhaul/base/clock.h"
#include "longhaul/config/write.h"
#include "longhaul/train/results/scalars.h"

namespace longhaul::train {
namespace {

namespace fs = std::filesystem;

// Of one rank: the first has the folder itself, as in a job without save_for_all_ranks.
EventFile open_events(const JobConfig& config, const StepWriterOptions& options) {
  fs::path folder = fs::path(config.job.dump_folder) / config.metrics.save_tb_folder;
  if (options.rank > 0) folder /= fmt::format("rank_{}", options.rank);
  EventFile events(folder, options.last_step + 1);
  events.add_text(options.last_step, seconds_since_1970(), "job",
                  "```toml\n" + to_toml(config) + "```\n");
  return events;
}

nlohmann::ordered_json wandb_number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

}  // namespace

nlohmann::ordered_json wandb_line(const StepMetrics& metrics) {
  nlohmann::ordered_json line = {{"_step", metrics.step}, {"_timestamp", metrics.time}};
  for (const auto& [name, value] : scalars_of(metrics)) line[name] = wandb_number(value);
  return line;
}

StepWriter::StepWriter(const JobConfig& config, const StepWriterOptions& options)
    : config_(config),
      metrics_(fs::path(config.job.dump_folder) / options.metrics_file, options.last_step) {
  if (options.metrics_only) return;
  if (config.metrics.enable_tensorboard) events_ = open_events(config, options);
  if (config.metrics.enable_wandb && options.rank == 0) {
    wandb_.emplace(fs::path(config.job.dump_folder) / "wandb-history.jsonl", options.last_step,
                   "_step");
  }
}

void StepWriter::append(const StepMetrics& metrics) {
  metrics_.append(to_json(metrics));
  if (wandb_) wandb_->append(wandb_line(metrics));
  const bool worth_an_event = is_logged(config_, metrics.step) || metrics.validation ||
                              !metrics.indexer_recall_per_layer.empty();
  if (events_ && worth_an_event) {
    events_->add_scalars(metrics.step, metrics.time, scalars_of(metrics));
  }
}

void StepWriter::add_last_save(const StepMetrics& metrics) {
  metrics_.replace_last(to_json(metrics));
  if (wandb_) wandb_->replace_last(wandb_line(metrics));
  if (!events_) return;
  events_->add_scalars(metrics.step, seconds_since_1970(),
                       {{"seconds/checkpoint", metrics.seconds.at("checkpoint")}});
}

}  // namespace longhaul::train
