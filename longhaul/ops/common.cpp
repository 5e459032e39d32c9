#include "longhaul/ops/common.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <limits>

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

Tensor KeyRange::last() const {
  if (last_BS.defined()) return last_BS;
  return at::arange(first_BS.size(1), first_BS.options()).expand(first_BS.sizes());
}

KeyRange KeyRange::of_queries(int64_t first, int64_t count) const {
  LONGHAUL_CHECK(first >= 0 && count >= 0 && first + count <= first_BS.size(1),
                 "key range: queries: expected some of 0 to {}, got {} to {}", first_BS.size(1) - 1,
                 first, first + count - 1);
  return {first_BS.narrow(1, first, count), last().narrow(1, first, count)};
}

void check_key_range(const KeyRange& range, at::IntArrayRef sizes_BS, int64_t num_keys,
                     const char* what) {
  const auto check_dtype = [&](const Tensor& x) {
    LONGHAUL_CHECK(x.scalar_type() == at::kLong, "{}: expected Long, got {}", what,
                   c10::toString(x.scalar_type()));
  };
  check_shape(range.first_BS, sizes_BS, what);
  check_dtype(range.first_BS);
  if (range.last_BS.defined()) {
    check_shape(range.last_BS, sizes_BS, what);
    check_dtype(range.last_BS);
  } else {
    LONGHAUL_CHECK(num_keys == sizes_BS[1], "{}: {} keys, expected one for each of {} queries",
                   what, num_keys, sizes_BS[1]);
  }
}

Tensor visible_mask(const KeyRange& range, int64_t num_keys) {
  check_dims(range.first_BS, 2, "doc_start");
  const Tensor key_S = at::arange(num_keys, range.first_BS.options());
  return (key_S >= range.first_BS.unsqueeze(-1)).logical_and_(key_S <= range.last().unsqueeze(-1));
}

Tensor visible_mask(const Tensor& doc_start_BS) {
  check_dims(doc_start_BS, 2, "doc_start");
  return visible_mask(KeyRange(doc_start_BS), doc_start_BS.size(1));
}

int64_t keys_up_to_last(const Tensor& mask_BQS) {
  const int64_t S = mask_BQS.size(2);
  if (mask_BQS.is_meta() || mask_BQS.numel() == 0) return S;
  const Tensor seen = mask_BQS.any(0).any(0).nonzero();
  return seen.size(0) == 0 ? 1 : seen[-1].item<int64_t>() + 1;
}

std::string shape_text(const Tensor& x) { return fmt::format("{}", fmt::join(x.sizes(), " x ")); }

void check_dims(const Tensor& x, int64_t dims, const char* what) {
  LONGHAUL_CHECK(x.dim() == dims, "{}: expected {} dimensions, got [{}]", what, dims,
                 shape_text(x));
}

void check_shape(const Tensor& x, at::IntArrayRef expected, const char* what) {
  LONGHAUL_CHECK(fits(x, expected), "{}: expected [{}], got [{}]", what, expected_text(expected),
                 shape_text(x));
}

Tensor to_int32(const Tensor& indices) {
  if (indices.scalar_type() != at::kLong) return indices.to(at::kInt).contiguous();
  using Limits = std::numeric_limits<int32_t>;
  return indices.clamp(Limits::min(), Limits::max()).to(at::kInt).contiguous();
}

void check_same_dtype(const Tensor& x, const Tensor& like, const char* what,
                      const char* like_what) {
  LONGHAUL_CHECK(x.scalar_type() == like.scalar_type(), "{}: expected {}, the dtype of {}, got {}",
                 what, c10::toString(like.scalar_type()), like_what,
                 c10::toString(x.scalar_type()));
}

void check_is_floating(const Tensor& x, const char* what) {
  LONGHAUL_CHECK(at::isFloatingType(x.scalar_type()), "{}: expected floating-point numbers, got {}",
                 what, c10::toString(x.scalar_type()));
}

void check_is_integer(const Tensor& x, const char* what) {
  LONGHAUL_CHECK(x.scalar_type() == at::kInt || x.scalar_type() == at::kLong,
                 "{}: expected Int or Long, got {}", what, c10::toString(x.scalar_type()));
}

}  // namespace longhaul::ops
