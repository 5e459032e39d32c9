#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/flash_attention/distributed_attention.h"
#include "longhaul/ops/saved_results.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check_indices(const Tensor& query_BSHD, const Tensor& indices_BSK) {
  check_shape(indices_BSK, {query_BSHD.size(0), query_BSHD.size(1), kAnySize},
              "sparse attention indices");
  check_is_integer(indices_BSK, "sparse attention indices");
}

// [..., D] with its V value columns and the columns behind them each filled up to a multiple of 32.
Tensor pad_parts(const Tensor& x, int64_t V) {
  const int64_t D = x.size(-1);
  if (V % kKernelColumns == 0 || V == D) return pad_last(x, kKernelColumns);
  return at::cat({pad_last(x.narrow(-1, 0, V), kKernelColumns),
                  pad_last(x.narrow(-1, V, D - V), kKernelColumns)},
                 -1);
}

Tensor unpad_parts(const Tensor& x, int64_t D, int64_t V) {
  if (x.size(-1) == D) return x;
  if (V % kKernelColumns == 0 || V == D) return x.narrow(-1, 0, D).contiguous();
  return at::cat({x.narrow(-1, 0, V), x.narrow(-1, round_up(V, kKernelColumns), D - V)}, -1);
}

// The kernels' view of the operands; holds what it points at.
struct Operands {
  Tensor query_BSHD, key_BLD, indices_BSK;
  int64_t D, V;  // without padding
  longhaul_sparse_attention_args args;

  Operands(const Tensor& query, const Tensor& key, const Tensor& indices, double scale, int64_t V)
      : query_BSHD(pad_parts(query, V)),
        key_BLD(pad_parts(key, V)),
        indices_BSK(to_int32(indices)),
        D(query.size(3)),
        V(V),
        args{.dtype = kernel_dtype(query),
             .B = query.size(0),
             .S = query.size(1),
             .L = key.size(1),
             .H = query.size(2),
             .D = query_BSHD.size(3),
             .V = round_up(V, kKernelColumns),
             .K = indices.size(2),
             .scale = static_cast<float>(scale),
             .query = query_BSHD.const_data_ptr(),
             .key = key_BLD.const_data_ptr(),
             .indices = indices_BSK.const_data_ptr<int32_t>(),
             .out = nullptr,
             .softmax_max = nullptr,
             .softmax_sum = nullptr,
             .head_sum = nullptr} {}
};

// As the kernels read them.
struct StatisticsOfKernel {
  Tensor max_BSH, sum_BSH;

  explicit StatisticsOfKernel(const AttentionState& attention)
      : max_BSH(attention.softmax_max.to(at::kFloat).contiguous()),
        sum_BSH(attention.softmax_sum.to(at::kFloat).contiguous()) {}
  template <typename Args>
  void give(Args& args) const {
    args.softmax_max = max_BSH.data_ptr<float>();
    args.softmax_sum = sum_BSH.data_ptr<float>();
  }
};

// What the kernels write into, and the call: out [B, S, H, V], softmax_max and softmax_sum [B, S,
// H], head_sum [B, S, K] or empty. `operands` makes the kernels' view of the operands.
template <typename MakeOperands, typename Kernel, typename Workspace>
variable_list attend(const Tensor& query, const Tensor& indices, int64_t V, bool with_head_sum,
                     const MakeOperands& operands, Kernel kernel, Workspace workspace) {
  const int64_t B = query.size(0), S = query.size(1), H = query.size(2);
  const int64_t K = with_head_sum ? indices.size(2) : 0;
  const auto fp32 = query.options().dtype(at::kFloat);
  const Tensor out = at::empty({B, S, H, round_up(V, kKernelColumns)}, query.options());
  const Tensor max = at::empty({B, S, H}, fp32), sum = at::empty({B, S, H}, fp32);
  const Tensor head_sum = at::empty({B, S, K}, fp32);
  if (!query.is_meta() && indices.size(2) > 0) {
    auto view = operands();
    view.args.out = out.data_ptr();
    view.args.softmax_max = max.data_ptr<float>();
    view.args.softmax_sum = sum.data_ptr<float>();
    if (with_head_sum) view.args.head_sum = head_sum.data_ptr<float>();
    run_kernel("sparse_flash_attention", kernel, workspace, view.args);
  } else if (!query.is_meta()) {
    for (const auto& x : {out, max, sum}) x.zero_();
  }
  return {unpad_parts(out, V, V), max, sum, head_sum};
}

