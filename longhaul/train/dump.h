// A debugging aid: gradients and parameters of a step under Hugging Face's names, to compare with
// another implementation.
#pragma once

#include <filesystem>

#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/parallel/fsdp.h"
#include "longhaul/train/metrics.h"

namespace longhaul::train {

// Writes <folder>/step-N.safetensors: grad.<name> (before clipping), param.<name> (after the
// update; router biases too), and what metrics.jsonl says under the same names: loss, lm_loss,
// mtp_loss, indexer_loss_per_layer, balance_loss, z_loss and grad_norm. Tensors are fp32, or fp64
// when the model trains in fp64; losses and the norm fp64. Called between the update and the
// clearing of the gradients. Collective; the first rank writes.
void dump_step(const std::filesystem::path& folder, const deepseek_v3::Model& model,
               const parallel::Fsdp& fsdp, const StepMetrics& metrics, bool is_first);

}  // namespace longhaul::train
