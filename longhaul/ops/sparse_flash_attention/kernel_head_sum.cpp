// The sum over heads of the probabilities at a query's selected keys, made again from the saved
// statistics: P = exp(s - lse). Heads lie on the lanes, as in the forward pass.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/heads.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/key_list.h"
#include "longhaul/ops/cpu/operands.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_sparse_attention_args;

// What a thread works in.
template <typename T, bool kSplit>
struct Buffers {
  using Layout = HeadLayout<Operand<T>, kSplit>;

  KeyList keys;
  int32_t* query;  // [D steps][vectors][16]
  char* zeros;     // a row

  Buffers(const Args& a, Workspace& workspace) {
    const int64_t room = round_up(a.K, kKeyBlock) + kLanes;
    keys.keys = workspace.take<int32_t>(room);
    keys.slots = workspace.take<int32_t>(room);
    query = workspace.take<int32_t>(a.D / Layout::kStep * Layout::vectors(a.H) * kLanes);
    zeros = workspace.take<char>(a.D * static_cast<int64_t>(sizeof(Operand<T>)));
  }
};

template <typename T, bool kSplit>
class HeadSum {
 public:
  using Layout = HeadLayout<Operand<T>, kSplit>;

  HeadSum(const Args& a, Workspace& workspace) : a_(a), buffers_(a, workspace) {}

  void clear() { std::memset(buffers_.zeros, 0, static_cast<size_t>(a_.D) * sizeof(Operand<T>)); }

  // One query: `row` counts over the batch, `key` is its row of the batch.
  void add_heads(int64_t row, const Operand<T>* key) {
    const int64_t row_bytes = a_.D * static_cast<int64_t>(sizeof(Operand<T>)),
                  lanes = vectors() * kLanes;
    const char* base = reinterpret_cast<const char*>(key);
    KeyList& keys = buffers_.keys;
    keys.fill(a_.indices + row * a_.K, a_.K);
    pack_heads<Operand<T>, kSplit>(static_cast<const T*>(a_.query) + row * a_.H * a_.D, a_.D,
                                   static_cast<int>(a_.H), a_.D, static_cast<int>(vectors()),
                                   buffers_.query, lanes);
    Layout::load_lse(a_.softmax_max + row * a_.H, a_.softmax_sum + row * a_.H, a_.H, lse_);
    float* out = a_.head_sum + row * a_.K;
    keys.clear_values(out, a_.K);
    for (int64_t from = 0; from < keys.size; from += kKeyBlock) {
      const char* rows[kKeyBlock];
      const int count = keys.rows(from, base, row_bytes, buffers_.zeros, rows);
      keys.prefetch_rows(from + kKeyBlock, from + 2 * kKeyBlock, base, row_bytes);
      for (int r = 0; r < count; r += kLanes) {
        keys.store_values(sums_of(rows + r), out, from + r);
      }
    }
  }

 private:
  int64_t vectors() const { return Layout::vectors(a_.H); }

  // Of 16 keys.
  LONGHAUL_INLINE Floats sums_of(const char* const* rows) const {
    const Floats scale2 = all(a_.scale * kLog2E);
    Floats units[kLanes] = {};
    for (int64_t v = 0; v < vectors(); ++v) {
      for (int r = 0; r < kLanes; r += 8) {
        Floats dots[8][1];
        multiply_rows<Operand<T>, kSplit, 8, 1, 2>(rows + r, buffers_.query + v * kLanes,
                                                   vectors() * kLanes, a_.D / Layout::kStep, dots);
        for (int i = 0; i < 8; i += Layout::kKeysInUnit) {
          units[(r + i) / Layout::kKeysInUnit] +=
              exp2(fma(Layout::unit(&dots[i][0]), scale2, -lse_[v]));
        }
      }
    }
    return sums_over_heads<kSplit>(units);
  }

  const Args& a_;
  Buffers<T, kSplit> buffers_;
  Floats lse_[kMaxVectors];
};

template <typename T, bool kSplit>
size_t thread_bytes(const Args& a) {
  Workspace workspace(nullptr);
  const HeadSum<T, kSplit> one(a, workspace);
  return workspace.bytes();
}

template <typename T, bool kSplit>
void run(const Args& a, void* memory) {
  Workspace shared(memory);
  const Operands<T> keys(a.key, a.B * a.L * a.D, shared);
  char* rest = static_cast<char*>(memory) + shared.bytes();
  const size_t bytes = thread_bytes<T, kSplit>(a);
#pragma omp parallel
  {
    const FlushDenormals flush;
    Workspace workspace(rest + bytes * static_cast<size_t>(omp_get_thread_num()));
    HeadSum<T, kSplit> sum(a, workspace);
    sum.clear();
    keys.widen();
#pragma omp for schedule(dynamic, 16)
    for (int64_t row = 0; row < a.B * a.S; ++row) {
      sum.add_heads(row, keys.get() + row / a.S * a.L * a.D);
    }
  }
}

}  // namespace

size_t sparse_attention_head_sum_workspace(const Args& a) {
  return with_layout(a.dtype, a.H, [&]<typename T, bool kSplit>() {
    Workspace shared(nullptr);
    const Operands<T> keys(a.key, a.B * a.L * a.D, shared);
    return shared.bytes() + thread_bytes<T, kSplit>(a) * static_cast<size_t>(omp_get_max_threads());
  });
}

void sparse_attention_head_sum(const Args& a, void* workspace) {
  with_layout(a.dtype, a.H, [&]<typename T, bool kSplit>() { run<T, kSplit>(a, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
