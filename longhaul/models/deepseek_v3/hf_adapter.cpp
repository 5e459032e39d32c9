#include "longhaul/models/deepseek_v3/hf_adapter.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"

namespace longhaul::deepseek_v3 {
namespace {

// What has these names is quantized in DeepSeek's FP8 folders. Not so the router, the indexer's
// weights_proj, embedding, output head and eh_proj, and nothing that those folders do not have.
constexpr std::array kFp8Projections = {"q_proj",    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
                                        "kv_b_proj", "o_proj",   "wq_b",     "wk",
                                        "gate_proj", "up_proj",  "down_proj"};
constexpr std::array kFp32Tensors = {".mlp.gate.e_score_correction_bias", ".indexer.k_norm.weight",
                                     ".indexer.k_norm.bias"};

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

// What of a folder is no parameter of ours and need not be.
struct Spare {
  std::vector<std::string> layers;  // tensors of MTP layers that the model does not have
  std::vector<MtpCopy> copies;      // of MTP layers that it has
};

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

at::ScalarType published_dtype(const std::string& hf_name) {
  const bool fp8 =
      std::any_of(kFp8Projections.begin(), kFp8Projections.end(), [&](const char* projection) {
        return hf_name.ends_with(fmt::format(".{}.weight", projection));
      });
  if (fp8) return at::kFloat8_e4m3fn;
  const bool fp32 = std::any_of(kFp32Tensors.begin(), kFp32Tensors.end(),
                                [&](const char* end) { return hf_name.ends_with(end); });
  return fp32 ? at::kFloat : at::kBFloat16;
}

std::vector<MtpCopy> mtp_copies(const ModelConfig& config) {
  std::vector<MtpCopy> copies;
  for (int64_t k = 0; k < config.num_nextn_predict_layers; ++k) {
    const std::string layer = fmt::format("model.layers.{}.", config.num_hidden_layers + k);
    copies.push_back({layer + "embed_tokens.weight", "model.embed_tokens.weight"});
    copies.push_back({layer + "shared_head.head.weight", "lm_head.weight"});
    copies.push_back({layer + "shared_head.norm.weight", "model.norm.weight"});
  }
  return copies;
}

namespace {

// Each list of names that is wrong, with what is wrong with them.
std::vector<std::string> find_problems(const std::map<std::string, Target>& wanted,
                                       const HfSource& source,
                                       const std::vector<std::string>& unexpected) {
  std::vector<std::string> missing, misshapen, other;
  const std::set<std::string> present(source.names.begin(), source.names.end());
  for (const auto& [name, target] : wanted) {
    const at::IntArrayRef sizes = target.part.global_sizes;
    if (present.count(name) == 0) {
      missing.push_back(name);
      continue;
    }
    if (const auto shape = source.shape(name); sizes != at::IntArrayRef(shape)) {
      misshapen.push_back(fmt::format("{} is [{}], the model wants [{}]", name,
                                      fmt::join(shape, ", "), fmt::join(sizes, ", ")));
    }
    const std::string problem = source.problem ? source.problem(name) : "";
    if (!problem.empty()) other.push_back(problem);
  }
  std::vector<std::string> problems;
  if (!missing.empty()) problems.push_back("missing: " + list_of(missing, ", "));
  if (!unexpected.empty()) problems.push_back("unexpected: " + list_of(unexpected, ", "));
  if (!misshapen.empty()) problems.push_back("of another shape: " + list_of(misshapen, ", "));
  if (!other.empty()) problems.push_back("scales: " + list_of(other, ", "));
  return problems;
}

// Divides what is not wanted. A layer after our last one is one of MTP if it has its projection: a
// deeper trunk is another model.
Spare find_spare(const Model& model, const std::map<std::string, Target>& wanted,
                 const HfSource& source, std::vector<std::string>& unexpected) {
  std::map<std::string, std::string> originals;
  for (const auto& [copy, original] : mtp_copies(model.config())) originals[copy] = original;
  const std::set<std::string> present(source.names.begin(), source.names.end());
  const auto is_mtp = [&](int64_t layer) {
    return present.count(fmt::format("model.layers.{}.eh_proj.weight", layer)) > 0;
  };
  Spare spare;
  for (const auto& name : source.names) {
    if (wanted.count(name) > 0) continue;
    if (const auto copy = originals.find(name); copy != originals.end()) {
      spare.copies.push_back({name, copy->second});
    } else if (layer_of(name) >= model.num_layers() && is_mtp(layer_of(name))) {
      spare.layers.push_back(name);
    } else {
      unexpected.push_back(name);
    }
  }
  return spare;
}

void tell_of_spare(const Model& model, const HfSource& source, const Spare& spare) {
  if (!spare.layers.empty()) {
    log::info("{}: {} tensors of MTP layers are not used (mtp.num_modules = {}), such as {}",
              source.origin, spare.layers.size(), model.config().num_nextn_predict_layers,
              spare.layers[0]);
  }
  std::vector<std::string> differing;
  for (const auto& [copy, original] : spare.copies) {
    const bool equal = source.equal ? source.equal(copy, original)
                                    : at::equal(source.load(copy).to(at::kDouble),
                                                source.load(original).to(at::kDouble));
    if (!equal) differing.push_back(fmt::format("{} (here {})", copy, original));
  }
  if (differing.empty()) return;
  log::warn(
      "{}: tensors of MTP layers differ from those that the model shares with its trunk, and are "
      "not used: {}; mtp.own_norm = true keeps a norm, embedding and head are always shared",
      source.origin, list_of(differing, ", "));
}

void check(const Model& model, const std::map<std::string, Target>& wanted,
           const HfSource& source) {
  std::vector<std::string> unexpected;
  const Spare spare = find_spare(model, wanted, source, unexpected);
  const auto problems = find_problems(wanted, source, unexpected);
  if (!problems.empty()) {
    fail_user("{} does not fit the model ({}); {}", source.origin, fmt::join(problems, "; "),
              source.remedy);
  }
  tell_of_spare(model, source, spare);
}

// What of a tensor is ours.
Tensor load_part(const HfSource& source, const std::string& name, const Target& target) {
  const auto sizes = target.tensor.sizes();
  if (!source.load_rows || sizes.empty()) {
    return nn::take_part(source.load(name), target.part, sizes);
  }
  const Tensor rows = source.load_rows(name, target.part.offsets[0], sizes[0]);
  return nn::take_part(rows, nn::within_rows(target.part, sizes), sizes);
}

}  // namespace

void check_hf(Model& model, const HfSource& source, const PartOf& part_of) {
  check(model, targets(model, part_of), source);
}

void load_hf(Model& model, const HfSource& source, const PartOf& part_of) {
  auto wanted = targets(model, part_of);
  check(model, wanted, source);
  const at::NoGradGuard no_grad;
  for (auto& [name, target] : wanted) {
    if (!target.tensor.defined() || target.tensor.numel() == 0) continue;
    target.tensor.copy_(load_part(source, name, target));
  }
}

}  // namespace longhaul::deepseek_v3
