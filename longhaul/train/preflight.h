// What would stop a run and can be known before data is read and memory is taken.
#pragma once

#include "longhaul/config/job_config.h"
#include "longhaul/parallel/parallel_dims.h"
#include "longhaul/train/resolve_model.h"

namespace longhaul::train {

// Throws UserError, naming the setting and its place, if a converter is not there or the job lacks
// what it needs of the job and the model's shape: `config check` calls it too.
void check_converters(const JobConfig& config, const deepseek_v3::ModelConfig& shape);

// Throws UserError if the sequences or the experts cannot be dealt to the ranks.
void check_parallelism(const JobConfig& config, const ResolvedModel& resolved,
                       const Degrees& degrees);

// All of it that can be known without the data and the machine, for `ranks` ranks. UserError.
void check_job(const JobConfig& config, int64_t ranks);

// Throws UserError if LONGHAUL_ISA names no instruction set that the processor has.
void check_kernels();

// Throws UserError if the job cannot run here: too little memory for the weights, gradients and
// moments, and the copy for saves in the background, of which each of the `ranks_here` that share
// this machine has one of `pieces`;
// initial weights that are not there; a pattern of optimizer.no_decay without a parameter;
// LONGHAUL_ISA naming what the processor lacks.
void check_machine(const JobConfig& config, const ResolvedModel& resolved, int64_t pieces = 1,
                   int64_t ranks_here = 1);

}  // namespace longhaul::train
