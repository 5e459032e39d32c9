// The indexer's loss and gradients in one pass over the selected keys. With p the normalised head
// sum, r the softmax of the scores I, a = q_j.k and dI = r - p:
//   loss = sum of p (log p - log r),   dw_j += dI relu(a),   dq_j += c k,   dk += c q_j,
//   c = dI w_j where a > 0
// With dI given instead it is the gradient of the scores at the selected keys.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/heads.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/operands.h"
#include "longhaul/ops/cpu/row_scatter.h"
#include "longhaul/ops/indexer_kl_loss/divergence.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

struct Args : longhaul_indexer_kl_loss_args {
  const float* d_scores;  // [B, S, K] dI, or null: that of the loss
};

// What a thread works in.
template <typename T, bool kSplit>
struct Buffers {
  using Layout = HeadLayout<Operand<T>, kSplit>;

  KeyList keys;      // without gradients; else the superblock's
  int32_t* query;    // [D steps][vectors][16]
  float* scores;     // of the selected keys, then dI
  float* target;     // p
  int32_t* weights;  // c of a block as operands
  float* sums;       // dq [D / 32][heads][32]
  char* zeros;       // a row

  Buffers(const Args& a, Workspace& workspace) {
    const int64_t K = round_up(a.K, kKeyBlock), lanes = Layout::vectors(a.H) * kLanes;
    keys.keys = workspace.take<int32_t>(K + kLanes);
    keys.slots = workspace.take<int32_t>(K + kLanes);
    query = workspace.take<int32_t>(a.D / Layout::kStep * lanes);
    scores = workspace.take<float>(K);
    target = workspace.take<float>(K);
    weights = workspace.take<int32_t>(kKeyBlock / kPackOperand<T> * lanes);
    sums = workspace.take<float>(a.D * Layout::heads(a.H));
    zeros = workspace.take<char>(a.D * static_cast<int64_t>(sizeof(Operand<T>)));
  }
};

template <typename T, bool kSplit>
RowScatter plan_scatter(const Args& a, Workspace& workspace) {
  const int words = static_cast<int>(HeadLayout<Operand<T>, kSplit>::heads(a.H)) / kPackOperand<T>;
  RowScatter scatter = {};
  scatter.K = a.K;
  scatter.D = a.D;
  scatter.weight_words = words;
  scatter.paired_words = words * a.D;
  scatter.terms[0] = {.paired = nullptr, .D = a.D, .offset = 0, .words = words};
  scatter.num_terms = 1;
  scatter.take(workspace, a.S, a.L, omp_get_max_threads());
  return scatter;
}

template <typename T, bool kSplit>
class Loss {
 public:
  using Layout = HeadLayout<Operand<T>, kSplit>;

  Loss(const Args& a, Workspace& workspace) : a_(a), buffers_(a, workspace) {}

  void clear() { std::memset(buffers_.zeros, 0, static_cast<size_t>(a_.D) * sizeof(Operand<T>)); }

  // One query's loss.
  void evaluate(int64_t row, const Operand<T>* key) {
    buffers_.keys.fill(a_.indices + row * a_.K, a_.K);
    prepare(row);
    diverge(row, buffers_.keys, key);
  }

  // Its loss and gradients; `place`: where in the scatter's buffers it leaves its part.
  void differentiate(int64_t row, const Operand<T>* key, const RowScatter& scatter, int64_t place) {
    ask_for_rows(row);
    const KeyList keys = scatter.fill_keys(place, a_.indices + row * a_.K);
    prepare(row);
    a_.d_scores ? take_gradients(row, keys) : diverge(row, keys, key);

    const int H = static_cast<int>(a_.H), heads = static_cast<int>(Layout::heads(a_.H));
    pair_heads<Operand<T>>(query_of(row), a_.D, H, heads, a_.D,
                           scatter.paired + place * scatter.paired_words);
    std::memset(buffers_.sums, 0, static_cast<size_t>(a_.D * heads) * sizeof(float));
    for (int64_t v = 0; v < Layout::vectors(a_.H); ++v) d_weights_[v] = Floats{};
    for (int64_t from = 0; from < keys.size; from += kKeyBlock) {
      const char* rows[kKeyBlock];
      const int count = keys.rows(from, base(key), row_bytes(), buffers_.zeros, rows);
      keys.prefetch_rows(from + kKeyBlock, from + 2 * kKeyBlock, base(key), row_bytes());
      const int padded = static_cast<int>(round_up(count, 8));
      for (int r = 0; r < padded; r += 8) {
        int32_t* weights = scatter.weights_of(place) + (from + r) * scatter.weight_words;
        for (int64_t v = 0; v < Layout::vectors(a_.H); ++v) {
          add_keys(rows + r, r, buffers_.scores + from + r, v, weights, heads);
        }
      }
      add_weighted_rows<Operand<T>>(rows, padded, buffers_.weights, heads, a_.D, buffers_.sums);
    }
    store_gradients(row);
  }

