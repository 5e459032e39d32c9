// Backward. With s = scale q.k, P = exp(s - lse), delta = sum over columns of d_out out:
//   dS = P (d_out.v - delta) scale,   dq += dS k,   dk += dS q,   dv += P d_out
// The values are the first columns of the keys, so dv is added into dk.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/heads.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/operands.h"
#include "longhaul/ops/cpu/row_scatter.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_sparse_attention_grad_args;

// What a thread works in during the first phase.
template <typename T, bool kSplit>
struct Buffers {
  using Layout = HeadLayout<Operand<T>, kSplit>;

  int32_t* packed;   // for each vector of heads [V steps][q, d_out][16], then [D - V steps][16]
  int32_t* weights;  // dS of a block as operands
  float* sums;       // dq [D / 32][heads][32]
  char* zeros;       // a row

  Buffers(const longhaul_sparse_attention_args& a, Workspace& workspace) {
    const int64_t vectors = Layout::vectors(a.H);
    packed = workspace.take<int32_t>(vectors * kLanes * (a.D + a.V) / Layout::kStep);
    weights = workspace.take<int32_t>(kKeyBlock / kPackOperand<T> * vectors * kLanes);
    sums = workspace.take<float>(a.D * Layout::heads(a.H));
    zeros = workspace.take<char>(a.D * static_cast<int64_t>(sizeof(Operand<T>)));
  }
};

// A query's dS and P at each key lie one after the other: the words of 2 x heads.
template <typename T, bool kSplit>
RowScatter plan_scatter(const longhaul_sparse_attention_args& a, Workspace& workspace) {
  const int heads = static_cast<int>(HeadLayout<Operand<T>, kSplit>::heads(a.H));
  const int words = heads / kPackOperand<T>;
  RowScatter scatter = {};
  scatter.K = a.K;
  scatter.D = a.D;
  scatter.weight_words = 2 * words;
  scatter.paired_words = words * (a.D + a.V);
  scatter.terms[0] = {.paired = nullptr, .D = a.D, .offset = 0, .words = words};
  scatter.terms[1] = {.paired = nullptr, .D = a.V, .offset = words, .words = words};
  scatter.term_offsets[1] = words * a.D;
  scatter.num_terms = 2;
  scatter.take(workspace, a.S, a.L, omp_get_max_threads());
  return scatter;
}

template <typename T, bool kSplit>
class Backward {
 public:
  using Layout = HeadLayout<Operand<T>, kSplit>;

  Backward(const Args& args, Workspace& workspace)
      : args_(args), a_(args.forward), buffers_(a_, workspace) {}

  void clear() { std::memset(buffers_.zeros, 0, static_cast<size_t>(a_.D) * sizeof(Operand<T>)); }

  // First phase of one query; `place`: where in the scatter's buffers it leaves its part.
  void differentiate(int64_t row, const Operand<T>* key, const RowScatter& scatter, int64_t place) {
    const T* query = static_cast<const T*>(a_.query) + row * a_.H * a_.D;
    const T* d_out = static_cast<const T*>(args_.d_out) + row * a_.H * a_.V;
    ask_for_rows(row);
    const KeyList keys = scatter.fill_keys(place, a_.indices + row * a_.K);
    pack(query, d_out);
    load_statistics(row, d_out);
    const int H = static_cast<int>(a_.H), heads = static_cast<int>(Layout::heads(a_.H));
    int32_t* paired = scatter.paired + place * scatter.paired_words;
    pair_heads<Operand<T>>(query, a_.D, H, heads, a_.D, paired + scatter.term_offsets[0]);
    pair_heads<Operand<T>>(d_out, a_.V, H, heads, a_.V, paired + scatter.term_offsets[1]);

    const char* base = reinterpret_cast<const char*>(key);
    const int64_t row_bytes = a_.D * static_cast<int64_t>(sizeof(Operand<T>));
    std::memset(buffers_.sums, 0, static_cast<size_t>(a_.D * heads) * sizeof(float));
    for (int64_t from = 0; from < keys.size; from += kKeyBlock) {
      const char* rows[kKeyBlock];
      const int count = keys.rows(from, base, row_bytes, buffers_.zeros, rows);
      keys.prefetch_rows(from + kKeyBlock, from + 2 * kKeyBlock, base, row_bytes);
      const int padded = static_cast<int>(round_up(count, 8));
      for (int r = 0; r < padded; r += 8) {
        for (int64_t v = 0; v < Layout::vectors(a_.H); ++v) {
          add_keys(rows + r, r, count - r, v,
                   scatter.weights_of(place) + (from + r) * scatter.weight_words, heads);
        }
      }
      add_weighted_rows<Operand<T>>(rows, padded, buffers_.weights, heads, a_.D, buffers_.sums);
    }
    store_sums<Operand<T>>(buffers_.sums, heads, H, a_.D, ones_,
                           static_cast<T*>(args_.d_query) + row * a_.H * a_.D, a_.D);
  }

