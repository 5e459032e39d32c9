// Between tensors and the CPU kernels, which take pointers.
#pragma once

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "include/longhaul/kernels.h"
#include "longhaul/base/error.h"

namespace longhaul::ops {

// The rows of attention's and the indexer's kernels are a multiple of it.
inline constexpr int64_t kKernelColumns = 32;

// Empty if the CPU kernels can compute with `x` (a Meta tensor gets its shapes), else why not.
inline std::string why_no_cpu_kernel(const at::Tensor& x) {
  if (!x.device().is_cpu() && !x.is_meta()) {
    return "there is none for " + x.device().str();
  }
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16) {
    return std::string("it computes in Float and BFloat16, not in ") +
           c10::toString(x.scalar_type());
  }
  return "";
}

inline longhaul_dtype kernel_dtype(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? LONGHAUL_BFLOAT16 : LONGHAUL_FLOAT32;
}

// A workspace that many calls share: it grows, by a quarter at least, to what the largest needs.
// Calls kernels of include/longhaul/kernels.h, which profilers see as longhaul::op; throws Error
// with what they say.
class KernelMemory {
 public:
  template <typename Args>
  void run(const char* op, const char* (*kernel)(const Args*, void*),
           size_t (*workspace)(const Args*), const Args& args) {
    RECORD_FUNCTION(std::string("longhaul::") + op, c10::ArrayRef<const c10::IValue>{});
    const auto bytes = static_cast<int64_t>(workspace(&args));
    if (size_ < bytes) {
      memory_.reset();  // before the larger one is there
      size_ = std::max(bytes, size_ + size_ / 4);
      memory_ = at::empty({size_}, at::kByte);
    }
    const char* wrong = kernel(&args, memory_.defined() ? memory_.data_ptr() : nullptr);
    LONGHAUL_CHECK(!wrong, "{}: {}", op, wrong ? wrong : "");
  }

 private:
  at::Tensor memory_;
  int64_t size_ = 0;
};

// A call with a workspace of its own. It is not kept for the next call: in longhaul's processes
// freed pages stay with the allocator (cli/startup.h), so that the next one costs no page faults
// and other tensors lie there in between. For other programs: docs/operators.md.
template <typename Args>
void run_kernel(const char* op, const char* (*kernel)(const Args*, void*),
                size_t (*workspace)(const Args*), const Args& args) {
  KernelMemory().run(op, kernel, workspace, args);
}

// The same for a kernel without a workspace.
template <typename Args>
void run_kernel(const char* op, const char* (*kernel)(const Args*), const Args& args) {
  RECORD_FUNCTION(std::string("longhaul::") + op, c10::ArrayRef<const c10::IValue>{});
  const char* wrong = kernel(&args);
  LONGHAUL_CHECK(!wrong, "{}: {}", op, wrong ? wrong : "");
}

// x with the sizes `sizes`, the elements of its last dimension next to each other. A copy only
// where no strides can say that.
inline at::Tensor as_rows(const at::Tensor& x, at::IntArrayRef sizes) {
  const at::Tensor rows = x.reshape(sizes);
  return rows.stride(-1) == 1 || rows.size(-1) == 1 ? rows : rows.contiguous();
}

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The last dimension filled up with zeros to a multiple of `multiple`, contiguous. Nothing is
// copied where nothing is missing.
inline at::Tensor pad_last(const at::Tensor& x, int64_t multiple) {
  const int64_t missing = round_up(x.size(-1), multiple) - x.size(-1);
  return missing == 0 ? x.contiguous() : at::constant_pad_nd(x, {0, missing});
}

}  // namespace longhaul::ops
