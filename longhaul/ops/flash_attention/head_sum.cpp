#include "longhaul/ops/flash_attention/head_sum.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/flash_attention/operands.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::ops {
namespace {

// Log-probabilities before the statistics, [queries, heads, keys], of one row of the batch.
Tensor scaled_scores(const Tensor& q_QHD, const Tensor& key, double scale) {
  const int64_t Q = q_QHD.size(0), H = q_QHD.size(1);
  if (key.dim() == 2) {
    const Tensor flat = q_QHD.reshape({1, Q * H, -1});
    return product(flat * scale, key.t().unsqueeze(0)).view({Q, H, -1});
  }
  return product(q_QHD.transpose(0, 1) * scale, key.permute({1, 2, 0})).transpose(0, 1);
}

Tensor head_sum_reference(const AttentionState& a, const KeyRange& range, const QueryBlock& at) {
  const Tensor hidden = visible_mask(range, at).logical_not();
  const Tensor sum_QK = head_sum_without_mask(a, at).masked_fill_(hidden, 0);
  return at::constant_pad_nd(sum_QK.t(), {0, round_up(at.queries, kHeadSumGroup) - at.queries});
}

}  // namespace

// Padded as the kernels read them; the workspace is kept from block to block.
struct HeadSums::Operands {
  Tensor query_BSHD, key_BHLD, max_BSH, sum_BSH;
  KernelMemory memory;
};

Tensor head_sum_without_mask(const AttentionState& a, const QueryBlock& at) {
  const auto wide = wide_type(a.query_BSHD);
  const auto queries = [&](const Tensor& x) {
    return x[at.row].narrow(0, at.query, at.queries).to(wide);
  };
  const Tensor key = a.key[at.row].narrow(0, at.key, at.keys).to(wide);
  const Tensor lse = queries(a.softmax_max) + queries(a.softmax_sum).log();
  return (scaled_scores(queries(a.query_BSHD), key, a.scale) - lse.unsqueeze(-1)).exp_().sum(1);
}

std::vector<QueryBlock> query_blocks(const KeyRange& range, int64_t num_keys) {
  const int64_t B = range.first_BS.size(0), S = range.first_BS.size(1);
  const bool known = !range.first_BS.is_meta();
  const auto on_host = [&](const Tensor& x) { return known ? x.cpu().contiguous() : Tensor(); };
  const Tensor first = on_host(range.first_BS), last = on_host(range.last());
  std::vector<QueryBlock> blocks;
  for (int64_t row = 0; row < B; ++row) {
    for (int64_t t = 0; t < S; t += kQueryBlock) {
      const int64_t count = std::min(kQueryBlock, S - t);
      int64_t low = known ? num_keys : 0, high = known ? 0 : num_keys;
      for (int64_t i = row * S + t; known && i < row * S + t + count; ++i) {
        const int64_t from = first.const_data_ptr<int64_t>()[i];
        const int64_t to = last.const_data_ptr<int64_t>()[i];
        if (from > to) continue;
        low = std::min(low, from);
        high = std::max(high, to + 1);
      }
      if (low < high) blocks.push_back({row, t, count, low, high - low});
    }
  }
  return blocks;
}

Tensor visible_mask(const KeyRange& range, const QueryBlock& block) {
  const BlockKeys visible(range, block);
  const Tensor key = at::arange(block.keys, range.first_BS.options());
  return (key >= visible.first.unsqueeze(1)).logical_and_(key <= visible.last.unsqueeze(1));
}

HeadSums::HeadSums(const AttentionState& attention, const KeyRange& range, Kernel kernel)
    : attention_(attention), range_(range.first_BS, range.last()) {
  const Tensor& q = attention.query_BSHD;
  check_dims(q, 4, "attention query");
  const int64_t B = q.size(0), S = q.size(1), H = q.size(2), D = q.size(3);
  const int64_t L = range.last_BS.defined() ? attention.key.size(1) : range.first_BS.size(1);
  if (attention.key.dim() == 3) {
    check_shape(attention.key, {B, L, D}, "attention key");
  } else {
    check_shape(attention.key, {B, L, H, D}, "attention key");
  }
  check_key_range(range, {B, S}, L, "attention doc_start");
  check_same_dtype(attention.key, q, "attention key", "the query");
  check_shape(attention.softmax_max, {B, S, H}, "attention softmax_max");
  check_shape(attention.softmax_sum, {B, S, H}, "attention softmax_sum");
  if (kernel == Kernel::kReference || q.is_meta()) return;
  operands_ = std::make_unique<Operands>(
      Operands{.query_BSHD = pad_last(q, kKernelColumns),
               .key_BHLD = keys_by_head(attention.key),
               .max_BSH = attention.softmax_max.to(at::kFloat).contiguous(),
               .sum_BSH = attention.softmax_sum.to(at::kFloat).contiguous(),
               .memory = {}});
}

HeadSums::~HeadSums() = default;

Tensor HeadSums::of(const QueryBlock& at) const {
  const at::NoGradGuard no_grad;
  if (!operands_) return head_sum_reference(attention_, range_, at);
  const Tensor query = operands_->query_BSHD[at.row].narrow(0, at.query, at.queries);
  const Tensor key = operands_->key_BHLD[at.row].narrow(1, at.key, at.keys);
  const BlockKeys visible(range_, at);
  const Tensor sum =
      at::empty({at.keys, round_up(at.queries, kHeadSumGroup)}, query.options().dtype(at::kFloat));
  const auto statistics = [&](const Tensor& x) {
    return x[at.row].narrow(0, at.query, at.queries).const_data_ptr<float>();
  };
  operands_->memory.run(
      "attention_head_sum", longhaul_attention_head_sum, longhaul_attention_head_sum_workspace,
      longhaul_attention_head_sum_args{.dtype = kernel_dtype(query),
                                       .S = at.queries,
                                       .L = at.keys,
                                       .H = query.size(1),
                                       .D = query.size(2),
                                       .key_heads = key.size(0),
                                       .key_head_stride = key.stride(0),
                                       .scale = static_cast<float>(attention_.scale),
                                       .query = query.const_data_ptr(),
                                       .key = key.const_data_ptr(),
                                       .softmax_max = statistics(operands_->max_BSH),
                                       .softmax_sum = statistics(operands_->sum_BSH),
                                       .first_key = visible.first.const_data_ptr<int64_t>(),
                                       .last_key = visible.last.const_data_ptr<int64_t>(),
                                       .head_sum = sum.data_ptr<float>()});
  return sum;
}

Tensor whole_head_sum(const HeadSums& sums, at::ScalarType dtype) {
  const Tensor& query = sums.attention().query_BSHD;
  const int64_t L = sums.attention().key.size(1);
  const Tensor whole = at::zeros({query.size(0), query.size(1), L}, query.options().dtype(dtype));
  for (const QueryBlock& block : query_blocks(sums.range(), L)) {
    whole[block.row]
        .narrow(0, block.query, block.queries)
        .narrow(1, block.key, block.keys)
        .copy_(sums.of(block).narrow(1, 0, block.queries).t());
  }
  return whole;
}

}  // namespace longhaul::ops
