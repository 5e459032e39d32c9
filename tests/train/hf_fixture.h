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
