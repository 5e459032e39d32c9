// Between our parameters and the tensors of a Hugging Face folder. The names are the same but for
// the routed experts: ours are one stacked parameter a layer, theirs one tensor an expert.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "longhaul/models/deepseek_v3/model.h"

namespace longhaul::deepseek_v3 {

// `tensor` of our parameter `name` (or its gradient, or a moment) as views under Hugging Face's
// names.
std::vector<std::pair<std::string, Tensor>> hf_views(const std::string& name, const Tensor& tensor);

// The type in which DeepSeek's FP8 folders (V3, V3.2-Exp) hold the tensor of this Hugging Face
// name: F8_E4M3, with scales of blocks, the projections of attention, indexer, MLPs and experts;
// fp32 the router's bias and the norm of the indexer's keys; bf16 all others.
at::ScalarType published_dtype(const std::string& hf_name);

// A tensor that each MTP layer of a published folder carries and we share with the trunk.
struct MtpCopy {
  std::string copy, original;
};

// Of all MTP layers: embedding, output head, and the norm before it, which is a parameter of ours
// where ModelSettings::mtp_own_norm is set.
std::vector<MtpCopy> mtp_copies(const ModelConfig& config);

// Where to read from: the names a folder holds and a way to load one of them.
struct HfSource {
  std::string origin;  // for messages, with what helps if the model is another one
  std::string remedy = "check model.flavor against its config.json";
  std::vector<std::string> names;
  std::function<std::vector<int64_t>(const std::string&)> shape;
  std::function<Tensor(const std::string&)> load;
  // Rows first .. first + count - 1 (dim 0) of what load() returns. May be null: then all of it is
  // loaded.
  std::function<Tensor(const std::string&, int64_t first, int64_t count)> load_rows = nullptr;
  // What else is wrong with a tensor; empty: nothing. May be null.
  std::function<std::string(const std::string&)> problem = nullptr;
  // Whether two tensors hold the same values. May be null: then they are loaded.
  std::function<bool(const std::string&, const std::string&)> equal = nullptr;
};

// UserError that lists missing, unexpected, misshapen and otherwise wrong tensors. Tensors that are
// right and will not be read are said in the log: the MTP layers of a folder, if the model has
// none, and, as a warning, an MTP layer's copies of what we share, if they differ from it.
void check_hf(Model& model, const HfSource& source, const PartOf& part_of = whole_parameter);

// Copies every parameter and router bias from `source`, one tensor at a time, after check_hf().
// What lies in no part of ours is not read.
void load_hf(Model& model, const HfSource& source, const PartOf& part_of = whole_parameter);

}  // namespace longhaul::deepseek_v3
