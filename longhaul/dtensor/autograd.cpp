// The differentiable doors between DTensors and plain tensors, and between placements.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/dtensor/dtensor.h"
#include "longhaul/dtensor/redistribute.h"
#include "longhaul/ops/saved_results.h"

namespace longhaul::dtensor {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A spec and the sizes of the whole, kept for the backward pass.
struct Kept : torch::CustomClassHolder {
  Kept(Spec s, std::vector<int64_t> n) : spec(std::move(s)), sizes(std::move(n)) {}
  Spec spec;
  std::vector<int64_t> sizes;
};

void keep(AutogradContext* ctx, Spec spec, at::IntArrayRef sizes) {
  ctx->saved_data["kept"] =
      c10::IValue::make_capsule(c10::make_intrusive<Kept>(std::move(spec), sizes.vec()));
}

const Kept& kept(AutogradContext* ctx) {
  return static_cast<const Kept&>(*ctx->saved_data["kept"].toCapsule());
}

Tensor wrap_dense(const Tensor& local, Spec spec, at::IntArrayRef sizes) {
  const Tensor part = local.is_non_overlapping_and_dense() ? local : local.contiguous();
  return wrap(part, std::move(spec), sizes, dense_strides(sizes, part));
}

Tensor redistributed(const Tensor& x, const Placements& placements) {
  const Spec& spec = spec_of(x);
  if (spec.placements == placements) return x;
  const Tensor local =
      redistribute_local(local_of(x), x.sizes(), *spec.mesh, spec.placements, placements);
  return wrap_dense(local, {spec.mesh, placements}, x.sizes());
}

// What the gradient of a tensor in `forward` should lie in, when it arrives in `arrived`.
Placements gradient_placements(const Placements& forward, const Placements& arrived) {
  Placements result = forward;
  for (size_t i = 0; i < result.size(); ++i) {
    if (forward[i].is_partial()) result[i] = Placement::replicate();
    if (forward[i].is_replicate() && arrived[i].is_partial(Reduction::kSum)) result[i] = arrived[i];
  }
  return result;
}

Placements without_partial(const Placements& placements) {
  Placements result = placements;
  for (auto& placement : result) {
    if (placement.is_partial()) placement = Placement::replicate();
  }
  return result;
}

// How many ranks' terms a tensor is the mean of.
int64_t averaged_terms(const Spec& spec) {
  int64_t terms = 1;
  for (size_t i = 0; i < spec.placements.size(); ++i) {
    if (spec.placements[i].is_partial(Reduction::kAvg)) {
      terms *= spec.mesh->axis(static_cast<int>(i)).size();
    }
  }
  return terms;
}

bool is_extreme(const Placement& placement) {
  return placement.is_partial(Reduction::kMax) || placement.is_partial(Reduction::kMin);
}

// A gradient may come as a plain zero (of an output that nobody used).
Tensor as_dtensor(const Tensor& grad, const Kept& like) {
  if (is_dtensor(grad)) return grad;
  LONGHAUL_CHECK(grad.dim() == 0 || grad.numel() == 0,
                 "the gradient of a DTensor is a plain tensor of {} elements", grad.numel());
  return distribute(grad, like.spec.mesh,
                    Placements(like.spec.placements.size(), Placement::replicate()));
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  static Tensor forward(AutogradContext* ctx, const Tensor& local, const Spec& spec,
                        const std::vector<int64_t>& sizes) {
    ctx->set_materialize_grads(false);
    keep(ctx, spec, sizes);
    return wrap_dense(local.detach(), spec, sizes);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return {Tensor(), Tensor(), Tensor()};
    const Kept& to = kept(ctx);
    // A part's gradient: of a slice the slice; of a copy or a term, the whole; of one of n averaged
    // terms, an n-th of it.
    const Tensor grad =
        redistributed(as_dtensor(grads[0], to), without_partial(to.spec.placements));
    const int64_t terms = averaged_terms(to.spec);
    const Tensor& part = local_of(grad);
    return {terms == 1 ? part : part / terms, Tensor(), Tensor()};
  }
};

struct ToLocal : torch::autograd::Function<ToLocal> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Placements& grad_placements) {
    ctx->set_materialize_grads(false);
    keep(ctx, {spec_of(x).mesh, grad_placements}, x.sizes());
    return local_of(x).detach();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return {Tensor(), Tensor()};
    const Kept& to = kept(ctx);
    return {wrap_dense(grads[0], to.spec, to.sizes), Tensor()};
  }
};

struct Redistribute : torch::autograd::Function<Redistribute> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Placements& placements) {
    ctx->set_materialize_grads(false);
    keep(ctx, spec_of(x), x.sizes());
    const char* collective = first_collective(*spec_of(x).mesh, spec_of(x).placements, placements);
    if (collective == nullptr) return redistributed(x, placements);
    return ops::saved_or_computed({.op = collective}, [&] { return redistributed(x, placements); });
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return {Tensor(), Tensor()};
    const Kept& from = kept(ctx);
    const Tensor grad = as_dtensor(grads[0], from);
    return {
        redistributed(grad, gradient_placements(from.spec.placements, spec_of(grad).placements)),
        Tensor()};
  }
};

