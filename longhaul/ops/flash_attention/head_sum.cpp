#include "longhaul/ops/flash_attention/head_sum.h"

#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cpu/tensors.h"
#include "longhaul/ops/flash_attention/operands.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::ops {
namespace {

constexpr int64_t kGroup = 32;  // the kernels' queries come in groups of so many

// Log-probabilities before the statistics, [queries, heads, keys], of one row of the batch.
Tensor scaled_scores(const Tensor& q_QHD, const Tensor& key, double scale) {
  const int64_t Q = q_QHD.size(0), H = q_QHD.size(1);
  if (key.dim() == 2) {
    const Tensor flat = q_QHD.reshape({1, Q * H, -1});
    return product(flat * scale, key.t().unsqueeze(0)).view({Q, H, -1});
  }
  return product(q_QHD.transpose(0, 1) * scale, key.permute({1, 2, 0})).transpose(0, 1);
}

Tensor head_sum_reference(const AttentionState& a, const Tensor& doc_start, const QueryBlock& at) {
  const Tensor hidden = visible_mask(doc_start, at).logical_not();
  const Tensor sum_QK = head_sum_without_mask(a, at).masked_fill_(hidden, 0);
  return at::constant_pad_nd(sum_QK.t(), {0, round_up(at.queries, kGroup) - at.queries});
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
    return x[at.row].narrow(0, at.query - a.first_query, at.queries).to(wide);
  };
  const Tensor key = a.key[at.row].narrow(0, at.key, at.keys).to(wide);
  const Tensor lse = queries(a.softmax_max) + queries(a.softmax_sum).log();
  return (scaled_scores(queries(a.query_BSHD), key, a.scale) - lse.unsqueeze(-1)).exp_().sum(1);
}

std::vector<QueryBlock> query_blocks(const Tensor& doc_start_BS) {
  return query_blocks(doc_start_BS, 0, doc_start_BS.size(1));
}

std::vector<QueryBlock> query_blocks(const Tensor& doc_start_BS, int64_t first, int64_t count_all) {
  const int64_t B = doc_start_BS.size(0), S = doc_start_BS.size(1), end = first + count_all;
  LONGHAUL_CHECK(first >= 0 && end <= S, "queries {} to {} of {}", first, end, S);
  const bool known = !doc_start_BS.is_meta();
  const Tensor starts = known ? doc_start_BS.cpu().contiguous() : Tensor();
  std::vector<QueryBlock> blocks;
  for (int64_t row = 0; row < B; ++row) {
    for (int64_t t = first; t < end; t += kQueryBlock) {
      const int64_t count = std::min(kQueryBlock, end - t);
      int64_t low = known ? S : 0, high = known ? 0 : t + count;
      for (int64_t i = t; known && i < t + count; ++i) {
        const int64_t start = starts.const_data_ptr<int64_t>()[row * S + i];
        if (start > i) continue;
        low = std::min(low, start);
        high = i + 1;
      }
      if (low < high) blocks.push_back({row, t, count, low, high - low});
    }
  }
  return blocks;
}

Tensor visible_mask(const Tensor& doc_start_BS, const QueryBlock& block) {
  const auto options = doc_start_BS.options();
  const Tensor key = at::arange(block.key, block.key + block.keys, options);
  const Tensor query = at::arange(block.query, block.query + block.queries, options).unsqueeze(1);
  const Tensor start = doc_start_BS[block.row].narrow(0, block.query, block.queries).unsqueeze(1);
  return (key >= start).logical_and_(key <= query);
}

HeadSums::HeadSums(const AttentionState& attention, const Tensor& doc_start_BS, Kernel kernel)
    : attention_(attention), doc_start_BS_(doc_start_BS) {
  const Tensor& q = attention.query_BSHD;
  check_dims(q, 4, "attention query");
  const int64_t B = q.size(0), S = q.size(1), H = q.size(2), D = q.size(3);
  const int64_t L = doc_start_BS.size(1);
  if (attention.key.dim() == 3) {
    check_shape(attention.key, {B, L, D}, "attention key");
  } else {
    check_shape(attention.key, {B, L, H, D}, "attention key");
  }
  check_same_dtype(attention.key, q, "attention key", "the query");
  LONGHAUL_CHECK(attention.first_query >= 0 && attention.first_query + S <= L,
                 "attention: queries {} to {}, but {} keys", attention.first_query,
                 attention.first_query + S, L);
  check_shape(attention.softmax_max, {B, S, H}, "attention softmax_max");
  check_shape(attention.softmax_sum, {B, S, H}, "attention softmax_sum");
  check_shape(doc_start_BS, {B, L}, "attention doc_start");
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
  if (!operands_) return head_sum_reference(attention_, doc_start_BS_, at);
  const int64_t first = at.query - attention_.first_query;
  const Tensor query = operands_->query_BSHD[at.row].narrow(0, first, at.queries);
  const Tensor key = operands_->key_BHLD[at.row].narrow(1, at.key, at.keys);
  const BlockKeys visible(doc_start_BS_, at);
  const Tensor sum =
      at::empty({at.keys, round_up(at.queries, kGroup)}, query.options().dtype(at::kFloat));
  const auto statistics = [&](const Tensor& x) {
    return x[at.row].narrow(0, first, at.queries).const_data_ptr<float>();
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

Tensor whole_head_sum(const HeadSums& sums, const Tensor& doc_start_BS, at::ScalarType dtype) {
  const int64_t B = doc_start_BS.size(0), L = doc_start_BS.size(1);
  const int64_t first = sums.attention().first_query, S = sums.attention().query_BSHD.size(1);
  const Tensor whole = at::zeros({B, S, L}, doc_start_BS.options().dtype(dtype));
  for (const QueryBlock& block : query_blocks(doc_start_BS, first, S)) {
    whole[block.row]
        .narrow(0, block.query - first, block.queries)
        .narrow(1, block.key, block.keys)
        .copy_(sums.of(block).narrow(1, 0, block.queries).t());
  }
  return whole;
}

}  // namespace longhaul::ops
