// Dense causal attention. Ascend has no schema of its own for it with documents and rope parts: the
// arguments are those of sparse_flash_attention without its selection.
#include <ATen/core/grad_mode.h>

#include "longhaul/ops/library/attention.h"

namespace longhaul::ops::library {
namespace {

namespace cpu {

ThreeTensors flash_attention(const Tensor& query, const Tensor& key, const MaybeTensor& value,
                             double scale_value, const MaybeTensor& lengths_query,
                             const MaybeTensor& lengths_kv, const MaybeTensor& query_rope,
                             const MaybeTensor& key_rope, std::string_view layout_query,
                             std::string_view layout_kv, int64_t sparse_mode, int64_t pre_tokens,
                             int64_t next_tokens, bool return_softmax_lse) {
  const char* op = "flash_attention";
  const at::NoGradGuard no_grad;
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  const Layout layout(op, same_layout(op, layout_query, layout_kv), query);
  const auto operands =
      dense_attention_operands(layout, {op, query, key, value, query_rope, key_rope});
  const MaybeTensor lengths = common_lengths(
      op, "actual_seq_lengths_query and actual_seq_lengths_kv", lengths_query, lengths_kv);
  const auto result = ops::flash_attention(operands.query_BSHD, operands.key, operands.value,
                                           layout.doc_start_BS(query, lengths),
                                           {.scale = scale_value,
                                            .value_dim = key.size(-1),
                                            .return_statistics = return_softmax_lse,
                                            .kernel = Kernel::kFused});
  const auto statistics = [&](const Tensor& rows) {
    return rows.defined() ? layout.statistics(rows, key.size(-2)) : no_statistics(query);
  };
  return {layout.out(result.out_BSHV), statistics(result.softmax_max),
          statistics(result.softmax_sum)};
}

AttentionGradients gradients(const AttentionState& attention, const Tensor& doc_start,
                             const Tensor& out, const Tensor& d_out) {
  if (takes_kernel("flash_attention_grad", why_no_fused_attention(attention.query_BSHD))) {
    return flash_attention_grad(attention, doc_start, out, d_out);
  }
  check_attention_grad(attention, out, d_out);
  return reference_attention_gradients(
      attention, d_out, [&](const Tensor& query, const Tensor& key, const Tensor& value) {
        return flash_attention_reference(query, key, value, doc_start,
                                         {.scale = attention.scale, .value_dim = out.size(-1)})
            .out_BSHV;
      });
}

AttentionResults flash_attention_grad(
    const Tensor& query, const Tensor& key, const MaybeTensor& value, const Tensor& d_out,
    const Tensor& out, const Tensor& softmax_max, const Tensor& softmax_sum, double scale_value,
    const MaybeTensor& query_rope, const MaybeTensor& key_rope, const MaybeTensor& actual_seq_qlen,
    const MaybeTensor& actual_seq_kvlen, std::optional<std::string_view> layout_name,
    std::optional<int64_t> sparse_mode, std::optional<int64_t> pre_tokens,
    std::optional<int64_t> next_tokens) {
  const char* op = "flash_attention_grad";
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  const Layout layout(op, layout_name.value_or("BSND"), query);
  const AttentionArguments arguments = {op, query, key, value, query_rope, key_rope};
  const AttentionState attention = attention_state(
      layout, dense_attention_operands(layout, arguments), softmax_max, softmax_sum, scale_value);
  const MaybeTensor lengths =
      common_lengths(op, "actual_seq_qlen and actual_seq_kvlen", actual_seq_qlen, actual_seq_kvlen);
  return attention_results(
      layout, arguments,
      gradients(attention, layout.doc_start_BS(query, lengths), layout.in(out), layout.in(d_out)));
}

}  // namespace cpu

namespace meta {

ThreeTensors flash_attention(const Tensor& query, const Tensor& key, const MaybeTensor& value,
                             double /*scale_value*/, const MaybeTensor& /*lengths_query*/,
                             const MaybeTensor& /*lengths_kv*/, const MaybeTensor& query_rope,
                             const MaybeTensor& key_rope, std::string_view /*layout_query*/,
                             std::string_view /*layout_kv*/, int64_t /*sparse_mode*/,
                             int64_t /*pre_tokens*/, int64_t /*next_tokens*/,
                             bool return_softmax_lse) {
  return sized_attention({"flash_attention", query, key, value, query_rope, key_rope},
                         return_softmax_lse);
}

AttentionResults flash_attention_grad(
    const Tensor& query, const Tensor& key, const MaybeTensor& value, const Tensor& /*d_out*/,
    const Tensor& /*out*/, const Tensor& /*softmax_max*/, const Tensor& /*softmax_sum*/,
    double /*scale_value*/, const MaybeTensor& query_rope, const MaybeTensor& key_rope,
    const MaybeTensor& /*actual_seq_qlen*/, const MaybeTensor& /*actual_seq_kvlen*/,
    std::optional<std::string_view> /*layout*/, std::optional<int64_t> /*sparse_mode*/,
    std::optional<int64_t> /*pre_tokens*/, std::optional<int64_t> /*next_tokens*/) {
  return sized_like_attention({"flash_attention_grad", query, key, value, query_rope, key_rope});
}

}  // namespace meta

namespace autograd {

// What is not differentiated.
struct FlashAttentionArguments {
  double scale_value;
  const MaybeTensor &lengths_query, &lengths_kv;
  std::string_view layout_query, layout_kv;
  int64_t sparse_mode, pre_tokens, next_tokens;
  bool return_softmax_lse;
};

struct FlashAttention : torch::autograd::Function<FlashAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                               const MaybeTensor& value, const MaybeTensor& query_rope,
                               const MaybeTensor& key_rope, const FlashAttentionArguments& a) {
    static const auto op = find_operator<decltype(cpu::flash_attention)>("flash_attention");
    const at::AutoDispatchBelowADInplaceOrView guard;
    // The gradient needs the statistics.
    const auto [out, max, sum] =
        op.call(query, key, value, a.scale_value, a.lengths_query, a.lengths_kv, query_rope,
                key_rope, a.layout_query, a.layout_kv, a.sparse_mode, a.pre_tokens, a.next_tokens,
                /*return_softmax_lse=*/true);
    ctx->save_for_backward({query, key, or_undefined(value), out, max, sum,
                            or_undefined(query_rope), or_undefined(key_rope),
                            or_undefined(a.lengths_query), or_undefined(a.lengths_kv)});
    ctx->saved_data["scale"] = a.scale_value;
    ctx->saved_data["layout"] = std::string(a.layout_query);
    const Tensor max_result = a.return_softmax_lse ? max : no_statistics(query);
    const Tensor sum_result = a.return_softmax_lse ? sum : no_statistics(query);
    ctx->mark_non_differentiable({max_result, sum_result});
    return {out, max_result, sum_result};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op =
        find_operator<decltype(cpu::flash_attention_grad)>("flash_attention_grad");
    const auto saved = ctx->get_saved_variables();
    const auto [d_query, d_key, d_value, d_query_rope, d_key_rope] =
        op.call(saved[0], saved[1], as_optional(saved[2]), grads[0], saved[3], saved[4], saved[5],
                ctx->saved_data["scale"].toDouble(), as_optional(saved[6]), as_optional(saved[7]),
                as_optional(saved[8]), as_optional(saved[9]),
                ctx->saved_data["layout"].toStringView(), std::nullopt, std::nullopt, std::nullopt);
    const auto of = [](const Tensor& gradient, const Tensor& x) {
      return x.defined() ? gradient : Tensor();
    };
    return {
        d_query, d_key, of(d_value, saved[2]), of(d_query_rope, saved[6]), of(d_key_rope, saved[7]),
        Tensor()};
  }
};

ThreeTensors flash_attention(const Tensor& query, const Tensor& key, const MaybeTensor& value,
                             double scale_value, const MaybeTensor& lengths_query,
                             const MaybeTensor& lengths_kv, const MaybeTensor& query_rope,
                             const MaybeTensor& key_rope, std::string_view layout_query,
                             std::string_view layout_kv, int64_t sparse_mode, int64_t pre_tokens,
                             int64_t next_tokens, bool return_softmax_lse) {
  const auto out = FlashAttention::apply(
      query, key, value, query_rope, key_rope,
      FlashAttentionArguments{scale_value, lengths_query, lengths_kv, layout_query, layout_kv,
                              sparse_mode, pre_tokens, next_tokens, return_softmax_lse});
  return {out[0], out[1], out[2]};
}

}  // namespace autograd
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
  m.def(
      "flash_attention(Tensor query, Tensor key, Tensor? value, float scale_value, *, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
      "Tensor? query_rope=None, Tensor? key_rope=None, str layout_query=\"BSND\", "
      "str layout_kv=\"BSND\", int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, bool return_softmax_lse=False) -> "
      "(Tensor, Tensor, Tensor)",
      kTags);
  m.def(
      "flash_attention_grad(Tensor query, Tensor key, Tensor? value, Tensor d_out, Tensor out, "
      "Tensor softmax_max, Tensor softmax_sum, float scale_value, Tensor? query_rope=None, "
      "Tensor? key_rope=None, Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, "
      "str? layout=\"BSND\", int? sparse_mode=3, int? pre_tokens=9223372036854775807, "
      "int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("flash_attention", cpu::flash_attention);
  m.impl("flash_attention_grad", cpu::flash_attention_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("flash_attention", meta::flash_attention);
  m.impl("flash_attention_grad", meta::flash_attention_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("flash_attention", autograd::flash_attention);
  m.impl("flash_attention_grad", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace longhaul::ops::library
