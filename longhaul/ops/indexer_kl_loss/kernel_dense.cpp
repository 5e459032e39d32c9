// The indexer's loss over all keys that a block of queries sees, and its gradients (the formulas:
// kernel.cpp). Queries lie on the lanes: scores, softmax and dI are [keys][queries], and sums over
// heads and over keys are vertical.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/block_scatter.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/operands.h"
#include "longhaul/ops/indexer_kl_loss/divergence.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_dense_indexer_kl_loss_args;

// What the threads share.
template <typename T>
struct Shared {
  int64_t groups, Q;     // Q = groups * 32
  int32_t* queries;      // [heads][groups][D / kPackOperand<T>][32]
  float* weights;        // [heads][Q]
  float* scores;         // [L + kTile][Q]: I, then dI
  char* zeros;           // a row
  BlockScatter scatter;  // a block of it is one head
  Operands<T> keys;

  Shared(const Args& a, Workspace& workspace)
      : groups(block_lanes(a.S) / kGroup), keys(a.key, a.L * a.D, workspace) {
    Q = groups * kGroup;
    queries = workspace.take<int32_t>(a.H * groups * (a.D / kPackOperand<T>)*kGroup);
    weights = workspace.take<float>(a.H * Q);
    scores = workspace.take<float>((a.L + kTile) * Q);
    zeros = workspace.take<char>(a.D * static_cast<int64_t>(sizeof(Operand<T>)));
    scatter = {};
    if (!a.d_query) return;
    scatter.L = a.L;
    scatter.lanes = Q;
    scatter.weight_words = Q / kPackOperand<T>;
    scatter.paired_words = Q / kPackOperand<T> * a.D;
    scatter.take(workspace, a.H, omp_get_max_threads());
  }
};

// What a thread works in.
template <typename T>
struct Buffers {
  int32_t* weights;  // dI w where q.k > 0, of a tile, as operands
  float* sums;       // dq of a head [groups][D / 32][32][32]

  Buffers(const Args& a, Workspace& workspace) {
    weights = workspace.take<int32_t>(kTile / kPackOperand<T> * kGroup);
    sums = workspace.take<float>(a.d_query ? a.D * kBlock : 0);
  }
};

template <typename T>
class Loss {
 public:
  using Layout = HeadLayout<Operand<T>, false>;

  Loss(const Args& a, Workspace& workspace)
      : a_(a), shared_(a, workspace), view_(a.first_key, a.last_key, a.S) {
    std::memset(shared_.zeros, 0, static_cast<size_t>(a.D) * sizeof(Operand<T>));
  }

