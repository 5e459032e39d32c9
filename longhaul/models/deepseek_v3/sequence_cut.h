// What layers ask of the others where a batch holds a slice of each sequence and not the whole.
// Most of a layer works on its slice alone; attention needs the keys of all slots, and a loss by
// sequence the sums over them. Whoever cuts the batch implements it (parallel/context.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace longhaul::deepseek_v3 {

using at::Tensor;

// `count` consecutive slots of a slice, from `slot` on, which stand from `position` on in the whole
// sequence.
struct SliceRun {
  int64_t slot, position, count;
};

// All slices call the same functions in the same order, and their backward passes too.
class SequenceCut {
 public:
  virtual ~SequenceCut() = default;
  // The rows of the whole sequence in its order, [B, S, ...], from those of each slice, [B, slots,
  // ...]. Differentiable: a row's gradient is the sum of its gradients in all slices.
  virtual Tensor gather(const Tensor& x_BS) const = 0;
  // The sum of a statistic over all slices, the same on each; no gradient.
  virtual Tensor sum(const Tensor& statistic) const = 0;
  // This slice, in the order of its slots.
  virtual const std::vector<SliceRun>& runs() const = 0;
};

}  // namespace longhaul::deepseek_v3
