// The one file that calls oneDNN. libtorch exports mkldnn_matmul without a header, so it is
// declared here; this declaration is pinned to libtorch 2.11.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/matmul/matmul.h"

namespace at::native {
void mkldnn_matmul(const Tensor& mat1, const Tensor& mat2, const Tensor& result, float beta,
                   float alpha);
}  // namespace at::native

namespace longhaul::ops {
namespace {

// On Intel MKL takes large fp32 products: a training step is 1.2 times as fast (Xeon, model 207; on
// AMD MKL is half as fast). Small ones stay with oneDNN, which deviates less there: 3e-6 against
// 4e-6 in the logits of a model of 64 dimensions.
constexpr int64_t kLargeProduct = int64_t{1} << 20;  // multiplications

bool mkl_is_faster() {
  static const bool intel = __builtin_cpu_is("intel") != 0;
  return intel;
}

// oneDNN's path throws on CPUs without it.
bool has_avx512() {
  static const bool found = __builtin_cpu_supports("avx512f") != 0;
  return found;
}

// oneDNN leaves the result unwritten for K = 0.
bool onednn_applies(const Tensor& a, const Tensor& b, const Tensor& out) {
  const bool fp32_on_cpu = out.device().is_cpu() && a.scalar_type() == at::kFloat &&
                           b.scalar_type() == at::kFloat && out.numel() > 0 && a.size(-1) > 0;
  if (!fp32_on_cpu || !has_avx512()) return false;
  return !mkl_is_faster() || out.numel() * a.size(-1) < kLargeProduct;
}

// bf16 products by fp32 kernels: of the same numbers, added up in fp32 and rounded once. 1.8 times
// as fast where the CPU's own bf16 products are slow or missing (Xeon, model 207: 285 against 518
// ms of a training step).
bool takes_bf16_as_fp32(const Tensor& out) {
  static const bool slow = !__builtin_cpu_supports("amx-bf16") &&
                           (mkl_is_faster() || !__builtin_cpu_supports("avx512bf16"));
  return slow && out.device().is_cpu() && out.scalar_type() == at::kBFloat16;
}

void aten_product_out(const Tensor& a, const Tensor& b, Tensor& out, float beta) {
  if (beta == 0.0F) {
    a.dim() == 2 ? at::mm_out(out, a, b) : at::bmm_out(out, a, b);
  } else {
    a.dim() == 2 ? out.addmm_(a, b) : out.baddbmm_(a, b);
  }
}

}  // namespace

std::string fp32_product_kernels() {
  if (!has_avx512()) return "MKL: the CPU has no AVX-512 for oneDNN";
  return mkl_is_faster() ? "MKL, small ones by oneDNN: faster on Intel's CPUs" : "oneDNN";
}

void product_out(const Tensor& a, const Tensor& b, Tensor& out, float beta) {
  LONGHAUL_CHECK(a.dim() == b.dim() && (a.dim() == 2 || a.dim() == 3) && a.size(-1) == b.size(-2) &&
                     (a.dim() == 2 || a.size(0) == b.size(0)),
                 "product: expected [M, K] and [K, N], or both with as many in front, got [{}] and "
                 "[{}]",
                 shape_text(a), shape_text(b));
  auto expected = a.sizes().vec();
  expected.back() = b.size(-1);
  check_shape(out, expected, "result of a product");
  const at::NoGradGuard no_grad;
  if (takes_bf16_as_fp32(out)) {
    Tensor wide =
        beta == 0.0F ? at::empty(out.sizes(), out.options().dtype(at::kFloat)) : out.to(at::kFloat);
    product_out(a.to(at::kFloat), b.to(at::kFloat), wide, beta);
    out.copy_(wide);
  } else if (onednn_applies(a, b, out)) {
    RECORD_FUNCTION("longhaul::matmul", c10::ArrayRef<const c10::IValue>{});
    at::native::mkldnn_matmul(a, b, out, beta, 1.0F);
  } else {
    aten_product_out(a, b, out, beta);
  }
}

Tensor product(const Tensor& a, const Tensor& b) {
  LONGHAUL_CHECK(a.dim() >= 2 && b.dim() == a.dim(),
                 "product: expected matrices with as many dimensions each, got [{}] and [{}]",
                 shape_text(a), shape_text(b));
  auto shape = a.sizes().vec();
  shape.back() = b.size(-1);
  Tensor out = at::empty(shape, a.options());
  product_out(a, b, out);
  return out;
}

}  // namespace longhaul::ops