std::vector<int64_t> whole_sizes(const Tensor& local, const DeviceMesh& mesh,
                                 const Placements& placements) {
  auto sizes = local.sizes().vec();
  for (size_t i = 0; i < placements.size(); ++i) {
    if (placements[i].is_shard()) {
      sizes[static_cast<size_t>(placements[i].dim())] *= mesh.axis(static_cast<int>(i)).size();
    }
  }
  return sizes;
}

void check_placements(const DeviceMesh& mesh, const Placements& placements, int64_t dims) {
  LONGHAUL_CHECK(static_cast<int>(placements.size()) == mesh.num_axes(),
                 "{} placements {} for the {} axes of mesh {}", placements.size(),
                 text_of(placements), mesh.num_axes(), mesh.text());
  for (const auto& placement : placements) {
    LONGHAUL_CHECK(!placement.is_shard() || (placement.dim() >= 0 && placement.dim() < dims),
                   "{} of a tensor with {} dims", placement.text(), dims);
  }
}

}  // namespace

Tensor distribute(const Tensor& whole, const Mesh& mesh, const Placements& placements) {
  check_placements(*mesh, placements, whole.dim());
  const at::NoGradGuard no_grad;
  const auto box = mesh->local_box(whole.sizes(), placements);
  Tensor local = whole;
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    const auto i = static_cast<size_t>(dim);
    local = local.narrow(dim, box.offsets[i], box.sizes[i]);
  }
  for (const auto& placement : placements) {
    LONGHAUL_CHECK(!placement.is_partial(), "a whole tensor has no terms: {}", text_of(placements));
  }
  // A part of its own: what is written into it does not reach `whole` on this rank alone.
  const bool is_part = local.numel() != whole.numel();
  return wrap_dense(is_part ? local.clone(at::MemoryFormat::Contiguous) : local.contiguous(),
                    {mesh, placements}, whole.sizes());
}

Tensor from_local(const Tensor& local, const Mesh& mesh, const Placements& placements,
                  at::OptionalIntArrayRef global_sizes) {
  check_placements(*mesh, placements, local.dim());
  const auto sizes = global_sizes ? global_sizes->vec() : whole_sizes(local, *mesh, placements);
  const auto expected = mesh->local_sizes(sizes, placements);
  LONGHAUL_CHECK(local.sizes() == at::IntArrayRef(expected),
                 "a part of sizes [{}] for a tensor of [{}] in {} on mesh {}; expected [{}]",
                 fmt::join(local.sizes(), ", "), fmt::join(sizes, ", "), text_of(placements),
                 mesh->text(), fmt::join(expected, ", "));
  const bool differentiable = local.requires_grad() && at::GradMode::is_enabled();
  LONGHAUL_CHECK(
      !differentiable || std::none_of(placements.begin(), placements.end(), is_extreme),
      "a part in {} on mesh {} needs a gradient, but which rank's part it belongs to is not known; "
      "detach() the part",
      text_of(placements), mesh->text());
  return FromLocal::apply(local, Spec{mesh, placements}, sizes);
}

Tensor to_local(const Tensor& x, const std::optional<Placements>& grad_placements) {
  return ToLocal::apply(x, grad_placements.value_or(without_partial(spec_of(x).placements)));
}

Tensor redistribute(const Tensor& x, const Placements& placements) {
  check_placements(*spec_of(x).mesh, placements, x.dim());
  if (spec_of(x).placements == placements) return x;
  return Redistribute::apply(x, placements);
}

Tensor full_tensor(const Tensor& x) {
  return to_local(
      redistribute(x, Placements(spec_of(x).placements.size(), Placement::replicate())));
}

std::vector<Tensor> local_map(const Mesh& mesh, const std::vector<LocalInput>& inputs,
                              const std::vector<LocalOutput>& outputs,
                              const std::function<std::vector<Tensor>(std::vector<Tensor>)>& f) {
  std::vector<Tensor> parts;
  parts.reserve(inputs.size());
  for (const auto& input : inputs) {
    if (!input.tensor.defined() || !is_dtensor(input.tensor)) {
      LONGHAUL_CHECK(!input.tensor.defined() || !input.tensor.requires_grad(),
                     "a plain tensor that needs a gradient beside DTensors: make it a DTensor");
      parts.push_back(
          input.tensor.defined()
              ? local_of(distribute(input.tensor, mesh, without_partial(input.placements)))
              : Tensor());
      continue;
    }
    parts.push_back(to_local(redistribute(input.tensor, input.placements), input.grads));
  }
  const auto results = f(std::move(parts));
  LONGHAUL_CHECK(results.size() == outputs.size(), "{} results, {} declared", results.size(),
                 outputs.size());
  std::vector<Tensor> wrapped;
  wrapped.reserve(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) {
      wrapped.emplace_back();
      continue;
    }
    const auto& sizes = outputs[i].sizes;
    wrapped.push_back(from_local(results[i], mesh, outputs[i].placements,
                                 sizes.empty() ? at::OptionalIntArrayRef() : sizes));
  }
  return wrapped;
}

}  // namespace longhaul::dtensor
