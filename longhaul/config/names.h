// The names that a job file may use for things that live in other folders: datasets, converters,
// models. A name that is known here need not be available yet; missing_behaviour() says which are.
#pragma once

#include "longhaul/config/job_config.h"

namespace longhaul {

// "files", "text", "tokenized", and the names of TorchTitan and of the recipe.
Strings dataset_names();

// True for the datasets that training can read.
bool is_available_dataset(const std::string& name);

// Every converter name a file may list.
Strings converter_names();

// The operators whose results selective activation checkpointing can keep.
Strings savable_operator_names();

// The models that can be trained: deepseek_v3, deepseek_v32.
Strings model_names();

}  // namespace longhaul
