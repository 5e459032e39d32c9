// The weights of a Hugging Face folder into a model, or into the parameters of one of ours. Called
// by the trainer, by the commands that look at weights, and by convert().
#pragma once

#include "longhaul/checkpoint/hf_weights.h"
#include "longhaul/models/deepseek_v3/hf_adapter.h"

namespace longhaul::train {

// `weights` must outlive the result.
deepseek_v3::HfSource hf_source(const checkpoint::HfWeights& weights);

// Copies the weights of a Hugging Face folder, or the parts of them that the model holds. UserError
// that lists what is wrong with it, before anything is written; without `quantized` also if it
// holds quantized weights.
void load_hf_folder(deepseek_v3::Model& model, const std::string& path, bool quantized,
                    const deepseek_v3::PartOf& part_of = deepseek_v3::whole_parameter);

}  // namespace longhaul::train
