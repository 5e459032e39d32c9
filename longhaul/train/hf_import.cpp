#include "longhaul/train/hf_import.h"

#include "longhaul/base/error.h"

namespace longhaul::train {

deepseek_v3::HfSource hf_source(const checkpoint::HfWeights& weights) {
  deepseek_v3::HfSource source;
  source.origin = weights.path().string();
  source.names = weights.names();
  source.shape = [&](const std::string& name) { return weights.shape(name); };
  source.load = [&](const std::string& name) { return weights.load(name); };
  source.load_rows = [&](const std::string& name, int64_t first, int64_t count) {
    return weights.load_rows(name, first, count);
  };
  source.problem = [&](const std::string& name) { return weights.problem(name); };
  source.equal = [&](const std::string& a, const std::string& b) { return weights.equal(a, b); };
  return source;
}

void load_hf_folder(deepseek_v3::Model& model, const std::string& path,
                    const HfLoadOptions& options) {
  const checkpoint::HfWeights weights(path);
  if (!options.quantized && !weights.quantized().empty()) {
    fail_user(
        "{}: {} is quantized (F8_E4M3); set checkpoint.initial_load_in_hf and "
        "checkpoint.initial_load_in_hf_quantized to true",
        path, *weights.quantized().begin());
  }
  auto source = hf_source(weights);
  if (!options.compare_copies) source.equal = [](const auto&, const auto&) { return true; };
  deepseek_v3::load_hf(model, source, options.part_of);
}

}  // namespace longhaul::train