struct SparseAttention : torch::autograd::Function<SparseAttention> {
  // As attend().
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                               const Tensor& indices, const AttentionOptions& options) {
    const auto operands = [&] {
      return Operands(query, key, indices, options.scale, options.value_dim);
    };
    const auto results = saved_or_computed({.op = "sparse_flash_attention"}, [&] {
      return attend(query, indices, options.value_dim, options.return_head_sum, operands,
                    longhaul_sparse_attention, longhaul_sparse_attention_workspace);
    });
    ctx->save_for_backward({query, key, indices, results[0], results[1], results[2]});
    ctx->saved_data["scale"] = options.scale;
    ctx->mark_non_differentiable({results[1], results[2], results[3]});
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [d_query, d_key, no_value] =
        sparse_flash_attention_grad({.query_BSHD = saved[0],
                                     .key = saved[1],
                                     .softmax_max = saved[4],
                                     .softmax_sum = saved[5],
                                     .scale = ctx->saved_data["scale"].toDouble()},
                                    saved[2], saved[3], grads[0]);
    return {d_query, d_key, Tensor(), Tensor()};
  }
};

// Keys or values of each head as rows a stride apart, padded; a copy only where it must be.
Tensor head_rows(const Tensor& x_BLHD) {
  const int64_t D = x_BLHD.size(3);
  const Tensor x = D % kKernelColumns == 0 ? x_BLHD : pad_last(x_BLHD, kKernelColumns);
  return as_rows(x, {x.size(0) * x.size(1) * x.size(2), x.size(3)});
}

// The kernels' view of the operands of expanded attention; holds what it points at. Without a value
// its rows are those of the key, which the kernels of head sums do not read.
struct ExpandedOperands {
  Tensor query_BSHD, key_rows, value_rows, indices_BSK;
  longhaul_sparse_attention_expanded_args args;

  ExpandedOperands(const Tensor& query, const Tensor& key, const Tensor& value,
                   const Tensor& indices, double scale)
      : query_BSHD(pad_last(query, kKernelColumns)),
        key_rows(head_rows(key)),
        value_rows(value.defined() ? head_rows(value) : key_rows),
        indices_BSK(to_int32(indices)),
        args{.dtype = kernel_dtype(query),
             .B = query.size(0),
             .S = query.size(1),
             .L = key.size(1),
             .H = query.size(2),
             .D = query_BSHD.size(3),
             .V = value_rows.size(1),
             .K = indices.size(2),
             .key_stride = key_rows.stride(0),
             .value_stride = value_rows.stride(0),
             .scale = static_cast<float>(scale),
             .query = query_BSHD.const_data_ptr(),
             .key = key_rows.const_data_ptr(),
             .value = value_rows.const_data_ptr(),
             .indices = indices_BSK.const_data_ptr<int32_t>(),
             .out = nullptr,
             .softmax_max = nullptr,
             .softmax_sum = nullptr,
             .head_sum = nullptr} {}
};

struct ExpandedSparseAttention : torch::autograd::Function<ExpandedSparseAttention> {
  // As attend().
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                               const Tensor& value, const Tensor& indices,
                               const AttentionOptions& options) {
    const auto operands = [&] {
      return ExpandedOperands(query, key, value, indices, options.scale);
    };
    const auto results = saved_or_computed({.op = "sparse_flash_attention"}, [&] {
      return attend(query, indices, value.size(3), options.return_head_sum, operands,
                    longhaul_sparse_attention_expanded,
                    longhaul_sparse_attention_expanded_workspace);
    });
    ctx->save_for_backward({query, key, value, indices, results[0], results[1], results[2]});
    ctx->saved_data["scale"] = options.scale;
    ctx->mark_non_differentiable({results[1], results[2], results[3]});
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [d_query, d_key, d_value] =
        sparse_flash_attention_grad({.query_BSHD = saved[0],
                                     .key = saved[1],
                                     .value = saved[2],
                                     .softmax_max = saved[5],
                                     .softmax_sum = saved[6],
                                     .scale = ctx->saved_data["scale"].toDouble()},
                                    saved[3], saved[4], grads[0]);
    return {d_query, d_key, d_value, Tensor(), Tensor()};
  }
};

