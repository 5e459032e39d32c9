// What a job file's `converters` list switches on: names of fused kernels, each of which takes over
// an operation in every module that has it. Applied after the model is built and before anything is
// done to its parameters; the model itself knows nothing of the names. `npu_` before a name, as the
// Ascend recipe writes it, changes nothing.
#pragma once

#include <string>
#include <vector>

#include "longhaul/nn/module.h"

namespace longhaul::converters {

// What a converter may ask of the job.
struct Properties {
  at::ScalarType compute_dtype = at::kFloat;
  at::Device device = at::kCPU;
  // Of one rank; 0 where the model has none.
  int64_t attention_heads = 0, index_heads = 0;
  bool has_routed_experts = true;
};

struct Converter {
  const char* name;
  const char* modules;    // a glob over the modules' paths; the operation of those is taken over
  const char* operation;  // of nn::Module::kernels()
  const char* replaces;   // for people
  // Empty if the job has what it needs, else what is missing and what to set.
  std::string (*unmet)(const Properties&);
};

// All there are.
const std::vector<Converter>& registry();

// Throws UserError for a name that is not there (with the nearest one that is), a need that is not
// met, and two names that claim the same operation.
void check(const std::vector<std::string>& names, const Properties& properties);

// Applies the converters of these names. Throws UserError as check does, and for a converter that
// finds nothing to replace in the model.
void apply(nn::Module& model, const std::vector<std::string>& names, const Properties& properties);

}  // namespace longhaul::converters