 private:
  // What this query writes, and what the query that this thread probably takes next reads.
  LONGHAUL_INLINE void ask_for_rows(int64_t row) const {
    const int64_t next = row + omp_get_num_threads();
    prefetch_row(static_cast<const T*>(a_.d_query), row, a_.H * a_.D);
    if (next >= a_.B * a_.S) return;
    prefetch_row(a_.indices, next, a_.K);
    prefetch_row(a_.head_sum, next, a_.K);
    prefetch_row(a_.scores, next, a_.K);
    prefetch_row(a_.d_scores, next, a_.K);
    prefetch_row(static_cast<const T*>(a_.query), next, a_.H * a_.D);
  }

  const T* query_of(int64_t row) const {
    return static_cast<const T*>(a_.query) + row * a_.H * a_.D;
  }
  static const char* base(const Operand<T>* key) { return reinterpret_cast<const char*>(key); }
  int64_t row_bytes() const { return a_.D * static_cast<int64_t>(sizeof(Operand<T>)); }

  void prepare(int64_t row) {
    const int64_t vectors = Layout::vectors(a_.H);
    pack_heads<Operand<T>, kSplit>(query_of(row), a_.D, static_cast<int>(a_.H), a_.D,
                                   static_cast<int>(vectors), buffers_.query, vectors * kLanes);
    float weights[kMaxVectors * kLanes];
    for (int64_t h = 0; h < Layout::heads(a_.H); ++h) {
      weights[h] = h < a_.H ? a_.weights[row * a_.H + h] : 0;
    }
    for (int64_t v = 0; v < vectors; ++v) {
      weights_[v] = Layout::load_heads(weights + v * Layout::kHeads);
    }
  }

  // relu(q.k) of 8 keys for one vector of heads.
  LONGHAUL_INLINE void multiply(const char* const* rows, int64_t v,
                                Floats (&units)[8 / Layout::kKeysInUnit]) const {
    Floats dots[8][1];
    multiply_rows<Operand<T>, kSplit, 8, 1, 2>(rows, buffers_.query + v * kLanes,
                                               Layout::vectors(a_.H) * kLanes, a_.D / Layout::kStep,
                                               dots);
    for (int i = 0; i < 8 / Layout::kKeysInUnit; ++i) {
      units[i] = max(Floats{}, Layout::unit(&dots[i * Layout::kKeysInUnit][0]));
    }
  }

  // The scores of the selected keys, as the selection saw them or computed anew.
  void find_scores(int64_t row, const KeyList& keys, const Operand<T>* key) {
    if (a_.scores) {
      for (int64_t i = 0; i < keys.size; i += kLanes) {
        store(buffers_.scores + i, keys.values(a_.scores + row * a_.K, i));
      }
      return;
    }
    constexpr int kUnits = kLanes / Layout::kKeysInUnit;
    for (int64_t from = 0; from < keys.size; from += kKeyBlock) {
      const char* rows[kKeyBlock];
      keys.rows(from, base(key), row_bytes(), buffers_.zeros, rows);
      for (int r = 0; r < kKeyBlock; r += kLanes) {
        Floats units[kLanes] = {};
        for (int64_t v = 0; v < Layout::vectors(a_.H); ++v) {
          for (int half = 0; half < 2; ++half) {
            Floats dots[8 / Layout::kKeysInUnit];
            multiply(rows + r + 8 * half, v, dots);
            for (int i = 0; i < kUnits / 2; ++i) {
              units[half * kUnits / 2 + i] =
                  fma(dots[i], weights_[v], units[half * kUnits / 2 + i]);
            }
          }
        }
        store(buffers_.scores + from + r, sums_over_heads<kSplit>(units));
      }
    }
  }