 private:
  // What this query writes, and what the query that this thread probably takes next reads.
  LONGHAUL_INLINE void ask_for_rows(int64_t row) const {
    const int64_t next = row + omp_get_num_threads();
    prefetch_row(static_cast<const T*>(args_.d_query), row, a_.H * a_.D);
    if (next >= a_.B * a_.S) return;
    prefetch_row(a_.indices, next, a_.K);
    prefetch_row(static_cast<const T*>(a_.query), next, a_.H * a_.D);
    prefetch_row(static_cast<const T*>(a_.out), next, a_.H * a_.V);
    prefetch_row(static_cast<const T*>(args_.d_out), next, a_.H * a_.V);
  }

  void pack(const T* query, const T* d_out) {
    const int64_t V_steps = a_.V / Layout::kStep, all_steps = (a_.D + a_.V) / Layout::kStep;
    for (int64_t v = 0; v < Layout::vectors(a_.H); ++v) {
      int32_t* to = buffers_.packed + v * all_steps * kLanes;
      const int64_t h0 = v * Layout::kHeads, left = a_.H - h0;
      const int heads = static_cast<int>(left < Layout::kHeads ? left : Layout::kHeads);
      const T* q = query + h0 * a_.D;
      pack_heads<Operand<T>, kSplit>(q, a_.D, heads, a_.V, 1, to, 2 * kLanes);
      pack_heads<Operand<T>, kSplit>(d_out + h0 * a_.V, a_.V, heads, a_.V, 1, to + kLanes,
                                     2 * kLanes);
      pack_heads<Operand<T>, kSplit>(q + a_.V, a_.D, heads, a_.D - a_.V, 1,
                                     to + V_steps * 2 * kLanes, kLanes);
    }
  }

  // Log-sum-exp in base 2 and delta of each head.
  void load_statistics(int64_t row, const T* d_out) {
    const T* out = static_cast<const T*>(a_.out) + row * a_.H * a_.V;
    Layout::load_lse(a_.softmax_max + row * a_.H, a_.softmax_sum + row * a_.H, a_.H, lse_);
    for (int64_t v = 0; v < Layout::vectors(a_.H); ++v) {
      Floats products[kLanes] = {};
      for (int64_t i = 0; i < Layout::kHeads && v * Layout::kHeads + i < a_.H; ++i) {
        const int64_t at = (v * Layout::kHeads + i) * a_.V;
        for (int64_t d = 0; d < a_.V; d += kLanes * kPack<T>) {
          products[i] = dot<T>(products[i], load_words(out + at + d), load_words(d_out + at + d));
        }
      }
      float delta[kLanes];
      store(delta, sums_of_lanes(products));
      delta_[v] = Layout::load_heads(delta);
    }
  }

