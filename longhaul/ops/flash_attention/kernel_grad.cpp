// Backward. With s = scale q.k, P = exp(s - lse), delta = sum over columns of d_out out:
//   dS = P (d_out.v - delta) scale,   dq += dS k,   dk += dS q,   dv += P d_out
// A block of queries of one head computes dq and leaves [dS | P] of each key for the sums over
// queries (see block_scatter.h). Values that are the first columns of the keys add dv into dk.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/block_scatter.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/flash_attention/head_keys.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_flash_attention_grad_args;

// What a thread works in during the first phase.
template <typename T>
struct Buffers {
  int32_t *query, *d_out;  // of a block: [groups][D or V / kPackOperand<T>][32]
  int32_t* weights;        // dS of a tile as operands
  float* sums;             // dq [groups][D / 32][32][32]
  char* zeros;             // a row

  Buffers(const longhaul_flash_attention_args& a, Workspace& workspace) {
    query = workspace.take<int32_t>(a.D / kPackOperand<T> * kBlock);
    d_out = workspace.take<int32_t>(a.V / kPackOperand<T> * kBlock);
    weights = workspace.take<int32_t>(kTile / kPackOperand<T> * kGroup);
    sums = workspace.take<float>(a.D * kBlock);
    zeros = workspace.take<char>(zero_bytes(a));
  }
};

template <typename T>
class Backward {
 public:
  using Layout = HeadLayout<Operand<T>, false>;

  Backward(const Args& args, const AllKeys<T>& keys, Workspace& workspace)
      : args_(args), a_(args.forward), all_keys_(keys), buffers_(a_, workspace) {}

  void clear() { std::memset(buffers_.zeros, 0, static_cast<size_t>(zero_bytes(a_))); }

  // First phase of a block; `place` is its number in the superblock.
  void differentiate(int64_t b, int64_t h, int64_t t0, const BlockScatter& scatter, int64_t place) {
    const HeadKeys head(a_, all_keys_, b, h);
    const BlockView view = view_of(a_, b, t0);
    const int64_t row = b * a_.S + t0;
    scatter.ranges[place] = view.keys;
    prepare(view, row, h, scatter.paired_of(place), scatter.lanes);
    const int groups = static_cast<int>(scatter.lanes / kGroup);
    for (int64_t key = view.keys.low; key < view.keys.high; key += kTile) {
      const TileRows keys = head.key_tile(key, view.keys.high, buffers_.zeros);
      const TileRows values = head.value_tile(key, view.keys.high, buffers_.zeros);
      int32_t* weights = scatter.weights_of(place, key);
      for (int g = 0; g < groups; ++g) {
        if (view.groups[g].any.meets(key, key + kTile)) {
          add_tile(g, view.groups[g], keys, values, key, weights, scatter.lanes);
        } else {
          clear_tile(g, keys.padded, weights, scatter.lanes);
        }
      }
    }
    for (int g = 0; g < groups; ++g) {
      store_sums<Operand<T>>(
          sums_of(g), kGroup, static_cast<int>(view.queries_of(g)), a_.D, ones_,
          static_cast<T*>(args_.d_query) + ((row + g * kGroup) * a_.H + h) * a_.D, a_.H * a_.D);
    }
  }

 private:
  int32_t* query_of(int g) { return buffers_.query + g * (a_.D / kPackOperand<T>)*kGroup; }
  int32_t* d_out_of(int g) { return buffers_.d_out + g * (a_.V / kPackOperand<T>)*kGroup; }
  float* sums_of(int g) { return buffers_.sums + g * a_.D * kGroup; }

  void prepare(const BlockView& view, int64_t row, int64_t h, int32_t* paired, int64_t lanes) {
    const T* query = static_cast<const T*>(a_.query) + (row * a_.H + h) * a_.D;
    const T* d_out = static_cast<const T*>(args_.d_out) + (row * a_.H + h) * a_.V;
    const int count = static_cast<int>(view.queries), all_lanes = static_cast<int>(lanes);
    pair_heads<Operand<T>>(query, a_.H * a_.D, count, all_lanes, a_.D, paired);
    pair_heads<Operand<T>>(d_out, a_.H * a_.V, count, all_lanes, a_.V,
                           paired + lanes / kPackOperand<T> * a_.D);
    for (int g = 0; g < kGroups && view.queries_of(g) > 0; ++g) {
      const int64_t at = g * kGroup * a_.H, queries = view.queries_of(g);
      pack_group<Operand<T>>(query + at * a_.D, a_.H * a_.D, queries, a_.D, query_of(g));
      pack_group<Operand<T>>(d_out + at * a_.V, a_.H * a_.V, queries, a_.V, d_out_of(g));
      load_statistics(g, row + g * kGroup, h, queries);
      std::memset(sums_of(g), 0, static_cast<size_t>(a_.D * kGroup) * sizeof(float));
    }
  }

