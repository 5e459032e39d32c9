// The sum over heads of the probabilities of a block of queries, made again from the saved
// statistics: P = exp(s - lse). Queries lie on the lanes, so heads add up vertically.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/operands.h"
#include "longhaul/ops/cpu/query_block.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_attention_head_sum_args;

// What the threads share.
template <typename T>
struct Shared {
  int64_t groups;
  int32_t* queries;  // [heads][groups][D / kPackOperand<T>][32]
  float* lse;        // [heads][groups][32], in base 2
  char* zeros;       // a row
  Operands<T> keys;  // a run is the rows of a head, or those of all heads

  Shared(const Args& a, Workspace& workspace)
      : groups(block_lanes(a.S) / kGroup),
        keys(a.key, a.key_heads, a.L * a.D, a.key_head_stride, workspace) {
    queries = workspace.take<int32_t>(a.H * groups * (a.D / kPackOperand<T>)*kGroup);
    lse = workspace.take<float>(a.H * groups * kGroup);
    zeros = workspace.take<char>(a.D * static_cast<int64_t>(sizeof(Operand<T>)));
  }
};

template <typename T>
class HeadSum {
 public:
  HeadSum(const Args& a, Workspace& workspace)
      : a_(a), shared_(a, workspace), view_(a.first_key, a.last_key, a.S) {
    std::memset(shared_.zeros, 0, static_cast<size_t>(a.D) * sizeof(Operand<T>));
  }

  // On all threads of the enclosing parallel region.
  void run() const {
    const int64_t groups = shared_.groups, tiles = (a_.L + kTile - 1) / kTile;
    shared_.keys.widen();
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a_.H * groups; ++i) pack(i / groups, static_cast<int>(i % groups));
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tiles * groups; ++i) {
      add_heads(static_cast<int>(i % groups), i / groups * kTile);
    }
  }

 private:
  int32_t* queries_of(int64_t h, int g) const {
    return shared_.queries + (h * shared_.groups + g) * (a_.D / kPackOperand<T>)*kGroup;
  }
  float* lse_of(int64_t h, int g) const { return shared_.lse + (h * shared_.groups + g) * kGroup; }

  void pack(int64_t h, int g) const {
    const int64_t at = g * kGroup * a_.H + h, count = view_.queries_of(g);
    pack_group<Operand<T>>(static_cast<const T*>(a_.query) + at * a_.D, a_.H * a_.D, count, a_.D,
                           queries_of(h, g));
    Floats lse[kVectors];
    load_lse(a_.softmax_max + at, a_.softmax_sum + at, a_.H, count, lse);
    for (int v = 0; v < kVectors; ++v) store(lse_of(h, g) + v * kLanes, lse[v]);
  }

  // The head sum of a group at a tile of keys.
  void add_heads(int g, int64_t key) const {
    const GroupView& view = view_.groups[g];
    float sums[kTile * kGroup] = {};
    const int64_t end = a_.L - key < kTile ? a_.L : key + kTile;
    if (view.any.meets(key, end)) {
      const bool whole = view.all_see(key, key + kTile);
      for (int64_t h = 0; h < a_.H; ++h) {
        const TileRows rows(shared_.keys.get(a_.key_heads == 1 ? 0 : h),
                            a_.D * static_cast<int64_t>(sizeof(Operand<T>)), key, end,
                            shared_.zeros);
        if (whole) {
          add_head<false>(h, g, view, rows, key, sums);
        } else {
          add_head<true>(h, g, view, rows, key, sums);
        }
      }
    }
    for (int64_t i = key; i < end; ++i) {
      float* out = a_.head_sum + (i * shared_.groups + g) * kGroup;
      std::memcpy(out, sums + (i - key) * kGroup, kGroup * sizeof(float));
    }
  }

  template <bool kPartly>
  LONGHAUL_INLINE void add_head(int64_t h, int g, const GroupView& view, const TileRows& rows,
                                int64_t key, float* sums) const {
    const Floats scale2 = all(a_.scale * kLog2E);
    const Floats lse[kVectors] = {load(lse_of(h, g)), load(lse_of(h, g) + kLanes)};
    for (int r = 0; r < rows.padded; r += kRows) {
      Floats dots[kRows][kVectors];
      multiply_group<Operand<T>>(rows.of + r, queries_of(h, g), a_.D, dots);
      for (int i = 0; i < kRows; ++i) {
        for (int v = 0; v < kVectors; ++v) {
          float* at = sums + (r + i) * kGroup + v * kLanes;
          Floats x = fma(dots[i][v], scale2, -lse[v]);
          if constexpr (kPartly) x = select(view.sees(v, key + r + i), x, all(kMasked));
          store(at, load(at) + exp2(x));
        }
      }
    }
  }

  const Args& a_;
  Shared<T> shared_;
  BlockView view_;
};

template <typename T>
void run(const Args& a, void* memory) {
  Workspace workspace(memory);
  const HeadSum<T> sum(a, workspace);
#pragma omp parallel
  {
    const FlushDenormals flush;
    sum.run();
  }
}

}  // namespace

size_t attention_head_sum_workspace(const Args& a) {
  return with_dtype(a.dtype, [&]<typename T>() {
    Workspace workspace(nullptr);
    const Shared<T> shared(a, workspace);
    return workspace.bytes();
  });
}

void attention_head_sum(const Args& a, void* workspace) {
  with_dtype(a.dtype, [&]<typename T>() { run<T>(a, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
