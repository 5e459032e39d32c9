// The lightning indexer's selection, and the gradient of its scores.
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"

#include "longhaul/ops/library/indexer.h"

namespace longhaul::ops::library {
namespace {

namespace cpu {

// The first K of `topk` columns are there; the others say none.
Tensor widen(const Tensor& rows_BSK, int64_t topk, double none) {
  return at::constant_pad_nd(rows_BSK, {0, topk - rows_BSK.size(2)}, none);
}

std::tuple<Tensor, Tensor> lightning_indexer(
    const Tensor& query, const Tensor& key, const Tensor& weights, const MaybeTensor& query_lengths,
    const MaybeTensor& key_lengths, const MaybeTensor& block_table, std::string_view layout_query,
    std::string_view layout_key, int64_t sparse_count, int64_t sparse_mode, int64_t pre_tokens,
    int64_t next_tokens, bool return_value) {
  const char* op = "lightning_indexer";
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  check_absent(op, "block_table", block_table);
  const Layout layout(op, same_layout(op, layout_query, layout_key), query);
  const MaybeTensor lengths = common_lengths(
      op, "actual_seq_lengths_query and actual_seq_lengths_key", query_lengths, key_lengths);
  const auto selection =
      ops::lightning_indexer(layout.in(query), layout.shared_head(key, "key"), layout.in(weights),
                             layout.doc_start_BS(query, lengths), sparse_count, Kernel::kFused);
  const auto as_result = [&](const Tensor& rows, double none) {
    return layout.with_head(widen(rows, sparse_count, none));
  };
  return {as_result(selection.indices_BSK, -1),
          return_value ? as_result(selection.scores_BSK, 0) : no_result(selection.scores_BSK)};
}

std::tuple<Tensor, Tensor, Tensor> lightning_indexer_grad(
    const Tensor& query, const Tensor& key, const Tensor& dy, const Tensor& sparse_indices,
    const Tensor& weights, const MaybeTensor& query_lengths, const MaybeTensor& key_lengths,
    Strings layout_name, Int sparse_mode, Int pre_tokens, Int next_tokens) {
  const char* op = "lightning_indexer_grad";
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  const Layout layout(op, layout_name.value_or("BSND"), query);
  const Tensor indices =
      layout.selected_keys(sparse_indices, key,
                           common_lengths(op, "actual_seq_lengths_query and actual_seq_lengths_key",
                                          query_lengths, key_lengths));
  const auto d = ops::lightning_indexer_grad(inputs_of(layout, query, key, weights, "key"), indices,
                                             layout.shared_head(dy, "dy"), Kernel::kFused);
  return {layout.out(d.query_BSHD), layout.with_head(d.key_BSD), layout.out(d.weights_BSH)};
}

}  // namespace cpu

namespace meta {

std::tuple<Tensor, Tensor> lightning_indexer(
    const Tensor& query, const Tensor& /*key*/, const Tensor& /*weights*/,
    const MaybeTensor& /*query_lengths*/, const MaybeTensor& /*key_lengths*/,
    const MaybeTensor& /*block_table*/, std::string_view /*layout_query*/,
    std::string_view /*layout_key*/, int64_t sparse_count, int64_t /*sparse_mode*/,
    int64_t /*pre_tokens*/, int64_t /*next_tokens*/, bool return_value) {
  SymSizes sizes = query.sym_sizes().vec();
  sizes[sizes.size() - 2] = 1;
  sizes.back() = sparse_count;
  return {sized(query, sizes, at::kInt),
          sized(query, return_value ? sizes : SymSizes{0}, wide_type(query))};
}

std::tuple<Tensor, Tensor, Tensor> lightning_indexer_grad(
    const Tensor& query, const Tensor& key, const Tensor& /*dy*/, const Tensor& /*sparse_indices*/,
    const Tensor& weights, const MaybeTensor& /*query_lengths*/, const MaybeTensor& /*key_lengths*/,
    Strings /*layout*/, Int /*sparse_mode*/, Int /*pre_tokens*/, Int /*next_tokens*/) {
  return {sized_like(query), sized_like(key), sized_like(weights)};
}

}  // namespace meta

namespace autograd {

// What is not differentiated.
struct IndexerArguments {
  const MaybeTensor &query_lengths, &key_lengths, &block_table;
  std::string_view layout_query, layout_key;
  int64_t sparse_count, sparse_mode, pre_tokens, next_tokens;
  bool return_value;
};

// The selection has no gradient, its scores have.
struct LightningIndexer : torch::autograd::Function<LightningIndexer> {
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                               const Tensor& weights, const IndexerArguments& a) {
    static const auto op = find_operator<decltype(cpu::lightning_indexer)>("lightning_indexer");
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [indices, values] = op.call(
        query, key, weights, a.query_lengths, a.key_lengths, a.block_table, a.layout_query,
        a.layout_key, a.sparse_count, a.sparse_mode, a.pre_tokens, a.next_tokens, a.return_value);
    ctx->save_for_backward(
        {query, key, weights, indices, or_undefined(a.query_lengths), or_undefined(a.key_lengths)});
    ctx->saved_data["layout"] = std::string(a.layout_query);
    ctx->mark_non_differentiable(a.return_value ? variable_list{indices}
                                                : variable_list{indices, values});
    return {indices, values};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op =
        find_operator<decltype(cpu::lightning_indexer_grad)>("lightning_indexer_grad");
    const auto saved = ctx->get_saved_variables();
    const auto [d_query, d_key, d_weights] =
        op.call(saved[0], saved[1], grads[1], saved[3], saved[2], as_optional(saved[4]),
                as_optional(saved[5]), ctx->saved_data["layout"].toStringView(), std::nullopt,
                std::nullopt, std::nullopt);
    return {d_query, d_key, d_weights, Tensor()};
  }
};

std::tuple<Tensor, Tensor> lightning_indexer(
    const Tensor& query, const Tensor& key, const Tensor& weights, const MaybeTensor& query_lengths,
    const MaybeTensor& key_lengths, const MaybeTensor& block_table, std::string_view layout_query,
    std::string_view layout_key, int64_t sparse_count, int64_t sparse_mode, int64_t pre_tokens,
    int64_t next_tokens, bool return_value) {
  const auto out = LightningIndexer::apply(
      query, key, weights,
      IndexerArguments{query_lengths, key_lengths, block_table, layout_query, layout_key,
                       sparse_count, sparse_mode, pre_tokens, next_tokens, return_value});
  return {out[0], out[1]};
}

}  // namespace autograd
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
  m.def(
      "lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "Tensor? block_table=None, str layout_query=\"BSND\", str layout_key=\"BSND\", "
      "int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)",
      kTags);
  m.def(
      "lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices, "
      "Tensor weights, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_key=None, str? layout=\"BSND\", int? sparse_mode=3, "
      "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) -> "
      "(Tensor, Tensor, Tensor)",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("lightning_indexer", cpu::lightning_indexer);
  m.impl("lightning_indexer_grad", cpu::lightning_indexer_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("lightning_indexer", meta::lightning_indexer);
  m.impl("lightning_indexer_grad", meta::lightning_indexer_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("lightning_indexer", autograd::lightning_indexer);
  m.impl("lightning_indexer_grad", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace longhaul::ops::library