  void load_statistics(int g, int64_t row, int64_t h, int64_t count) {
    const int64_t at = row * a_.H + h;
    load_lse(a_.softmax_max + at, a_.softmax_sum + at, a_.H, count, lse_[g]);
    float delta[kGroup] = {};
    for (int64_t i = 0; i < count; ++i) {
      const T* out = static_cast<const T*>(a_.out) + (at + i * a_.H) * a_.V;
      const T* d_out = static_cast<const T*>(args_.d_out) + (at + i * a_.H) * a_.V;
      Floats products = {};
      for (int64_t d = 0; d < a_.V; d += kLanes) {
        products = fma(load_as_floats(out + d), load_as_floats(d_out + d), products);
      }
      delta[i] = sum(products);
    }
    for (int v = 0; v < kVectors; ++v) delta_[g][v] = load(delta + v * kLanes);
  }

  void add_tile(int g, const GroupView& view, const TileRows& keys, const TileRows& values,
                int64_t key, int32_t* key_weights, int64_t lanes) {
    const bool whole = view.all_see(key, key + keys.padded);
    const int64_t words = 2 * lanes / kPackOperand<T>;
    for (int r = 0; r < keys.padded; r += kRows) {
      Floats scores[kRows][kVectors], d_values[kRows][kVectors];
      multiply_group<Operand<T>>(keys.of + r, query_of(g), a_.D, scores);
      multiply_group<Operand<T>>(values.of + r, d_out_of(g), a_.V, d_values);
      int32_t* weights = key_weights + r * words;
      if (whole) {
        differentiate_rows<false>(g, view, key, r, scores, d_values, weights, lanes);
      } else {
        differentiate_rows<true>(g, view, key, r, scores, d_values, weights, lanes);
      }
    }
    add_weighted_rows<Operand<T>>(keys.of, keys.padded, buffers_.weights, kGroup, a_.D, sums_of(g));
  }

  // dS and P of 8 keys, those from r on of the tile: as operands of dq, and as the keys' weights.
  template <bool kPartly>
  LONGHAUL_INLINE void differentiate_rows(int g, const GroupView& view, int64_t key, int r,
                                          const Floats (&scores)[kRows][kVectors],
                                          const Floats (&d_values)[kRows][kVectors],
                                          int32_t* key_weights, int64_t lanes) {
    const Floats scale = all(a_.scale), scale2 = all(a_.scale * kLog2E);
    const int64_t words = 2 * lanes / kPackOperand<T>;
    for (int i = 0; i < kRows; i += kPackOperand<T>) {
      for (int v = 0; v < kVectors; ++v) {
        Floats dS[kPackOperand<T>];
        for (int u = 0; u < kPackOperand<T>; ++u) {
          Floats x = fma(scores[i + u][v], scale2, -lse_[g][v]);
          if constexpr (kPartly) x = select(view.sees(v, key + r + i + u), x, all(kMasked));
          const Floats p = exp2(x);
          dS[u] = p * (d_values[i + u][v] - delta_[g][v]) * scale;
          Layout::store_key_weights(key_weights + (i + u) * words, g * kVectors + v,
                                    static_cast<int>(lanes), dS[u], p);
        }
        Layout::store_operand(buffers_.weights + (r + i) / kPackOperand<T> * kGroup + v * kLanes,
                              dS);
      }
    }
  }

  void clear_tile(int g, int padded, int32_t* key_weights, int64_t lanes) {
    for (int i = 0; i < padded; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        Layout::store_key_weights(key_weights + i * 2 * lanes / kPackOperand<T>, g * kVectors + v,
                                  static_cast<int>(lanes), Floats{}, Floats{});
      }
    }
  }

  const Args& args_;
  const longhaul_flash_attention_args& a_;
  const AllKeys<T>& all_keys_;
  Buffers<T> buffers_;
  Floats lse_[kGroups][kVectors], delta_[kGroups][kVectors];
  static constexpr Ones ones_ = {};
};

// Blocks in the order in which their weights are added: those of the heads that share keys (a set)
// one after the other. A superblock is some blocks of one set, or some whole sets.
struct Plan {
  int64_t heads_in_set, blocks_in_set, sets;
  int64_t blocks_at_once, sets_at_once;  // one of the two is 1 or all of a set

  Plan(const longhaul_flash_attention_args& a, int64_t blocks) {
    heads_in_set = a.key_heads == 1 ? a.H : 1;
    blocks_in_set = num_blocks(a.S) * heads_in_set;
    sets = a.B * a.H / heads_in_set;
    blocks_at_once = blocks < blocks_in_set ? blocks : blocks_in_set;
    sets_at_once = blocks < blocks_in_set ? 1 : blocks / blocks_in_set;
    if (sets_at_once > sets) sets_at_once = sets;
  }
};

template <typename T>
class Run {
 public:
  static size_t thread_bytes(const Args& args) {
    Workspace workspace(nullptr);
    const Buffers<T> one(args.forward, workspace);
    return workspace.bytes();
  }

  Run(const Args& args, Workspace& workspace)
      : args_(args),
        a_(args.forward),
        words_(block_lanes(a_.S) / kPackOperand<T>),
        scatter_(plan_scatter(workspace)),
        plan_(a_, scatter_.blocks),
        keys_(a_, workspace) {
    key_sums_ = workspace.take<float>(plan_.sets_at_once * a_.L * a_.D);
    value_sums_ = workspace.take<float>(a_.value ? plan_.sets_at_once * a_.L * a_.V : 0);
  }

