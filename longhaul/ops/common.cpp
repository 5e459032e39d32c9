#include "longhaul/ops/common.h"

#include <fmt/ranges.h>

#include "longhaul/base/error.h"

namespace longhaul::ops {

Tensor visible_mask(const Tensor& doc_start_BS) {
  check_dims(doc_start_BS, 2, "doc_start");
  const int64_t S = doc_start_BS.size(1);
  const Tensor key_S = at::arange(S, doc_start_BS.options());
  const Tensor causal_SS = key_S.unsqueeze(0) <= key_S.unsqueeze(1);
  return (key_S >= doc_start_BS.unsqueeze(-1)).logical_and_(causal_SS);
}

std::string shape_text(const Tensor& x) { return fmt::format("{}", fmt::join(x.sizes(), " x ")); }

void check_dims(const Tensor& x, int64_t dims, const char* what) {
  LONGHAUL_CHECK(x.dim() == dims, "{}: expected {} dimensions, got {}", what, dims, shape_text(x));
}

}  // namespace longhaul::ops
