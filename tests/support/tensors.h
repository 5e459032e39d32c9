// Random tensors that depend on a number and nothing else, and the visibility of packed documents,
// for tests.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "longhaul/base/rng.h"

namespace longhaul::testing {

// Standard normals times `std`.
inline at::Tensor normal(at::IntArrayRef sizes, uint64_t seed, double std = 1.0,
                         at::ScalarType dtype = at::kDouble) {
  const CounterRng rng(seed, "tests");
  at::Tensor x = at::empty(sizes, at::kDouble);
  auto* out = x.data_ptr<double>();
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = std * rng.normal(i);
  return x.to(dtype);
}

// Integers in 0 .. end - 1.
inline at::Tensor integers(at::IntArrayRef sizes, int64_t end, uint64_t seed) {
  const CounterRng rng(seed, "tests");
  at::Tensor x = at::empty(sizes, at::kLong);
  auto* out = x.data_ptr<int64_t>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    out[i] = static_cast<int64_t>(rng.uniform(i) * static_cast<double>(end));
  }
  return x;
}

// doc_start of one row that holds documents of these lengths; a negative length is padding.
inline std::vector<int64_t> doc_starts(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> starts;
  for (const int64_t length : lengths) {
    const auto begin = static_cast<int64_t>(starts.size());
    for (int64_t t = begin; t < begin + std::abs(length); ++t) {
      starts.push_back(length < 0 ? t + 1 : begin);
    }
  }
  return starts;
}

// doc_start [B, S] of rows of documents.
inline at::Tensor doc_start(const std::vector<std::vector<int64_t>>& rows) {
  std::vector<at::Tensor> tensors;
  for (const auto& row : rows) tensors.push_back(at::tensor(doc_starts(row), at::kLong));
  return at::stack(tensors);
}

// The message of the exception that `call` throws, or "" if it throws none.
template <typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace longhaul::testing