  // On all threads of the enclosing parallel region.
  void run(Backward<T>& backward) const {
    for (int64_t set = 0; set < plan_.sets; set += plan_.sets_at_once) {
      const int64_t left = plan_.sets - set;
      const int64_t sets = left < plan_.sets_at_once ? left : plan_.sets_at_once;
      for (int64_t block = 0; block < plan_.blocks_in_set; block += plan_.blocks_at_once) {
        run_superblock(backward, set, sets, block);
      }
    }
  }

  const AllKeys<T>& keys() const { return keys_; }

 private:
  BlockScatter plan_scatter(Workspace& workspace) const {
    BlockScatter scatter = {};
    scatter.L = a_.L;
    scatter.lanes = block_lanes(a_.S);
    scatter.weight_words = 2 * words_;
    scatter.paired_words = words_ * (a_.D + a_.V);
    scatter.take(workspace, num_blocks(a_.S) * a_.B * a_.H, omp_get_max_threads());
    return scatter;
  }

  void run_superblock(Backward<T>& backward, int64_t set0, int64_t sets, int64_t block0) const {
    const int64_t end = block0 + plan_.blocks_at_once;
    const int64_t count = (end < plan_.blocks_in_set ? end : plan_.blocks_in_set) - block0;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < sets * count; ++i) {
      const int64_t set = set0 + i / count, block = block0 + i % count;
      const int64_t head = set * plan_.heads_in_set + block % plan_.heads_in_set;
      backward.differentiate(head / a_.H, head % a_.H, block / plan_.heads_in_set * kBlock,
                             scatter_, i);
    }
    const int64_t chunks = (a_.L + kChunk - 1) / kChunk;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < sets * chunks; ++i) {
      add_chunk(set0, i / chunks, i % chunks * kChunk, block0, count);
    }
  }

  // Second phase for the keys from `from` on of the superblock's set number `place`.
  void add_chunk(int64_t set0, int64_t place, int64_t from, int64_t block0, int64_t count) const {
    const int64_t to = from + kChunk < a_.L ? from + kChunk : a_.L;
    const bool first = block0 == 0, last = block0 + count == plan_.blocks_in_set;
    const RowTerm dk{.paired = nullptr, .D = a_.D, .offset = 0, .words = static_cast<int>(words_)};
    const RowTerm dv{.paired = nullptr,
                     .D = a_.V,
                     .offset = static_cast<int>(words_),
                     .words = static_cast<int>(words_)};
    const auto add = [&](const RowTerm* terms, const int64_t* offsets, int num, int64_t D,
                         float* sums, void* out) {
      float* rows = sums + place * a_.L * D;
      const int64_t n = (to - from) * D;
      if (first) std::memset(rows + from * D, 0, static_cast<size_t>(n) * sizeof(float));
      scatter_.template add<Operand<T>>(place * count, (place + 1) * count, from, to, terms,
                                        offsets, num, D, rows);
      T* result = static_cast<T*>(out) + ((set0 + place) * a_.L + from) * D;
      for (int64_t i = 0; last && i < n; i += kLanes) {
        store_rounded(result + i, load(rows + from * D + i));
      }
    };
    const RowTerm both[2] = {dk, dv};
    const int64_t offsets[2] = {0, words_ * a_.D};
    add(both, offsets, a_.value ? 1 : 2, a_.D, key_sums_, args_.d_key);
    if (a_.value) add(both + 1, offsets + 1, 1, a_.V, value_sums_, args_.d_value);
  }

  static constexpr int64_t kChunk = 64;  // keys whose sums a thread owns

  const Args& args_;
  const longhaul_flash_attention_args& a_;
  int64_t words_;  // of a key's dS in a block
  BlockScatter scatter_;
  Plan plan_;
  AllKeys<T> keys_;
  float *key_sums_, *value_sums_;  // [sets at once][L][D or V]
};

template <typename T>
void run_all(const Args& args, void* memory) {
  Workspace shared(memory);
  const Run<T> run(args, shared);
  char* rest = static_cast<char*>(memory) + shared.bytes();
  const size_t bytes = Run<T>::thread_bytes(args);
#pragma omp parallel
  {
    const FlushDenormals flush;
    Workspace own(rest + bytes * static_cast<size_t>(omp_get_thread_num()));
    Backward<T> backward(args, run.keys(), own);
    backward.clear();
    run.keys().widen();
    run.run(backward);
  }
}

}  // namespace

size_t flash_attention_grad_workspace(const Args& args) {
  return with_dtype(args.forward.dtype, [&]<typename T>() {
    Workspace shared(nullptr);
    const Run<T> run(args, shared);
    return shared.bytes() + Run<T>::thread_bytes(args) * static_cast<size_t>(omp_get_max_threads());
  });
}

void flash_attention_grad(const Args& args, void* workspace) {
  with_dtype(args.forward.dtype, [&]<typename T>() { run_all<T>(args, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