  // dS and P of 8 keys, of which `count` are there, for one vector of heads: as operands of dq for
  // rows r.. of the block, and as weights of the keys' gradients.
  LONGHAUL_INLINE void add_keys(const char* const* rows, int r, int count, int64_t v,
                                int32_t* key_weights, int heads) {
    const int64_t V_steps = a_.V / Layout::kStep, R_steps = (a_.D - a_.V) / Layout::kStep;
    const int32_t* packed = buffers_.packed + v * (2 * V_steps + R_steps) * kLanes;
    Floats dots[8][2];
    multiply_rows<Operand<T>, kSplit, 8, 2>(rows, packed, 2 * kLanes, V_steps, dots);
    const char* rest[8];
    Floats scores[8][1];
    for (int i = 0; i < 8; ++i) {
      rest[i] = rows[i] + a_.V * static_cast<int64_t>(sizeof(Operand<T>));
      scores[i][0] = dots[i][0];
    }
    multiply_rows<Operand<T>, kSplit, 8, 1, 2, true>(rest, packed + 2 * V_steps * kLanes, kLanes,
                                                     R_steps, scores);

    constexpr int kKeys = Layout::kKeysInUnit, kUnits = Layout::kUnitsAtOnce;
    const Floats scale2 = all(a_.scale * kLog2E), scale = all(a_.scale);
    for (int i = 0; i < 8; i += kKeys * kUnits) {
      Floats dS[kUnits];
      for (int u = 0; u < kUnits; ++u) {
        const int at = i + u * kKeys;
        const Floats d_values[2] = {dots[at][1], dots[at + kKeys - 1][1]};
        const Floats s[2] = {scores[at][0], scores[at + kKeys - 1][0]};
        const Floats p = select(Layout::keys_before(count - at),
                                exp2(fma(Layout::unit(s), scale2, -lse_[v])), Floats{});
        dS[u] = p * (Layout::unit(d_values) - delta_[v]) * scale;
        Layout::store_key_weights(key_weights + at * 2 * heads / kPackOperand<T>, v, heads, dS[u],
                                  p);
      }
      Layout::store_operand(
          buffers_.weights + (r + i) / kPackOperand<T> * heads + v * Layout::kHeads, dS);
    }
  }

  const Args& args_;
  const longhaul_sparse_attention_args& a_;
  Buffers<T, kSplit> buffers_;
  Floats lse_[kMaxVectors], delta_[kMaxVectors];
  static constexpr Ones ones_ = {};
};

template <typename T, bool kSplit>
struct Run {
  static size_t thread_bytes(const Args& args) {
    Workspace workspace(nullptr);
    const Backward<T, kSplit> one(args, workspace);
    return workspace.bytes();
  }

  static size_t workspace(const Args& args) {
    const auto& a = args.forward;
    Workspace shared(nullptr);
    plan_scatter<T, kSplit>(a, shared);
    const Operands<T> keys(a.key, a.B * a.L * a.D, shared);
    return shared.bytes() + thread_bytes(args) * static_cast<size_t>(omp_get_max_threads());
  }

  static void run(const Args& args, void* memory) {
    const auto& a = args.forward;
    Workspace shared(memory);
    const RowScatter scatter = plan_scatter<T, kSplit>(a, shared);
    const Operands<T> keys(a.key, a.B * a.L * a.D, shared);
    char* rest = static_cast<char*>(memory) + shared.bytes();
    const size_t bytes = thread_bytes(args);
#pragma omp parallel
    {
      const FlushDenormals flush;
      Workspace own(rest + bytes * static_cast<size_t>(omp_get_thread_num()));
      Backward<T, kSplit> backward(args, own);
      backward.clear();
      keys.widen();
      for (int64_t b = 0; b < a.B; ++b) {
        const Operand<T>* key = keys.get() + b * a.L * a.D;
        const auto differentiate = [&](int64_t t, int64_t place) {
          backward.differentiate(b * a.S + t, key, scatter, place);
        };
        scatter.run<Operand<T>>(a.S, a.L, differentiate,
                                static_cast<T*>(args.d_key) + b * a.L * a.D);
      }
    }
  }
};

}  // namespace

size_t sparse_attention_grad_workspace(const Args& args) {
  return with_layout(args.forward.dtype, args.forward.H,
                     [&]<typename T, bool kSplit>() { return Run<T, kSplit>::workspace(args); });
}

void sparse_attention_grad(const Args& args, void* workspace) {
  with_layout(args.forward.dtype, args.forward.H,
              [&]<typename T, bool kSplit>() { Run<T, kSplit>::run(args, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
