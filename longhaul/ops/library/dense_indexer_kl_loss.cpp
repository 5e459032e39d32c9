// The indexer's loss over all keys that a query sees.
#include "longhaul/ops/flash_attention/head_sum.h"
#include "longhaul/ops/library/attention.h"
#include "longhaul/ops/library/indexer.h"

namespace longhaul::ops::library {
namespace {

namespace cpu {

std::tuple<Tensor, Tensor> dense_lightning_indexer_softmax_lse(
    const Tensor& query_index, const Tensor& key_index, const Tensor& weights,
    Lengths actual_seq_qlen, Lengths actual_seq_klen, Strings layout_name, Int sparse_mode,
    Int pre_tokens, Int next_tokens) {
  const char* op = "dense_lightning_indexer_softmax_lse";
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  const Layout layout(op, layout_name.value_or("BSND"), query_index);
  const Tensor doc_start = layout.doc_start_BS(
      key_index,
      common_lengths(op, "actual_seq_qlen and actual_seq_klen", actual_seq_qlen, actual_seq_klen));
  const auto softmax = dense_indexer_softmax(inputs_of(layout, query_index, key_index, weights),
                                             doc_start, Kernel::kFused);
  return {layout.statistics(softmax.max_BS), layout.statistics(softmax.sum_BS)};
}

IndexerSoftmax softmax_from(const Layout& layout, const Tensor& max, const Tensor& sum) {
  return {layout.from_statistics(max, "softmax_max_index"),
          layout.from_statistics(sum, "softmax_sum_index")};
}

FourTensors dense_lightning_indexer_kl_loss_from_head_sum(
    const Tensor& query_index, const Tensor& key_index, const Tensor& weights,
    const Tensor& head_sum, const Tensor& softmax_max_index, const Tensor& softmax_sum_index,
    Lengths actual_seq_klen, std::string_view layout_name, int64_t first_query) {
  const char* op = "dense_lightning_indexer_kl_loss_from_head_sum";
  const Layout layout(op, layout_name, query_index);
  const Tensor sums = layout.shared_head(head_sum, "head_sum");
  const Tensor doc_start = layout.doc_start_BS(key_index, actual_seq_klen);
  const int64_t queries = layout.in(query_index).size(1);
  check_shape(sums, {kAnySize, queries, doc_start.size(1)},
              "dense_lightning_indexer_kl_loss_from_head_sum: head_sum");
  // As HeadSums gives them.
  const auto sums_of_block = [&](const QueryBlock& at) {
    const Tensor block =
        sums[at.row].narrow(0, at.query, at.queries).narrow(1, at.key, at.keys).t();
    return pad_last(block, kHeadSumGroup);
  };
  return kl_results(layout,
                    dense_indexer_kl_gradients(
                        inputs_of(layout, query_index, key_index, weights),
                        layout.keys_of_queries(doc_start, first_query, queries), sums_of_block,
                        {.kernel = Kernel::kFused,
                         .softmax = softmax_from(layout, softmax_max_index, softmax_sum_index)}));
}

FourTensors dense_lightning_indexer_grad_kl_loss(
    const Tensor& query, const Tensor& key, const Tensor& query_index, const Tensor& key_index,
    const Tensor& weights, const Tensor& softmax_max, const Tensor& softmax_sum,
    const Tensor& softmax_max_index, const Tensor& softmax_sum_index, double scale_value,
    const MaybeTensor& query_rope, const MaybeTensor& key_rope, Lengths actual_seq_qlen,
    Lengths actual_seq_klen, Strings layout_name, Int sparse_mode, Int pre_tokens,
    Int next_tokens) {
  const char* op = "dense_lightning_indexer_grad_kl_loss";
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  const Layout layout(op, layout_name.value_or("BSND"), query);
  const Tensor doc_start = layout.doc_start_BS(
      key_index,
      common_lengths(op, "actual_seq_qlen and actual_seq_klen", actual_seq_qlen, actual_seq_klen));
  const AttentionState attention = attention_state(
      layout, dense_attention_operands(layout, {op, query, key, {}, query_rope, key_rope}),
      softmax_max, softmax_sum, scale_value);
  check_shape(layout.in(query_index),
              {layout.in(query).size(0), layout.in(query).size(1), kAnySize, kAnySize},
              "dense_lightning_indexer_grad_kl_loss: query_index");
  const bool fused = takes_kernel(op, why_no_fused_attention(attention.query_BSHD));
  const HeadSums sums(attention, doc_start, fused ? Kernel::kFused : Kernel::kReference);
  return kl_results(layout,
                    dense_indexer_kl_gradients(
                        inputs_of(layout, query_index, key_index, weights), doc_start,
                        [&](const QueryBlock& block) { return sums.of(block); },
                        {.kernel = Kernel::kFused,
                         .softmax = softmax_from(layout, softmax_max_index, softmax_sum_index)}));
}

}  // namespace cpu

namespace meta {

std::tuple<Tensor, Tensor> dense_lightning_indexer_softmax_lse(
    const Tensor& query_index, const Tensor& /*key_index*/, const Tensor& /*weights*/,
    SymLengths /*actual_seq_qlen*/, SymLengths /*actual_seq_klen*/, Strings /*layout*/,
    Int /*sparse_mode*/, Int /*pre_tokens*/, Int /*next_tokens*/) {
  SymSizes sizes = query_index.sym_sizes().vec();  // [B, 1, S], or [1, T]
  sizes.resize(sizes.size() - 2);
  sizes.insert(sizes.end() - 1, 1);
  const auto wide = wide_type(query_index);
  return {sized(query_index, sizes, wide), sized(query_index, sizes, wide)};
}

FourTensors dense_lightning_indexer_kl_loss_from_head_sum(
    const Tensor& query_index, const Tensor& key_index, const Tensor& weights,
    const Tensor& /*head_sum*/, const Tensor& /*softmax_max_index*/,
    const Tensor& /*softmax_sum_index*/, SymLengths /*actual_seq_klen*/,
    std::string_view /*layout*/, int64_t /*first_query*/) {
  return sized_kl_results(query_index, key_index, weights);
}

FourTensors dense_lightning_indexer_grad_kl_loss(
    const Tensor& /*query*/, const Tensor& /*key*/, const Tensor& query_index,
    const Tensor& key_index, const Tensor& weights, const Tensor& /*softmax_max*/,
    const Tensor& /*softmax_sum*/, const Tensor& /*softmax_max_index*/,
    const Tensor& /*softmax_sum_index*/, double /*scale_value*/, const MaybeTensor& /*query_rope*/,
    const MaybeTensor& /*key_rope*/, SymLengths /*actual_seq_qlen*/, SymLengths /*actual_seq_klen*/,
    Strings /*layout*/, Int /*sparse_mode*/, Int /*pre_tokens*/, Int /*next_tokens*/) {
  return sized_kl_results(query_index, key_index, weights);
}

}  // namespace meta
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
  m.def(
      "dense_lightning_indexer_softmax_lse(Tensor query_index, Tensor key_index, Tensor weights, "
      "*, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout='BSND', "
      "int? sparse_mode=3, int? pre_tokens=9223372036854775807, "
      "int? next_tokens=9223372036854775807) -> (Tensor, Tensor)",
      kTags);
  m.def(
      "dense_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, "
      "Tensor key_index, Tensor weights, Tensor softmax_max, Tensor softmax_sum, "
      "Tensor softmax_max_index, Tensor softmax_sum_index, float scale_value, *, "
      "Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, "
      "SymInt[]? actual_seq_klen=None, str? layout='BSND', int? sparse_mode=3, "
      "int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) -> "
      "(Tensor, Tensor, Tensor, Tensor)",
      kTags);
  m.def(
      "dense_lightning_indexer_kl_loss_from_head_sum(Tensor query_index, Tensor key_index, "
      "Tensor weights, Tensor head_sum, Tensor softmax_max_index, Tensor softmax_sum_index, *, "
      "SymInt[]? actual_seq_klen=None, str layout='BSND', int first_query=0) -> "
      "(Tensor, Tensor, Tensor, Tensor)",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("dense_lightning_indexer_softmax_lse", cpu::dense_lightning_indexer_softmax_lse);
  m.impl("dense_lightning_indexer_grad_kl_loss", cpu::dense_lightning_indexer_grad_kl_loss);
  m.impl("dense_lightning_indexer_kl_loss_from_head_sum",
         cpu::dense_lightning_indexer_kl_loss_from_head_sum);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("dense_lightning_indexer_softmax_lse", meta::dense_lightning_indexer_softmax_lse);
  m.impl("dense_lightning_indexer_grad_kl_loss", meta::dense_lightning_indexer_grad_kl_loss);
  m.impl("dense_lightning_indexer_kl_loss_from_head_sum",
         meta::dense_lightning_indexer_kl_loss_from_head_sum);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  for (const char* gradient :
       {"dense_lightning_indexer_softmax_lse", "dense_lightning_indexer_grad_kl_loss",
        "dense_lightning_indexer_kl_loss_from_head_sum"}) {
    m.impl(gradient, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace longhaul::ops::library
