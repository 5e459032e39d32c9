#include "longhaul/ops/flash_attention/flash_attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/flash_attention/distributed_attention.h"
#include "longhaul/ops/flash_attention/head_sum.h"
#include "longhaul/ops/flash_attention/operands.h"
#include "longhaul/ops/saved_results.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Back to the layout of `like`, without padding.
Tensor as_operand(const Tensor& x_BHLD, const Tensor& like) {
  const Tensor x = x_BHLD.narrow(-1, 0, like.size(-1));
  return like.dim() == 4 ? x.transpose(1, 2) : x.squeeze(1);
}

// The kernels' view of the operands; holds what it points at.
struct Operands {
  Tensor query_BSHD, key, value, first_BS, last_BS;
  longhaul_flash_attention_args args;

  Operands(const Tensor& q, const Tensor& k, const Tensor& v, const KeyRange& range,
           const AttentionOptions& options)
      : query_BSHD(pad_last(q, kKernelColumns)),
        key(keys_by_head(k)),
        value(v.defined() ? keys_by_head(v) : v),
        first_BS(range.first_BS.contiguous()),
        last_BS(range.last().contiguous()),
        args{.dtype = kernel_dtype(q),
             .B = q.size(0),
             .S = q.size(1),
             .L = k.size(1),
             .H = q.size(2),
             .D = query_BSHD.size(3),
             .V = round_up(v.defined() ? v.size(-1) : options.value_dim, kKernelColumns),
             .key_heads = key.size(1),
             .scale = static_cast<float>(options.scale),
             .query = query_BSHD.const_data_ptr(),
             .key = key.const_data_ptr(),
             .value = v.defined() ? value.const_data_ptr() : nullptr,
             .first_key = first_BS.const_data_ptr<int64_t>(),
             .last_key = last_BS.const_data_ptr<int64_t>(),
             .out = nullptr,
             .softmax_max = nullptr,
             .softmax_sum = nullptr} {}
};

// out [B, S, H, V], softmax_max and softmax_sum [B, S, H].
variable_list attend(const Tensor& query, const Tensor& key, const Tensor& value,
                     const KeyRange& range, const AttentionOptions& options) {
  const int64_t B = query.size(0), S = query.size(1), H = query.size(2);
  const int64_t V = value.defined() ? value.size(-1) : options.value_dim;
  const auto fp32 = query.options().dtype(at::kFloat);
  Tensor out = at::empty({B, S, H, round_up(V, kKernelColumns)}, query.options());
  const Tensor max = at::empty({B, S, H}, fp32), sum = at::empty({B, S, H}, fp32);
  if (!query.is_meta() && out.numel() > 0) {
    Operands operands(query, key, value, range, options);
    operands.args.out = out.data_ptr();
    operands.args.softmax_max = max.data_ptr<float>();
    operands.args.softmax_sum = sum.data_ptr<float>();
    run_kernel("flash_attention", longhaul_flash_attention, longhaul_flash_attention_workspace,
               operands.args);
  }
  return {out.size(3) == V ? out : out.narrow(-1, 0, V).contiguous(), max, sum};
}

struct FlashAttention : torch::autograd::Function<FlashAttention> {
  // As attend().
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                               const std::optional<Tensor>& some_value, const KeyRange& range,
                               const AttentionOptions& options) {
    const Tensor value = some_value.value_or(Tensor());
    const auto results = saved_or_computed(
        {.op = "flash_attention"}, [&] { return attend(query, key, value, range, options); });
    const Tensor &out = results[0], &max = results[1], &sum = results[2];
    ctx->save_for_backward({query, key, value, range.first_BS, out, max, sum, range.last_BS});
    ctx->saved_data["scale"] = options.scale;
    ctx->mark_non_differentiable({max, sum});
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [d_query, d_key, d_value] =
        flash_attention_grad({.query_BSHD = saved[0],
                              .key = saved[1],
                              .value = saved[2],
                              .softmax_max = saved[5],
                              .softmax_sum = saved[6],
                              .scale = ctx->saved_data["scale"].toDouble()},
                             {saved[3], saved[7]}, saved[4], grads[0]);
    return {d_query, d_key, d_value, Tensor(), Tensor()};
  }
};

