#include "longhaul/train/hf_import.h"

#include "longhaul/base/error.h"

namespace longhaul::train {

deepseek_v3::HfSource hf_source(const checkpoint::HfWeights& weights) {
  deepseek_v3::HfSource source;
  source.origin = weights.path().string();
  source.names = weights.names();
  source.shape = [&](const std::string& name) { return weights.shape(name); };
  source.load = [&](const std::string& name) { return weights.load(name); };
  source.problem = [&](const std::string& name) { return weights.problem(name); };
  source.equal = [&](const std::string& a, const std::string& b) { return weights.equal(a, b); };
  return source;
}

void load_hf_folder(deepseek_v3::Model& model, const std::string& path, bool quantized,
                    const deepseek_v3::PartOf& part_of) {
  const checkpoint::HfWeights weights(path);
  if (!quantized && !weights.quantized().empty()) {
    fail_user(
        "{}: {} is quantized (F8_E4M3); set checkpoint.initial_load_in_hf and "
        "checkpoint.initial_load_in_hf_quantized to true",
        path, *weights.quantized().begin());
  }
  deepseek_v3::load_hf(model, hf_source(weights), part_of);
}

}  // namespace longhaul::train
