// Cross-entropy with the output projection where each rank has a slice of the vocabulary: the
// logits of a slice never leave their rank, only each token's maximum, sum and label's logit do.
#include "longhaul/ops/cross_entropy/cross_entropy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "longhaul/dtensor/operators/placing.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::dtensor {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kLogitsBytes = int64_t{64} << 20;

// The ranks that share the vocabulary, the first id of this one's slice, and the number of all ids.
struct Vocabulary {
  std::vector<const Communicator*> axes;
  int64_t start, size;

  void reduce(Tensor& x, Reduction reduction) const {
    for (const Communicator* axis : axes) axis->all_reduce(x, reduction).wait();
  }
};

void check_labels(const Tensor& labels_T, int64_t num_ids) {
  if (labels_T.is_meta()) return;  // they have no values
  const Tensor known = (labels_T == ops::kIgnoredLabel)
                           .logical_or_((labels_T >= 0).logical_and_(labels_T < num_ids));
  LONGHAUL_CHECK(known.all().item<bool>(), "cross-entropy: a label outside 0 .. {}", num_ids - 1);
}

struct Sums {
  Tensor loss, d_hidden, d_weight;
};

// A block of tokens: adds its loss and, where wanted, its gradients for a gradient of 1.
void add_block(const Tensor& hidden_TD, const Tensor& weight_VD, const Tensor& labels_T,
               const Vocabulary& vocabulary, Tensor d_hidden_TD, Sums& sums) {
  const Tensor logits_TV = ops::product(hidden_TD, weight_VD.t());
  const int64_t T = logits_TV.size(0), V = logits_TV.size(1);
  Tensor max_T = V > 0
                     ? logits_TV.amax(1)
                     : at::full({T}, -std::numeric_limits<double>::infinity(), logits_TV.options());
  vocabulary.reduce(max_T, Reduction::kMax);
  const Tensor valid_T = labels_T != ops::kIgnoredLabel;
  const Tensor own_T = (labels_T >= vocabulary.start)
                           .logical_and_(labels_T < vocabulary.start + V)
                           .logical_and_(valid_T);
  const Tensor column_T = (labels_T - vocabulary.start).masked_fill_(own_T.logical_not(), 0);
  Tensor exponents_TV = (logits_TV - max_T.unsqueeze(1)).exp_();
  // Each token's sum and label's logit travel together.
  Tensor both = at::zeros({2, T}, logits_TV.options());
  both[0].copy_(exponents_TV.sum(1));
  if (V > 0) {
    both[1].copy_(
        logits_TV.gather(1, column_T.unsqueeze(1)).squeeze(1).masked_fill_(own_T.logical_not(), 0));
  }
  vocabulary.reduce(both, Reduction::kSum);
  sums.loss += (both[0].log() + max_T - both[1]).masked_fill_(valid_T.logical_not(), 0).sum();
  if (!sums.d_hidden.defined() || V == 0) return;
  Tensor d_logits_TV = exponents_TV.div_(both[0].unsqueeze(1));
  d_logits_TV.scatter_add_(1, column_T.unsqueeze(1),
                           own_T.to(logits_TV.scalar_type()).neg().unsqueeze(1));
  d_logits_TV.masked_fill_(valid_T.logical_not().unsqueeze(1), 0);
  ops::product_out(d_logits_TV, weight_VD, d_hidden_TD);
  sums.d_weight += ops::product(d_logits_TV.t(), hidden_TD);
}

Sums compute(const Tensor& hidden_TD, const Tensor& weight_VD, const Tensor& labels_T,
             const Vocabulary& vocabulary, int64_t block, bool with_gradients) {
  const at::NoGradGuard no_grad;
  check_labels(labels_T, vocabulary.size);
  const auto wide = ops::wide_type(hidden_TD);
  const Tensor hidden = hidden_TD.to(wide), weight = weight_VD.to(wide);
  Sums sums{at::zeros({}, hidden.options()), {}, {}};
  if (with_gradients) {
    sums.d_hidden = at::zeros_like(hidden);
    sums.d_weight = at::zeros_like(weight);
  }
  for (int64_t t = 0; t < hidden.size(0); t += block) {
    const int64_t count = std::min(block, hidden.size(0) - t);
    add_block(hidden.narrow(0, t, count), weight, labels_T.narrow(0, t, count), vocabulary,
              with_gradients ? sums.d_hidden.narrow(0, t, count) : Tensor(), sums);
  }
  return sums;
}

struct VocabularyCrossEntropy : torch::autograd::Function<VocabularyCrossEntropy> {
  static Tensor forward(AutogradContext* ctx, const Tensor& hidden, const Tensor& weight,
                        const Tensor& labels, const Vocabulary& vocabulary, int64_t block,
                        bool with_gradients) {
    const Sums sums = compute(hidden, weight, labels, vocabulary, block, with_gradients);
    if (with_gradients) {
      ctx->save_for_backward({sums.d_hidden, sums.d_weight});
      ctx->saved_data["hidden_dtype"] = hidden.scalar_type();
      ctx->saved_data["weight_dtype"] = weight.scalar_type();
    }
    return sums.loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    variable_list result(6);
    result[0] = (saved[0] * grads[0]).to(ctx->saved_data["hidden_dtype"].toScalarType());
    result[1] = (saved[1] * grads[0]).to(ctx->saved_data["weight_dtype"].toScalarType());
    return result;
  }
};

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& labels,
                            int64_t kernel) {
  const Mesh& mesh = mesh_of({&hidden, &weight});
  Placing placing("linear_cross_entropy", mesh, {hidden, weight, labels}, {{}});
  Vocabulary vocabulary{{}, 0, weight.size(0)};
  int64_t slices = 1;
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    if (placement_of(weight, axis).is_shard(0)) {
      vocabulary.axes.push_back(&mesh->axis(static_cast<int>(axis)));
      slices *= vocabulary.axes.back()->size();
      placing.share({Placement::replicate(), Placement::shard(0), Placement::replicate()},
                    {Placement::replicate()});
    } else if (const Placement now = placement_of(hidden, axis);
               now.is_shard() && now.dim() < hidden.dim() - 1) {
      placing.share({now, Placement::replicate(), now}, {Placement::partial()});
    } else {
      placing.replicate();
    }
  }
  if (!vocabulary.axes.empty() && kernel_of(kernel) == ops::Kernel::kFused) {
    ops::report_fallback("linear_cross_entropy", "the vocabulary is cut");
  }
  vocabulary.start = placing.box_of_input(1).offsets[0];
  // The same on every rank, whatever the size of its slice.
  const int64_t slice = ceil_div(weight.size(0), slices);
  const int64_t block = std::max<int64_t>(1, kLogitsBytes / (slice * 4));
  const bool with_gradients =
      at::GradMode::is_enabled() && (hidden.requires_grad() || weight.requires_grad());
  return placing.compute([&](const std::vector<Tensor>& x) {
    if (vocabulary.axes.empty()) {
      return std::vector{ops::linear_cross_entropy(x[0], x[1], x[2], kernel_of(kernel))};
    }
    const Tensor hidden_TD = x[0].reshape({-1, x[0].size(-1)}), labels_T = x[2].reshape({-1});
    return std::vector{VocabularyCrossEntropy::apply(hidden_TD, x[1], labels_T, vocabulary, block,
                                                     with_gradients)};
  })[0];
}

TORCH_LIBRARY_IMPL(longhaul_model, AutogradPrivateUse2, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy);
}

}  // namespace
}  // namespace longhaul::dtensor

// What the linker is told to keep.
extern "C" void longhaul_dtensor_cross_entropy() {}
