// How a DTensor is made of ATen's parts: a TensorImpl of backend PrivateUse2 with the sizes and
// strides of the whole and no memory of its own. Inside dtensor/ only.
#pragma once

#include "longhaul/dtensor/dtensor.h"

namespace longhaul::dtensor {

// Where operators on DTensors arrive: below autograd and above every backend. On the backend's own
// key a plain tensor of a later backend (Meta is the last) beside a DTensor would take the call.
// ATen leaves this key to others and registers nothing on it.
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::Fake;

class DTensorImpl : public c10::TensorImpl {
 public:
  DTensorImpl(Tensor local, Spec spec, at::IntArrayRef sizes, at::IntArrayRef strides);

  const Tensor& local() const { return local_; }
  const Spec& spec() const { return spec_; }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& source) override;

 private:
  template <typename Version>
  c10::intrusive_ptr<TensorImpl> copy(Version&& version, bool allow_change) const;

  Tensor local_;
  Spec spec_;
};

}  // namespace longhaul::dtensor
