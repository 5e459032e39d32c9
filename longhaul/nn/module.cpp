#include "longhaul/nn/module.h"

#include <ATen/ATen.h>

namespace longhaul::nn {

std::vector<NamedParameter> Module::parameters() const {
  std::vector<NamedParameter> out;
  collect("", &Module::own_parameters_, out);
  return out;
}

std::vector<NamedParameter> Module::buffers() const {
  std::vector<NamedParameter> out;
  collect("", &Module::own_buffers_, out);
  return out;
}

std::vector<NamedKernel> Module::kernels() const {
  std::vector<NamedKernel> out;
  collect_kernels("", out);
  return out;
}

void Module::add_kernel(std::string operation, ops::Kernel& slot) {
  own_kernels_.emplace_back(std::move(operation), &slot);
}

void Module::collect_kernels(const std::string& path, std::vector<NamedKernel>& out) const {
  for (const auto& [operation, slot] : own_kernels_) out.push_back({path, operation, slot});
  for (const auto& [name, child] : children_) {
    child->collect_kernels(path.empty() ? name : path + "." + name, out);
  }
}

void Module::add_parameter(std::string name, Tensor& slot, at::IntArrayRef sizes, Init init,
                           const TensorSpec& spec) {
  slot = at::zeros(sizes, at::TensorOptions().dtype(spec.dtype).device(spec.device));
  slot.set_requires_grad(true);
  own_parameters_.push_back({std::move(name), &slot, init});
}

void Module::add_buffer(std::string name, Tensor& slot, at::IntArrayRef sizes,
                        const TensorSpec& spec) {
  slot = at::zeros(sizes, at::TensorOptions().dtype(spec.dtype).device(spec.device));
  own_buffers_.push_back({std::move(name), &slot, Init::kZeros});
}

void Module::add_child(std::string name, Module& child) {
  children_.emplace_back(std::move(name), &child);
}

void Module::collect(const std::string& prefix, List list, std::vector<NamedParameter>& out) const {
  for (const auto& own : this->*list) out.push_back({prefix + own.name, own.tensor, own.init});
  for (const auto& [name, child] : children_) child->collect(prefix + name + ".", list, out);
}

}  // namespace longhaul::nn
