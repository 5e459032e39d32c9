#include "longhaul/ops/cpu/isa.h"

#include <cstdlib>

#include "longhaul/base/error.h"

namespace longhaul::cpu {

namespace portable {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
namespace avx512_bf16 {
extern const KernelTable kTable;
}

namespace {

// On a Xeon of model 207 vdpbf16ps reaches 197 GFLOP/s and fp32 products of unpacked bf16 327, on
// AMD's Zen 4 and 5 vdpbf16ps is twice as fast as fp32 (loops on registers).
bool has_slow_bf16() { return __builtin_cpu_is("intel") != 0; }

IsaChoice choose() {
  if (const char* wanted = std::getenv("LONGHAUL_ISA"); wanted && *wanted) {
    for (const Isa isa : kAllIsas) {
      if (std::string(wanted) != name_of(isa)) continue;
      if (!is_supported(isa)) {
        fail_user("LONGHAUL_ISA = {}: this processor lacks it ({})", wanted, requirement(isa));
      }
      return {isa, isa, "LONGHAUL_ISA names it"};
    }
    fail_user("LONGHAUL_ISA = {}: must be avx512_bf16, avx512, avx2 or portable", wanted);
  }
  for (const Isa isa : kAllIsas) {
    if (!is_supported(isa)) continue;
    std::string reason = std::string("the processor has ") + requirement(isa);
    if (isa != Isa::kAvx512Bf16 || !has_slow_bf16()) return {isa, isa, reason};
    return {Isa::kAvx512, isa,
            reason +
                ", but Intel's bf16 products are slower than fp32 ones; pointwise kernels round "
                "with avx512_bf16"};
  }
  return {Isa::kPortable, Isa::kPortable, requirement(Isa::kPortable)};
}

// The table of one instruction set with the pointwise kernels of another; rotation is no slower in
// the first (fp32: 68 to 78% of the bandwidth there, 51 to 73% in avx512_bf16).
KernelTable mixed(const KernelTable& products, const KernelTable& pointwise) {
  KernelTable table = products;
  table.rms_norm = pointwise.rms_norm;
  table.rms_norm_grad_workspace = pointwise.rms_norm_grad_workspace;
  table.rms_norm_grad = pointwise.rms_norm_grad;
  table.swiglu = pointwise.swiglu;
  table.swiglu_grad = pointwise.swiglu_grad;
  table.moe_token_permute = pointwise.moe_token_permute;
  table.moe_token_unpermute = pointwise.moe_token_unpermute;
  table.cross_entropy = pointwise.cross_entropy;
  table.adam_w = pointwise.adam_w;
  return table;
}

}  // namespace

const char* name_of(Isa isa) {
  constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_bf16"};
  return kNames[static_cast<int>(isa)];
}

const char* requirement(Isa isa) {
  switch (isa) {
    case Isa::kAvx512Bf16:
      return "AVX-512 F, BW, VL, DQ and BF16";
    case Isa::kAvx512:
      return "AVX-512 F, BW, VL and DQ";
    case Isa::kAvx2:
      return "AVX2 and FMA";
    case Isa::kPortable:
      break;
  }
  return "nothing beyond x86-64";
}

bool is_supported(Isa isa) {
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  switch (isa) {
    case Isa::kAvx512Bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16");
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kPortable:
      break;
  }
  return true;
}

const IsaChoice& chosen_isa() {
  static const IsaChoice choice = choose();
  return choice;
}

const KernelTable& kernels_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx512Bf16:
      return avx512_bf16::kTable;
    case Isa::kAvx512:
      return avx512::kTable;
    case Isa::kAvx2:
      return avx2::kTable;
    case Isa::kPortable:
      break;
  }
  return portable::kTable;
}

const KernelTable& kernels() {
  static const KernelTable table =
      mixed(kernels_of(chosen_isa().isa), kernels_of(chosen_isa().pointwise));
  return table;
}

}  // namespace longhaul::cpu
