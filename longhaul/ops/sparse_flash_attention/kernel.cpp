// Forward. A query's heads are packed on the lanes, its keys' rows are read where they lie, 64 at a
// time, with an online softmax: maxima, sums and probabilities are vertical.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/heads.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/key_list.h"
#include "longhaul/ops/cpu/operands.h"
#include "longhaul/ops/cpu/tile.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_sparse_attention_args;

constexpr float kMasked = -1e30F;
// Keys whose rows are read for the scores, and again for the weighted sums.
constexpr int kKeysAtOnce = 64;

// What a thread works in.
template <typename T, bool kSplit>
struct Buffers {
  using Layout = HeadLayout<Operand<T>, kSplit>;

  int64_t vectors, units;
  KeyList keys;
  int32_t* query;    // [D steps][vectors][16]
  float* scores;     // [units][vectors][16], of the block's maximum when they were made
  float* maxima;     // [blocks][vectors][16]
  int32_t* weights;  // probabilities of a block as operands
  float* sums;       // [V / 32][heads][32]
  char* zeros;       // a row

  Buffers(const Args& a, Workspace& workspace) : vectors(Layout::vectors(a.H)) {
    const int64_t K = round_up(a.K, kKeysAtOnce), lanes = vectors * kLanes;
    units = K / Layout::kKeysInUnit;
    keys.keys = workspace.take<int32_t>(K + kLanes);
    keys.slots = workspace.take<int32_t>(K + kLanes);
    query = workspace.take<int32_t>(a.D / Layout::kStep * lanes);
    scores = workspace.take<float>(units * lanes);
    maxima = workspace.take<float>(K / kKeysAtOnce * lanes);
    weights = workspace.take<int32_t>(kKeysAtOnce / kPackOperand<T> * lanes);
    sums = workspace.take<float>(a.V * Layout::heads(a.H));
    zeros = workspace.take<char>(a.D * static_cast<int64_t>(sizeof(Operand<T>)));
  }
};

// Statistics of the softmax, in base 2.
struct Statistics {
  Floats max[kMaxVectors], sum[kMaxVectors];
};

template <typename T, bool kSplit>
class Forward {
 public:
  using Layout = HeadLayout<Operand<T>, kSplit>;

  Forward(const Args& a, Workspace& workspace) : a_(a), buffers_(a, workspace) {}

  void clear() { std::memset(buffers_.zeros, 0, static_cast<size_t>(a_.D) * sizeof(Operand<T>)); }

  // One query: `row` counts over the batch, `key` is its row of the batch.
  void attend(int64_t row, const Operand<T>* key) {
    const int64_t row_bytes = a_.D * static_cast<int64_t>(sizeof(Operand<T>));
    const char* base = reinterpret_cast<const char*>(key);
    auto& b = buffers_;
    b.keys.fill(a_.indices + row * a_.K, a_.K);
    pack_heads<Operand<T>, kSplit>(static_cast<const T*>(a_.query) + row * a_.H * a_.D, a_.D,
                                   static_cast<int>(a_.H), a_.D, static_cast<int>(b.vectors),
                                   b.query, b.vectors * kLanes);
    ask_for_rows(row);
    std::memset(b.sums, 0, static_cast<size_t>(a_.V * Layout::heads(a_.H)) * sizeof(float));
    for (int64_t v = 0; v < b.vectors; ++v) stats_.max[v] = all(kMasked), stats_.sum[v] = Floats{};
    for (int64_t from = 0; from < b.keys.size; from += kKeysAtOnce) {
      const char* rows[kKeysAtOnce];
      const int count = b.keys.rows(from, base, row_bytes, b.zeros, rows);
      b.keys.prefetch_rows(from + kKeysAtOnce, from + 2 * kKeysAtOnce, base, row_bytes);
      add_block(rows, from / kKeysAtOnce, count);
    }
    finish(row);
  }

 private:
  // What this query writes, and what the one after it reads.
  LONGHAUL_INLINE void ask_for_rows(int64_t row) const {
    prefetch_row(static_cast<const T*>(a_.out), row, a_.H * a_.V);
    prefetch_row(a_.head_sum, row, a_.K);
    if (row + 1 == a_.B * a_.S) return;
    prefetch_row(a_.indices, row + 1, a_.K);
    prefetch_row(static_cast<const T*>(a_.query), row + 1, a_.H * a_.D);
  }

