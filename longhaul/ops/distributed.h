// Operators on tensors that lie on many ranks. The operators of this folder compute on plain
// tensors; for tensors of another kind (backend PrivateUse2, see dtensor/) each of them hands over,
// through the dispatcher, to what that kind's owner registered under its name in the namespace
// longhaul_model. Above autograd: what is registered differentiates itself.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "longhaul/ops/common.h"

namespace longhaul::ops {

inline bool is_distributed_tensor(const Tensor& x) {
  return x.defined() && x.key_set().has_backend(c10::BackendComponent::PrivateUse2Bit);
}

// longhaul_model::name.
c10::OperatorHandle distributed_operator(const char* name);

template <typename Signature>
class DistributedOperator;

// Calls what is registered for distributed tensors, whatever tensors stand beside them: the
// dispatcher's own choice would be that of the latest backend among them.
template <typename Result, typename... Args>
class DistributedOperator<Result(Args...)> {
 public:
  explicit DistributedOperator(const c10::OperatorHandle& op) : op_(op.typed<Result(Args...)>()) {}
  Result call(Args... args) const {
    return op_.redispatch(c10::DispatchKeySet(c10::DispatchKey::AutogradPrivateUse2),
                          std::forward<Args>(args)...);
  }

 private:
  c10::TypedOperatorHandle<Result(Args...)> op_;
};

template <typename Signature>
DistributedOperator<Signature> distributed(const char* name) {
  return DistributedOperator<Signature>(distributed_operator(name));
}

inline std::optional<Tensor> given(const Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

}  // namespace longhaul::ops
