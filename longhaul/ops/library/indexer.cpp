// The lightning indexer, its gradient and its losses.
#include "longhaul/ops/flash_attention/head_sum.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/library/attention.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace longhaul::ops::library {
namespace {

using Strings = std::optional<std::string_view>;
using Int = std::optional<int64_t>;
using Lengths = at::OptionalIntArrayRef;
using SymLengths = at::OptionalSymIntArrayRef;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

IndexerInputs inputs_of(const Layout& layout, const Tensor& query, const Tensor& key,
                        const Tensor& weights, const char* key_name = "key_index") {
  return {layout.in(query), layout.shared_head(key, key_name), layout.in(weights)};
}

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

FourTensors as_results(const Layout& layout, const KlGradients& kl) {
  return {layout.out(kl.grads.query_BSHD), layout.with_head(kl.grads.key_BSD),
          layout.out(kl.grads.weights_BSH), kl.loss.reshape({1})};
}

FourTensors sparse_lightning_indexer_kl_loss_from_head_sum(
    const Tensor& query_index, const Tensor& key_index, const Tensor& weights,
    const Tensor& sparse_indices, const Tensor& head_sum, std::string_view layout_name) {
  const Layout layout("sparse_lightning_indexer_kl_loss_from_head_sum", layout_name, query_index);
  return as_results(layout, sparse_indexer_kl_gradients(
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
  return as_results(layout,
                    sparse_indexer_kl_gradients(inputs_of(layout, query_index, key_index, weights),
                                                indices, head_sum, Kernel::kFused));
}

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
  check_shape(sums, {kAnySize, layout.in(query_index).size(1), doc_start.size(1)},
              "dense_lightning_indexer_kl_loss_from_head_sum: head_sum");
  // As the kernels of HeadSums give them: by key, queries filled up to whole groups of 32.
  const auto sums_of_block = [&](const QueryBlock& at) {
    const Tensor block =
        sums[at.row].narrow(0, at.query - first_query, at.queries).narrow(1, at.key, at.keys).t();
    return pad_last(block, 32);
  };
  return as_results(
      layout, dense_indexer_kl_gradients(
                  inputs_of(layout, query_index, key_index, weights), doc_start, sums_of_block,
                  {.kernel = Kernel::kFused,
                   .first_query = first_query,
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
  const bool fused = why_no_fused_attention(attention.query_BSHD, attention.key, {}).empty();
  const HeadSums sums(attention, doc_start, fused ? Kernel::kFused : Kernel::kReference);
  return as_results(layout,
                    dense_indexer_kl_gradients(
                        inputs_of(layout, query_index, key_index, weights), doc_start,
                        [&](const QueryBlock& block) { return sums.of(block); },
                        {.kernel = Kernel::kFused,
                         .first_query = 0,
                         .softmax = softmax_from(layout, softmax_max_index, softmax_sum_index)}));
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

FourTensors kl_results(const Tensor& query_index, const Tensor& key_index, const Tensor& weights) {
  return {sized_like(query_index), sized_like(key_index), sized_like(weights),
          sized(query_index, {1}, wide_type(query_index))};
}

FourTensors sparse_lightning_indexer_kl_loss_from_head_sum(
    const Tensor& query_index, const Tensor& key_index, const Tensor& weights,
    const Tensor& /*sparse_indices*/, const Tensor& /*head_sum*/, std::string_view /*layout*/) {
  return kl_results(query_index, key_index, weights);
}

FourTensors sparse_lightning_indexer_grad_kl_loss(
    const Tensor& /*query*/, const Tensor& /*key*/, const Tensor& query_index,
    const Tensor& key_index, const Tensor& weights, const Tensor& /*sparse_indices*/,
    const Tensor& /*softmax_max*/, const Tensor& /*softmax_sum*/, double /*scale_value*/,
    const MaybeTensor& /*query_rope*/, const MaybeTensor& /*key_rope*/,
    SymLengths /*actual_seq_qlen*/, SymLengths /*actual_seq_klen*/, Strings /*layout*/,
    Int /*sparse_mode*/, Int /*pre_tokens*/, Int /*next_tokens*/, const MaybeTensor& /*sinks*/) {
  return kl_results(query_index, key_index, weights);
}

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
  return kl_results(query_index, key_index, weights);
}

FourTensors dense_lightning_indexer_grad_kl_loss(
    const Tensor& /*query*/, const Tensor& /*key*/, const Tensor& query_index,
    const Tensor& key_index, const Tensor& weights, const Tensor& /*softmax_max*/,
    const Tensor& /*softmax_sum*/, const Tensor& /*softmax_max_index*/,
    const Tensor& /*softmax_sum_index*/, double /*scale_value*/, const MaybeTensor& /*query_rope*/,
    const MaybeTensor& /*key_rope*/, SymLengths /*actual_seq_qlen*/, SymLengths /*actual_seq_klen*/,
    Strings /*layout*/, Int /*sparse_mode*/, Int /*pre_tokens*/, Int /*next_tokens*/) {
  return kl_results(query_index, key_index, weights);
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

constexpr const char* kGradients[] = {"lightning_indexer_grad",
                                      "sparse_lightning_indexer_grad_kl_loss",
                                      "sparse_lightning_indexer_kl_loss_from_head_sum",
                                      "dense_lightning_indexer_softmax_lse",
                                      "dense_lightning_indexer_grad_kl_loss",
                                      "dense_lightning_indexer_kl_loss_from_head_sum"};

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
  m.impl("lightning_indexer", cpu::lightning_indexer);
  m.impl("lightning_indexer_grad", cpu::lightning_indexer_grad);
  m.impl("sparse_lightning_indexer_grad_kl_loss", cpu::sparse_lightning_indexer_grad_kl_loss);
  m.impl("sparse_lightning_indexer_kl_loss_from_head_sum",
         cpu::sparse_lightning_indexer_kl_loss_from_head_sum);
  m.impl("dense_lightning_indexer_softmax_lse", cpu::dense_lightning_indexer_softmax_lse);
  m.impl("dense_lightning_indexer_grad_kl_loss", cpu::dense_lightning_indexer_grad_kl_loss);
  m.impl("dense_lightning_indexer_kl_loss_from_head_sum",
         cpu::dense_lightning_indexer_kl_loss_from_head_sum);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("lightning_indexer", meta::lightning_indexer);
  m.impl("lightning_indexer_grad", meta::lightning_indexer_grad);
  m.impl("sparse_lightning_indexer_grad_kl_loss", meta::sparse_lightning_indexer_grad_kl_loss);
  m.impl("sparse_lightning_indexer_kl_loss_from_head_sum",
         meta::sparse_lightning_indexer_kl_loss_from_head_sum);
  m.impl("dense_lightning_indexer_softmax_lse", meta::dense_lightning_indexer_softmax_lse);
  m.impl("dense_lightning_indexer_grad_kl_loss", meta::dense_lightning_indexer_grad_kl_loss);
  m.impl("dense_lightning_indexer_kl_loss_from_head_sum",
         meta::dense_lightning_indexer_kl_loss_from_head_sum);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("lightning_indexer", autograd::lightning_indexer);
  for (const char* gradient : kGradients) {
    m.impl(gradient, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace longhaul::ops::library
