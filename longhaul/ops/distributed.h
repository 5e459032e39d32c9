// Operators on tensors that lie on many ranks. The operators of this folder compute on plain
// tensors; for tensors of another kind (dispatch key PrivateUse2, see dtensor/) each of them hands
// over, through the dispatcher, to what that kind's owner registered under its name in the
// namespace longhaul_model. Above autograd: what is registered differentiates itself.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "longhaul/ops/common.h"

namespace longhaul::ops {

inline bool is_distributed_tensor(const Tensor& x) {
  return x.defined() && x.key_set().has_backend(c10::BackendComponent::PrivateUse2Bit);
}

// longhaul_model::name.
c10::OperatorHandle distributed_operator(const char* name);

// The same, for a call with distributed tensors.
template <typename Signature>
c10::TypedOperatorHandle<Signature> distributed(const char* name) {
  return distributed_operator(name).typed<Signature>();
}

inline std::optional<Tensor> given(const Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

}  // namespace longhaul::ops
