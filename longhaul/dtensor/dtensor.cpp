#include "longhaul/dtensor/dtensor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "longhaul/base/error.h"
#include "longhaul/dtensor/dtensor_impl.h"

namespace longhaul::dtensor {

DTensorImpl::DTensorImpl(Tensor local, Spec spec, at::IntArrayRef sizes, at::IntArrayRef strides)
    : TensorImpl(c10::DispatchKeySet({c10::DispatchKey::PrivateUse2, kDTensorKey}), local.dtype(),
                 local.device()),
      local_(std::move(local)),
      spec_(std::move(spec)) {
  set_sizes_and_strides(sizes, strides);
}

template <typename Version>
c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::copy(Version&& version, bool allow_change) const {
  auto impl = c10::make_intrusive<DTensorImpl>(local_, spec_, sizes(), strides());
  impl->set_version_counter(std::forward<Version>(version));
  impl->set_allow_tensor_metadata_change(allow_change);
  return impl;
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version, bool allow_change) const {
  return copy(version, allow_change);
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version, bool allow_change) const {
  return copy(std::move(version), allow_change);
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& source) {
  const auto* other = dynamic_cast<const DTensorImpl*>(source.get());
  LONGHAUL_CHECK(other != nullptr, "a DTensor can take the data of a DTensor only");
  local_ = other->local_;
  spec_ = other->spec_;
  set_sizes_and_strides(other->sizes(), other->strides());
}

namespace {

const DTensorImpl& impl_of(const Tensor& x) {
  LONGHAUL_CHECK(is_dtensor(x), "expected a DTensor, got a plain tensor of {}",
                 x.defined() ? fmt::format("sizes [{}]", fmt::join(x.sizes(), ", ")) : "no sizes");
  return static_cast<const DTensorImpl&>(*x.unsafeGetTensorImpl());
}

}  // namespace

const Spec& spec_of(const Tensor& x) { return impl_of(x).spec(); }
const Tensor& local_of(const Tensor& x) { return impl_of(x).local(); }

std::string describe(const std::vector<Tensor>& tensors) {
  std::vector<std::string> texts;
  for (const Tensor& x : tensors) {
    texts.push_back(!x.defined()
                        ? "none"
                        : fmt::format("[{}] {}", fmt::join(x.sizes(), ", "),
                                      is_dtensor(x) ? text_of(spec_of(x).placements) : "plain"));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

Tensor wrap(const Tensor& local, Spec spec, at::IntArrayRef global_sizes,
            at::IntArrayRef global_strides) {
  return at::detail::make_tensor<DTensorImpl>(local, std::move(spec), global_sizes, global_strides);
}

std::vector<int64_t> dense_strides(at::IntArrayRef sizes, const Tensor& ordered_like) {
  std::vector<size_t> dims(sizes.size());
  std::iota(dims.begin(), dims.end(), 0);
  std::stable_sort(dims.begin(), dims.end(), [&](size_t a, size_t b) {
    return ordered_like.strides()[a] > ordered_like.strides()[b];
  });
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    strides[*dim] = stride;
    stride *= std::max<int64_t>(sizes[*dim], 1);
  }
  return strides;
}

}  // namespace longhaul::dtensor
