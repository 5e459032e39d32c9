#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "longhaul/checkpoint/tools.h"

namespace longhaul::checkpoint {
namespace {

// Elements compared at a time, so that the fp64 copies stay small.
constexpr int64_t kSlice = int64_t{1} << 20;

struct Deviation {
  int64_t count = 0;
  double absolute = 0;
  double relative = 0;
};

// The elements of two flat slices that differ by more than the tolerance.
at::Tensor differing(const at::Tensor& a, const at::Tensor& b, const at::Tensor& distance,
                     const at::Tensor& b_double, const Tolerance& tolerance) {
  at::Tensor differ = a.ne(b);
  if (a.is_floating_point() && b.is_floating_point()) {
    differ = differ.logical_and(a.isnan().logical_and(b.isnan()).logical_not());
  }
  const at::Tensor limit = b_double.abs().mul(tolerance.relative).add(tolerance.absolute);
  // A distance of 0 between unequal values is int64 rounded to fp64; inf and NaN are never close.
  const at::Tensor close =
      distance.le(limit).logical_and(distance.isfinite()).logical_and(distance.ne(0));
  return differ.logical_and(close.logical_not());
}

// A NaN on either side stays visible, as in at::max.
double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }

void compare_slice(const at::Tensor& a, const at::Tensor& b, const Tolerance& tolerance,
                   Deviation& deviation) {
  const at::Tensor a_double = a.to(at::kDouble), b_double = b.to(at::kDouble);
  const at::Tensor distance = (a_double - b_double).abs();
  // fp8 has no comparison of its own; fp64 holds all its values.
  const bool narrow = a.element_size() == 1 && a.is_floating_point();
  const bool mixed = a.scalar_type() != b.scalar_type();
  const at::Tensor differ = narrow || mixed
                                ? differing(a_double, b_double, distance, b_double, tolerance)
                                : differing(a, b, distance, b_double, tolerance);
  const at::Tensor distances = distance.masked_select(differ);
  if (distances.numel() == 0) return;
  const at::Tensor scale =
      at::maximum(a_double.abs(), b_double.abs()).masked_select(differ).clamp_min(1e-300);
  deviation.count += distances.numel();
  deviation.absolute = larger(deviation.absolute, distances.max().item<double>());
  deviation.relative = larger(deviation.relative, (distances / scale).max().item<double>());
}

Deviation compare(const at::Tensor& a, const at::Tensor& b, const Tolerance& tolerance) {
  Deviation deviation;
  const at::Tensor flat_a = a.flatten(), flat_b = b.flatten();
  for (int64_t begin = 0; begin < flat_a.numel(); begin += kSlice) {
    const int64_t length = std::min(kSlice, flat_a.numel() - begin);
    compare_slice(flat_a.narrow(0, begin, length), flat_b.narrow(0, begin, length), tolerance,
                  deviation);
  }
  return deviation;
}

void diff_tensor(const std::string& name, const TensorSource& a, const TensorSource& b,
                 const Tolerance& tolerance, std::vector<Difference>& differences) {
  const auto& info_a = a.info(name);
  const auto& info_b = b.info(name);
  if (info_a.shape != info_b.shape) {
    differences.push_back(
        {name,
         fmt::format("shape {} in A, {} in B", safetensors::shape_text(info_a.shape),
                     safetensors::shape_text(info_b.shape)),
         {},
         {}});
    return;
  }
  std::string what;
  if (info_a.dtype != info_b.dtype) {
    what = fmt::format("dtype {} in A, {} in B", safetensors::dtype_name(info_a.dtype),
                       safetensors::dtype_name(info_b.dtype));
  }
  const Deviation deviation = compare(a.load(name), b.load(name), tolerance);
  if (deviation.count > 0) {
    what += fmt::format("{}{} of {} values differ", what.empty() ? "" : "; ", deviation.count,
                        info_a.elements());
    differences.push_back({name, what, deviation.absolute, deviation.relative});
  } else if (!what.empty()) {
    differences.push_back({name, what, {}, {}});
  }
}

}  // namespace

std::vector<Difference> diff(const fs::path& path_a, const fs::path& path_b,
                             const Tolerance& tolerance) {
  const at::NoGradGuard no_grad;
  const auto a = open_source(path_a);
  const auto b = open_source(path_b);
  const auto names_a = a->names(), names_b = b->names();
  std::vector<std::string> all;
  std::set_union(names_a.begin(), names_a.end(), names_b.begin(), names_b.end(),
                 std::back_inserter(all));
  std::vector<Difference> differences;
  for (const auto& name : all) {
    const bool in_a = std::binary_search(names_a.begin(), names_a.end(), name);
    const bool in_b = std::binary_search(names_b.begin(), names_b.end(), name);
    if (in_a && in_b) {
      diff_tensor(name, *a, *b, tolerance, differences);
    } else {
      differences.push_back({name, in_a ? "only in A" : "only in B", {}, {}});
    }
  }
  return differences;
}

}  // namespace longhaul::checkpoint
