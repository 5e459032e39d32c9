// Writes each step's figures wherever the job wants them: metrics.jsonl always, TensorBoard events
// with metrics.enable_tensorboard, wandb-history.jsonl with metrics.enable_wandb. The .jsonl files
// are cut back to the step that a run goes on from; a start adds an event file, which says from
// which step on the older ones count as undone. Called by the run, on each rank that writes.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "longhaul/config/job_config.h"
#include "longhaul/train/metrics.h"
#include "longhaul/train/results/event_file.h"

namespace longhaul::train {

struct StepWriterOptions {
  std::string metrics_file = "metrics.jsonl";  // in the run folder
  int64_t last_step = 0;                       // lines up to here are kept; 0: a run that starts
  int rank = 0;
  // Neither events nor W&B's history: for a run that only looks at another's checkpoints.
  bool metrics_only = false;
};

class StepWriter {
 public:
  StepWriter(const JobConfig& config, const StepWriterOptions& options);
  // FileError if the disk is full.
  void append(const StepMetrics& metrics);
  // The same step again, which has learnt the seconds of "checkpoint" since.
  void add_last_save(const StepMetrics& metrics);

 private:
  const JobConfig& config_;
  StepLines metrics_;
  std::optional<EventFile> events_;
  std::optional<StepLines> wandb_;
};

// A line of wandb-history.jsonl: `_step`, `_timestamp` and the scalars by name; numbers that are
// not finite as W&B writes them ("NaN", "Infinity", "-Infinity").
nlohmann::ordered_json wandb_line(const StepMetrics& metrics);

}  // namespace longhaul::train
