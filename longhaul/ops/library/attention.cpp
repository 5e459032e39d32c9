// sparse_flash_attention and the sums over its heads from which the indexer learns.
#include "longhaul/ops/library/attention.h"

#include "longhaul/ops/library/layout.h"
#include "longhaul/ops/library/operators.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace longhaul::ops::library {

namespace {

Tensor with_rope(const Tensor& x, const MaybeTensor& rope) {
  return rope ? at::cat({x, *rope}, -1) : x;
}

}  // namespace

AttentionState attention_state(const Layout& layout, const AttentionArguments& a) {
  LONGHAUL_CHECK(a.query_rope.has_value() == a.key_rope.has_value(),
                 "{}: query_rope and key_rope come together", a.op);
  const Tensor key = layout.in(with_rope(a.key, a.key_rope));
  return {.query_BSHD = layout.in(with_rope(a.query, a.query_rope)),
          .key = key.dim() == 4 && key.size(2) == 1 ? key.squeeze(2) : key,
          .softmax_max = layout.from_statistics(a.softmax_max, "softmax_max"),
          .softmax_sum = layout.from_statistics(a.softmax_sum, "softmax_sum"),
          .scale = a.scale_value};
}

namespace {

// attention_mode 2 (absorbed MLA): the value is the key, the rope part is only compared.
void check_absorbed(const char* op, const Tensor& key, const MaybeTensor& value,
                    std::optional<int64_t> attention_mode, int64_t sparse_block_size) {
  const bool own_value =
      value && (value->data_ptr() != key.data_ptr() || value->sizes() != key.sizes());
  LONGHAUL_CHECK(
      attention_mode.value_or(2) == 2 && !own_value,
      "{}: attention_mode and value: only 2 (absorbed MLA, no value of its own) is there", op);
  LONGHAUL_CHECK(sparse_block_size == 1, "{}: sparse_block_size is {}, must be 1", op,
                 sparse_block_size);
}

namespace cpu {

std::tuple<Tensor, Tensor, Tensor> sparse_flash_attention(
    const Tensor& query, const Tensor& key, const MaybeTensor& value, const Tensor& sparse_indices,
    double scale_value, const MaybeTensor& block_table,
    const MaybeTensor& /*actual_seq_lengths_query*/, const MaybeTensor& /*actual_seq_lengths_kv*/,
    const MaybeTensor& query_rope, const MaybeTensor& key_rope, int64_t sparse_block_size,
    std::string_view layout_query, std::string_view layout_kv, int64_t sparse_mode,
    int64_t pre_tokens, int64_t next_tokens, int64_t attention_mode, bool return_softmax_lse,
    const MaybeTensor& sinks) {
  const char* op = "sparse_flash_attention";
  const at::NoGradGuard no_grad;
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  check_absent(op, "block_table", block_table);
  check_absent(op, "sinks", sinks);
  check_absorbed(op, key, value, attention_mode, sparse_block_size);
  LONGHAUL_CHECK(query_rope.has_value() == key_rope.has_value(),
                 "{}: query_rope and key_rope come together", op);
  const Layout layout(op, same_layout(op, layout_query, layout_kv), query);
  const auto result = ops::sparse_flash_attention(
      layout.in(with_rope(query, query_rope)), layout.shared_head(with_rope(key, key_rope), "key"),
      {}, layout.shared_head(sparse_indices, "sparse_indices"),
      {.scale = scale_value,
       .value_dim = key.size(-1),
       .return_statistics = return_softmax_lse,
       .kernel = Kernel::kFused});
  const auto statistics = [&](const Tensor& rows) {
    return rows.defined() ? layout.statistics(rows)
                          : at::empty({0}, query.options().dtype(wide_type(query)));
  };
  return {layout.out(result.out_BSHV), statistics(result.softmax_max),
          statistics(result.softmax_sum)};
}

SparseAttentionGradients gradients(const AttentionState& attention, const Tensor& indices_BSK,
                                   const Tensor& out, const Tensor& d_out) {
  if (why_no_fused_sparse_attention(attention.query_BSHD, attention.key, {}).empty()) {
    return ops::sparse_flash_attention_grad(attention, indices_BSK, out, d_out);
  }
  check_sparse_attention_grad(attention, indices_BSK, out, d_out);
  const auto attend = [&](const std::vector<Tensor>& x) {
    return sparse_flash_attention_reference(x[0], x[1], {}, indices_BSK,
                                            {.scale = attention.scale, .value_dim = out.size(-1)})
        .out_BSHV;
  };
  const auto found = reference_gradients(attend, {attention.query_BSHD, attention.key}, d_out);
  return {found[0], found[1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sparse_flash_attention_grad(
    const Tensor& query, const Tensor& key, const MaybeTensor& value, const Tensor& sparse_indices,
    const Tensor& d_out, const Tensor& out, const Tensor& softmax_max, const Tensor& softmax_sum,
    double scale_value, int64_t sparse_block_size, const MaybeTensor& query_rope,
    const MaybeTensor& key_rope, const MaybeTensor& /*actual_seq_qlen*/,
    const MaybeTensor& /*actual_seq_kvlen*/, std::optional<std::string_view> layout_name,
    std::optional<int64_t> sparse_mode, std::optional<int64_t> pre_tokens,
    std::optional<int64_t> next_tokens, std::optional<int64_t> attention_mode) {
  const char* op = "sparse_flash_attention_grad";
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  check_absorbed(op, key, value, attention_mode, sparse_block_size);
  const Layout layout(op, layout_name.value_or("BSND"), query);
  const AttentionState attention = attention_state(
      layout, {op, query, key, query_rope, key_rope, softmax_max, softmax_sum, scale_value});
  const int64_t V = key.size(-1);
  check_shape(layout.in(out), {kAnySize, kAnySize, kAnySize, V},
              "sparse_flash_attention_grad: out");
  const auto found = gradients(attention, layout.shared_head(sparse_indices, "sparse_indices"),
                               layout.in(out), layout.in(d_out));
  const auto parts = [&](const Tensor& gradient, const MaybeTensor& rope) {
    const int64_t R = gradient.size(-1) - V;
    return std::pair(gradient.narrow(-1, 0, V).contiguous(),
                     rope ? gradient.narrow(-1, V, R).contiguous() : no_result(query));
  };
  const auto [d_query, d_query_rope] = parts(layout.out(found.d_query), query_rope);
  const auto [d_key, d_key_rope] = parts(layout.with_head(found.d_key), key_rope);
  return {d_query, d_key, no_result(key), d_query_rope, d_key_rope};
}

Tensor sparse_attention_head_sum(const Tensor& query, const Tensor& key,
                                 const Tensor& sparse_indices, const Tensor& softmax_max,
                                 const Tensor& softmax_sum, double scale_value,
                                 const MaybeTensor& query_rope, const MaybeTensor& key_rope,
                                 std::string_view layout_name) {
  const char* op = "sparse_attention_head_sum";
  const Layout layout(op, layout_name, query);
  const AttentionState attention = attention_state(
      layout, {op, query, key, query_rope, key_rope, softmax_max, softmax_sum, scale_value});
  return layout.with_head(ops::sparse_attention_head_sum(
      attention, layout.shared_head(sparse_indices, "sparse_indices")));
}

Tensor dense_attention_head_sum(const Tensor& query, const Tensor& key, const Tensor& softmax_max,
                                const Tensor& softmax_sum, double scale_value,
                                const MaybeTensor& query_rope, const MaybeTensor& key_rope,
                                at::OptionalIntArrayRef actual_seq_klen,
                                std::string_view layout_name, int64_t first_query) {
  const char* op = "dense_attention_head_sum";
  const Layout layout(op, layout_name, query);
  AttentionState attention = attention_state(
      layout, {op, query, key, query_rope, key_rope, softmax_max, softmax_sum, scale_value});
  attention.first_query = first_query;
  const Tensor doc_start = layout.doc_start_BS(key, actual_seq_klen);
  const bool fused = why_no_fused_attention(attention.query_BSHD, attention.key, {}).empty();
  const HeadSums sums(attention, doc_start, fused ? Kernel::kFused : Kernel::kReference);
  return layout.with_head(whole_head_sum(sums, doc_start, wide_type(query)));
}

}  // namespace cpu

namespace meta {

// [B, 1, S, H], or [1, T, H].
SymSizes statistics_sizes(const Tensor& query) {
  SymSizes sizes = query.sym_sizes().vec();
  sizes.pop_back();
  sizes.insert(query.dim() == 4 ? sizes.begin() + 1 : sizes.begin(), 1);
  return sizes;
}

std::tuple<Tensor, Tensor, Tensor> sparse_flash_attention(
    const Tensor& query, const Tensor& /*key*/, const MaybeTensor& /*value*/,
    const Tensor& /*sparse_indices*/, double /*scale_value*/, const MaybeTensor& /*block_table*/,
    const MaybeTensor& /*actual_seq_lengths_query*/, const MaybeTensor& /*actual_seq_lengths_kv*/,
    const MaybeTensor& /*query_rope*/, const MaybeTensor& /*key_rope*/,
    int64_t /*sparse_block_size*/, std::string_view /*layout_query*/,
    std::string_view /*layout_kv*/, int64_t /*sparse_mode*/, int64_t /*pre_tokens*/,
    int64_t /*next_tokens*/, int64_t /*attention_mode*/, bool return_softmax_lse,
    const MaybeTensor& /*sinks*/) {
  const SymSizes sizes = return_softmax_lse ? statistics_sizes(query) : SymSizes{0};
  const auto wide = wide_type(query);
  return {sized_like(query), sized(query, sizes, wide), sized(query, sizes, wide)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sparse_flash_attention_grad(
    const Tensor& query, const Tensor& key, const MaybeTensor& /*value*/,
    const Tensor& /*sparse_indices*/, const Tensor& /*d_out*/, const Tensor& /*out*/,
    const Tensor& /*softmax_max*/, const Tensor& /*softmax_sum*/, double /*scale_value*/,
    int64_t /*sparse_block_size*/, const MaybeTensor& query_rope, const MaybeTensor& key_rope,
    const MaybeTensor& /*actual_seq_qlen*/, const MaybeTensor& /*actual_seq_kvlen*/,
    std::optional<std::string_view> /*layout*/, std::optional<int64_t> /*sparse_mode*/,
    std::optional<int64_t> /*pre_tokens*/, std::optional<int64_t> /*next_tokens*/,
    std::optional<int64_t> /*attention_mode*/) {
  const auto of_rope = [&](const MaybeTensor& rope) {
    return rope ? sized_like(*rope) : no_result(query);
  };
  return {sized_like(query), sized_like(key), no_result(key), of_rope(query_rope),
          of_rope(key_rope)};
}

Tensor sparse_attention_head_sum(const Tensor& query, const Tensor& /*key*/,
                                 const Tensor& sparse_indices, const Tensor& /*softmax_max*/,
                                 const Tensor& /*softmax_sum*/, double /*scale_value*/,
                                 const MaybeTensor& /*query_rope*/, const MaybeTensor& /*key_rope*/,
                                 std::string_view /*layout*/) {
  return sized(query, sparse_indices.sym_sizes().vec(), wide_type(query));
}

Tensor dense_attention_head_sum(const Tensor& query, const Tensor& key,
                                const Tensor& /*softmax_max*/, const Tensor& /*softmax_sum*/,
                                double /*scale_value*/, const MaybeTensor& /*query_rope*/,
                                const MaybeTensor& /*key_rope*/,
                                at::OptionalSymIntArrayRef /*actual_seq_klen*/,
                                std::string_view /*layout*/, int64_t /*first_query*/) {
  SymSizes sizes = query.sym_sizes().vec();
  sizes[sizes.size() - 2] = 1;
  sizes.back() = key.sym_size(query.dim() - 3);
  return sized(query, sizes, wide_type(query));
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
    const Tensor max_result = a.return_softmax_lse ? max : at::empty({0}, max.options());
    const Tensor sum_result = a.return_softmax_lse ? sum : at::empty({0}, sum.options());
    ctx->mark_non_differentiable({max_result, sum_result});
    return {out, max_result, sum_result};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op =
        find_operator<decltype(cpu::sparse_flash_attention_grad)>("sparse_flash_attention_grad");
    const auto saved = ctx->get_saved_variables();
    const MaybeTensor query_rope = as_optional(saved[7]), key_rope = as_optional(saved[8]);
    const auto [d_query, d_key, d_value, d_query_rope, d_key_rope] = op.call(
        saved[0], saved[1], as_optional(saved[2]), saved[3], grads[0], saved[4], saved[5], saved[6],
        ctx->saved_data["scale"].toDouble(), /*sparse_block_size=*/1, query_rope, key_rope,
        as_optional(saved[9]), as_optional(saved[10]), ctx->saved_data["layout"].toStringView(),
        std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    // The value is the key: what it gets is in d_key.
    return {d_query,
            d_key,
            Tensor(),
            query_rope ? d_query_rope : Tensor(),
            key_rope ? d_key_rope : Tensor(),
            Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor> sparse_flash_attention(
    const Tensor& query, const Tensor& key, const MaybeTensor& value, const Tensor& sparse_indices,
    double scale_value, const MaybeTensor& block_table, const MaybeTensor& lengths_query,
    const MaybeTensor& lengths_kv, const MaybeTensor& query_rope, const MaybeTensor& key_rope,
    int64_t sparse_block_size, std::string_view layout_query, std::string_view layout_kv,
    int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens, int64_t attention_mode,
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
  m.def(
      "sparse_attention_head_sum(Tensor query, Tensor key, Tensor sparse_indices, "
      "Tensor softmax_max, Tensor softmax_sum, float scale_value, *, Tensor? query_rope=None, "
      "Tensor? key_rope=None, str layout=\"BSND\") -> Tensor",
      kTags);
  m.def(
      "dense_attention_head_sum(Tensor query, Tensor key, Tensor softmax_max, Tensor softmax_sum, "
      "float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, "
      "SymInt[]? actual_seq_klen=None, str layout=\"BSND\", int first_query=0) -> Tensor",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("sparse_flash_attention", cpu::sparse_flash_attention);
  m.impl("sparse_flash_attention_grad", cpu::sparse_flash_attention_grad);
  m.impl("sparse_attention_head_sum", cpu::sparse_attention_head_sum);
  m.impl("dense_attention_head_sum", cpu::dense_attention_head_sum);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("sparse_flash_attention", meta::sparse_flash_attention);
  m.impl("sparse_flash_attention_grad", meta::sparse_flash_attention_grad);
  m.impl("sparse_attention_head_sum", meta::sparse_attention_head_sum);
  m.impl("dense_attention_head_sum", meta::dense_attention_head_sum);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("sparse_flash_attention", autograd::sparse_flash_attention);
  for (const char* gradient :
       {"sparse_flash_attention_grad", "sparse_attention_head_sum", "dense_attention_head_sum"}) {
    m.impl(gradient, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace longhaul::ops::library
