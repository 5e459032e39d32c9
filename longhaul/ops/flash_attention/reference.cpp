#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/flash_attention/flash_attention.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::ops {
namespace {

// Finite, so that a row without keys gives no NaN.
constexpr double kMasked = -1e30;

// One key row for all heads: scores are [B, S, H, S], the head's dim is 2.
struct SharedKeys {
  static constexpr int64_t kHeadDim = 2;

  static Tensor layout(const Tensor& x_BLD) { return x_BLD; }
  static Tensor scores(const Tensor& q, const Tensor& k) {
    const int64_t B = q.size(0), S = q.size(1), H = q.size(2);
    return ops::bmm(q.reshape({B, S * H, q.size(3)}), k.transpose(1, 2)).view({B, S, H, k.size(1)});
  }
  static Tensor apply(const Tensor& p, const Tensor& v) {
    const int64_t B = p.size(0), S = p.size(1), H = p.size(2);
    return ops::bmm(p.reshape({B, S * H, p.size(3)}), v).view({B, S, H, v.size(2)});
  }
};

// Keys of their own for each head: scores are [B, H, S, S], the head's dim is 1.
struct KeysByHead {
  static constexpr int64_t kHeadDim = 1;

  // [B, L, H, D] as [B * H, L, D].
  static Tensor layout(const Tensor& x_BLHD) {
    const int64_t B = x_BLHD.size(0), L = x_BLHD.size(1), H = x_BLHD.size(2);
    return x_BLHD.transpose(1, 2).reshape({B * H, L, x_BLHD.size(3)});
  }
  static Tensor scores(const Tensor& q, const Tensor& k) {
    return ops::bmm(layout(q), k.transpose(1, 2))
        .view({q.size(0), q.size(2), q.size(1), k.size(1)});
  }
  static Tensor apply(const Tensor& p, const Tensor& v) {
    const int64_t B = p.size(0), H = p.size(1), S = p.size(2);
    return ops::bmm(p.reshape({B * H, S, p.size(3)}), v).view({B, H, S, v.size(2)}).transpose(1, 2);
  }
};

// k and v in the layout of Keys and in the working dtype.
template <typename Keys>
AttentionResult attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask_BSS,
                       const AttentionOptions& options) {
  const auto wide = wide_type(q);
  // Added, not filled in: the sum is vectorised and its backward is free, since P is exactly 0
  // there.
  const Tensor bias_BSS = at::zeros(mask_BSS.sizes(), q.options().dtype(wide))
                              .masked_fill_(mask_BSS.logical_not(), kMasked);
  const Tensor scores =
      Keys::scores(q.to(wide) * options.scale, k) + bias_BSS.unsqueeze(Keys::kHeadDim);
  const Tensor p = at::softmax(scores, -1);
  const Tensor sees_BS = mask_BSS.any(-1);
  AttentionResult result;
  result.out_BSHV = (Keys::apply(p, v) * sees_BS.unsqueeze(-1).unsqueeze(-1)).to(q.scalar_type());

  const at::NoGradGuard no_grad;
  if (options.return_head_sum) {
    result.head_sum = p.detach().sum(Keys::kHeadDim).mul_(sees_BS.unsqueeze(-1));
  }
  if (options.return_statistics) {
    const auto as_BSH = [&](const Tensor& x) {
      const Tensor ordered = Keys::kHeadDim == 1 ? x.transpose(1, 2) : x;
      return ordered.mul(sees_BS.unsqueeze(-1));
    };
    result.softmax_max = as_BSH(scores.detach().amax(-1));
    result.softmax_sum = as_BSH(p.detach().amax(-1).reciprocal());  // the largest exponent is 0
  }
  return result;
}

// Results of consecutive blocks of queries as one.
AttentionResult joined(const std::vector<AttentionResult>& blocks) {
  if (blocks.size() == 1) return blocks[0];
  const auto cat = [&](Tensor AttentionResult::*part) {
    if (!(blocks[0].*part).defined()) return Tensor();
    std::vector<Tensor> parts;
    for (const auto& block : blocks) parts.push_back(block.*part);
    return at::cat(parts, 1);
  };
  return {cat(&AttentionResult::out_BSHV), cat(&AttentionResult::softmax_max),
          cat(&AttentionResult::softmax_sum), cat(&AttentionResult::head_sum)};
}

