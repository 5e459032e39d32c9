// Attention and the lightning indexer written out in loops, in double: what the operators are
// compared with.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace longhaul::testing {

struct LoopAttention {
  at::Tensor out_BSHV, max_BSH, sum_BSH, head_sum_BSS;
};

// Keys and values of all heads in the form [B, S, H, .].
inline at::Tensor by_head(const at::Tensor& x, int64_t H) {
  return x.dim() == 4 ? x : x.unsqueeze(2).expand({x.size(0), x.size(1), H, x.size(2)});
}

// Softmax attention of one query of one head over `keys`, added to the results.
inline void attend_in_loops(LoopAttention& r, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::vector<int64_t>& keys, double scale,
                            int64_t b, int64_t t, int64_t h) {
  const auto Q = q.accessor<double, 4>(), K = k.accessor<double, 4>(), V = v.accessor<double, 4>();
  std::vector<double> scores;
  for (const int64_t s : keys) {
    double dot = 0;
    for (int64_t d = 0; d < Q.size(3); ++d) dot += Q[b][t][h][d] * K[b][s][h][d];
    scores.push_back(scale * dot);
  }
  if (keys.empty()) return;
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (const double x : scores) sum += std::exp(x - largest);
  r.max_BSH.accessor<double, 3>()[b][t][h] = largest;
  r.sum_BSH.accessor<double, 3>()[b][t][h] = sum;
  for (size_t i = 0; i < keys.size(); ++i) {
    const double p = std::exp(scores[i] - largest) / sum;
    r.head_sum_BSS.accessor<double, 3>()[b][t][keys[i]] += p;
    for (int64_t d = 0; d < V.size(3); ++d) {
      r.out_BSHV.accessor<double, 4>()[b][t][h][d] += p * V[b][keys[i]][h][d];
    }
  }
}

// q [B, S, H, D], key and value with or without heads, mask [B, S, S] (true: attend).
inline LoopAttention attention_in_loops(const at::Tensor& q, const at::Tensor& key,
                                        const at::Tensor& value, const at::Tensor& mask_BSS,
                                        double scale) {
  const int64_t B = q.size(0), S = q.size(1), H = q.size(2), keys = key.size(1);
  const at::Tensor k = by_head(key, H), v = by_head(value, H);
  const auto options = q.options().requires_grad(false);
  LoopAttention r{at::zeros({B, S, H, v.size(3)}, options), at::zeros({B, S, H}, options),
                  at::zeros({B, S, H}, options), at::zeros({B, S, keys}, options)};
  const auto mask = mask_BSS.accessor<bool, 3>();
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < S; ++t) {
      std::vector<int64_t> visible;
      for (int64_t s = 0; s < keys; ++s) {
        if (mask[b][t][s]) visible.push_back(s);
      }
      for (int64_t h = 0; h < H; ++h) attend_in_loops(r, q, k, v, visible, scale, b, t, h);
    }
  }
  return r;
}

// I[t,s] = sum over j of w[t,j] * relu(q[t,j] . k[s]).
inline at::Tensor indexer_scores_in_loops(const at::Tensor& query_BSHD, const at::Tensor& key_BSD,
                                          const at::Tensor& weights_BSH) {
  const auto q = query_BSHD.accessor<double, 4>();
  const auto k = key_BSD.accessor<double, 3>(), w = weights_BSH.accessor<double, 3>();
  at::Tensor scores = at::zeros({q.size(0), q.size(1), k.size(1)}, at::kDouble);
  auto I = scores.accessor<double, 3>();
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t t = 0; t < q.size(1); ++t) {
      for (int64_t s = 0; s < k.size(1); ++s) {
        for (int64_t j = 0; j < q.size(2); ++j) {
          double dot = 0;
          for (int64_t d = 0; d < q.size(3); ++d) dot += q[b][t][j][d] * k[b][s][d];
          if (dot > 0) I[b][t][s] += w[b][t][j] * dot;
        }
      }
    }
  }
  return scores;
}

// The min(K, visible) keys of largest score among the visible ones, ascending, then -1. Keys are
// picked one after the other, the lowest first among equals.
inline at::Tensor topk_in_loops(const at::Tensor& scores_BSS, const at::Tensor& mask_BSS,
                                int64_t K) {
  const at::Tensor wide = scores_BSS.to(at::kDouble);
  const auto I = wide.accessor<double, 3>();
  const auto mask = mask_BSS.accessor<bool, 3>();
  at::Tensor indices = at::full({I.size(0), I.size(1), K}, -1, at::kInt);
  auto out = indices.accessor<int32_t, 3>();
  for (int64_t b = 0; b < I.size(0); ++b) {
    for (int64_t t = 0; t < I.size(1); ++t) {
      std::vector<int64_t> left, picked;
      for (int64_t s = 0; s < I.size(2); ++s) {
        if (mask[b][t][s]) left.push_back(s);
      }
      while (!left.empty() && static_cast<int64_t>(picked.size()) < K) {
        const auto best = std::max_element(left.begin(), left.end(), [&](int64_t x, int64_t y) {
          return I[b][t][x] < I[b][t][y];
        });
        picked.push_back(*best);
        left.erase(best);
      }
      std::sort(picked.begin(), picked.end());
      for (size_t i = 0; i < picked.size(); ++i) {
        out[b][t][static_cast<int64_t>(i)] = static_cast<int32_t>(picked[i]);
      }
    }
  }
  return indices;
}

}  // namespace longhaul::testing