  float* scores_of(int64_t unit) { return buffers_.scores + unit * buffers_.vectors * kLanes; }

  void add_block(const char* const* rows, int64_t block, int count) {
    auto& b = buffers_;
    const int64_t unit0 = block * (kKeysAtOnce / Layout::kKeysInUnit);
    const int padded = static_cast<int>(round_up(count, 8));
    score(rows, unit0, count, padded);
    for (int64_t v = 0; v < b.vectors; ++v) {
      store(b.maxima + (block * b.vectors + v) * kLanes, raise_maximum(unit0, v));
      exponentiate(unit0, padded, v);
    }
    const int heads = static_cast<int>(Layout::heads(a_.H));
    add_weighted_rows<Operand<T>>(rows, padded, b.weights, heads, a_.V, b.sums);
  }

  // Scores of `padded` keys, those from `count` on masked, and the maxima with them.
  void score(const char* const* rows, int64_t unit0, int count, int padded) {
    auto& b = buffers_;
    const Floats scale = all(a_.scale * kLog2E);
    const int64_t stride = b.vectors * kLanes, steps = a_.D / Layout::kStep;
    for (int64_t v = 0; v < b.vectors; ++v) found_[v] = stats_.max[v];
    for (int r = 0; r < padded; r += 8) {
      for (int64_t v = 0; v < b.vectors; ++v) {
        Floats dots[8][1], found = found_[v];
        multiply_rows<Operand<T>, kSplit, 8, 1, 2>(rows + r, b.query + v * kLanes, stride, steps,
                                                   dots);
        for (int i = 0; i < 8; i += Layout::kKeysInUnit) {
          Floats scores = Layout::unit(&dots[i][0]) * scale;
          if (r + 8 > count) {
            scores = select(Layout::keys_before(count - (r + i)), scores, all(kMasked));
          }
          store(scores_of(unit0 + (r + i) / Layout::kKeysInUnit) + v * kLanes, scores);
          found = max(found, scores);
        }
        found_[v] = found;
      }
    }
  }

  // The running maximum of a vector of heads with the block's scores; sums so far are rescaled.
  Floats raise_maximum(int64_t unit0, int64_t v) {
    const Floats found = Layout::max_of_head(found_[v]);
    if (greater(found, stats_.max[v]) == 0) return stats_.max[v];
    const Floats factor = exp2(stats_.max[v] - found);
    stats_.max[v] = found;
    stats_.sum[v] *= factor;
    if (unit0 > 0) rescale(v, factor);
    return found;
  }

  void rescale(int64_t v, Floats factor) {
    float factors[kLanes];
    Layout::store_heads(factors, factor);
    const int heads = static_cast<int>(Layout::heads(a_.H));
    for (int64_t chunk = 0; chunk < a_.V / kColumns; ++chunk) {
      float* sums = buffers_.sums + (chunk * heads + v * Layout::kHeads) * kColumns;
      scale_sums(sums, Layout::kHeads, kColumns, factors);
    }
  }

  // Scores to exponentials in place, their sums, and the block's weights as operands.
  void exponentiate(int64_t unit0, int padded, int64_t v) {
    auto& b = buffers_;
    const int64_t heads = Layout::heads(a_.H);
    constexpr int kUnits = Layout::kUnitsAtOnce;
    for (int i = 0; i < padded / Layout::kKeysInUnit; i += kUnits) {
      Floats e[kUnits];
      for (int u = 0; u < kUnits; ++u) {
        float* at = scores_of(unit0 + i + u) + v * kLanes;
        e[u] = exp2(load(at) - stats_.max[v]);
        stats_.sum[v] += e[u];
        store(at, e[u]);
      }
      Layout::store_operand(
          b.weights + i * Layout::kKeysInUnit / kPackOperand<T> * heads + v * Layout::kHeads, e);
    }
  }

