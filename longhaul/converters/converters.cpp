#include "longhaul/converters/converters.h"

#include <fmt/ranges.h>
#include <fnmatch.h>

#include <set>

#include "longhaul/base/error.h"
#include "longhaul/base/text.h"

namespace longhaul::converters {
namespace {

constexpr int64_t kMostHeads = 128;  // of the attention's and the indexer's kernels

// What every kernel needs.
std::string kernel_unmet(const Properties& properties) {
  if (!properties.device.is_cpu()) {
    return fmt::format(
        "training.device = \"cpu\", got {}: its kernels are the CPU's; remove it from "
        "model.converters to train there",
        properties.device.str());
  }
  if (properties.compute_dtype != at::kDouble) return "";
  return "a compute dtype of float32 or bfloat16, got float64 (training.dtype = \"float64\" runs "
         "on the reference operators)";
}

std::string dsa_unmet(const Properties& properties) {
  if (const std::string unmet = kernel_unmet(properties); !unmet.empty()) return unmet;
  if (properties.attention_heads > kMostHeads) {
    return fmt::format(
        "at most {} attention heads on a rank, got {}; raise "
        "parallelism.tensor_parallel_degree, or remove it from model.converters",
        kMostHeads, properties.attention_heads);
  }
  if (properties.index_heads > kMostHeads) {
    return fmt::format("at most {} heads of the indexer, got {}; remove it from model.converters",
                       kMostHeads, properties.index_heads);
  }
  return "";
}

std::string permute_unmet(const Properties& properties) {
  if (const std::string unmet = kernel_unmet(properties); !unmet.empty()) return unmet;
  return properties.has_routed_experts
             ? ""
             : "a model with routed experts; this one has none, remove it from model.converters";
}

std::string without_prefix(const std::string& name) {
  return name.starts_with("npu_") ? name.substr(4) : name;
}

const Converter& find(const std::string& name) {
  for (const auto& converter : registry()) {
    if (without_prefix(name) == converter.name) return converter;
  }
  std::vector<std::string> known;
  for (const auto& converter : registry()) known.push_back(converter.name);
  fail_user("converter '{}' is not there{}; there are: {}", name,
            did_you_mean(without_prefix(name), known), fmt::join(known, ", "));
}

bool takes_over(const Converter& converter, const nn::NamedKernel& slot) {
  return slot.operation == converter.operation &&
         ::fnmatch(converter.modules, slot.module.c_str(), 0) == 0;
}

}  // namespace

const std::vector<Converter>& registry() {
  static const std::vector<Converter> all = {
      {.name = "dsa",
       .modules = "*.self_attn",
       .operation = "dsa",
       .replaces = "indexer scores and top-k, sparse and dense attention, the indexer's loss",
       .unmet = dsa_unmet},
      {.name = "rms_norm",
       .modules = "*norm",
       .operation = "rms_norm",
       .replaces = "RMSNorm",
       .unmet = kernel_unmet},
      {.name = "rope",
       .modules = "*.self_attn*",
       .operation = "rope",
       .replaces = "rotary position embedding of attention and indexer",
       .unmet = kernel_unmet},
      {.name = "permute",
       .modules = "*.mlp*",
       .operation = "permute",
       .replaces = "the router's choice, tokens to their experts and back",
       .unmet = permute_unmet},
      {.name = "gmm",
       .modules = "*.mlp*",
       .operation = "gmm",
       .replaces = "the experts' products and SwiGLU",
       .unmet = kernel_unmet},
      {.name = "cross_entropy",
       .modules = "",
       .operation = "cross_entropy",
       .replaces = "the output projection with its loss, MTP's too",
       .unmet = kernel_unmet},
  };
  return all;
}

void check(const std::vector<std::string>& names, const Properties& properties) {
  std::set<std::string> claimed;
  for (const auto& name : names) {
    const Converter& converter = find(name);
    if (const std::string unmet = converter.unmet(properties); !unmet.empty()) {
      fail_user("converter '{}' needs {}", name, unmet);
    }
    if (!claimed.insert(converter.operation).second) {
      fail_user("converter '{}' claims what another one in the list has already", name);
    }
  }
}

void apply(nn::Module& model, const std::vector<std::string>& names, const Properties& properties) {
  check(names, properties);
  for (const auto& name : names) {
    const Converter& converter = find(name);
    int replaced = 0;
    for (const auto& slot : model.kernels()) {
      if (!takes_over(converter, slot)) continue;
      *slot.kernel = ops::Kernel::kFused;
      ++replaced;
    }
    if (replaced == 0) {
      fail_user("converter '{}' finds nothing to replace in this model ({}); remove it", name,
                converter.replaces);
    }
  }
}

}  // namespace longhaul::converters
