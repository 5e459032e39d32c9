// Which instruction set the kernels use: the best that the processor has, or what the environment
// variable LONGHAUL_ISA names.
#pragma once

#include <string>

#include "longhaul/ops/cpu/kernel_table.h"

namespace longhaul::cpu {

enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

inline constexpr Isa kAllIsas[] = {Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2,
                                   Isa::kPortable};  // best first

struct IsaChoice {
  Isa isa;        // attention, the indexer, grouped products
  Isa pointwise;  // norms, SwiGLU, permute, losses, AdamW; else the same
  std::string reason;
};

// "portable", "avx2", "avx512", "avx512_bf16".
const char* name_of(Isa isa);

// What it asks of a processor, in words.
const char* requirement(Isa isa);

// Whether this processor can run it.
bool is_supported(Isa isa);

// The choice of this process, made at the first call. Throws UserError if LONGHAUL_ISA names no
// instruction set or one that the processor lacks.
const IsaChoice& chosen_isa();

const KernelTable& kernels_of(Isa isa);

// Those of chosen_isa(); with LONGHAUL_ISA set all are of the one it names.
const KernelTable& kernels();

}  // namespace longhaul::cpu
