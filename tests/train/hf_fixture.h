// Hugging Face folders for tests: written from tensors, and read back.
#pragma once

#include <gmock/gmock.h>

#include "longhaul/checkpoint/hf_weights.h"
#include "longhaul/checkpoint/tensor_file.h"
#include "tests/support/quantized.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {

inline void write_hf(const fs::path& folder, const Tensors& tensors, const std::string& config) {
  fs::create_directories(folder);
  checkpoint::save_safetensors(folder / "model.safetensors", tensors, {{"format", "pt"}});
  write_text(folder / "config.json", config);
}

// A reference checkpoint's config.json with further keys.
inline std::string golden_json(const std::string& name, const nlohmann::json& more = {}) {
  auto json = nlohmann::json::parse(read_file(golden_path(name) / "checkpoint/config.json"));
  if (!more.is_null()) json.update(more);
  return json.dump(1);
}

inline const nlohmann::json kPublishedQuantization = {{"quantization_config",
                                                       {{"activation_scheme", "dynamic"},
                                                        {"fmt", "e4m3"},
                                                        {"quant_method", "fp8"},
                                                        {"scale_fmt", "ue8m0"},
                                                        {"weight_block_size", {128, 128}}}}};

inline Tensors golden_weights(const std::string& name) {
  return load_golden(name + "/checkpoint/model.safetensors");
}

// A reference checkpoint whose queries and, if it has one, indexer come from the hidden state
// itself.
inline const nlohmann::json kNoQLora = {{"q_lora_rank", nullptr}};

inline Tensors golden_weights_without_q_lora(const std::string& name) {
  Tensors tensors = golden_weights(name);
  for (const auto& [a_name, q_a] : Tensors(tensors)) {
    const size_t at = a_name.find("q_a_proj.weight");
    if (at == std::string::npos) continue;
    const std::string attention = a_name.substr(0, at);
    tensors[attention + "q_proj.weight"] =
        at::matmul(tensors.at(attention + "q_b_proj.weight"), q_a);
    if (const auto wq_b = tensors.find(attention + "indexer.wq_b.weight"); wq_b != tensors.end()) {
      wq_b->second = at::matmul(wq_b->second, q_a);
    }
    for (const char* part : {"q_a_proj", "q_a_layernorm", "q_b_proj"}) {
      tensors.erase(attention + part + ".weight");
    }
  }
  return tensors;
}

inline Tensors read_hf(const fs::path& folder) {
  const checkpoint::HfReader reader(folder);
  Tensors tensors;
  for (const auto& name : reader.names()) tensors[name] = reader.load(name);
  return tensors;
}

inline std::vector<std::string> names_of(const Tensors& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  return names;
}

// Equal types and bits, name by name.
inline void expect_identical_tensors(const Tensors& actual, const Tensors& expected) {
  EXPECT_EQ(names_of(actual), names_of(expected));
  for (const auto& [name, tensor] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end()) continue;
    EXPECT_EQ(found->second.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(found->second.scalar_type() == tensor.scalar_type() &&
                at::equal(found->second, tensor))
        << name;
  }
}

}  // namespace longhaul::testing
