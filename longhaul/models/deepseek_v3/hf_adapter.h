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

// Where to read from: the names a folder holds and a way to load one of them.
struct HfSource {
  std::string origin;  // for messages
  std::vector<std::string> names;
  std::function<std::vector<int64_t>(const std::string&)> shape;
  std::function<Tensor(const std::string&)> load;
};

// Copies every parameter and router bias from `source`, one tensor at a time. Before anything is
// written, missing, unexpected and misshapen tensors are collected; any of them is a UserError that
// lists them. The MTP layers of a folder are left out, with a log line, if the model has none;
// their copies of the embedding and the head are not read, since ours are shared. What
// lies in no part of ours is not read.
void load_hf(Model& model, const HfSource& source, const PartOf& part_of = whole_parameter);

}  // namespace longhaul::deepseek_v3
