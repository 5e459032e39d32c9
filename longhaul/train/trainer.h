// The trainer: owns model, optimizer, data and the run's state, and takes one step at a time. It
// does not decide when to save or stop (train/run.h does) and prints nothing. Each rank has one:
// what is said below to be the same on all ranks is, and collective functions are called on all.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/config/job_config.h"
#include "longhaul/data/dataset.h"
#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/optim/adam_w.h"
#include "longhaul/optim/gradients.h"
#include "longhaul/optim/lr_schedule.h"
#include "longhaul/parallel/context.h"
#include "longhaul/parallel/data_parallel.h"
#include "longhaul/parallel/plans/deepseek_v3.h"
#include "longhaul/train/metrics.h"
#include "longhaul/train/resolve_model.h"
#include "longhaul/train/setup.h"
#include "longhaul/train/step_timer.h"
#include "longhaul/train/validation.h"

namespace longhaul::train {

// Everything of a run that is neither a weight nor a moment.
struct Progress {
  int64_t step = 0;   // steps taken
  uint64_t rows = 0;  // rows of data consumed: the whole data position
  int64_t tokens = 0;
};

// A step that would have left numbers that are not finite: all ranks throw it together, and nothing
// was changed.
class StepRefused : public UserError {
 public:
  using UserError::UserError;
};

// What of a checkpoint restore() leaves as it is.
struct Excluded {
  bool optimizer = false;  // moments
  bool data = false;       // the data position: the run begins with its first row
  bool step = false;       // the step and with it the schedule, and the tokens seen
};

class Trainer {
 public:
  // Builds this rank's part of the model, initialised from the job's seed, and opens the training
  // data.
  Trainer(const JobConfig& config, const ResolvedModel& resolved,
          const parallel::ParallelDims& dims);

  // One optimizer step; its metrics are the same on all ranks, but for times and memory.
  // Collective. StepRefused if the loss or the gradients are not finite and the job says to stop,
  // or if the weights or router biases are not finite.
  StepMetrics step();

  // The first rank that has not all rows of one more step; nothing while all have, as always with
  // training.repeat. Collective.
  std::optional<int> rank_out_of_data() const;

  // The state as a checkpoint, which all ranks save together. It shares the tensors' storage, and
  // ends before the next step.
  checkpoint::Snapshot snapshot() const;
  // The weights alone, in `dtype` if given (router biases keep theirs).
  checkpoint::Snapshot weights(std::optional<at::ScalarType> dtype) const;
  // And back, without a check of its checksums. UserError that lists what does not fit, of weights
  // and moments, before anything is overwritten.
  void restore(const std::filesystem::path& step_folder, const Excluded& excluded = {});
  // Weights only, from a Hugging Face folder or from a step folder.
  void load_weights(const std::string& path, bool hugging_face);
  // Loss on held-out data. Collective.
  ValidationResult validate(const data::Dataset& dataset, const ValidationOptions& options);

  const parallel::ParallelDims& dims() const { return dims_; }
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

  void add_state(checkpoint::Snapshot& snapshot, const std::string& name,
                 const nn::NamedParameter& of, const at::Tensor& tensor,
                 std::optional<at::ScalarType> dtype) const;
  void check_range(const checkpoint::Snapshot& snapshot) const;
  void check_moments(const checkpoint::CheckpointReader& reader, const std::string& origin) const;
  void restore_moments(const checkpoint::CheckpointReader& reader);
  data::RowRange rows_of_step() const;
  StepData load_step(StepTimer& timer) const;
  // The batch where and how the model takes it.
  deepseek_v3::Batch placed(const deepseek_v3::Batch& host_batch) const;
  StepLosses forward_backward(const StepData& data, StepTimer& timer);
  bool measures_recall(int64_t step) const;
  void clear_gradients();
  std::vector<optim::GradientGroup> gradient_groups() const;
  // False if the step must be left out; throws if the job says to stop, or if the weights
  // themselves are not finite.
  bool may_update(const StepMetrics& metrics) const;
  // Gradient norm, guard, update.
  void take_optimizer_step(const deepseek_v3::StepStats& stats, StepTimer& timer,
                           StepMetrics& metrics);
  void update(const deepseek_v3::StepStats& stats, double lr, double grad_norm);
  void update_router_biases(const deepseek_v3::StepStats& stats);
  StepMetrics measure(const StepLosses& losses) const;
  // What only steps that are logged measure; gradients are still there.
  void measure_more(const deepseek_v3::StepStats& stats, StepMetrics& metrics) const;
  void dump(const StepMetrics& metrics) const;

  deepseek_v3::PartOf part_of() const;

  JobConfig config_;
  parallel::ParallelDims dims_;
  BatchSizes batch_sizes_;
  at::Device device_;
  // Before the model: what is wrong with the data is found before anything large is allocated.
  std::unique_ptr<data::Dataset> dataset_;
  std::unique_ptr<parallel::ContextParallel> context_;  // or nullptr
  std::unique_ptr<deepseek_v3::Model> model_;
  std::unique_ptr<parallel::TensorParallel> tensor_;  // or nullptr
  std::unique_ptr<parallel::Fsdp> fsdp_;              // these end before the model
  std::vector<nn::NamedParameter> parameters_;
  optim::AdamW optimizer_;
  optim::LrSchedule schedule_;
  double peak_flops_, flops_per_step_;
  Progress progress_;
};

// The model of a job, with its converters applied, and not initialised; with `on_meta`, without
// memory for its parameters.
std::unique_ptr<deepseek_v3::Model> build_model(const JobConfig& config,
                                                const ResolvedModel& resolved, at::Device device,
                                                bool on_meta = false);
void initialize_model(deepseek_v3::Model& model, const JobConfig& config,
                      const ResolvedModel& resolved,
                      const deepseek_v3::PartOf& part_of = deepseek_v3::whole_parameter);

// What of `source` does not fit the model: missing, unexpected and misshapen names.
// Empty: it fits.
std::string find_misfits(const deepseek_v3::Model& model, const checkpoint::TensorSource& source,
                         const deepseek_v3::PartOf& part_of = deepseek_v3::whole_parameter);

// Copies weights and router biases out of `source`, one at a time, or the parts of them that the
// model holds. UserError that lists missing, unexpected and misshapen names, before anything is
// written.
void load_model_tensors(deepseek_v3::Model& model, const checkpoint::TensorSource& source,
                        const std::string& origin,
                        const deepseek_v3::PartOf& part_of = deepseek_v3::whole_parameter);

}  // namespace longhaul::train
