// The indexer's loss over the selected keys.
#include "longhaul/ops/library/attention.h"
#include "longhaul/ops/library/indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace longhaul::ops::library {
namespace {

namespace cpu {

FourTensors sparse_lightning_indexer_kl_loss_from_head_sum(
    const Tensor& query_index, const Tensor& key_index, const Tensor& weights,
    const Tensor& sparse_indices, const Tensor& head_sum, std::string_view layout_name) {
  const Layout layout("sparse_lightning_indexer_kl_loss_from_head_sum", layout_name, query_index);
  return kl_results(layout, sparse_indexer_kl_gradients(
                                inputs_of(layout, query_index, key_index, weights),
                                layout.shared_head(sparse_indices, "sparse_indices"),
                                layout.shared_head(head_sum, "head_sum"), Kernel::kFused));
}

FourTensors sparse_lightning_indexer_grad_kl_loss(
    const Tensor& query, const Tensor& key, const Tensor& query_index, const Tensor& key_index,
    const Tensor& weights, const Tensor& sparse_indices, const Tensor& softmax_max,
    const Tensor& softmax_sum, double scale_value, const MaybeTensor& query_rope,
    const MaybeTensor& key_rope, Lengths actual_seq_qlen, Lengths actual_seq_klen,
    Strings layout_name, Int sparse_mode, Int pre_tokens, Int next_tokens,
    const MaybeTensor& sinks) {
  const char* op = "sparse_lightning_indexer_grad_kl_loss";
  check_causal(op, sparse_mode, pre_tokens, next_tokens);
  check_absent(op, "sinks", sinks);
  const Layout layout(op, layout_name.value_or("BSND"), query);
  const Tensor indices =
      layout.selected_keys(sparse_indices, key,
                           as_tensor(common_lengths(op, "actual_seq_qlen and actual_seq_klen",
                                                    actual_seq_qlen, actual_seq_klen)));
  const Tensor head_sum = ops::sparse_attention_head_sum(
      attention_state(layout,
                      dense_attention_operands(layout, {op, query, key, {}, query_rope, key_rope}),
                      softmax_max, softmax_sum, scale_value),
      indices);
  return kl_results(layout,
                    sparse_indexer_kl_gradients(inputs_of(layout, query_index, key_index, weights),
                                                indices, head_sum, Kernel::kFused));
}

}  // namespace cpu

namespace meta {

FourTensors sparse_lightning_indexer_kl_loss_from_head_sum(
    const Tensor& query_index, const Tensor& key_index, const Tensor& weights,
    const Tensor& /*sparse_indices*/, const Tensor& /*head_sum*/, std::string_view /*layout*/) {
  return sized_kl_results(query_index, key_index, weights);
}

FourTensors sparse_lightning_indexer_grad_kl_loss(
    const Tensor& /*query*/, const Tensor& /*key*/, const Tensor& query_index,
    const Tensor& key_index, const Tensor& weights, const Tensor& /*sparse_indices*/,
    const Tensor& /*softmax_max*/, const Tensor& /*softmax_sum*/, double /*scale_value*/,
    const MaybeTensor& /*query_rope*/, const MaybeTensor& /*key_rope*/,
    SymLengths /*actual_seq_qlen*/, SymLengths /*actual_seq_klen*/, Strings /*layout*/,
    Int /*sparse_mode*/, Int /*pre_tokens*/, Int /*next_tokens*/, const MaybeTensor& /*sinks*/) {
  return sized_kl_results(query_index, key_index, weights);
}

}  // namespace meta
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
  m.def(
      "sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, "
      "Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max, "
      "Tensor softmax_sum, float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, "
      "SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout='BSND', "
      "int? sparse_mode=3, int? pre_tokens=9223372036854775807, "
      "int? next_tokens=9223372036854775807, Tensor? sinks=None) -> "
      "(Tensor, Tensor, Tensor, Tensor)",
      kTags);
  m.def(
      "sparse_lightning_indexer_kl_loss_from_head_sum(Tensor query_index, Tensor key_index, "
      "Tensor weights, Tensor sparse_indices, Tensor head_sum, *, str layout='BSND') -> "
      "(Tensor, Tensor, Tensor, Tensor)",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("sparse_lightning_indexer_grad_kl_loss", cpu::sparse_lightning_indexer_grad_kl_loss);
  m.impl("sparse_lightning_indexer_kl_loss_from_head_sum",
         cpu::sparse_lightning_indexer_kl_loss_from_head_sum);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("sparse_lightning_indexer_grad_kl_loss", meta::sparse_lightning_indexer_grad_kl_loss);
  m.impl("sparse_lightning_indexer_kl_loss_from_head_sum",
         meta::sparse_lightning_indexer_kl_loss_from_head_sum);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  for (const char* gradient : {"sparse_lightning_indexer_grad_kl_loss",
                               "sparse_lightning_indexer_kl_loss_from_head_sum"}) {
    m.impl(gradient, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace longhaul::ops::library
