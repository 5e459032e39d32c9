#include "longhaul/nn/init.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include "longhaul/base/error.h"

namespace longhaul::nn {
namespace {

// The global index of the first element of a shard's row (a run along the last dim).
int64_t global_row_start(int64_t row, at::IntArrayRef shard_sizes, at::IntArrayRef global_sizes,
                         at::IntArrayRef offsets) {
  const int64_t dims = static_cast<int64_t>(shard_sizes.size());
  int64_t index = 0, stride = global_sizes[dims - 1];
  for (int64_t d = dims - 2; d >= 0; --d) {
    index += (row % shard_sizes[d] + offsets[d]) * stride;
    row /= shard_sizes[d];
    stride *= global_sizes[d];
  }
  return index + offsets[dims - 1];
}

}  // namespace

void fill_normal(Tensor& shard, const CounterRng& rng, double std, const Part& part) {
  const auto& [global_sizes, offsets] = part;
  LONGHAUL_CHECK(shard.dim() >= 1 && global_sizes.size() == shard.sizes().size() &&
                     offsets.size() == shard.sizes().size(),
                 "fill_normal: a shard of {} dimensions", shard.dim());
  if (shard.is_meta() || shard.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const int64_t width = shard.size(-1), rows = shard.numel() / width;
  Tensor values = at::empty(shard.sizes(), at::kDouble);
  auto* out = values.data_ptr<double>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t start = global_row_start(row, shard.sizes(), global_sizes, offsets);
      for (int64_t i = 0; i < width; ++i) out[row * width + i] = std * rng.normal(start + i);
    }
  });
  shard.copy_(values);
}

Part whole(const Tensor& tensor) {
  return {tensor.sizes().vec(), std::vector<int64_t>(static_cast<size_t>(tensor.dim()), 0)};
}

Tensor take_part(const Tensor& whole, const Part& part, at::IntArrayRef sizes) {
  LONGHAUL_CHECK(whole.sizes() == at::IntArrayRef(part.global_sizes),
                 "a part of [{}] is wanted of a tensor of [{}]", fmt::join(part.global_sizes, ", "),
                 fmt::join(whole.sizes(), ", "));
  Tensor taken = whole;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    taken = taken.narrow(static_cast<int64_t>(dim), part.offsets[dim], sizes[dim]);
  }
  return taken;
}

Part within_rows(Part part, at::IntArrayRef sizes) {
  part.global_sizes[0] = sizes[0];
  part.offsets[0] = 0;
  return part;
}

void fill_normal(Tensor& tensor, const CounterRng& rng, double std) {
  fill_normal(tensor, rng, std, whole(tensor));
}

}  // namespace longhaul::nn
