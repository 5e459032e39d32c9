// An attention that has run, as the operators that follow it get it from their callers. Only the
// operators' registration includes this.
#pragma once

#include "longhaul/ops/flash_attention/head_sum.h"
#include "longhaul/ops/library/layout.h"

namespace longhaul::ops::library {

struct AttentionArguments {
  const char* op;  // for messages
  const Tensor &query, &key;
  const std::optional<Tensor>&query_rope, &key_rope;
  const Tensor &softmax_max, &softmax_sum;
  double scale_value;
};

// One head of keys is shared by all of the query's heads (absorbed MLA). Throws Error for other
// layouts.
AttentionState attention_state(const Layout& layout, const AttentionArguments& arguments);

}  // namespace longhaul::ops::library
