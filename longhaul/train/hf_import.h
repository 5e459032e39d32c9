// The weights of a Hugging Face folder into a model, or into the parameters of one of ours. Called
// by the trainer, by the commands that look at weights, and by convert().
#pragma once

#include "longhaul/checkpoint/hf_weights.h"
#include "longhaul/models/deepseek_v3/hf_adapter.h"

namespace longhaul::train {

// `weights` must outlive the result.
deepseek_v3::HfSource hf_source(const checkpoint::HfWeights& weights);

struct HfLoadOptions {
  // Quantized weights are read, too; else they are an error.
  bool quantized = false;
  // Warn of an MTP layer's copies that differ from what the model shares with its trunk, for which
  // they are read: of ranks that load together one is enough.
  bool compare_copies = true;
  deepseek_v3::PartOf part_of = deepseek_v3::whole_parameter;
};

// Copies the weights of a Hugging Face folder, or the parts of them that the model holds: of others
// only the headers and, of quantized ones, scales are read. UserError that lists what is wrong with
// it, before anything is written.
void load_hf_folder(deepseek_v3::Model& model, const std::string& path,
                    const HfLoadOptions& options);

}  // namespace longhaul::train