  // dI as it is given; 0 for keys that are not there.
  void take_gradients(int64_t row, const KeyList& keys) {
    for (int64_t i = 0; i < round_up(keys.size, kKeyBlock); i += kLanes) {
      store(buffers_.scores + i, keys.values(a_.d_scores + row * a_.K, i));
    }
  }

  // The loss of the query, and dI in place of the scores; 0 for keys that are not there.
  void diverge(int64_t row, const KeyList& keys, const Operand<T>* key) {
    const int64_t padded = round_up(keys.size, kKeyBlock);
    float* scores = buffers_.scores;
    Floats masses = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Floats p = keys.values(a_.head_sum + row * a_.K, i);
      store(buffers_.target + i, p);
      masses += p;
    }
    const float mass = sum(masses);
    if (keys.size == 0 || mass <= 0) {
      for (int64_t i = 0; i < padded; ++i) scores[i] = 0;
      a_.loss[row] = 0;
      return;
    }
    find_scores(row, keys, key);
    for (int64_t i = 0; i < padded; i += kLanes) {
      store(buffers_.target + i, load(buffers_.target + i) / mass);
    }
    for (int64_t i = keys.size; i < padded; ++i) scores[i] = -1e30F;
    Floats highest = load(scores);
    for (int64_t i = 0; i < padded; i += kLanes) highest = max(highest, load(scores + i));
    const Floats shift = all(largest(highest) * kLog2E);

    Floats total = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Floats x = load(scores + i) * kLog2E - shift;
      total += exp2(x);
      store(scores + i, x);
    }
    a_.loss[row] = kLn2 * to_gradients(padded, sum(total));
    for (int64_t i = keys.size; i < padded; ++i) scores[i] = 0;
  }

  // Shifted scores x to dI = r - p; returns the loss in base 2.
  float to_gradients(int64_t padded, float sum_of_e) {
    const Floats inverse = all(1 / sum_of_e), log_sum = log2(all(sum_of_e));
    Floats loss = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Divergence d =
          divergence_at(load(buffers_.scores + i), load(buffers_.target + i), inverse, log_sum);
      loss += d.loss;
      store(buffers_.scores + i, d.d_scores);
    }
    return sum(loss);
  }

  // Gradients at 8 keys for one vector of heads.
  LONGHAUL_INLINE void add_keys(const char* const* rows, int r, const float* d_scores, int64_t v,
                                int32_t* key_weights, int heads) {
    constexpr int kKeys = Layout::kKeysInUnit, kUnits = Layout::kUnitsAtOnce;
    Floats dots[8 / kKeys];
    multiply(rows, v, dots);
    for (int i = 0; i < 8; i += kKeys * kUnits) {
      Floats c[kUnits];
      for (int u = 0; u < kUnits; ++u) {
        const int at = i + u * kKeys;
        const Floats a = dots[at / kKeys];
        const Floats dI = kSplit ? all_pairs(d_scores + at) : all(d_scores[at]);
        d_weights_[v] = fma(dI, a, d_weights_[v]);
        c[u] = select(greater(a, Floats{}), dI * weights_[v], Floats{});
        Layout::store_key_weights(key_weights + at * heads / kPackOperand<T>, v, c[u]);
      }
      Layout::store_operand(
          buffers_.weights + (r + i) / kPackOperand<T> * heads + v * Layout::kHeads, c);
    }
  }

  void store_gradients(int64_t row) {
    const int64_t H = a_.H, heads = Layout::heads(H);
    float d_weights[kMaxVectors * kLanes];
    for (int64_t v = 0; v < Layout::vectors(H); ++v) {
      Layout::store_heads(d_weights + v * Layout::kHeads, Layout::sum_of_head(d_weights_[v]));
    }
    std::memcpy(a_.d_weights + row * H, d_weights, static_cast<size_t>(H) * sizeof(float));
    store_sums<Operand<T>>(buffers_.sums, static_cast<int>(heads), static_cast<int>(H), a_.D, ones_,
                           static_cast<T*>(a_.d_query) + row * H * a_.D, a_.D);
  }

  const Args& a_;
  Buffers<T, kSplit> buffers_;
  Floats weights_[kMaxVectors], d_weights_[kMaxVectors];
  static constexpr Ones ones_ = {};
};

