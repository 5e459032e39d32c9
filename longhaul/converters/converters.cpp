#include "longhaul/converters/converters.h"

#include <set>

#include "longhaul/base/error.h"

namespace longhaul::converters {
namespace {

std::string dtype_unmet(const Properties& properties) {
  if (properties.compute_dtype != at::kDouble) return "";
  return "a compute dtype of float32 or bfloat16 (training.dtype = \"float64\" runs on the "
         "reference operators)";
}

std::string without_prefix(const std::string& name) {
  return name.starts_with("npu_") ? name.substr(4) : name;
}

const Converter& find(const std::string& name) {
  for (const auto& converter : registry()) {
    if (without_prefix(name) == converter.name) return converter;
  }
  std::string known;
  for (const auto& converter : registry()) {
    known += (known.empty() ? "" : ", ") + std::string(converter.name);
  }
  fail_user("converter '{}' is not there; there are: {}", name, known);
}

}  // namespace

const std::vector<Converter>& registry() {
  static const std::vector<Converter> all = {
      {.name = "dsa",
       .operation = "dsa",
       .replaces = "indexer scores and top-k, sparse and dense attention, the indexer's loss",
       .unmet = dtype_unmet},
      {.name = "rms_norm", .operation = "rms_norm", .replaces = "RMSNorm", .unmet = dtype_unmet},
      {.name = "rope",
       .operation = "rope",
       .replaces = "rotary position embedding of attention and indexer",
       .unmet = dtype_unmet},
      {.name = "permute",
       .operation = "permute",
       .replaces = "the router's choice, tokens to their experts and back",
       .unmet = dtype_unmet},
      {.name = "gmm",
       .operation = "gmm",
       .replaces = "the experts' products and SwiGLU",
       .unmet = dtype_unmet},
      {.name = "cross_entropy",
       .operation = "cross_entropy",
       .replaces = "the output projection with its loss, MTP's too",
       .unmet = dtype_unmet},
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
      if (slot.operation != converter.operation) continue;
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