  void finish(int64_t row) {
    auto& b = buffers_;
    float inverse[kMaxVectors * kLanes];
    const bool empty = b.keys.size == 0;
    for (int64_t v = 0; v < b.vectors; ++v) {
      stats_.sum[v] = Layout::sum_of_head(stats_.sum[v]);
      float maxima[kLanes], sums[kLanes];
      Layout::store_heads(maxima, empty ? Floats{} : stats_.max[v] * kLn2);
      Layout::store_heads(sums, stats_.sum[v]);
      for (int64_t h = v * Layout::kHeads; h < (v + 1) * Layout::kHeads; ++h) {
        const float sum = sums[h - v * Layout::kHeads];
        inverse[h] = empty ? 0 : 1 / sum;
        if (h >= a_.H) continue;
        a_.softmax_max[row * a_.H + h] = maxima[h - v * Layout::kHeads];
        a_.softmax_sum[row * a_.H + h] = sum;
      }
    }
    store_sums<Operand<T>>(b.sums, static_cast<int>(Layout::heads(a_.H)), static_cast<int>(a_.H),
                           a_.V, inverse, static_cast<T*>(a_.out) + row * a_.H * a_.V, a_.V);
    if (a_.head_sum) store_head_sum(a_.head_sum + row * a_.K, inverse);
  }

  // Padding of the heads counts nothing: its factor is 0.
  void store_head_sum(float* out, float* inverse) {
    auto& b = buffers_;
    for (int64_t h = a_.H; h < Layout::heads(a_.H); ++h) inverse[h] = 0;
    b.keys.clear_values(out, a_.K);
    for (int64_t from = 0; from < b.keys.size; from += kLanes) {
      const int64_t block = from / kKeysAtOnce;
      Floats sums = {};
      for (int64_t v = 0; v < b.vectors; ++v) {
        const Floats then = load(b.maxima + (block * b.vectors + v) * kLanes);
        const Floats factor =
            exp2(then - stats_.max[v]) * Layout::load_heads(inverse + v * Layout::kHeads);
        Floats units[kLanes];
        for (int i = 0; i < kLanes / Layout::kKeysInUnit; ++i) {
          units[i] = load(scores_of(from / Layout::kKeysInUnit + i) + v * kLanes) * factor;
        }
        sums += sums_over_heads<kSplit>(units);
      }
      b.keys.store_values(sums, out, from);
    }
  }

  const Args& a_;
  Buffers<T, kSplit> buffers_;
  Statistics stats_;
  Floats found_[kMaxVectors];  // a block's maxima, of each lane
};

template <typename T, bool kSplit>
struct Run {
  static size_t thread_bytes(const Args& a) {
    Workspace workspace(nullptr);
    const Forward<T, kSplit> one(a, workspace);
    return workspace.bytes();
  }

  static size_t workspace(const Args& a) {
    Workspace shared(nullptr);
    const Operands<T> keys(a.key, a.B * a.L * a.D, shared);
    return shared.bytes() + thread_bytes(a) * static_cast<size_t>(omp_get_max_threads());
  }

  static void run(const Args& a, void* memory) {
    Workspace shared(memory);
    const Operands<T> keys(a.key, a.B * a.L * a.D, shared);
    char* rest = static_cast<char*>(memory) + shared.bytes();
    const size_t bytes = thread_bytes(a);
#pragma omp parallel
    {
      const FlushDenormals flush;
      Workspace workspace(rest + bytes * static_cast<size_t>(omp_get_thread_num()));
      Forward<T, kSplit> forward(a, workspace);
      forward.clear();
      keys.widen();
#pragma omp for schedule(dynamic, 16)
      for (int64_t row = 0; row < a.B * a.S; ++row) {
        forward.attend(row, keys.get() + row / a.S * a.L * a.D);
      }
    }
  }
};

}  // namespace

size_t sparse_attention_workspace(const Args& a) {
  return with_layout(a.dtype, a.H,
                     [&]<typename T, bool kSplit>() { return Run<T, kSplit>::workspace(a); });
}

void sparse_attention(const Args& a, void* workspace) {
  with_layout(a.dtype, a.H, [&]<typename T, bool kSplit>() { Run<T, kSplit>::run(a, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
