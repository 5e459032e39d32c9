// Forward, with keys and values for each head. All of a query's scores are there before their
// softmax: keys lie on the lanes.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/dtype.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/sparse_flash_attention/expanded.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_sparse_attention_expanded_args;

constexpr float kMasked = -1e30F;

template <typename T>
class Forward {
 public:
  Forward(const Args& a, Workspace& workspace) : a_(a) {
    const int64_t K = round_up(a.K, kKeyBlock);
    keys_.keys = workspace.take<int32_t>(K + kLanes);
    keys_.slots = workspace.take<int32_t>(K + kLanes);
    scores_ = workspace.take<float>(K);
    weights_ = workspace.take<T>(K);
    sums_ = workspace.take<float>(a.V);
    zeros_ = workspace.take<char>(zero_bytes());
  }

  void clear() { std::memset(zeros_, 0, static_cast<size_t>(zero_bytes())); }

  // All heads of the task's queries of row b of the batch, from `first` on.
  void attend(int64_t b, int64_t first) {
    const int64_t end = first + kQueries < a_.S ? first + kQueries : a_.S;
    for (int64_t h = 0; h < a_.H; ++h) {
      const auto keys =
          HeadRows::of(static_cast<const T*>(a_.key), a_.key_stride, a_.L, a_.H, b, h);
      const auto values =
          HeadRows::of(static_cast<const T*>(a_.value), a_.value_stride, a_.L, a_.H, b, h);
      for (int64_t t = first; t < end; ++t) attend(b * a_.S + t, h, keys, values);
    }
  }

 private:
  int64_t zero_bytes() const {
    return (a_.D > a_.V ? a_.D : a_.V) * static_cast<int64_t>(sizeof(T));
  }

  // One query, which is row `row` over the batch, and one head.
  void attend(int64_t row, int64_t h, const HeadRows& keys, const HeadRows& values) {
    const int64_t at = row * a_.H + h;
    keys_.fill(a_.indices + row * a_.K, a_.K);
    const Floats max = all(score(static_cast<const T*>(a_.query) + at * a_.D, keys));
    const float sum = exponentiate(max);
    const bool empty = keys_.size == 0;
    const float inverse = empty ? 0 : 1 / sum;
    a_.softmax_max[at] = empty ? 0 : max[0] * kLn2;
    a_.softmax_sum[at] = sum;

    std::memset(sums_, 0, static_cast<size_t>(a_.V) * sizeof(float));
    for (int64_t from = 0; from < keys_.size; from += kKeyBlock) {
      const char* rows[kKeyBlock];
      const int count = keys_.rows(from, values.base, values.bytes, zeros_, rows);
      add_weighted_rows(rows, static_cast<int>(round_up(count, kPack<T>)), weights_ + from, a_.V,
                        sums_);
    }
    store_sums<T>(sums_, 1, 1, a_.V, &inverse, static_cast<T*>(a_.out) + at * a_.V, a_.V);
    if (a_.head_sum) add_to_head_sum(a_.head_sum + row * a_.K, h, inverse);
  }

  // Scores in base 2, those behind the last key masked; returns the largest.
  float score(const T* query, const HeadRows& keys) {
    const Floats scale = all(a_.scale * kLog2E);
    Floats found = all(kMasked);
    for (int64_t from = 0; from < keys_.size; from += kKeyBlock) {
      const char* rows[kKeyBlock];
      const int count = keys_.rows(from, keys.base, keys.bytes, zeros_, rows);
      for (int r = 0; r < count; r += kLanes) {
        const Floats scores = select(first_lanes(count - r),
                                     multiply_rows(rows + r, query, a_.D) * scale, all(kMasked));
        store(scores_ + from + r, scores);
        found = max(found, scores);
      }
    }
    return largest(found);
  }

  // Scores to exponentials in place and to the weights of the values; returns their sum.
  float exponentiate(Floats max) {
    Floats sums = {};
    for (int64_t i = 0; i < keys_.size; i += kLanes) {
      const Floats e = exp2(load(scores_ + i) - max);
      sums += e;
      store(scores_ + i, e);
      store_rounded(weights_ + i, e);
    }
    return sum(sums);
  }

  void add_to_head_sum(float* out, int64_t h, float inverse) const {
    if (h == 0) std::memset(out, 0, static_cast<size_t>(a_.K) * sizeof(float));
    for (int64_t i = 0; i < keys_.size; ++i) out[keys_.slots[i]] += scores_[i] * inverse;
  }

  const Args& a_;
  KeyList keys_;
  float* scores_;  // [K], then exponentials
  T* weights_;     // [K]
  float* sums_;    // [V / 32][32]
  char* zeros_;    // a row
};

template <typename T>
size_t thread_bytes(const Args& a) {
  Workspace workspace(nullptr);
  const Forward<T> one(a, workspace);
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
    Forward<T> forward(a, workspace);
    forward.clear();
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < a.B * tasks; ++task) {
      forward.attend(task / tasks, task % tasks * kQueries);
    }
  }
}

}  // namespace

size_t sparse_attention_expanded_workspace(const Args& a) {
  return with_dtype(a.dtype, [&]<typename T>() {
    return thread_bytes<T>(a) * static_cast<size_t>(omp_get_max_threads());
  });
}

void sparse_attention_expanded(const Args& a, void* workspace) {
  with_dtype(a.dtype, [&]<typename T>() { run<T>(a, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
