// Weights on disk from one form into the other, without a job: a Hugging Face folder into a
// model-only step folder of ours, and a step folder into a Hugging Face folder. Called by `longhaul
// convert`.
#pragma once

#include <functional>
#include <optional>

#include "longhaul/checkpoint/hf_writer.h"

namespace longhaul::train {

struct ConvertOptions {
  // Of the weights; router biases stay as they are. Nothing: as they are, and bfloat16 for what was
  // quantized. float8_e4m3fn: of a Hugging Face folder only, see HfExportOptions::fp8.
  std::optional<at::ScalarType> dtype = {};
  // The model's config.json; empty: the one that comes with the weights.
  fs::path config = {};
  // Folder of the tokenizer's files for a Hugging Face folder; empty: where the weights say.
  fs::path assets = {};
  int64_t max_shard_bytes = checkpoint::HfWriteOptions{}.max_shard_bytes;
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};
};

// What `from` is decides on the direction; `to` is then the name of the new Hugging Face folder, or
// of the step folder (step-<N>). UserError that lists what does not fit, or if `to` is there. Takes
// the memory of one parameter; nothing is at `to` before all is.
void convert(const fs::path& from, const fs::path& to, const ConvertOptions& options);

}  // namespace longhaul::train
