#include "longhaul/nn/module.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

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

std::vector<NamedModule> Module::modules() {
  std::vector<NamedModule> found = {{"", this}};
  for (const auto& [name, child] : children_) {
    for (auto& below : child->modules()) {
      found.push_back({below.name.empty() ? name : name + "." + below.name, below.module});
    }
  }
  return found;
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

std::string Module::describe() const {
  std::string out;
  describe("", 0, out);
  return out;
}

void Module::describe(const std::string& name, int depth, std::string& out) const {
  const auto line = [&](int level, const std::string& text) {
    out += fmt::format("{:{}}{}\n", "", 2 * level, text);
  };
  std::string title = name;
  for (const auto& [operation, slot] : own_kernels_) {
    const bool fused = *slot == ops::Kernel::kFused;
    title += fmt::format(" [{}: {}]", operation, fused ? "fused" : "reference");
  }
  if (!title.empty()) line(depth, title);
  for (const auto* list : {&own_parameters_, &own_buffers_}) {
    for (const auto& own : *list) {
      const char* state = list == &own_buffers_         ? ", buffer"
                          : own.tensor->requires_grad() ? ""
                                                        : ", frozen";
      line(depth + 1,
           fmt::format("{} [{}]{}", own.name, fmt::join(own.tensor->sizes(), ", "), state));
    }
  }
  for (const auto& [child_name, child] : children_) child->describe(child_name, depth + 1, out);
}

void Module::add_parameter(std::string name, Tensor& slot, at::IntArrayRef sizes, Init init,
                           const TensorSpec& spec) {
  slot = at::zeros(sizes, at::TensorOptions().dtype(spec.dtype).device(spec.device));
  slot.set_requires_grad(true);
  own_parameters_.push_back({std::move(name), &slot, init, spec.exact});
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
  for (const auto& own : this->*list) {
    out.push_back(own);
    out.back().name = prefix + own.name;
  }
  for (const auto& [name, child] : children_) child->collect(prefix + name + ".", list, out);
}

}  // namespace longhaul::nn
