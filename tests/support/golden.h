// Reference vectors (tests/golden/README.md) as tensors, and comparisons at stated tolerances.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>

#include "longhaul/base/file.h"
#include "longhaul/base/safetensors.h"
#include "tests/support/source_folder.h"

namespace longhaul::testing {

using Tensors = std::map<std::string, at::Tensor>;

inline std::filesystem::path golden_path(const std::string& name) {
  return std::filesystem::path(test::source_folder()) / "tests" / "golden" / name;
}

inline at::ScalarType scalar_type(safetensors::DType dtype) {
  using safetensors::DType;
  switch (dtype) {
    case DType::kF64:
      return at::kDouble;
    case DType::kF32:
      return at::kFloat;
    case DType::kI64:
      return at::kLong;
    case DType::kI32:
      return at::kInt;
    case DType::kU8:
      return at::kByte;
    default:
      throw std::runtime_error("a dtype that no reference vector has");
  }
}

// All tensors of tests/golden/<name>.
inline Tensors load_golden(const std::string& name) {
  const safetensors::Reader reader(golden_path(name));
  Tensors tensors;
  for (const auto& [key, info] : reader.header().tensors) {
    auto* bytes = const_cast<std::byte*>(reader.bytes(info).data());
    tensors[key] = at::from_blob(bytes, info.shape, scalar_type(info.dtype)).clone();
  }
  return tensors;
}

// The largest difference, as a share of the largest expected value.
inline double relative_to_max(const at::Tensor& actual, const at::Tensor& expected) {
  const auto a = actual.detach().to(at::kDouble), e = expected.to(at::kDouble);
  if (a.sizes() != e.sizes() || a.numel() == 0) return INFINITY;
  const double difference = (a - e).abs().max().item<double>();
  const double scale = e.abs().max().item<double>();
  return difference == 0 ? 0 : difference / std::max(scale, 1e-30);
}

inline double max_difference(const at::Tensor& actual, const at::Tensor& expected) {
  const auto a = actual.detach().to(at::kDouble), e = expected.to(at::kDouble);
  if (a.sizes() != e.sizes()) return INFINITY;
  return (a - e).abs().max().item<double>();
}

}  // namespace longhaul::testing
