// What the files of operators share. Each registers schemas, the CPU's kernels, sizes on the Meta
// device and gradients under the dispatch keys of their names; another device adds kernels of its
// own under its key, and the sizes and gradients here serve it too.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/kernel.h"

namespace longhaul::ops::library {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;
using SymSizes = std::vector<c10::SymInt>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using Mask2 = std::array<bool, 2>;  // which of two gradients are wanted

// What the tests check of every operator: it can be traced without data.
inline const std::vector<at::Tag> kTags = {at::Tag::pt2_compliant_tag};

// torch.ops.longhaul.NAME with the signature of its CPU kernel. Calls go through the dispatcher.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const std::string& name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("longhaul::" + name).c_str(), "")
      .template typed<Signature>();
}

// What an optional argument or result without a value is.
inline Tensor or_undefined(const MaybeTensor& x) { return x.value_or(Tensor()); }
inline MaybeTensor as_optional(const Tensor& x) {
  return x.defined() ? MaybeTensor(x) : std::nullopt;
}
// A result that the schema has and that is not there.
inline Tensor no_result(const Tensor& like) { return at::empty({0}, like.options()); }

// For the Meta kernels: one argument on that device is enough to get there; beside others it would
// have results that nobody computes.
inline void check_is_meta(const Tensor& x) {
  LONGHAUL_CHECK(x.is_meta(), "expected all arguments on one device, got [{}] on {} beside meta",
                 shape_text(x), x.device().str());
}
// For the Meta kernels: a contiguous result of the device of `like`.
inline Tensor sized(const Tensor& like, const SymSizes& sizes, at::ScalarType dtype) {
  check_is_meta(like);
  return at::empty_symint(sizes, like.options().dtype(dtype));
}
inline Tensor sized_like(const Tensor& x) { return sized(x, x.sym_sizes().vec(), x.scalar_type()); }

// x as int64. Throws Error unless it holds integers.
inline Tensor to_int64(const Tensor& x, const char* what) {
  check_is_integer(x, what);
  return x.to(at::kLong);
}

// Throws Error unless the values are integers from `low` to `high`.
inline void check_values(const Tensor& x, int64_t low, int64_t high, const char* what) {
  check_is_integer(x, what);
  if (x.numel() == 0) return;
  const auto [least, most] = at::aminmax(x);
  const auto first = least.item<int64_t>(), last = most.item<int64_t>();
  LONGHAUL_CHECK(first >= low && last <= high, "{}: expected {} to {}, got {}", what, low, high,
                 first < low ? first : last);
}

// Throws Error for an argument that Ascend's signature has and that is not supported.
inline void check_absent(const char* op, const char* argument, const MaybeTensor& value) {
  LONGHAUL_CHECK(!value, "{}: {} is not supported: expected None, got [{}]", op, argument,
                 shape_text(*value));
}

// Whether nothing speaks against the kernel of `op`; else `reason` is reported and the reference
// computes.
inline bool takes_kernel(const char* op, const std::string& reason) {
  if (!reason.empty()) report_fallback(op, reason);
  return reason.empty();
}

// The gradients of f(inputs) by automatic differentiation, for kernels, which run below autograd:
// in dtypes that no fused kernel covers the reference defines the gradient.
std::vector<Tensor> reference_gradients(const std::function<Tensor(const std::vector<Tensor>&)>& f,
                                        const std::vector<Tensor>& inputs, const Tensor& d_out);

}  // namespace longhaul::ops::library
