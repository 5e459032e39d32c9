#include "longhaul/models/deepseek_v3/context.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace longhaul::deepseek_v3 {

void accumulate(std::map<int64_t, Tensor>& by_layer, int64_t layer, const Tensor& value) {
  const at::NoGradGuard no_grad;
  const auto found = by_layer.find(layer);
  if (found == by_layer.end()) {
    by_layer.emplace(layer, value.detach().clone());
  } else {
    found->second.add_(value.detach());
  }
}

}  // namespace longhaul::deepseek_v3
