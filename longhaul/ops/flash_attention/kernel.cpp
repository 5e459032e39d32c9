// Forward. A block of queries of one head walks over the keys that it sees, a tile at a time, with
// an online softmax.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/flash_attention/head_keys.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_flash_attention_args;

// What a thread works in.
template <typename T>
struct Buffers {
  int32_t* queries;  // [groups][D / kPackOperand<T>][32]
  float* scores;     // [keys of a tile][32]
  int32_t* weights;  // probabilities of a tile as operands
  float* sums;       // [groups][V / 32][32][32]
  char* zeros;       // a row

  Buffers(const Args& a, Workspace& workspace) {
    queries = workspace.take<int32_t>(a.D / kPackOperand<T> * kBlock);
    scores = workspace.take<float>(kTile * kGroup);
    weights = workspace.take<int32_t>(kTile / kPackOperand<T> * kGroup);
    sums = workspace.take<float>(a.V * kBlock);
    zeros = workspace.take<char>(zero_bytes(a));
  }
};

// Of a group's softmax, in base 2.
struct Statistics {
  Floats max[kVectors], sum[kVectors];
};

template <typename T>
class Forward {
 public:
  using Layout = HeadLayout<Operand<T>, false>;

  Forward(const Args& a, const AllKeys<T>& keys, Workspace& workspace)
      : a_(a), all_keys_(keys), buffers_(a, workspace) {}

  void clear() { std::memset(buffers_.zeros, 0, static_cast<size_t>(zero_bytes(a_))); }

  void attend(int64_t b, int64_t h, int64_t t0) {
    const HeadKeys head(a_, all_keys_, b, h);
    const BlockView view = view_of(a_, b, t0);
    const int64_t row = b * a_.S + t0;
    prepare(view, row, h);
    for (int64_t key = view.keys.low; key < view.keys.high; key += kTile) {
      const TileRows keys = head.key_tile(key, view.keys.high, buffers_.zeros);
      const TileRows values = head.value_tile(key, view.keys.high, buffers_.zeros);
      for (int g = 0; g < kGroups; ++g) {
        if (!view.groups[g].any.meets(key, key + kTile)) continue;
        add_tile(g, view.groups[g], keys, values, key);
      }
    }
    for (int g = 0; g < kGroups; ++g) finish(g, row + g * kGroup, h, view.queries_of(g));
  }

 private:
  int32_t* queries_of(int g) { return buffers_.queries + g * (a_.D / kPackOperand<T>)*kGroup; }
  float* sums_of(int g) { return buffers_.sums + g * a_.V * kGroup; }

  void prepare(const BlockView& view, int64_t row, int64_t h) {
    for (int g = 0; g < kGroups; ++g) {
      if (view.queries_of(g) == 0) continue;
      const T* query = static_cast<const T*>(a_.query) + ((row + g * kGroup) * a_.H + h) * a_.D;
      pack_group<Operand<T>>(query, a_.H * a_.D, view.queries_of(g), a_.D, queries_of(g));
      std::memset(sums_of(g), 0, static_cast<size_t>(a_.V * kGroup) * sizeof(float));
      for (int v = 0; v < kVectors; ++v) {
        stats_[g].max[v] = all(kMasked), stats_[g].sum[v] = Floats{};
      }
    }
  }

  void add_tile(int g, const GroupView& view, const TileRows& keys, const TileRows& values,
                int64_t key) {
    Floats found[kVectors] = {stats_[g].max[0], stats_[g].max[1]};
    if (view.all_see(key, key + keys.padded)) {
      score<false>(g, view, keys, key, found);
    } else {
      score<true>(g, view, keys, key, found);
    }
    raise_maximum(g, found);
    exponentiate(stats_[g], keys.padded);
    add_weighted_rows<Operand<T>>(values.of, keys.padded, buffers_.weights, kGroup, a_.V,
                                  sums_of(g));
  }