variable_list apply_fused(const Tensor& query, const Tensor& key, const Tensor& value,
                          const Tensor& indices, const AttentionOptions& options) {
  if (value.defined()) {
    return ExpandedSparseAttention::apply(query, key, value, indices, options);
  }
  return SparseAttention::apply(query, key, indices, options);
}

AttentionResult fused(const Tensor& query, const Tensor& key, const Tensor& value,
                      const Tensor& indices, const AttentionOptions& options) {
  const auto results = apply_fused(query, key, value, indices, options);
  AttentionResult result;
  result.out_BSHV = results[0];
  if (options.return_statistics) {
    result.softmax_max = results[1];
    result.softmax_sum = results[2];
  }
  if (options.return_head_sum) result.head_sum = results[3];
  return result;
}

AttentionGradients absorbed_gradients(const AttentionState& attention, const Tensor& indices_BSK,
                                      const Tensor& out_BSHV, const Tensor& d_out_BSHV) {
  const Tensor &query = attention.query_BSHD, &key = attention.key;
  const int64_t V = out_BSHV.size(3);
  const StatisticsOfKernel statistics(attention);
  Operands operands(query, key, indices_BSK, attention.scale, V);
  const Tensor out = pad_last(out_BSHV.to(query.scalar_type()), kKernelColumns);
  const Tensor d_out = pad_last(d_out_BSHV.to(query.scalar_type()), kKernelColumns);
  const Tensor d_query = at::empty(operands.query_BSHD.sizes(), query.options());
  const Tensor d_key = at::empty(operands.key_BLD.sizes(), key.options());
  operands.args.out = out.data_ptr();
  statistics.give(operands.args);
  run_kernel("sparse_flash_attention_grad", longhaul_sparse_attention_grad,
             longhaul_sparse_attention_grad_workspace,
             longhaul_sparse_attention_grad_args{.forward = operands.args,
                                                 .d_out = d_out.const_data_ptr(),
                                                 .d_query = d_query.data_ptr(),
                                                 .d_key = d_key.data_ptr()});
  return {unpad_parts(d_query, operands.D, V), unpad_parts(d_key, operands.D, V), Tensor()};
}

AttentionGradients expanded_gradients(const AttentionState& attention, const Tensor& indices_BSK,
                                      const Tensor& out_BSHV, const Tensor& d_out_BSHV) {
  const Tensor &query = attention.query_BSHD, &key = attention.key, &value = attention.value;
  const StatisticsOfKernel statistics(attention);
  ExpandedOperands operands(query, key, value, indices_BSK, attention.scale);
  const auto& a = operands.args;
  const Tensor out = pad_last(out_BSHV.to(query.scalar_type()), kKernelColumns);
  const Tensor d_out = pad_last(d_out_BSHV.to(query.scalar_type()), kKernelColumns);
  const Tensor d_query = at::empty(operands.query_BSHD.sizes(), query.options());
  const Tensor d_key = at::empty({a.B, a.L, a.H, a.D}, key.options());
  const Tensor d_value = at::empty({a.B, a.L, a.H, a.V}, value.options());
  operands.args.out = out.data_ptr();
  statistics.give(operands.args);
  run_kernel("sparse_flash_attention_grad", longhaul_sparse_attention_expanded_grad,
             longhaul_sparse_attention_expanded_grad_workspace,
             longhaul_sparse_attention_expanded_grad_args{.forward = operands.args,
                                                          .d_out = d_out.const_data_ptr(),
                                                          .d_query = d_query.data_ptr(),
                                                          .d_key = d_key.data_ptr(),
                                                          .d_value = d_value.data_ptr()});
  return {d_query.narrow(-1, 0, query.size(3)), d_key.narrow(-1, 0, key.size(3)),
          d_value.narrow(-1, 0, value.size(3))};
}

std::string why_no_kernel(const Tensor& query) {
  if (query.size(2) > 128) return "it has at most 128 heads";
  return why_no_cpu_kernel(query);
}

}  // namespace

