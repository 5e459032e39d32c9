// Where a run begins: which checkpoint it goes on from, and with which parts of it. Called by
// run.cpp. Those that take `ranks` are collective over them: the first looks and changes things,
// each reads a share of what is compared with its checksums, and all get the same answer.
#pragma once

#include <optional>

#include "longhaul/base/file.h"
#include "longhaul/config/job_config.h"
#include "longhaul/train/trainer.h"

namespace longhaul::train {

fs::path checkpoint_folder(const JobConfig& config);

// Whether the run writes checkpoints.
bool saves(const JobConfig& config);

// The step at or beyond the job's last one that lies complete in the folder, whatever its kind.
std::optional<int64_t> finished_step(const JobConfig& config, const dtensor::Communicator& ranks);

// Whether that step is still to be written as the Hugging Face folder that the job asks for: its
// whole state is saved and the folder is absent, as after an export that failed.
bool lacks_export(const JobConfig& config, int64_t step, const dtensor::Communicator& ranks);

// The step folder to resume from, if there is one. Clears away what saves that died have left.
// UserError if there are full or damaged checkpoints and none can be resumed from.
std::optional<fs::path> find_resumable_step(const JobConfig& config,
                                            const dtensor::Communicator& ranks);

// Once the run has its state: going back to an earlier step (checkpoint.load_step) begins another
// history, and what came after it gets another name, else the next start would pick the old one up
// again. A run that saves nothing leaves it alone.
void abandon_later_steps(const JobConfig& config, const dtensor::Communicator& ranks);

// Before `step` is saved, the weights alone or the whole state: a checkpoint of it that is of the
// other kind gets another name, so that it is not lost. The run has passed over a full one, and has
// gone on from an earlier step than a model-only one.
void make_way(const JobConfig& config, int64_t step, bool model_only,
              const dtensor::Communicator& ranks);

// checkpoint.exclude_from_loading, in TorchTitan's names of the parts of a state. UserError for
// others.
Excluded excluded_from_loading(const JobConfig& config);

// Of those, what is left out of the run's own checkpoint: a part that the job which saved it names
// as well was left out before, and what the checkpoint has of it is the run's own. Says so.
Excluded excluded_from_own(const JobConfig& config, const fs::path& step_folder);

// The full checkpoint that a new run goes on from: checkpoint.initial_load_path is one, or a folder
// with some. UserError if it is not.
fs::path find_initial_state(const JobConfig& config, const fs::path& path,
                            const dtensor::Communicator& ranks);

// The step folder that a new run takes its weights from, full or model-only: path is one, or a
// folder with some, of which the newest that is sound is taken. UserError if there is none.
fs::path find_initial_weights(const JobConfig& config, const fs::path& path,
                              const dtensor::Communicator& ranks);

}  // namespace longhaul::train
