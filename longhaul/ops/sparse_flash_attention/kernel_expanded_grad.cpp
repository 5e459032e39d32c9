// Backward, with keys and values for each head. With s = scale q.k, P = exp(s - lse), delta = sum
// over columns of d_out out:
//   dS = P (d_out.v - delta) scale,   dq += dS k,   dk += dS q,   dv += P d_out
// Without atomics and in an order that no number of threads changes: a thread owns a head of a row
// of the batch, walks the queries in ascending order and adds up its keys' gradients in fp32.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/dtype.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/sparse_flash_attention/expanded.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_sparse_attention_expanded_grad_args;

template <typename T>
class Backward {
 public:
  Backward(const Args& args, Workspace& workspace) : args_(args), a_(args.forward) {
    const int64_t K = round_up(a_.K, kKeyBlock);
    keys_.keys = workspace.take<int32_t>(K + kLanes);
    keys_.slots = workspace.take<int32_t>(K + kLanes);
    vectors_ = workspace.take<float>(a_.D + a_.V);
    query_sums_ = workspace.take<float>(a_.D);
    row_sums_ = workspace.take<float>(a_.L * (a_.D + a_.V));
    zeros_ = workspace.take<char>(zero_bytes());
  }

  void clear() { std::memset(zeros_, 0, static_cast<size_t>(zero_bytes())); }

  void differentiate(int64_t b, int64_t h) {
    const int64_t width = a_.D + a_.V;
    std::memset(row_sums_, 0, static_cast<size_t>(a_.L * width) * sizeof(float));
    const auto keys = HeadRows::of(static_cast<const T*>(a_.key), a_.key_stride, a_.L, a_.H, b, h);
    const auto values =
        HeadRows::of(static_cast<const T*>(a_.value), a_.value_stride, a_.L, a_.H, b, h);
    for (int64_t t = 0; t < a_.S; ++t) add_query(b * a_.S + t, h, keys, values);
    for (int64_t s = 0; s < a_.L; ++s) {
      const int64_t row = (b * a_.L + s) * a_.H + h;
      store_row(row_sums_ + s * width, a_.D, static_cast<T*>(args_.d_key) + row * a_.D);
      store_row(row_sums_ + s * width + a_.D, a_.V, static_cast<T*>(args_.d_value) + row * a_.V);
    }
  }

 private:
  // Of a block of keys.
  struct Weights {
    float dS[kKeyBlock], P[kKeyBlock];
    T operand[kKeyBlock];  // dS
  };

  int64_t zero_bytes() const {
    return (a_.D > a_.V ? a_.D : a_.V) * static_cast<int64_t>(sizeof(T));
  }

  static void store_row(const float* sums, int64_t D, T* out) {
    for (int64_t d = 0; d < D; d += kLanes) store_rounded(out + d, load(sums + d));
  }

  // One query, which is row `row` over the batch.
  void add_query(int64_t row, int64_t h, const HeadRows& keys, const HeadRows& values) {
    const int64_t at = row * a_.H + h;
    const T* query = static_cast<const T*>(a_.query) + at * a_.D;
    const T* d_out = static_cast<const T*>(args_.d_out) + at * a_.V;
    keys_.fill(a_.indices + row * a_.K, a_.K);
    load_query(at, query, d_out);
    std::memset(query_sums_, 0, static_cast<size_t>(a_.D) * sizeof(float));
    for (int64_t from = 0; from < keys_.size; from += kKeyBlock) {
      const char *key_rows[kKeyBlock], *value_rows[kKeyBlock];
      const int count = keys_.rows(from, keys.base, keys.bytes, zeros_, key_rows);
      keys_.rows(from, values.base, values.bytes, zeros_, value_rows);
      Weights weights;
      for (int r = 0; r < count; r += kLanes) {
        const Floats s = multiply_rows(key_rows + r, query, a_.D);
        const Floats d_p = multiply_rows(value_rows + r, d_out, a_.V);
        add_weights(s, d_p, count - r, r, weights);
      }
      add_weighted_rows(key_rows, static_cast<int>(round_up(count, kPack<T>)), weights.operand,
                        a_.D, query_sums_);
      for (int i = 0; i < count; ++i) {
        add_to_row(keys_.keys[from + i], weights.dS[i], weights.P[i]);
      }
    }
    constexpr float kOne = 1;
    store_sums<T>(query_sums_, 1, 1, a_.D, &kOne, static_cast<T*>(args_.d_query) + at * a_.D, a_.D);
  }

