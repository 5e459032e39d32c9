#include "longhaul/models/deepseek_v3/hf_adapter.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"

namespace longhaul::deepseek_v3 {
namespace {

// Hugging Face's name of an expert's tensor in the stack that we call `name`.
std::string expert_name(const std::string& name, int64_t expert) {
  const size_t end = name.find(kExpertsInName) + std::string(kExpertsInName).size();
  return fmt::format("{}{}.{}", name.substr(0, end), expert, name.substr(end));
}

// Where a tensor of a Hugging Face folder goes.
struct Target {
  Tensor tensor;  // undefined: no part of it is ours
  nn::Part part;
};

std::map<std::string, Target> targets(Model& model, const PartOf& part_of) {
  std::map<std::string, Target> result;
  for (const auto& list : {model.parameters(), model.buffers()}) {
    for (const auto& parameter : list) {
      const Tensor tensor = parameter.tensor->detach();
      const nn::Part part = part_of(parameter);
      if (!is_routed_expert(parameter.name)) {
        result[parameter.name] = {tensor, part};
        continue;
      }
      const int64_t first = part.offsets[0];
      const nn::Part of_expert = {{part.global_sizes.begin() + 1, part.global_sizes.end()},
                                  {part.offsets.begin() + 1, part.offsets.end()}};
      for (int64_t e = 0; e < part.global_sizes[0]; ++e) {
        const bool ours = e >= first && e < first + tensor.size(0);
        result[expert_name(parameter.name, e)] = {ours ? tensor.select(0, e - first) : Tensor(),
                                                  of_expert};
      }
    }
  }
  return result;
}

// The layer number in "model.layers.N.", or -1.
int64_t layer_of(const std::string& name) {
  static const std::string prefix = "model.layers.";
  if (name.rfind(prefix, 0) != 0) return -1;
  const size_t end = name.find('.', prefix.size());
  const std::string digits = name.substr(prefix.size(), end - prefix.size());
  const bool number = !digits.empty() && digits.size() < 9 &&
                      std::all_of(digits.begin(), digits.end(), [](char c) { return isdigit(c); });
  return number ? std::stoll(digits) : -1;
}

// Tensors of a published MTP layer that we do not hold: the whole layer if the model has no such
// module, else its copies of what is shared.
bool is_spare_mtp(const std::string& name, const Model& model) {
  const int64_t layer = layer_of(name);
  if (layer < model.config().num_hidden_layers) return false;
  if (layer >= model.num_layers()) return true;
  return name.find(".embed_tokens.") != std::string::npos ||
         name.find(".shared_head.") != std::string::npos;
}

std::string first_of(const std::vector<std::string>& names) {
  const size_t shown = std::min<size_t>(names.size(), 8);
  std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + shown, ", "));
  return names.size() > shown ? text + fmt::format(", ... ({} in all)", names.size()) : text;
}

}  // namespace

std::vector<std::pair<std::string, Tensor>> hf_views(const std::string& name,
                                                     const Tensor& tensor) {
  if (!is_routed_expert(name)) return {{name, tensor}};
  std::vector<std::pair<std::string, Tensor>> views;
  for (int64_t e = 0; e < tensor.size(0); ++e) {
    views.emplace_back(expert_name(name, e), tensor.select(0, e));
  }
  return views;
}

void load_hf(Model& model, const HfSource& source, const PartOf& part_of) {
  auto wanted = targets(model, part_of);
  std::vector<std::string> missing, unexpected, misshapen, spare;
  const std::set<std::string> present(source.names.begin(), source.names.end());
  for (const auto& [name, target] : wanted) {
    const at::IntArrayRef sizes = target.part.global_sizes;
    if (present.count(name) == 0) {
      missing.push_back(name);
    } else if (const auto shape = source.shape(name); sizes != at::IntArrayRef(shape)) {
      misshapen.push_back(fmt::format("{} is [{}], the model wants [{}]", name,
                                      fmt::join(shape, ", "), fmt::join(sizes, ", ")));
    }
  }
  for (const auto& name : source.names) {
    if (wanted.count(name) == 0) (is_spare_mtp(name, model) ? spare : unexpected).push_back(name);
  }
  std::vector<std::string> problems;
  if (!missing.empty()) problems.push_back("missing: " + first_of(missing));
  if (!unexpected.empty()) problems.push_back("unexpected: " + first_of(unexpected));
  if (!misshapen.empty()) problems.push_back("of another shape: " + first_of(misshapen));
  if (!problems.empty()) {
    fail_user("{} does not fit the model ({}); check model.flavor against its config.json",
              source.origin, fmt::join(problems, "; "));
  }
  if (!spare.empty()) {
    log::info("{}: {} tensors of MTP layers are not used (mtp.num_modules = {}), such as {}",
              source.origin, spare.size(), model.config().num_nextn_predict_layers, spare[0]);
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, target] : wanted) {
    if (!target.tensor.defined() || target.tensor.numel() == 0) continue;
    target.tensor.copy_(nn::take_part(source.load(name), target.part, target.tensor.sizes()));
  }
}

}  // namespace longhaul::deepseek_v3
