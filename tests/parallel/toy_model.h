// A chain of small blocks, to see data parallelism at work without a model around it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>

#include "longhaul/nn/init.h"
#include "longhaul/nn/layers.h"
#include "longhaul/parallel/fsdp.h"
#include "tests/support/golden.h"
#include "tests/support/tensors.h"

namespace longhaul::testing {

// y = x + tanh(x W1^T) W2^T + b, with W1 of 5 rows, which few numbers of ranks divide.
class ToyBlock : public nn::Module {
 public:
  static constexpr int64_t kWidth = 3, kInner = 5;

  explicit ToyBlock(const nn::TensorSpec& spec)
      : up_(kWidth, kInner, spec), down_(kInner, kWidth, spec) {
    add_child("up", up_);
    add_child("down", down_);
    add_parameter("bias", bias_, {kWidth}, nn::Init::kNormal, nn::exact(spec));
  }

  at::Tensor forward(const at::Tensor& x) const {
    if (on_compute) on_compute(*this);
    const at::Tensor y = x + down_.forward(up_.forward(x).tanh()) + bias_.to(x.scalar_type());
    if (on_end) on_end(*this);
    return y;
  }

  std::function<void(const ToyBlock&)> on_compute, on_end;

 private:
  nn::Linear up_, down_;
  at::Tensor bias_;
};

class ToyModel : public nn::Module {
 public:
  ToyModel(int num_blocks, const nn::TensorSpec& spec = {.dtype = at::kDouble}) {
    for (int i = 0; i < num_blocks; ++i) {
      blocks.push_back(std::make_unique<ToyBlock>(spec));
      add_child("blocks." + std::to_string(i), *blocks.back());
    }
  }

  at::Tensor forward(at::Tensor x) const {
    for (const auto& block : blocks) {
      x = block->hooked({x},
                        [&](const std::vector<at::Tensor>& in) { return block->forward(in[0]); });
    }
    return x;
  }

  // A unit for each block, cut over `shard`.
  std::vector<parallel::Fsdp::Unit> units(const parallel::Group& shard, bool reshard = true) const {
    std::vector<parallel::Fsdp::Unit> result;
    const auto all = parameters();
    for (size_t i = 0; i < blocks.size(); ++i) {
      const size_t n = all.size() / blocks.size();
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(i * n);
      result.push_back({.modules = {blocks[i].get()},
                        .groups = {{{first, first + static_cast<std::ptrdiff_t>(n)}, shard}},
                        .reshard_after_forward = reshard});
    }
    return result;
  }

  std::vector<std::unique_ptr<ToyBlock>> blocks;
};

// The same values on every layout.
inline void fill(ToyModel& model, const parallel::Fsdp& fsdp) {
  const at::NoGradGuard no_grad;
  for (auto& p : model.parameters()) {
    nn::fill_normal(*p.tensor, CounterRng(3, p.name), 0.7, fsdp.part_of(p));
  }
}

// The input of a rank and micro-batch.
inline at::Tensor toy_input(int row, at::ScalarType dtype = at::kDouble) {
  return normal({1, ToyBlock::kWidth}, 100 + static_cast<uint64_t>(row)).to(dtype);
}

}  // namespace longhaul::testing