  // Log-sum-exp in base 2, delta, and the vectors that are added to the keys' gradients.
  void load_query(int64_t at, const T* query, const T* d_out) {
    const T* out = static_cast<const T*>(a_.out) + at * a_.V;
    for (int64_t d = 0; d < a_.D; d += kLanes) store(vectors_ + d, load_as_floats(query + d));
    Floats products = {};
    for (int64_t d = 0; d < a_.V; d += kLanes) {
      const Floats gradient = load_as_floats(d_out + d);
      store(vectors_ + a_.D + d, gradient);
      products = fma(load_as_floats(out + d), gradient, products);
    }
    delta_ = all(sum(products));
    lse_ = a_.softmax_max[at] * kLog2E + log2(all(a_.softmax_sum[at]));
  }

  // Of 16 keys, of which `count` are there.
  LONGHAUL_INLINE void add_weights(Floats s, Floats d_p, int64_t count, int r, Weights& weights) {
    const Floats p =
        select(first_lanes(count), exp2(fma(s, all(a_.scale * kLog2E), -lse_)), Floats{});
    const Floats dS = p * (d_p - delta_) * a_.scale;
    store(weights.dS + r, dS);
    store(weights.P + r, p);
    store_rounded(weights.operand + r, dS);
  }

  void add_to_row(int64_t key, float dS, float p) {
    float* sums = row_sums_ + key * (a_.D + a_.V);
    add_scaled(vectors_, a_.D, dS, sums);
    add_scaled(vectors_ + a_.D, a_.V, p, sums + a_.D);
  }
  static LONGHAUL_INLINE void add_scaled(const float* x, int64_t n, float factor, float* sums) {
    for (int64_t i = 0; i < n; i += kLanes) {
      store(sums + i, fma(load(x + i), all(factor), load(sums + i)));
    }
  }

  const Args& args_;
  const longhaul_sparse_attention_expanded_args& a_;
  KeyList keys_;
  float* vectors_;     // [D + V]: q and d_out
  float* query_sums_;  // dq [D / 32][32]
  float* row_sums_;    // dk and dv [L][D + V]
  char* zeros_;        // a row
  Floats lse_, delta_;
};

template <typename T>
size_t thread_bytes(const Args& args) {
  Workspace workspace(nullptr);
  const Backward<T> one(args, workspace);
  return workspace.bytes();
}

template <typename T>
void run(const Args& args, void* memory) {
  const size_t bytes = thread_bytes<T>(args);
  const int64_t H = args.forward.H;
#pragma omp parallel
  {
    const FlushDenormals flush;
    Workspace workspace(static_cast<char*>(memory) +
                        bytes * static_cast<size_t>(omp_get_thread_num()));
    Backward<T> backward(args, workspace);
    backward.clear();
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < args.forward.B * H; ++i) backward.differentiate(i / H, i % H);
  }
}

}  // namespace

size_t sparse_attention_expanded_grad_workspace(const Args& args) {
  return with_dtype(args.forward.dtype, [&]<typename T>() {
    return thread_bytes<T>(args) * static_cast<size_t>(omp_get_max_threads());
  });
}

void sparse_attention_expanded_grad(const Args& args, void* workspace) {
  with_dtype(args.forward.dtype, [&]<typename T>() { run<T>(args, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
