// The trainer: owns model, optimizer, data and the run's state, and takes one step at a time. It
// does not decide when to save or stop (train/run.h does) and prints nothing.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/config/job_config.h"
#include "longhaul/data/dataset.h"
#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/optim/adam_w.h"
#include "longhaul/optim/lr_schedule.h"
#include "longhaul/train/metrics.h"
#include "longhaul/train/resolve_model.h"
#include "longhaul/train/setup.h"

namespace longhaul::train {

// Everything of a run that is neither a weight nor a moment.
struct Progress {
  int64_t step = 0;   // steps taken
  uint64_t rows = 0;  // rows of data consumed: the whole data position
  int64_t tokens = 0;
};

class Trainer {
 public:
  // Builds the model, initialised from the job's seed, and opens the training data.
  Trainer(const JobConfig& config, const ResolvedModel& resolved);

  // One optimizer step. UserError, and nothing is changed, if the loss or the gradients are not
  // finite and the job says to stop, or if the weights or router biases are not finite.
  StepMetrics step();

  // The state as a checkpoint, and back. `snapshot` shares the tensors' storage.
  checkpoint::Snapshot snapshot(bool model_only) const;
  void restore(const checkpoint::Snapshot& snapshot);
  // Weights only, from a Hugging Face folder or from one of our checkpoints.
  void load_weights(const std::string& path, bool hugging_face);

  deepseek_v3::Model& model() { return *model_; }
  const Progress& progress() const { return progress_; }
  const data::Dataset& dataset() const { return *dataset_; }
  double peak_flops() const { return peak_flops_; }

 private:
  // What one step reads: micro-batches on the host, and the counts over all of them.
  struct StepData {
    std::vector<deepseek_v3::Batch> micro_batches;
    deepseek_v3::GlobalCounts counts;
  };
  struct StepLosses {
    std::vector<double> by_tower;
    deepseek_v3::StepStats stats;
  };

  StepData load_step() const;
  StepLosses forward_backward(const StepData& data);
  void clear_gradients();
  // False if the step must be left out; throws if the job says to stop, or if the weights
  // themselves are not finite.
  bool may_update(const StepMetrics& metrics) const;
  void update(const deepseek_v3::StepStats& stats, double lr, double grad_norm);
  void update_router_biases(const deepseek_v3::StepStats& stats);
  StepMetrics measure(const StepLosses& losses) const;
  void dump(const StepMetrics& metrics) const;

  JobConfig config_;
  BatchSizes batch_sizes_;
  at::Device device_;
  // Before the model: what is wrong with the data is found before anything large is allocated.
  std::unique_ptr<data::Dataset> dataset_;
  std::unique_ptr<deepseek_v3::Model> model_;
  std::vector<nn::NamedParameter> parameters_;
  optim::AdamW optimizer_;
  optim::LrSchedule schedule_;
  double peak_flops_, flops_per_step_;
  Progress progress_;
};

// The model of a job, initialised from its seed.
std::unique_ptr<deepseek_v3::Model> build_model(const JobConfig& config,
                                                const ResolvedModel& resolved, at::Device device);

// Copies weights and router biases out of `tensors`. UserError that lists missing, unexpected and
// misshapen names, before anything is written.
void load_model_tensors(deepseek_v3::Model& model, const checkpoint::TensorMap& tensors,
                        const std::string& origin);

// Copies the weights of a Hugging Face folder.
void load_hf_folder(deepseek_v3::Model& model, const std::string& path);

}  // namespace longhaul::train
