// What a step leaves behind. One struct feeds the object of metrics.jsonl, the console's line and
// what is in results/ (TensorBoard, Weights & Biases). Called by the trainer and by reports.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "longhaul/config/job_config.h"
#include "longhaul/dtensor/collective_log.h"

namespace longhaul::train {

struct ValidationResult {
  double loss = 0;  // mean cross-entropy of the language model
  int64_t labels = 0;
  std::optional<double> bits_per_byte;  // where the data's text is known
};

// What one rank communicated in a step, of one kind along one axis.
struct CommunicationMetrics {
  int64_t count = 0;
  int64_t bytes = 0;          // of this rank's inputs
  double seconds = 0;         // from the collectives' starts to their ends
  double waited_seconds = 0;  // of which the rank computed nothing meanwhile
};

// What one rank holds, in bytes.
struct MemoryByKind {
  int64_t weights = 0;  // and the router's biases
  int64_t gradients = 0;
  int64_t optimizer = 0;
  // The most that tensors held at once beyond these since training began: activations, and what
  // else is made and goes within a step. Nothing where the allocator does not count.
  std::optional<int64_t> activations;
};

struct StepMetrics {
  int64_t step = 0;
  double loss = 0;  // the whole objective
  double lm_loss = 0;
  double mtp_loss = 0;      // mean over the MTP modules, before its weight
  double indexer_loss = 0;  // mean over layers, before its coefficient
  std::vector<double> indexer_loss_per_layer;
  double balance_loss = 0;  // weighted, summed over layers
  double z_loss = 0;        // weighted, summed over layers
  double grad_norm = 0;     // before clipping
  double lr = 0;
  int64_t tokens = 0;  // seen by the run so far
  double tokens_per_second = 0;
  double mfu = 0;                 // share of the measured peak of matrix products
  int64_t memory_peak_bytes = 0;  // see peak_device_memory_bytes()
  double time = 0;                // seconds since 1970
  bool skipped = false;           // a non-finite step that was not applied
  std::map<std::string, CommunicationMetrics> comm;  // by "<axis>.<kind>"; empty on one rank
  double comm_wait_share = 0;                        // of the step's time
  std::optional<ValidationResult> validation;

  // By layer, in those steps in which metrics.indexer_recall_freq asks for it.
  std::vector<double> indexer_recall_per_layer;

  // Of steps that is_logged() names only, so that the others wait for nothing.
  std::map<int64_t, std::vector<int64_t>> expert_load;  // by layer: tokens that chose each expert
  std::optional<MemoryByKind> memory;
  // Seconds by part: "data", "forward", "backward", "optimizer", "other" make the step; beside it,
  // in any step, "validation" after it and "checkpoint", for which training stood still before it
  // (in a run's last step after it, too).
  std::map<std::string, double> seconds;
};

// Whether everything is measured in this step: the first and each metrics.log_freq-th.
bool is_logged(const JobConfig& config, int64_t step);

// What the collectives of a step of `seconds` add to its metrics.
void add_communication(const dtensor::CollectiveLog::Totals& totals, double seconds,
                       StepMetrics& metrics);

// Non-finite numbers become the strings "nan", "inf" and "-inf", so that the text stays valid JSON.
nlohmann::ordered_json to_json(const StepMetrics& metrics);

// The console's line, and what of it a terminal's progress line has room for.
std::string to_line(const StepMetrics& metrics, int64_t steps, double seconds_left);
std::string short_line(const StepMetrics& metrics, double seconds_left);

// A file of a run folder with one object a step, opened for appending.
class StepLines {
 public:
  // Keeps the lines of steps up to `last_step`, which `step_key` names, and drops the rest, a torn
  // last line included. At last_step 0 (a run that starts) a file that is there is renamed to
  // <path>.<n>.
  StepLines(const std::filesystem::path& path, int64_t last_step,
            const std::string& step_key = "step");
  void append(const nlohmann::ordered_json& object);
  // In place of the line that was appended last; there must be one.
  void replace_last(const nlohmann::ordered_json& object);

 private:
  std::filesystem::path path_;
  std::ofstream out_;
  std::streamoff last_ = 0;  // where the last line begins
};

// Calls visit(object, place) with each object of a metrics.jsonl, in order, and the byte at which
// its line begins; lines that are torn or of another kind are left out.
void for_each_step(const std::filesystem::path& path,
                   const std::function<void(const nlohmann::json&, int64_t)>& visit);
// The same objects together, of a file that is small enough.
std::vector<nlohmann::json> read_metrics(const std::filesystem::path& path,
                                         const std::string& step_key = "step");

// A number as to_json writes it, back again.
double number_from(const nlohmann::json& value);

}  // namespace longhaul::train
