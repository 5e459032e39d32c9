// One training run from start to end: resumes or begins, takes steps, validates, saves, and leaves
// a run folder that can be continued and read. Called by `longhaul train` and by tests.
//
//   <dump_folder>/job.toml          the resolved job
//                 environment.json  what it ran on, at each start
//                 metrics.jsonl     one object a step; beside it: results/step_writer.h
//                 checkpoint/       step-N folders; step-N-hf: the last weights for Hugging Face
//                 summary.md, loss.svg
#pragma once

#include <atomic>

#include "longhaul/config/job_config.h"
#include "longhaul/dtensor/world.h"

namespace longhaul::train {

enum class Outcome {
  kFinished,     // the last step was taken
  kStopped,      // asked to stop, or out of time: saved, and the same command goes on
  kAlreadyDone,  // the last step was there before
};

// `stop` may become true at any time (a signal): the step under way is finished and saved.
// Collective over the ranks of `world`, each of which takes part in every step; the first of them
// writes the run folder and talks. All read the checkpoints.
Outcome run_training(const JobConfig& config, const std::atomic<bool>& stop, dtensor::World& world);

}  // namespace longhaul::train