  // Scores of a tile in base 2, and their maxima.
  template <bool kPartly>
  LONGHAUL_INLINE void score(int g, const GroupView& view, const TileRows& keys, int64_t key,
                             Floats (&found)[kVectors]) {
    const Floats scale = all(a_.scale * kLog2E);
    for (int r = 0; r < keys.padded; r += kRows) {
      Floats dots[kRows][kVectors];
      multiply_group<Operand<T>>(keys.of + r, queries_of(g), a_.D, dots);
      for (int i = 0; i < kRows; ++i) {
        for (int v = 0; v < kVectors; ++v) {
          Floats x = dots[i][v] * scale;
          if constexpr (kPartly) x = select(view.sees(v, key + r + i), x, all(kMasked));
          found[v] = max(found[v], x);
          store(buffers_.scores + (r + i) * kGroup + v * kLanes, x);
        }
      }
    }
  }

  // What was added up so far is rescaled to a new maximum.
  void raise_maximum(int g, const Floats (&found)[kVectors]) {
    Statistics& stats = stats_[g];
    float factors[kGroup];
    Mask raised = 0;
    for (int v = 0; v < kVectors; ++v) {
      raised |= greater(found[v], stats.max[v]);
      const Floats factor = exp2(stats.max[v] - found[v]);
      stats.max[v] = found[v];
      stats.sum[v] *= factor;
      store(factors + v * kLanes, factor);
    }
    if (raised) scale_sums(sums_of(g), kGroup, a_.V, factors);
  }

  // The tile's weights as operands, and their sums: by tile first, which is more accurate.
  void exponentiate(Statistics& stats, int padded) {
    Floats sums[kVectors] = {};
    for (int i = 0; i < padded; i += kPackOperand<T>) {
      for (int v = 0; v < kVectors; ++v) {
        Floats e[kPackOperand<T>];
        for (int u = 0; u < kPackOperand<T>; ++u) {
          e[u] = exp2(load(buffers_.scores + (i + u) * kGroup + v * kLanes) - stats.max[v]);
          sums[v] += e[u];
        }
        Layout::store_operand(buffers_.weights + i / kPackOperand<T> * kGroup + v * kLanes, e);
      }
    }
    for (int v = 0; v < kVectors; ++v) stats.sum[v] += sums[v];
  }

  void finish(int g, int64_t row, int64_t h, int64_t count) {
    if (count == 0) return;
    float maxima[kGroup], sums[kGroup], inverse[kGroup];
    for (int v = 0; v < kVectors; ++v) {
      store(maxima + v * kLanes, stats_[g].max[v] * kLn2);
      store(sums + v * kLanes, stats_[g].sum[v]);
    }
    for (int i = 0; i < count; ++i) {
      const bool empty = a_.first_key[row + i] > a_.last_key[row + i];
      inverse[i] = empty ? 0 : 1 / sums[i];
      a_.softmax_max[(row + i) * a_.H + h] = empty ? 0 : maxima[i];
      a_.softmax_sum[(row + i) * a_.H + h] = empty ? 0 : sums[i];
    }
    store_sums<Operand<T>>(sums_of(g), kGroup, static_cast<int>(count), a_.V, inverse,
                           static_cast<T*>(a_.out) + (row * a_.H + h) * a_.V, a_.H * a_.V);
  }

  const Args& a_;
  const AllKeys<T>& all_keys_;
  Buffers<T> buffers_;
  Statistics stats_[kGroups];
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
  const AllKeys<T> keys(a, shared);
  char* rest = static_cast<char*>(memory) + shared.bytes();
  const size_t bytes = thread_bytes<T>(a);
  const int64_t blocks = num_blocks(a.S), heads = a.B * a.H;
#pragma omp parallel
  {
    const FlushDenormals flush;
    Workspace workspace(rest + bytes * static_cast<size_t>(omp_get_thread_num()));
    Forward<T> forward(a, keys, workspace);
    forward.clear();
    keys.widen();
    // The longest first, so that the threads end together.
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < blocks * heads; ++i) {
      const int64_t head = i % heads;
      forward.attend(head / a.H, head % a.H, (blocks - 1 - i / heads) * kBlock);
    }
  }
}

}  // namespace

size_t flash_attention_workspace(const Args& a) {
  return with_dtype(a.dtype, [&]<typename T>() {
    Workspace shared(nullptr);
    const AllKeys<T> keys(a, shared);
    return shared.bytes() + thread_bytes<T>(a) * static_cast<size_t>(omp_get_max_threads());
  });
}

void flash_attention(const Args& a, void* workspace) {
  with_dtype(a.dtype, [&]<typename T>() { run<T>(a, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