  // On all threads of the enclosing parallel region.
  void run(const Buffers<T>& buffers) const {
    const int64_t groups = shared_.groups;
    const int64_t tiles = view_.keys.high > view_.keys.low
                              ? (view_.keys.high - view_.keys.low + kTile - 1) / kTile
                              : 0;
    shared_.keys.widen();
#pragma omp for schedule(static)
    for (int64_t h = 0; h < a_.H; ++h) pack(h);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tiles * groups; ++i) {
      score(static_cast<int>(i % groups), view_.keys.low + i / groups * kTile);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t v = 0; v < groups * kVectors; ++v) a_.head_sum ? diverge(v) : store_softmax(v);
    if (!a_.d_query) return;
    for (int64_t h0 = 0; h0 < a_.H; h0 += shared_.scatter.blocks) {
      const int64_t left = a_.H - h0, all = shared_.scatter.blocks;
      add_gradients(buffers, h0, left < all ? left : all);
    }
  }

 private:
  const T* query_of(int64_t h, int g) const {
    return static_cast<const T*>(a_.query) + (g * kGroup * a_.H + h) * a_.D;
  }
  int32_t* packed_of(int64_t h, int g) const {
    return shared_.queries + (h * shared_.groups + g) * (a_.D / kPackOperand<T>)*kGroup;
  }
  float* weights_of(int64_t h, int g) const { return shared_.weights + h * shared_.Q + g * kGroup; }
  float* scores_of(int64_t key, int g) const {
    return shared_.scores + key * shared_.Q + g * kGroup;
  }
  TileRows rows(int64_t key) const {
    return {shared_.keys.get(), a_.D * static_cast<int64_t>(sizeof(Operand<T>)), key,
            view_.keys.high, shared_.zeros};
  }

  void pack(int64_t h) const {
    for (int g = 0; g < shared_.groups; ++g) {
      const int64_t count = view_.queries_of(g);
      pack_group<Operand<T>>(query_of(h, g), a_.H * a_.D, count, a_.D, packed_of(h, g));
      for (int64_t i = 0; i < kGroup; ++i) {
        weights_of(h, g)[i] = i < count ? a_.weights[(g * kGroup + i) * a_.H + h] : 0;
      }
    }
  }

  // I of a group at a tile of keys; masked where a query does not see the key.
  void score(int g, int64_t key) const {
    const GroupView& view = view_.groups[g];
    const TileRows keys = rows(key);
    float sums[kTile * kGroup] = {};
    const bool some = view.any.meets(key, key + kTile);
    for (int64_t h = 0; some && h < a_.H; ++h) add_head(h, g, keys, sums);
    for (int i = 0; i < keys.padded; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        const bool there = some && key + i < view_.keys.high;
        const Mask seen = there ? view.sees(v, key + i) : 0;
        store(scores_of(key + i, g) + v * kLanes,
              select(seen, load(sums + i * kGroup + v * kLanes), all(kMasked)));
      }
    }
  }

  LONGHAUL_INLINE void add_head(int64_t h, int g, const TileRows& keys, float* sums) const {
    const Floats w[kVectors] = {load(weights_of(h, g)), load(weights_of(h, g) + kLanes)};
    for (int r = 0; r < keys.padded; r += kRows) {
      Floats dots[kRows][kVectors];
      multiply_group<Operand<T>>(keys.of + r, packed_of(h, g), a_.D, dots);
      for (int i = 0; i < kRows; ++i) {
        for (int v = 0; v < kVectors; ++v) {
          float* at = sums + (r + i) * kGroup + v * kLanes;
          store(at, fma(max(Floats{}, dots[i][v]), w[v], load(at)));
        }
      }
    }
  }

  // Of the scores of 16 queries: the largest one, and the sum of the exponentials of what each is
  // less than it.
  struct Softmax {
    Floats max = all(kMasked), sum = {};
  };

  Softmax softmax_of(int64_t vector) const {
    const int64_t Q = shared_.Q;
    const float* scores = shared_.scores + vector * kLanes;
    Softmax softmax;
    for (int64_t key = view_.keys.low; key < view_.keys.high; ++key) {
      softmax.max = max(softmax.max, load(scores + key * Q));
    }
    const Floats shift = softmax.max * kLog2E;
    over_keys(softmax.sum, [&](int64_t key) LONGHAUL_INLINED {
      return exp2(load(scores + key * Q) * kLog2E - shift);
    });
    return softmax;
  }

  Softmax given_softmax_of(int64_t vector) const {
    const int64_t from = vector * kLanes, count = a_.S - from;
    float max[kLanes] = {}, sum[kLanes] = {};
    for (int64_t i = 0; i < kLanes && i < count; ++i) {
      max[i] = a_.softmax_max[from + i];
      sum[i] = a_.softmax_sum[from + i];
    }
    return {load(max), load(sum)};
  }

  void store_softmax(int64_t vector) const {
    const Softmax softmax = softmax_of(vector);
    const Mask some = not_at_most(softmax.max, all(kMasked));
    store_queries(vector, select(some, softmax.max, Floats{}), a_.softmax_max);
    store_queries(vector, select(some, softmax.sum, Floats{}), a_.softmax_sum);
  }

  // A value of each of 16 queries.
  void store_queries(int64_t vector, Floats values, float* out) const {
    float of_query[kLanes];
    store(of_query, values);
    for (int64_t i = 0; i < kLanes && vector * kLanes + i < a_.S; ++i) {
      out[vector * kLanes + i] = of_query[i];
    }
  }

  // The loss of 16 queries, and dI in place of their scores. Sums go by tile first, which is more
  // accurate.
  void diverge(int64_t vector) const {
    const int64_t Q = shared_.Q;
    float* scores = shared_.scores + vector * kLanes;
    const float* head_sum = a_.head_sum + vector * kLanes;
    Floats mass = {};
    over_keys(mass, [&](int64_t key) { return load(head_sum + key * Q); });
    const Softmax softmax = a_.softmax_max ? given_softmax_of(vector) : softmax_of(vector);
    const Mask counts = not_at_most(mass, Floats{});  // NaN reaches the loss
    mass = select(counts, mass, all(1.0F));
    const Floats total = select(counts, softmax.sum, all(1.0F)), shift = softmax.max * kLog2E;
    const Floats inverse = 1.0F / total, log_sum = log2(total);
    Floats loss = {};
    over_keys(loss, [&](int64_t key) LONGHAUL_INLINED {
      const Floats x = load(scores + key * Q) * kLog2E - shift;
      const Divergence d = divergence_at(x, load(head_sum + key * Q) / mass, inverse, log_sum);
      store(scores + key * Q, select(counts, d.d_scores, Floats{}));
      return select(counts, d.loss, Floats{});
    });
    store_queries(vector, loss * kLn2, a_.loss);
  }

  template <typename F>
  LONGHAUL_INLINE void over_keys(Floats& sum, const F& term) const {
    const KeyRange& keys = view_.keys;
    for (int64_t from = keys.low; from < keys.high; from += kTile) {
      const int64_t to = keys.high - from < kTile ? keys.high : from + kTile;
      Floats part = {};
      for (int64_t key = from; key < to; ++key) part += term(key);
      sum += part;
    }
  }

  // Of `count` heads, those from h0 on.
  void add_gradients(const Buffers<T>& buffers, int64_t h0, int64_t count) const {
    const BlockScatter& scatter = shared_.scatter;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) differentiate(buffers, h0 + i, i);
    constexpr int64_t kChunk = 64;  // keys whose sums a thread owns
    const RowTerm dk{
        .paired = nullptr, .D = a_.D, .offset = 0, .words = static_cast<int>(scatter.weight_words)};
    const int64_t offset = 0, chunks = (a_.L + kChunk - 1) / kChunk;
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t to = a_.L - c * kChunk < kChunk ? a_.L : (c + 1) * kChunk;
      scatter.template add<Operand<T>>(0, count, c * kChunk, to, &dk, &offset, 1, a_.D, a_.d_key);
    }
  }

  // dq and dw of a head; `place` is its number in the superblock.
  void differentiate(const Buffers<T>& buffers, int64_t h, int64_t place) const {
    const BlockScatter& scatter = shared_.scatter;
    scatter.ranges[place] = view_.keys;
    const int groups = static_cast<int>(shared_.groups);
    pair_heads<Operand<T>>(query_of(h, 0), a_.H * a_.D, static_cast<int>(a_.S), groups * kGroup,
                           a_.D, scatter.paired_of(place));
    std::memset(buffers.sums, 0, static_cast<size_t>(a_.D * shared_.Q) * sizeof(float));
    Floats d_weights[kGroups][kVectors] = {};
    for (int64_t key = view_.keys.low; key < view_.keys.high; key += kTile) {
      const TileRows keys = rows(key);
      int32_t* weights = scatter.weights_of(place, key);
      for (int g = 0; g < groups; ++g) {
        if (!view_.groups[g].any.meets(key, key + kTile)) {
          clear_tile(g, keys.padded, weights);
          continue;
        }
        add_tile(buffers, h, g, keys, key, weights, d_weights[g]);
        add_weighted_rows<Operand<T>>(keys.of, keys.padded, buffers.weights, kGroup, a_.D,
                                      buffers.sums + g * a_.D * kGroup);
      }
    }
    for (int g = 0; g < groups; ++g) store_gradients(buffers, h, g, d_weights[g]);
  }

  LONGHAUL_INLINE void add_tile(const Buffers<T>& buffers, int64_t h, int g, const TileRows& keys,
                                int64_t key, int32_t* key_weights,
                                Floats (&d_weights)[kVectors]) const {
    const Floats w[kVectors] = {load(weights_of(h, g)), load(weights_of(h, g) + kLanes)};
    Floats sums[kVectors] = {};
    for (int r = 0; r < keys.padded; r += kRows) {
      Floats dots[kRows][kVectors];
      multiply_group<Operand<T>>(keys.of + r, packed_of(h, g), a_.D, dots);
      for (int i = r; i < r + kRows; i += kPackOperand<T>) {
        for (int v = 0; v < kVectors; ++v) {
          Floats c[kPackOperand<T>];
          for (int u = 0; u < kPackOperand<T>; ++u) {
            const Floats a = max(Floats{}, dots[i - r + u][v]);
            const Floats dI = load(scores_of(key + i + u, g) + v * kLanes);
            sums[v] = fma(dI, a, sums[v]);
            c[u] = select(greater(a, Floats{}), dI * w[v], Floats{});
            Layout::store_key_weights(key_weights + (i + u) * shared_.scatter.weight_words,
                                      g * kVectors + v, c[u]);
          }
          Layout::store_operand(buffers.weights + i / kPackOperand<T> * kGroup + v * kLanes, c);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) d_weights[v] += sums[v];
  }

  void clear_tile(int g, int padded, int32_t* key_weights) const {
    for (int i = 0; i < padded; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        Layout::store_key_weights(key_weights + i * shared_.scatter.weight_words, g * kVectors + v,
                                  Floats{});
      }
    }
  }

  void store_gradients(const Buffers<T>& buffers, int64_t h, int g,
                       const Floats (&d_weights)[kVectors]) const {
    static constexpr Ones kOnes = {};
    const int64_t count = view_.queries_of(g), at = g * kGroup * a_.H + h;
    float of_query[kGroup];
    for (int v = 0; v < kVectors; ++v) store(of_query + v * kLanes, d_weights[v]);
    for (int64_t i = 0; i < count; ++i) a_.d_weights[at + i * a_.H] = of_query[i];
    store_sums<Operand<T>>(buffers.sums + g * a_.D * kGroup, kGroup, static_cast<int>(count), a_.D,
                           kOnes, static_cast<T*>(a_.d_query) + at * a_.D, a_.H * a_.D);
  }

  const Args& a_;
  Shared<T> shared_;
  BlockView view_;
};

