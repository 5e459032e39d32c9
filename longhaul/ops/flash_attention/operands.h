// How the kernels of dense attention and of the loss that follows it read tensors.
#pragma once

#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/flash_attention/head_sum.h"

namespace longhaul::ops {

// Keys or values [B, L, H, D] or [B, L, D] as [B, heads, L, D], padded: a head's rows lie next to
// each other.
inline at::Tensor keys_by_head(const at::Tensor& x) {
  return pad_last(x.dim() == 4 ? x.transpose(1, 2) : x.unsqueeze(1), kKernelColumns);
}

// The first and the last key that each query of a block sees, counted from the block's first key.
struct BlockKeys {
  at::Tensor first, last;  // int64 [queries]

  BlockKeys(const KeyRange& range, const QueryBlock& at)
      : first(range.first_BS[at.row].narrow(0, at.query, at.queries) - at.key),
        last(range.last()[at.row].narrow(0, at.query, at.queries) - at.key) {}
};

}  // namespace longhaul::ops
