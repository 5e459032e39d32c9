// torch.ops.longhaul.*: the operators under Ascend's names and in Ascend's order of arguments
// (torch_npu's npu_* without the prefix), for use from Python or any other libtorch program through
// torch.ops.load_library("liblonghaul_ops.so"). Each is a composition of the operators in ops/,
// which bring their own autograd and Meta shapes; another device registers a kernel of its own
// under its dispatch key. docs/operators.md shows how to call them.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"
#include "longhaul/ops/grouped_matmul/grouped_matmul.h"
#include "longhaul/ops/library/layout.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/moe_gating_top_k/moe_gating_top_k.h"
#include "longhaul/ops/moe_token_permute/moe_token_permute.h"
#include "longhaul/ops/rms_norm/rms_norm.h"
#include "longhaul/ops/rotary_mul/rotary_mul.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"
#include "longhaul/ops/swiglu/swiglu.h"

namespace longhaul::ops::library {
namespace {

using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kCausal = 3;  // Ascend's sparse_mode of a causal mask

// Arguments that Ascend's signatures have and that say nothing else here.
void check_causal(const char* op, int64_t sparse_mode, const MaybeTensor& block_table,
                  int64_t pre_tokens, int64_t next_tokens) {
  LONGHAUL_CHECK(sparse_mode == kCausal, "{}: sparse_mode is {}, only 3 (causal) is there", op,
                 sparse_mode);
  LONGHAUL_CHECK(!block_table, "{}: block_table: keys in pages are not supported", op);
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  LONGHAUL_CHECK(pre_tokens == kAll && next_tokens == kAll,
                 "{}: pre_tokens and next_tokens: sliding windows are not supported", op);
}

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
  check_causal(op, sparse_mode, block_table, pre_tokens, next_tokens);
  LONGHAUL_CHECK(layout_query == layout_key, "{}: layouts '{}' and '{}' differ", op, layout_query,
                 layout_key);
  const Layout layout(op, layout_query, query, query_lengths ? query_lengths : key_lengths);
  const auto selection =
      ops::lightning_indexer(layout.in(query), layout.shared_head(key, "key"), layout.in(weights),
                             layout.doc_start_BS(), sparse_count, Kernel::kFused);
  const auto as_result = [&](const Tensor& rows, double none) {
    return layout.out(widen(rows, sparse_count, none).unsqueeze(2));
  };
  return {as_result(selection.indices_BSK, -1),
          return_value ? as_result(selection.scores_BSK, 0)
                       : at::empty({0}, selection.scores_BSK.options())};
}

// attention_mode 2 (absorbed MLA): the value is the key, the rope part is only compared.
std::tuple<Tensor, Tensor, Tensor> sparse_flash_attention(
    const Tensor& query, const Tensor& key, const MaybeTensor& value, const Tensor& sparse_indices,
    double scale_value, const MaybeTensor& block_table, const MaybeTensor& query_lengths,
    const MaybeTensor& key_lengths, const MaybeTensor& query_rope, const MaybeTensor& key_rope,
    int64_t sparse_block_size, std::string_view layout_query, std::string_view layout_kv,
    int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens, int64_t attention_mode,
    bool return_softmax_lse, const MaybeTensor& sinks) {
  const char* op = "sparse_flash_attention";
  check_causal(op, sparse_mode, block_table, pre_tokens, next_tokens);
  LONGHAUL_CHECK(attention_mode == 2 && (!value || value->is_same(key)),
                 "{}: only attention_mode 2 (absorbed MLA, no value of its own) is there", op);
  LONGHAUL_CHECK(sparse_block_size == 1 && !sinks,
                 "{}: sparse_block_size must be 1, and there are no sinks", op);
  LONGHAUL_CHECK(layout_query == layout_kv, "{}: layouts '{}' and '{}' differ", op, layout_query,
                 layout_kv);
  LONGHAUL_CHECK(query_rope.has_value() == key_rope.has_value(),
                 "{}: query_rope and key_rope come together", op);
  const Layout layout(op, layout_query, query, query_lengths ? query_lengths : key_lengths);
  const auto with_rope = [](const Tensor& x, const MaybeTensor& rope) {
    return rope ? at::cat({x, *rope}, -1) : x;
  };
  const auto result = ops::sparse_flash_attention(
      layout.in(with_rope(query, query_rope)), layout.shared_head(with_rope(key, key_rope), "key"),
      {}, layout.shared_head(sparse_indices, "sparse_indices"),
      {.scale = scale_value,
       .value_dim = key.size(-1),
       .return_statistics = return_softmax_lse,
       .kernel = Kernel::kFused});
  const auto statistics = [&](const Tensor& rows) {
    return rows.defined() ? layout.statistics(rows) : at::empty({0}, at::kFloat);
  };
  return {layout.out(result.out_BSHV), statistics(result.softmax_max),
          statistics(result.softmax_sum)};
}

// cos and sin as Ascend has them: [B, S, 1, R], each angle for both elements of its pair.
Tensor rotary_mul(const Tensor& input, const Tensor& cos, const Tensor& sin,
                  std::string_view rotary_mode, const MaybeTensor& rotate) {
  LONGHAUL_CHECK(!rotate, "rotary_mul: a matrix to rotate by is not supported");
  const bool half = rotary_mode == "half";
  LONGHAUL_CHECK(half || rotary_mode == "interleave",
                 "rotary_mul: rotary_mode '{}' is none of 'half' and 'interleave'", rotary_mode);
  const int64_t R = input.size(-1);
  const auto angles = [&](const Tensor& x) {
    check_shape(x, {input.size(0), input.size(1), 1, R}, "rotary_mul: r1, r2");
    const Tensor rows = x.squeeze(2);
    return half ? rows.narrow(-1, 0, R / 2) : rows.slice(-1, 0, R, 2);
  };
  return ops::rotary_mul(input, angles(cos), angles(sin),
                         half ? RotaryMode::kHalfSplit : RotaryMode::kInterleaved, Kernel::kFused);
}

// The gate is the first half of `dim`.
Tensor swiglu(const Tensor& input, int64_t dim) {
  const auto halves = input.chunk(2, dim);
  LONGHAUL_CHECK(halves.size() == 2 && halves[0].sizes() == halves[1].sizes(),
                 "swiglu: input [{}] has no two halves in dimension {}", shape_text(input), dim);
  return ops::swiglu(halves[0], halves[1], Kernel::kFused);
}

Tensor rms_norm(const Tensor& input, const Tensor& gamma, double epsilon) {
  return ops::rms_norm(input, gamma, epsilon, Kernel::kFused);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x1, const Tensor& x2, const Tensor& gamma,
                                        double epsilon) {
  const auto result = ops::rms_norm_add(x1, x2, gamma, epsilon, Kernel::kFused);
  return {result.y, result.sum};
}

// norm_type 0: softmax, 1: sigmoid. renorm: whether the weights of the chosen add up to 1 before
// they are scaled; a sigmoid's always do, as in Ascend's.
std::tuple<Tensor, Tensor, Tensor> moe_gating_top_k(const Tensor& x, int64_t k,
                                                    const MaybeTensor& bias, int64_t k_group,
                                                    int64_t group_count, int64_t renorm,
                                                    int64_t norm_type, double scaling) {
  LONGHAUL_CHECK(norm_type == 0 || norm_type == 1,
                 "moe_gating_top_k: norm_type is {}, must be 0 (softmax) or 1 (sigmoid)",
                 norm_type);
  const auto gating = ops::moe_gating_top_k(x, bias.value_or(Tensor()),
                                            {.k = k,
                                             .n_group = group_count,
                                             .topk_group = k_group,
                                             .softmax = norm_type == 0,
                                             .normalize = norm_type == 1 || renorm == 1,
                                             .scale = scaling},
                                            {}, Kernel::kFused);
  return {gating.weights_TK, gating.experts_TK.to(at::kInt), gating.scores_TE};
}

// What the second permutation needs of the first: the row of each choice; and the choice of each
// row, which only the reference asks for.
TokenOrder order_from(const Tensor& sorted_indices, int64_t k, bool for_reference) {
  const Tensor inverse = sorted_indices.to(at::kLong);
  return {.order = for_reference ? inverse.argsort() : inverse,
          .inverse = inverse.view({-1, k}),
          .counts_E = {}};
}

std::tuple<Tensor, Tensor> moe_token_permute(const Tensor& tokens, const Tensor& indices) {
  check_dims(tokens, 2, "moe_token_permute: tokens");
  const Tensor experts = indices.dim() == 1 ? indices.unsqueeze(1) : indices;
  const int64_t num_experts = experts.numel() == 0 ? 1 : experts.max().item<int64_t>() + 1;
  const auto order = sort_by_expert(experts.to(at::kLong), num_experts);
  return {ops::moe_token_permute(tokens, order, Kernel::kFused),
          order.inverse.flatten().to(at::kInt)};
}

Tensor moe_token_unpermute(const Tensor& permuted, const Tensor& sorted_indices,
                           const MaybeTensor& probs) {
  const Tensor weights =
      probs ? *probs : at::ones({sorted_indices.numel(), 1}, permuted.options().dtype(at::kFloat));
  check_dims(weights, 2, "moe_token_unpermute: probs");
  const bool for_reference = !why_no_cpu_kernel(permuted).empty();
  return ops::moe_token_unpermute(permuted, weights,
                                  order_from(sorted_indices, weights.size(1), for_reference),
                                  Kernel::kFused);
}

Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const Tensor& group_list) {
  return ops::grouped_matmul(x, weight, group_list.to(at::kLong), Kernel::kFused);
}

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& labels) {
  return ops::linear_cross_entropy(hidden, weight, labels, Kernel::kFused);
}

}  // namespace