template <typename T>
size_t thread_bytes(const Args& a) {
  Workspace workspace(nullptr);
  const Buffers<T> one(a, workspace);
  return workspace.bytes();
}

template <typename T>
void run(const Args& a, void* memory) {
  Workspace shared(memory);
  const Loss<T> loss(a, shared);
  char* rest = static_cast<char*>(memory) + shared.bytes();
  const size_t bytes = thread_bytes<T>(a);
#pragma omp parallel
  {
    const FlushDenormals flush;
    Workspace own(rest + bytes * static_cast<size_t>(omp_get_thread_num()));
    const Buffers<T> buffers(a, own);
    loss.run(buffers);
  }
}

}  // namespace

size_t dense_indexer_kl_loss_workspace(const Args& a) {
  return with_dtype(a.dtype, [&]<typename T>() {
    Workspace workspace(nullptr);
    const Shared<T> shared(a, workspace);
    return workspace.bytes() + thread_bytes<T>(a) * static_cast<size_t>(omp_get_max_threads());
  });
}

void dense_indexer_kl_loss(const Args& a, void* workspace) {
  with_dtype(a.dtype, [&]<typename T>() { run<T>(a, workspace); });
}

size_t dense_indexer_softmax_workspace(const Args& a) { return dense_indexer_kl_loss_workspace(a); }

void dense_indexer_softmax(const Args& a, void* workspace) { dense_indexer_kl_loss(a, workspace); }

}  // namespace longhaul::cpu::LONGHAUL_ISA
