// A module owns parameters, buffers and submodules and knows their names; nothing else. Names are
// the path through the tree and equal Hugging Face's ("model.layers.0.self_attn.o_proj.weight").
// Modules are neither copied nor moved: the registry points at their members.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "longhaul/ops/kernel.h"

namespace longhaul::nn {

using at::Tensor;

// Dtype and device of new parameters.
struct TensorSpec {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool exact = false;  // see NamedParameter
};

// How a parameter starts: matrices and the embedding normal, norms one, biases zero.
enum class Init { kNormal, kOnes, kZeros };

struct NamedParameter {
  std::string name;
  Tensor* tensor;
  Init init;
  // Enters the computation as it is kept; others may be cast to the compute dtype before their use
  // without a difference.
  bool exact = false;
};

// Where a tensor stands in a whole of `global_sizes` of which it is a part.
struct Part {
  std::vector<int64_t> global_sizes, offsets;
};

// An operation that a module computes, and the place that says which kernel it takes.
struct NamedKernel {
  std::string module;     // the path through the tree, without a dot at its end
  std::string operation;  // "dsa", "rms_norm", "rope", "permute", "gmm", "cross_entropy"
  ops::Kernel* kernel;
};

// Acts around a module's forward pass, and, through what it makes of the tensors that go in and
// out, around its backward pass.
class ModuleHook {
 public:
  virtual ~ModuleHook() = default;
  // Returns what the module computes with.
  virtual std::vector<Tensor> before(std::vector<Tensor> inputs) = 0;
  // Returns what goes on.
  virtual Tensor after(Tensor output) = 0;
};

class Module;

struct NamedModule {
  std::string name;  // the path through the tree, without a dot at its end; empty: the root
  Module* module;
};

class Module {
 public:
  Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  virtual ~Module() = default;

  // Trainable tensors of this module and its children, in order of registration.
  std::vector<NamedParameter> parameters() const;
  // Tensors that are state but not trained (the router's bias).
  std::vector<NamedParameter> buffers() const;
  // This module and all below it.
  std::vector<NamedModule> modules();
  // What converters may choose, of this module and its children.
  std::vector<NamedKernel> kernels() const;

  // f(inputs), the forward pass of this module, with its hooks around it, the first added
  // outermost. A module that may have a hook computes through here, or is called through here.
  template <typename F>
  Tensor hooked(std::vector<Tensor> inputs, const F& f) const {
    for (auto* hook : hooks_) inputs = hook->before(std::move(inputs));
    Tensor output = f(inputs);
    for (auto hook = hooks_.rbegin(); hook != hooks_.rend(); ++hook)
      output = (*hook)->after(output);
    return output;
  }
  // The hook must live until it is removed.
  void add_hook(ModuleHook* hook) { hooks_.push_back(hook); }
  void remove_hook(ModuleHook* hook) { std::erase(hooks_, hook); }

  // The tree for people: a line for each module with its operations and which kernel computes them,
  // and under it a line for each parameter and buffer with its sizes.
  std::string describe() const;

 protected:
  // Allocates `slot` and registers it under `name`.
  void add_parameter(std::string name, Tensor& slot, at::IntArrayRef sizes, Init init,
                     const TensorSpec& spec);
  void add_buffer(std::string name, Tensor& slot, at::IntArrayRef sizes, const TensorSpec& spec);
  // Registers an operation whose kernel may be chosen.
  void add_kernel(std::string operation, ops::Kernel& slot);
  // Registers a child that this module owns.
  void add_child(std::string name, Module& child);

 private:
  using List = std::vector<NamedParameter> Module::*;
  void collect(const std::string& prefix, List list, std::vector<NamedParameter>& out) const;
  void collect_kernels(const std::string& path, std::vector<NamedKernel>& out) const;
  void describe(const std::string& name, int depth, std::string& out) const;

  std::vector<ModuleHook*> hooks_;
  std::vector<NamedParameter> own_parameters_, own_buffers_;
  std::vector<std::pair<std::string, ops::Kernel*>> own_kernels_;
  std::vector<std::pair<std::string, Module*>> children_;
};

}  // namespace longhaul::nn
