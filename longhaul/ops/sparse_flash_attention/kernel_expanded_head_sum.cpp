// The sum over heads of the probabilities at a query's selected keys, with keys for each head, made
// again from the saved statistics: P = exp(s - lse). Keys lie on the lanes.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/dtype.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/sparse_flash_attention/expanded.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_sparse_attention_expanded_args;

template <typename T>
class HeadSum {
 public:
  HeadSum(const Args& a, Workspace& workspace) : a_(a) {
    const int64_t room = round_up(a.K, kKeyBlock) + kLanes;
    keys_.keys = workspace.take<int32_t>(room);
    keys_.slots = workspace.take<int32_t>(room);
    zeros_ = workspace.take<char>(a.D * static_cast<int64_t>(sizeof(T)));
  }

  void clear() { std::memset(zeros_, 0, static_cast<size_t>(a_.D) * sizeof(T)); }

  // All heads of the task's queries of row b of the batch, from `first` on.
  void add_heads(int64_t b, int64_t first) {
    const int64_t end = first + kQueries < a_.S ? first + kQueries : a_.S;
    std::memset(a_.head_sum + (b * a_.S + first) * a_.K, 0,
                static_cast<size_t>((end - first) * a_.K) * sizeof(float));
    for (int64_t h = 0; h < a_.H; ++h) {
      const auto keys =
          HeadRows::of(static_cast<const T*>(a_.key), a_.key_stride, a_.L, a_.H, b, h);
      for (int64_t t = first; t < end; ++t) add_head(b * a_.S + t, h, keys);
    }
  }

 private:
  // One query, which is row `row` over the batch, and one head.
  void add_head(int64_t row, int64_t h, const HeadRows& keys) {
    keys_.fill(a_.indices + row * a_.K, a_.K);
    const int64_t at = row * a_.H + h;
    const T* query = static_cast<const T*>(a_.query) + at * a_.D;
    float* out = a_.head_sum + row * a_.K;
    const Floats scale = all(a_.scale * kLog2E);
    const Floats lse = all(a_.softmax_max[at]) * kLog2E + log2(all(a_.softmax_sum[at]));
    for (int64_t from = 0; from < keys_.size; from += kKeyBlock) {
      const char* rows[kKeyBlock];
      const int count = keys_.rows(from, keys.base, keys.bytes, zeros_, rows);
      for (int r = 0; r < count; r += kLanes) {
        float found[kLanes];
        store(found, exp2(multiply_rows(rows + r, query, a_.D) * scale - lse));
        const int end = count - r < kLanes ? count - r : kLanes;
        for (int i = 0; i < end; ++i) out[keys_.slots[from + r + i]] += found[i];
      }
    }
  }

  const Args& a_;
  KeyList keys_;
  char* zeros_;  // a row
};

template <typename T>
size_t thread_bytes(const Args& a) {
  Workspace workspace(nullptr);
  const HeadSum<T> one(a, workspace);
  return workspace.bytes();
}

template <typename T>
void run(const Args& a, void* memory) {
  const size_t bytes = thread_bytes<T>(a);
  const int64_t tasks = (a.S + kQueries - 1) / kQueries;
#pragma omp parallel
  {
    const FlushDenormals flush;
    Workspace workspace(static_cast<char*>(memory) +
                        bytes * static_cast<size_t>(omp_get_thread_num()));
    HeadSum<T> sum(a, workspace);
    sum.clear();
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < a.B * tasks; ++task) {
      sum.add_heads(task / tasks, task % tasks * kQueries);
    }
  }
}

}  // namespace

size_t sparse_attention_expanded_head_sum_workspace(const Args& a) {
  return with_dtype(a.dtype, [&]<typename T>() {
    return thread_bytes<T>(a) * static_cast<size_t>(omp_get_max_threads());
  });
}

void sparse_attention_expanded_head_sum(const Args& a, void* workspace) {
  with_dtype(a.dtype, [&]<typename T>() { run<T>(a, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