// A block of queries needs only the keys up to the last one that it sees.
template <typename Keys>
AttentionResult attend_in_blocks(const Tensor& query_BSHD, const Tensor& key, const Tensor& value,
                                 const Tensor& mask_BSS, const AttentionOptions& options) {
  const int64_t S = query_BSHD.size(1), L = key.size(1);
  const auto wide = wide_type(query_BSHD);
  const Tensor keys = Keys::layout(key.to(wide)), values = Keys::layout(value.to(wide));
  std::vector<AttentionResult> blocks;
  const auto masks = mask_BSS.split(kQueryBlock, 1);
  for (const Tensor& q : query_BSHD.split(kQueryBlock, 1)) {
    const Tensor& rows = masks[blocks.size()];
    const int64_t seen = S <= kQueryBlock ? L : keys_up_to_last(rows);
    blocks.push_back(attend<Keys>(q, keys.narrow(1, 0, seen), values.narrow(1, 0, seen),
                                  rows.narrow(2, 0, seen), options));
    auto& head_sum = blocks.back().head_sum;
    if (head_sum.defined()) head_sum = at::constant_pad_nd(head_sum, {0, L - seen});
  }
  return joined(blocks);
}

}  // namespace

void check_attention_operands(const Tensor& q, const Tensor& key, const Tensor& value,
                              const AttentionOptions& options) {
  check_dims(q, 4, "attention query");
  const int64_t B = q.size(0), H = q.size(2), D = q.size(3);
  if (key.dim() == 3) {
    check_shape(key, {B, kAnySize, D}, "attention key");
  } else {
    check_shape(key, {B, kAnySize, H, D}, "attention key");
  }
  check_same_dtype(key, q, "attention key", "the query");
  if (!value.defined()) {
    LONGHAUL_CHECK(key.dim() == 3 && options.value_dim >= 1 && options.value_dim <= D,
                   "attention without a value tensor: expected a key [B, S, {}], whose first "
                   "columns are the values, and value_dim 1 to {}, got [{}] and {}",
                   D, D, shape_text(key), options.value_dim);
  } else if (key.dim() == 3) {
    check_shape(value, {B, key.size(1), kAnySize}, "attention value");
  } else {
    check_shape(value, {B, key.size(1), H, kAnySize}, "attention value");
  }
  if (value.defined()) check_same_dtype(value, q, "attention value", "the query");
}

void check_attention_grad(const AttentionState& attention, const Tensor& out_BSHV,
                          const Tensor& d_out_BSHV) {
  const Tensor& query = attention.query_BSHD;
  check_dims(query, 4, "attention query");
  const int64_t B = query.size(0), S = query.size(1), H = query.size(2);
  check_shape(out_BSHV, {B, S, H, attention.value.defined() ? attention.value.size(-1) : kAnySize},
              "attention out");
  check_shape(d_out_BSHV, out_BSHV.sizes(), "attention d_out");
  check_attention_operands(query, attention.key, attention.value, {.value_dim = out_BSHV.size(3)});
  check_shape(attention.softmax_max, {B, S, H}, "attention softmax_max");
  check_shape(attention.softmax_sum, {B, S, H}, "attention softmax_sum");
}

AttentionResult masked_attention(const Tensor& query_BSHD, const Tensor& key,
                                 const Tensor& separate_value, const Tensor& mask_BSS,
                                 const AttentionOptions& options) {
  check_attention_operands(query_BSHD, key, separate_value, options);
  const Tensor value =
      separate_value.defined() ? separate_value : key.narrow(2, 0, options.value_dim);
  check_shape(mask_BSS, {query_BSHD.size(0), query_BSHD.size(1), key.size(1)}, "attention mask");
  const auto attend = key.dim() == 3 ? attend_in_blocks<SharedKeys> : attend_in_blocks<KeysByHead>;
  return attend(query_BSHD, key, value, mask_BSS, options);
}

AttentionResult flash_attention_reference(const Tensor& query_BSHD, const Tensor& key,
                                          const Tensor& value, const KeyRange& range,
                                          const AttentionOptions& options) {
  return masked_attention(query_BSHD, key, value, visible_mask(range, key.size(1)), options);
}

}  // namespace longhaul::ops
