// Fuzzes the CPU kernels through include/longhaul/kernels.h: sizes, strides and contents of index
// rows, ranges and counts, right and wrong ones, and all kinds of numbers. A libFuzzer target under
// AddressSanitizer and UndefinedBehaviorSanitizer, for which the kernels are compiled by Clang.
// Packages: clang libclang-rt-14-dev libomp-dev.
//
//   scripts/build.sh fuzz
//   for isa in portable avx2 avx512 avx512_bf16; do
//     LONGHAUL_ISA=$isa build/fuzz/bin/kernels_fuzz -max_total_time=600 || break
//   done
//   build/fuzz/bin/kernels_fuzz crash-...       # runs an input that failed once more
//
// Every input runs twice, on one thread and on two or three, with other addresses and other bytes
// in the memory of the results. Beside the sanitizers' reports it fails where a kernel refuses what
// kernels.h allows or accepts what it excludes, where the two runs differ in a bit, where numbers
// give NaN, and where chosen indices are out of range, out of order or not as many as there can be.
#include <unistd.h>

#include "longhaul/ops/cpu/isa.h"
#include "tests/fuzz/operators.h"

namespace longhaul::fuzz {
namespace {

std::string outcome(const uint8_t* data, size_t size, int threads, bool second) {
  Case c(data + 1, size - 1, threads, second);
  kOperators[data[0] % std::size(kOperators)](c);
  return c.outcome();
}

}  // namespace
}  // namespace longhaul::fuzz

// Exit status 77, ctest's "skipped", where the processor lacks what LONGHAUL_ISA names.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  setenv("KMP_BLOCKTIME", "0", 0);  // waiting threads sleep
  const char* wanted = std::getenv("LONGHAUL_ISA");
  for (const auto isa : longhaul::cpu::kAllIsas) {
    if (wanted && std::string(wanted) == longhaul::cpu::name_of(isa) &&
        !longhaul::cpu::is_supported(isa)) {
      _exit(77);
    }
  }
  std::fprintf(stderr, "kernels_fuzz: %s\n", longhaul_kernels_isa());
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using longhaul::fuzz::outcome;
  if (size < 4) return 0;
  if (outcome(data, size, 1, false) != outcome(data, size, 2 + data[size - 1] % 2, true)) {
    longhaul::fuzz::fail("the two runs of an input differ");
  }
  return 0;
}
