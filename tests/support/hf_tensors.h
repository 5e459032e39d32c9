// A model's parameters and router biases by Hugging Face's names.
#pragma once

#include "longhaul/models/deepseek_v3/hf_adapter.h"
#include "tests/support/golden.h"

namespace longhaul::testing {

// Copies of their contents.
inline Tensors hf_tensors(deepseek_v3::Model& model) {
  Tensors tensors;
  for (const auto& list : {model.parameters(), model.buffers()}) {
    for (const auto& state : list) {
      for (const auto& [name, view] : deepseek_v3::hf_views(state.name, state.tensor->detach())) {
        tensors[name] = view.clone();
      }
    }
  }
  return tensors;
}

}  // namespace longhaul::testing
