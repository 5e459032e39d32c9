// A snapshot with every dtype and shape that a run may hold, and its comparison.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "longhaul/checkpoint/checkpoint.h"

namespace longhaul::checkpoint {

inline Snapshot make_snapshot(int64_t step, bool model_only = false) {
  Snapshot snapshot;
  snapshot.step = step;
  snapshot.model_only = model_only;
  auto& tensors = snapshot.tensors;
  const at::Tensor ramp =
      at::arange(60, at::kFloat).reshape({3, 20}).add(static_cast<double>(step));
  tensors["model.embed_tokens.weight"] = ramp;
  tensors["model.bf16"] = ramp.to(at::kBFloat16);
  tensors["model.fp16"] = ramp.to(at::kHalf);
  tensors["model.fp64"] = ramp.to(at::kDouble).div(3);
  tensors["model.int64"] = ramp.to(at::kLong).mul(int64_t{1} << 40);
  tensors["model.int32"] = ramp.to(at::kInt);
  tensors["model.uint8"] = ramp.to(at::kByte);
  tensors["model.bool"] = ramp.remainder(2).to(at::kBool);
  tensors["model.scalar"] = at::scalar_tensor(2.5);
  tensors["model.empty"] = at::empty({0, 4});
  tensors["model.transposed"] = ramp.t();
  tensors["model.strided"] = ramp.slice(1, 0, 20, 3);
  if (!model_only) {
    tensors["optimizer.model.embed_tokens.weight.exp_avg"] = ramp.mul(0.1);
    tensors["optimizer.model.embed_tokens.weight.exp_avg_sq"] = ramp.square();
  }
  snapshot.trainer = {{"seen_tokens", 1234567890123},
                      {"job_file", "[training]\nsteps = 3\n"},
                      {"rng", {{"seed", 42}}},
                      {"lr", 0.1}};
  return snapshot;
}

// What lies in a folder, sorted.
inline std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

inline void expect_same(const Snapshot& actual, const Snapshot& expected) {
  EXPECT_EQ(actual.step, expected.step);
  EXPECT_EQ(actual.model_only, expected.model_only);
  EXPECT_EQ(actual.trainer, expected.trainer);
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
  for (const auto& [name, tensor] : expected.tensors) {
    ASSERT_TRUE(actual.tensors.contains(name)) << name;
    const at::Tensor& other = actual.tensors.at(name);
    EXPECT_EQ(other.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(other.sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(at::equal(other, tensor)) << name;
  }
}

}  // namespace longhaul::checkpoint
