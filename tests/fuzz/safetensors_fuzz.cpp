// Fuzzes the reading of a safetensors header. A libFuzzer target under AddressSanitizer and
// UndefinedBehaviorSanitizer.
//
//   scripts/build.sh fuzz safetensors_fuzz
//   build/fuzz/bin/safetensors_fuzz -max_total_time=600 -rss_limit_mb=2048 -timeout=20
//     -dict=tests/fuzz/safetensors.dict CORPUS tests/fuzz/safetensors    # on one line
//
// An input is a whole file. A broken or hostile one has to end in a UserError. Beside the
// sanitizers' reports, other exceptions and hangs it fails where the header of a file that was
// accepted does not say which byte of it belongs to which tensor.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "longhaul/base/error.h"
#include "longhaul/base/safetensors.h"

namespace longhaul::safetensors {
namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "safetensors_fuzz: %s\n", what);
  std::abort();
}

void check(const Header& header, int64_t file_bytes) {
  std::vector<TensorInfo> tensors;
  for (const auto& [name, info] : header.tensors) {
    require(name == info.name, "a tensor has another's name");
    require(info.bytes() == tensor_bytes(info.dtype, info.shape, "fuzzed"),
            "a tensor's bytes are not those of its shape");
    tensors.push_back(info);
  }
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t end = 0;
  for (const auto& info : tensors) {
    require(info.begin == end, "there is a gap, or two tensors share a byte");
    end = info.end;
  }
  require(header.data_start + end == file_bytes, "the tensors are not the whole file");
}

}  // namespace
}  // namespace longhaul::safetensors

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longhaul;
  const auto bytes = static_cast<int64_t>(size);
  try {
    const std::string_view file(reinterpret_cast<const char*>(data), size);
    safetensors::check(safetensors::parse_header(file, bytes, "fuzzed"), bytes);
  } catch (const UserError&) {
  }
  return 0;
}