template <typename T, bool kSplit>
struct Run {
  static size_t thread_bytes(const Args& a) {
    Workspace workspace(nullptr);
    const Loss<T, kSplit> one(a, workspace);
    return workspace.bytes();
  }

  static size_t workspace(const Args& a) {
    Workspace shared(nullptr);
    if (a.d_query) plan_scatter<T, kSplit>(a, shared);
    const Operands<T> keys(a.key, a.B * a.L * a.D, shared);
    return shared.bytes() + thread_bytes(a) * static_cast<size_t>(omp_get_max_threads());
  }

  static void run(const Args& a, void* memory) {
    Workspace shared(memory);
    RowScatter scatter = {};
    if (a.d_query) scatter = plan_scatter<T, kSplit>(a, shared);
    const Operands<T> keys(a.key, a.B * a.L * a.D, shared);
    char* rest = static_cast<char*>(memory) + shared.bytes();
    const size_t bytes = thread_bytes(a);
#pragma omp parallel
    {
      const FlushDenormals flush;
      Workspace own(rest + bytes * static_cast<size_t>(omp_get_thread_num()));
      Loss<T, kSplit> loss(a, own);
      loss.clear();
      keys.widen();
      if (a.d_query) {
        for (int64_t b = 0; b < a.B; ++b) {
          const Operand<T>* key = keys.get() + b * a.L * a.D;
          const auto differentiate = [&](int64_t t, int64_t place) {
            loss.differentiate(b * a.S + t, key, scatter, place);
          };
          scatter.run<Operand<T>>(a.S, a.L, differentiate,
                                  static_cast<T*>(a.d_key) + b * a.L * a.D);
        }
      } else {
#pragma omp for schedule(dynamic, 16)
        for (int64_t row = 0; row < a.B * a.S; ++row) {
          loss.evaluate(row, keys.get() + row / a.S * a.L * a.D);
        }
      }
    }
  }
};

size_t workspace_of(const Args& a) {
  return with_layout(a.dtype, a.H,
                     [&]<typename T, bool kSplit>() { return Run<T, kSplit>::workspace(a); });
}

void run(const Args& a, void* workspace) {
  with_layout(a.dtype, a.H, [&]<typename T, bool kSplit>() { Run<T, kSplit>::run(a, workspace); });
}

Args of_given_gradient(const longhaul_lightning_indexer_grad_args& a) {
  return {{.dtype = a.dtype,
           .B = a.B,
           .S = a.S,
           .L = a.L,
           .H = a.H,
           .D = a.D,
           .K = a.K,
           .query = a.query,
           .key = a.key,
           .weights = a.weights,
           .indices = a.indices,
           .scores = nullptr,
           .head_sum = nullptr,
           .loss = nullptr,
           .d_query = a.d_query,
           .d_key = a.d_key,
           .d_weights = a.d_weights},
          a.d_scores};
}

}  // namespace

size_t indexer_kl_loss_workspace(const longhaul_indexer_kl_loss_args& a) {
  return workspace_of({a, nullptr});
}

void indexer_kl_loss(const longhaul_indexer_kl_loss_args& a, void* workspace) {
  run({a, nullptr}, workspace);
}

size_t lightning_indexer_grad_workspace(const longhaul_lightning_indexer_grad_args& a) {
  return workspace_of(of_given_gradient(a));
}

void lightning_indexer_grad(const longhaul_lightning_indexer_grad_args& a, void* workspace) {
  run(of_given_gradient(a), workspace);
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
