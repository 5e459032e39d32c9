// Attention over selected keys, absorbed and expanded.
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

#include <ATen/core/grad_mode.h>

#include "longhaul/ops/library/attention.h"

namespace longhaul::ops::library {

namespace {

// Ascend's attention_mode. Absorbed MLA: one key for all heads, which is the value too; the rope
// part is only compared.
constexpr int64_t kOwnKeys = 0, kAbsorbed = 2;

namespace cpu {

// The key of absorbed attention is [B, L, D], those of each head are [B, L, H, D].
AttentionOperands sparse_operands(const Layout& layout, const AttentionArguments& a,
                                  int64_t attention_mode) {
  auto [query, key, value] = attention_operands(layout, a);
  if (attention_mode == kOwnKeys) {
    LONGHAUL_CHECK(value.defined() && key.dim() == 4 && key.size(2) == query.size(2),
                   "{}: attention_mode 0: expected a key and a value of each of the query's {} "
                   "heads, got key [{}], value [{}]",
                   a.op, query.size(2), shape_text(a.key), a.value ? shape_text(*a.value) : "none");
    return {query, key, value};
  }
  LONGHAUL_CHECK(attention_mode == kAbsorbed,
                 "{}: attention_mode: expected 0 (keys and values of each head) or 2 (absorbed "
                 "MLA), got {}",
                 a.op, attention_mode);
  const bool own_value =
      a.value && (a.value->data_ptr() != a.key.data_ptr() || a.value->sizes() != a.key.sizes());
  LONGHAUL_CHECK(
      !own_value,
      "{}: value: expected None or the key itself for attention_mode 2 (0 takes keys and "
      "values of each head), got another tensor [{}]",
      a.op, shape_text(*a.value));
  LONGHAUL_CHECK(key.dim() == 4 && key.size(2) == 1,
                 "{}: key [{}]: expected one head, which all queries share", a.op,
                 shape_text(a.key));
  return {query, key.squeeze(2), Tensor()};
}

void check_block_size(const char* op, int64_t sparse_block_size) {
  LONGHAUL_CHECK(sparse_block_size == 1, "{}: sparse_block_size: expected 1, got {}", op,
                 sparse_block_size);
}

ThreeTensors sparse_flash_attention(const Tensor& query, const Tensor& key,
                                    const MaybeTensor& value, const Tensor& sparse_indices,
                                    double scale_value, const MaybeTensor& block_table,
                                    const MaybeTensor& lengths_query, const MaybeTensor& lengths_kv,
                                    const MaybeTensor& query_rope, const MaybeTensor& key_rope,
                                    int64_t sparse_block_size, std::string_view layout_query,
                                    std::string_view layout_kv, int64_t sparse_mode,
                                    int64_t pre_tokens, int64_t next_tokens, int64_t attention_mode,
                                    bool return_softmax_lse, const MaybeTensor& sinks) {
  const char* op = "sparse_flash_attention";
  const at::NoGradGuard no_grad;
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  check_absent(op, "block_table", block_table);
  check_absent(op, "sinks", sinks);
  check_block_size(op, sparse_block_size);
  const Layout layout(op, same_layout(op, layout_query, layout_kv), query);
  const auto operands =
      sparse_operands(layout, {op, query, key, value, query_rope, key_rope}, attention_mode);
  const Tensor indices =
      layout.selected_keys(sparse_indices, key,
                           common_lengths(op, "actual_seq_lengths_query and actual_seq_lengths_kv",
                                          lengths_query, lengths_kv));
  const auto result =
      ops::sparse_flash_attention(operands.query_BSHD, operands.key, operands.value, indices,
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

AttentionGradients gradients(const AttentionState& attention, const Tensor& indices_BSK,
                             const Tensor& out, const Tensor& d_out) {
  if (takes_kernel(
          "sparse_flash_attention_grad",
          why_no_fused_sparse_attention(attention.query_BSHD, attention.key, attention.value))) {
    return ops::sparse_flash_attention_grad(attention, indices_BSK, out, d_out);
  }
  check_attention_grad(attention, out, d_out);
  check_shape(indices_BSK, {out.size(0), out.size(1), kAnySize}, "sparse attention indices");
  return reference_attention_gradients(
      attention, d_out, [&](const Tensor& query, const Tensor& key, const Tensor& value) {
        return sparse_flash_attention_reference(
                   query, key, value, indices_BSK,
                   {.scale = attention.scale, .value_dim = out.size(-1)})
            .out_BSHV;
      });
}

AttentionResults sparse_flash_attention_grad(
    const Tensor& query, const Tensor& key, const MaybeTensor& value, const Tensor& sparse_indices,
    const Tensor& d_out, const Tensor& out, const Tensor& softmax_max, const Tensor& softmax_sum,
    double scale_value, int64_t sparse_block_size, const MaybeTensor& query_rope,
    const MaybeTensor& key_rope, const MaybeTensor& actual_seq_qlen,
    const MaybeTensor& actual_seq_kvlen, std::optional<std::string_view> layout_name,
    std::optional<int64_t> sparse_mode, std::optional<int64_t> pre_tokens,
    std::optional<int64_t> next_tokens, std::optional<int64_t> attention_mode) {
  const char* op = "sparse_flash_attention_grad";
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  check_block_size(op, sparse_block_size);
  const Layout layout(op, layout_name.value_or("BSND"), query);
  const AttentionArguments arguments = {op, query, key, value, query_rope, key_rope};
  const auto operands = sparse_operands(layout, arguments, attention_mode.value_or(kAbsorbed));
  const Tensor indices =
      layout.selected_keys(sparse_indices, key,
                           common_lengths(op, "actual_seq_qlen and actual_seq_kvlen",
                                          actual_seq_qlen, actual_seq_kvlen));
  check_shape(layout.in(out), {kAnySize, kAnySize, kAnySize, (value ? *value : key).size(-1)},
              "sparse_flash_attention_grad: out");
  return attention_results(
      layout, arguments,
      gradients(attention_state(layout, operands, softmax_max, softmax_sum, scale_value), indices,
                layout.in(out), layout.in(d_out)));
}

}  // namespace cpu

namespace meta {

// As far as results go: the value of absorbed attention is the key.
MaybeTensor own_value(const MaybeTensor& value, int64_t attention_mode) {
  return attention_mode == kAbsorbed ? std::nullopt : value;
}

ThreeTensors sparse_flash_attention(
    const Tensor& query, const Tensor& key, const MaybeTensor& value,
    const Tensor& /*sparse_indices*/, double /*scale_value*/, const MaybeTensor& /*block_table*/,
    const MaybeTensor& /*lengths_query*/, const MaybeTensor& /*lengths_kv*/,
    const MaybeTensor& query_rope, const MaybeTensor& key_rope, int64_t /*sparse_block_size*/,
    std::string_view /*layout_query*/, std::string_view /*layout_kv*/, int64_t /*sparse_mode*/,
    int64_t /*pre_tokens*/, int64_t /*next_tokens*/, int64_t attention_mode,
    bool return_softmax_lse, const MaybeTensor& /*sinks*/) {
  return sized_attention({"sparse_flash_attention", query, key, own_value(value, attention_mode),
                          query_rope, key_rope},
                         return_softmax_lse);
}

AttentionResults sparse_flash_attention_grad(
    const Tensor& query, const Tensor& key, const MaybeTensor& value,
    const Tensor& /*sparse_indices*/, const Tensor& /*d_out*/, const Tensor& /*out*/,
    const Tensor& /*softmax_max*/, const Tensor& /*softmax_sum*/, double /*scale_value*/,
    int64_t /*sparse_block_size*/, const MaybeTensor& query_rope, const MaybeTensor& key_rope,
    const MaybeTensor& /*actual_seq_qlen*/, const MaybeTensor& /*actual_seq_kvlen*/,
    std::optional<std::string_view> /*layout*/, std::optional<int64_t> /*sparse_mode*/,
    std::optional<int64_t> /*pre_tokens*/, std::optional<int64_t> /*next_tokens*/,
    std::optional<int64_t> attention_mode) {
  return sized_like_attention({"sparse_flash_attention_grad", query, key,
                               own_value(value, attention_mode.value_or(kAbsorbed)), query_rope,
                               key_rope});
}

}  // namespace meta

namespace autograd {

// What is not differentiated.
struct SparseAttentionArguments {
  const Tensor& sparse_indices;
  double scale_value;
  const MaybeTensor &block_table, &lengths_query, &lengths_kv;
  int64_t sparse_block_size;
  std::string_view layout_query, layout_kv;
  int64_t sparse_mode, pre_tokens, next_tokens, attention_mode;
  bool return_softmax_lse;
  const MaybeTensor& sinks;
};

struct SparseAttention : torch::autograd::Function<SparseAttention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                               const MaybeTensor& value, const MaybeTensor& query_rope,
                               const MaybeTensor& key_rope, const SparseAttentionArguments& a) {
    static const auto op =
        find_operator<decltype(cpu::sparse_flash_attention)>("sparse_flash_attention");
    const at::AutoDispatchBelowADInplaceOrView guard;
    // The gradient needs the statistics.
    const auto [out, max, sum] =
        op.call(query, key, value, a.sparse_indices, a.scale_value, a.block_table, a.lengths_query,
                a.lengths_kv, query_rope, key_rope, a.sparse_block_size, a.layout_query,
                a.layout_kv, a.sparse_mode, a.pre_tokens, a.next_tokens, a.attention_mode,
                /*return_softmax_lse=*/true, a.sinks);
    ctx->save_for_backward({query, key, or_undefined(value), a.sparse_indices, out, max, sum,
                            or_undefined(query_rope), or_undefined(key_rope),
                            or_undefined(a.lengths_query), or_undefined(a.lengths_kv)});
    ctx->saved_data["scale"] = a.scale_value;
    ctx->saved_data["layout"] = std::string(a.layout_query);
    ctx->saved_data["attention_mode"] = a.attention_mode;
    const Tensor max_result = a.return_softmax_lse ? max : no_statistics(query);
    const Tensor sum_result = a.return_softmax_lse ? sum : no_statistics(query);
    ctx->mark_non_differentiable({max_result, sum_result});
    return {out, max_result, sum_result};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op =
        find_operator<decltype(cpu::sparse_flash_attention_grad)>("sparse_flash_attention_grad");
    const auto saved = ctx->get_saved_variables();
    const int64_t mode = ctx->saved_data["attention_mode"].toInt();
    const MaybeTensor query_rope = as_optional(saved[7]), key_rope = as_optional(saved[8]);
    const auto [d_query, d_key, d_value, d_query_rope, d_key_rope] = op.call(
        saved[0], saved[1], as_optional(saved[2]), saved[3], grads[0], saved[4], saved[5], saved[6],
        ctx->saved_data["scale"].toDouble(), /*sparse_block_size=*/1, query_rope, key_rope,
        as_optional(saved[9]), as_optional(saved[10]), ctx->saved_data["layout"].toStringView(),
        std::nullopt, std::nullopt, std::nullopt, mode);
    // The value of absorbed attention is the key: what it gets is in d_key.
    return {d_query,
            d_key,
            mode == kAbsorbed ? Tensor() : d_value,
            query_rope ? d_query_rope : Tensor(),
            key_rope ? d_key_rope : Tensor(),
            Tensor()};
  }
};

ThreeTensors sparse_flash_attention(const Tensor& query, const Tensor& key,
                                    const MaybeTensor& value, const Tensor& sparse_indices,
                                    double scale_value, const MaybeTensor& block_table,
                                    const MaybeTensor& lengths_query, const MaybeTensor& lengths_kv,
                                    const MaybeTensor& query_rope, const MaybeTensor& key_rope,
                                    int64_t sparse_block_size, std::string_view layout_query,
                                    std::string_view layout_kv, int64_t sparse_mode,
                                    int64_t pre_tokens, int64_t next_tokens, int64_t attention_mode,
                                    bool return_softmax_lse, const MaybeTensor& sinks) {
  const auto out = SparseAttention::apply(
      query, key, value, query_rope, key_rope,
      SparseAttentionArguments{sparse_indices, scale_value, block_table, lengths_query, lengths_kv,
                               sparse_block_size, layout_query, layout_kv, sparse_mode, pre_tokens,
                               next_tokens, attention_mode, return_softmax_lse, sinks});
  return {out[0], out[1], out[2]};
}

}  // namespace autograd
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
  m.def(
      "sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
      "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
      "int sparse_block_size=1, str layout_query=\"BSND\", str layout_kv=\"BSND\", "
      "int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, int attention_mode=2, "
      "bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
      kTags);
  m.def(
      "sparse_flash_attention_grad(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
      "Tensor d_out, Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, "
      "int sparse_block_size, Tensor? query_rope=None, Tensor? key_rope=None, "
      "Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, str? layout=\"BSND\", "
      "int? sparse_mode=3, int? pre_tokens=9223372036854775807, "
      "int? next_tokens=9223372036854775807, int? attention_mode=2) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("sparse_flash_attention", cpu::sparse_flash_attention);
  m.impl("sparse_flash_attention_grad", cpu::sparse_flash_attention_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("sparse_flash_attention", meta::sparse_flash_attention);
  m.impl("sparse_flash_attention_grad", meta::sparse_flash_attention_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("sparse_flash_attention", autograd::sparse_flash_attention);
  m.impl("sparse_flash_attention_grad", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace longhaul::ops::library