TORCH_LIBRARY(longhaul, m) {
  m.def(
      "lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "Tensor? block_table=None, str layout_query=\"BSND\", str layout_key=\"BSND\", "
      "int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)",
      &lightning_indexer);
  m.def(
      "sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
      "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
      "int sparse_block_size=1, str layout_query=\"BSND\", str layout_kv=\"BSND\", "
      "int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, int attention_mode=2, "
      "bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
      &sparse_flash_attention);
  m.def(
      "rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', "
      "Tensor? rotate=None) -> Tensor",
      &rotary_mul);
  m.def("swiglu(Tensor input, int dim=-1) -> Tensor", &swiglu);
  m.def("rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> Tensor", &rms_norm);
  m.def(
      "add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> "
      "(Tensor, Tensor)",
      &add_rms_norm);
  m.def(
      "moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, int k_group=1, "
      "int group_count=1, int renorm=0, int norm_type=0, float routed_scaling_factor=1.0) -> "
      "(Tensor, Tensor, Tensor)",
      &moe_gating_top_k);
  m.def("moe_token_permute(Tensor tokens, Tensor indices) -> (Tensor, Tensor)", &moe_token_permute);
  m.def(
      "moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None) -> "
      "Tensor",
      &moe_token_unpermute);
  m.def("grouped_matmul(Tensor x, Tensor weight, Tensor group_list) -> Tensor", &grouped_matmul);
  m.def("linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels) -> Tensor",
        &linear_cross_entropy);
}

}  // namespace longhaul::ops::library
