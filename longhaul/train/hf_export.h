// Weights of ours as a Hugging Face folder: config.json, shards with an index, and what belongs to
// the tokenizer. An MTP layer gets its copies of embedding, output head and, unless it has one of
// its own, norm, so that the folder is complete in the published form. Called by run_training() at
// the end of a run and by convert().
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/hf_writer.h"
#include "longhaul/config/job_config.h"
#include "longhaul/models/deepseek_v3/model_config.h"

namespace longhaul::train {

struct HfExportOptions {
  // Where generation_config.json and the tokenizer's files are taken from, and of a config.json
  // what does not say what the model is, such as token ids. What is not there is left out; if there
  // is no tokenizer, a warning names all of it. Empty: nowhere.
  fs::path assets = {};
  // What to take for a file that `assets` has not (remembered_texts()).
  std::map<std::string, std::string> texts = {};
  // The projections as FP8 with scales of blocks and the others as DeepSeek publishes them
  // (deepseek_v3::published_dtype()), whatever their dtypes here.
  bool fp8 = false;
  int64_t max_shard_bytes = checkpoint::HfWriteOptions{}.max_shard_bytes;
  bool replace = false;
  const dtensor::Communicator* ranks = nullptr;
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};
};

// By name, the config.json and generation_config.json of a folder of assets, for a manifest: they
// are small, and the folder may be gone when they are wanted. Left out where they are no JSON
// objects.
std::map<std::string, std::string> remembered_texts(const fs::path& assets);

// UserError if `assets` has a config.json of which nothing can be taken.
void check_assets(const fs::path& assets);

// `weights`: parameters and router biases by our names, in the dtypes that are to be written but
// for FP8. UserError as check_assets()'s, before anything is written; as write_hf_folder()'s; and
// for FP8 if values are not finite in fp32. What exports of runs (hf_folder()) that died have left
// beside `folder` goes. Collective over `ranks`: parts go to the rank that writes them, and to no
// other. Takes the memory of one parameter, of three where there are parts, and for FP8 of one more
// tensor.
void export_hf(const fs::path& folder, const checkpoint::Snapshot& weights,
               const deepseek_v3::ModelConfig& config, const HfExportOptions& options);

// Where the end of a run exports to: <checkpoint folder>/step-<N>-hf. It is no checkpoint of ours:
// nothing here reads or purges it.
fs::path hf_folder(const JobConfig& config, int64_t step);

// checkpoint.export_dtype of weights on the way out; nothing for float32, which leaves them as they
// are, and for float8_e4m3fn, which is quantized from them as they are.
std::optional<at::ScalarType> export_dtype(const JobConfig& config);

// Whether checkpoint.export_dtype asks for HfExportOptions::fp8.
bool exports_fp8(const JobConfig& config);

// `tensor` in another dtype. UserError, with its name, if values are too large for float16.
at::Tensor to_dtype(const std::string& name, const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace longhaul::train
