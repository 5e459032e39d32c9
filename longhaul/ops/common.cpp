#include "longhaul/ops/common.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "longhaul/base/error.h"

namespace longhaul::ops {
namespace {

bool fits(const Tensor& x, at::IntArrayRef expected) {
  if (x.dim() != static_cast<int64_t>(expected.size())) return false;
  for (size_t d = 0; d < expected.size(); ++d) {
    if (expected[d] != kAnySize && expected[d] != x.size(static_cast<int64_t>(d))) return false;
  }
  return true;
}

// "2 x 3 x any".
std::string expected_text(at::IntArrayRef sizes) {
  std::string text;
  for (const int64_t size : sizes) {
    text += (text.empty() ? "" : " x ") + (size == kAnySize ? "any" : std::to_string(size));
  }
  return text;
}

}  // namespace

Tensor visible_mask(const Tensor& doc_start_BS) {
  check_dims(doc_start_BS, 2, "doc_start");
  const int64_t S = doc_start_BS.size(1);
  const Tensor key_S = at::arange(S, doc_start_BS.options());
  const Tensor causal_SS = key_S.unsqueeze(0) <= key_S.unsqueeze(1);
  return (key_S >= doc_start_BS.unsqueeze(-1)).logical_and_(causal_SS);
}

int64_t keys_up_to_last(const Tensor& mask_BQS) {
  const int64_t S = mask_BQS.size(2);
  if (mask_BQS.is_meta() || mask_BQS.numel() == 0) return S;
  const Tensor seen = mask_BQS.any(0).any(0).nonzero();
  return seen.size(0) == 0 ? 1 : seen[-1].item<int64_t>() + 1;
}

std::string shape_text(const Tensor& x) { return fmt::format("{}", fmt::join(x.sizes(), " x ")); }

void check_dims(const Tensor& x, int64_t dims, const char* what) {
  LONGHAUL_CHECK(x.dim() == dims, "{}: expected {} dimensions, got {}", what, dims, shape_text(x));
}

void check_shape(const Tensor& x, at::IntArrayRef expected, const char* what) {
  LONGHAUL_CHECK(fits(x, expected), "{}: expected [{}], got [{}]", what, expected_text(expected),
                 shape_text(x));
}

}  // namespace longhaul::ops
