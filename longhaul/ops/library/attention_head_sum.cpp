// The sums over heads of an attention's probabilities, from which the indexer learns.
#include "longhaul/ops/flash_attention/head_sum.h"
#include "longhaul/ops/library/attention.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace longhaul::ops::library {
namespace {

namespace cpu {

Tensor sparse_attention_head_sum(const Tensor& query, const Tensor& key,
                                 const Tensor& sparse_indices, const Tensor& softmax_max,
                                 const Tensor& softmax_sum, double scale_value,
                                 const MaybeTensor& query_rope, const MaybeTensor& key_rope,
                                 std::string_view layout_name) {
  const char* op = "sparse_attention_head_sum";
  const Layout layout(op, layout_name, query);
  const AttentionState attention = attention_state(
      layout, dense_attention_operands(layout, {op, query, key, {}, query_rope, key_rope}),
      softmax_max, softmax_sum, scale_value);
  check_values(sparse_indices, -1, attention.key.size(1) - 1,
               "sparse_attention_head_sum: sparse_indices");
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
  const AttentionState attention = attention_state(
      layout, dense_attention_operands(layout, {op, query, key, {}, query_rope, key_rope}),
      softmax_max, softmax_sum, scale_value);
  const KeyRange range = layout.keys_of_queries(layout.doc_start_BS(key, actual_seq_klen),
                                                first_query, attention.query_BSHD.size(1));
  const bool fused = takes_kernel(op, why_no_fused_attention(attention.query_BSHD));
  const HeadSums sums(attention, range, fused ? Kernel::kFused : Kernel::kReference);
  return layout.with_head(whole_head_sum(sums, wide_type(query)));
}

}  // namespace cpu

namespace meta {

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
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
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
  m.impl("sparse_attention_head_sum", cpu::sparse_attention_head_sum);
  m.impl("dense_attention_head_sum", cpu::dense_attention_head_sum);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("sparse_attention_head_sum", meta::sparse_attention_head_sum);
  m.impl("dense_attention_head_sum", meta::dense_attention_head_sum);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  for (const char* name : {"sparse_attention_head_sum", "dense_attention_head_sum"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace longhaul::ops::library