AttentionResult fused(const Tensor& query, const Tensor& key, const Tensor& value,
                      const KeyRange& range, const AttentionOptions& options) {
  const auto some_value = value.defined() ? std::optional(value) : std::nullopt;
  const auto results = FlashAttention::apply(query, key, some_value, range, options);
  AttentionResult result;
  result.out_BSHV = results[0];
  if (options.return_statistics) {
    result.softmax_max = results[1];
    result.softmax_sum = results[2];
  }
  if (options.return_head_sum) {
    const HeadSums sums({.query_BSHD = query.detach(),
                         .key = key.detach(),
                         .softmax_max = results[1],
                         .softmax_sum = results[2],
                         .scale = options.scale},
                        range, Kernel::kFused);
    result.head_sum = whole_head_sum(sums, at::kFloat);
  }
  return result;
}

}  // namespace

std::string why_no_fused_attention(const Tensor& query) {
  if (query.size(2) > 128) return "it has at most 128 heads";
  return why_no_cpu_kernel(query);
}

AttentionGradients flash_attention_grad(const AttentionState& attention, const KeyRange& range,
                                        const Tensor& out_BSHV, const Tensor& d_out_BSHV) {
  check_attention_grad(attention, out_BSHV, d_out_BSHV);
  const Tensor &query = attention.query_BSHD, &key = attention.key, &value = attention.value;
  check_key_range(range, {query.size(0), query.size(1)}, key.size(1), "attention doc_start");
  const auto zeros = [](const Tensor& x) { return x.defined() ? at::zeros_like(x) : x; };
  if (query.is_meta() || query.numel() == 0) return {zeros(query), zeros(key), zeros(value)};
  Operands operands(query, key, value, range,
                    {.scale = attention.scale, .value_dim = out_BSHV.size(3)});
  const auto padded = [&](const Tensor& x) {
    return pad_last(x.to(query.scalar_type()), kKernelColumns);
  };
  const Tensor out = padded(out_BSHV), d_out = padded(d_out_BSHV);
  const Tensor max = attention.softmax_max.to(at::kFloat).contiguous();
  const Tensor sum = attention.softmax_sum.to(at::kFloat).contiguous();
  const Tensor d_query = at::empty(operands.query_BSHD.sizes(), query.options());
  const Tensor d_key = at::empty(operands.key.sizes(), key.options());
  Tensor d_value;
  if (value.defined()) d_value = at::empty(operands.value.sizes(), value.options());
  operands.args.out = out.data_ptr();
  operands.args.softmax_max = max.data_ptr<float>();
  operands.args.softmax_sum = sum.data_ptr<float>();
  run_kernel("flash_attention_grad", longhaul_flash_attention_grad,
             longhaul_flash_attention_grad_workspace,
             longhaul_flash_attention_grad_args{
                 .forward = operands.args,
                 .d_out = d_out.const_data_ptr(),
                 .d_query = d_query.data_ptr(),
                 .d_key = d_key.data_ptr(),
                 .d_value = value.defined() ? d_value.data_ptr() : nullptr});
  return {d_query.narrow(-1, 0, query.size(-1)), as_operand(d_key, key),
          value.defined() ? as_operand(d_value, value) : Tensor()};
}

AttentionResult flash_attention(const Tensor& query_BSHD, const Tensor& key, const Tensor& value,
                                const KeyRange& range, const AttentionOptions& options) {
  if (is_distributed_tensor(query_BSHD)) {
    return attention_of(distributed<DistributedAttention>("flash_attention")
                            .call(query_BSHD, key, given(value), range.first_BS,
                                  given(range.last_BS), options.scale, options.value_dim,
                                  options.return_head_sum, options.return_statistics,
                                  static_cast<int64_t>(options.kernel)));
  }
  check_attention_operands(query_BSHD, key, value, options);
  check_key_range(range, {query_BSHD.size(0), query_BSHD.size(1)}, key.size(1),
                  "attention doc_start");
  LONGHAUL_CHECK(!options.return_head_sum || !range.last_BS.defined(),
                 "attention of some of a sequence's queries makes no head sum: see HeadSums");
  if (options.kernel == Kernel::kFused) {
    const std::string reason = why_no_fused_attention(query_BSHD);
    if (reason.empty()) return fused(query_BSHD, key, value, range, options);
    report_fallback("flash_attention", reason);
  }
  return flash_attention_reference(query_BSHD, key, value, range, options);
}

}  // namespace longhaul::ops