std::string why_no_fused_sparse_attention(const Tensor& query, const Tensor& key,
                                          const Tensor& value) {
  if (key.dim() != (value.defined() ? 4 : 3)) {
    return "it is for keys that heads share and whose first columns are the values, and for keys "
           "and values of each head";
  }
  return why_no_kernel(query);
}

AttentionGradients sparse_flash_attention_grad(const AttentionState& attention,
                                               const Tensor& indices_BSK, const Tensor& out_BSHV,
                                               const Tensor& d_out_BSHV) {
  check_attention_grad(attention, out_BSHV, d_out_BSHV);
  const Tensor &query = attention.query_BSHD, &key = attention.key, &value = attention.value;
  check_indices(query, indices_BSK);
  if (query.is_meta() || indices_BSK.size(2) == 0) {
    const auto zeros = [](const Tensor& x) { return x.defined() ? at::zeros_like(x) : x; };
    return {zeros(query), zeros(key), zeros(value)};
  }
  const auto gradients = value.defined() ? expanded_gradients : absorbed_gradients;
  return gradients(attention, indices_BSK, out_BSHV, d_out_BSHV);
}

Tensor sparse_attention_head_sum(const AttentionState& attention, const Tensor& indices_BSK) {
  const Tensor &query = attention.query_BSHD, &key = attention.key;
  check_dims(query, 4, "attention query");
  const int64_t B = query.size(0), S = query.size(1), H = query.size(2);
  if (key.dim() == 4) {
    check_shape(key, {B, kAnySize, H, query.size(3)}, "attention key");
  } else {
    check_shape(key, {B, kAnySize, query.size(3)}, "attention key");
  }
  check_same_dtype(key, query, "attention key", "the query");
  check_indices(query, indices_BSK);
  check_shape(attention.softmax_max, {B, S, H}, "attention softmax_max");
  check_shape(attention.softmax_sum, {B, S, H}, "attention softmax_sum");
  const std::string reason = why_no_kernel(query);
  if (!reason.empty()) {
    report_fallback("sparse_attention_head_sum", reason);
    return sparse_attention_head_sum_reference(attention, indices_BSK);
  }
  Tensor head_sum = at::empty(indices_BSK.sizes(), query.options().dtype(at::kFloat));
  if (query.is_meta() || head_sum.numel() == 0) return head_sum;
  const StatisticsOfKernel statistics(attention);
  const auto sum_with = [&](auto operands, auto kernel, auto workspace) {
    statistics.give(operands.args);
    operands.args.head_sum = head_sum.data_ptr<float>();
    run_kernel("sparse_attention_head_sum", kernel, workspace, operands.args);
  };
  if (key.dim() == 4) {
    sum_with(ExpandedOperands(query, key, /*value=*/{}, indices_BSK, attention.scale),
             longhaul_sparse_attention_expanded_head_sum,
             longhaul_sparse_attention_expanded_head_sum_workspace);
  } else {
    sum_with(Operands(query, key, indices_BSK, attention.scale, /*V=*/query.size(3)),
             longhaul_sparse_attention_head_sum, longhaul_sparse_attention_head_sum_workspace);
  }
  return head_sum;
}

AttentionResult sparse_flash_attention(const Tensor& query_BSHD, const Tensor& key,
                                       const Tensor& value, const Tensor& indices_BSK,
                                       const AttentionOptions& options) {
  if (is_distributed_tensor(query_BSHD)) {
    return attention_of(distributed<DistributedAttention>("sparse_flash_attention")
                            .call(query_BSHD, key, given(value), indices_BSK, std::nullopt,
                                  options.scale, options.value_dim, options.return_head_sum,
                                  options.return_statistics, static_cast<int64_t>(options.kernel)));
  }
  check_attention_operands(query_BSHD, key, value, options);
  check_indices(query_BSHD, indices_BSK);
  if (options.kernel == Kernel::kFused) {
    const std::string reason = why_no_fused_sparse_attention(query_BSHD, key, value);
    if (reason.empty()) return fused(query_BSHD, key, value, indices_BSK, options);
    report_fallback("sparse_flash_attention", reason);
  }
  return sparse_flash_attention_reference(query_BSHD, key, value, indices_BSK, options);
}

}  // namespace longhaul::ops
