// Pieces of the DTensor tests: wholes that every rank makes alike, and their parts in any
// placement.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <string>
#include <vector>

#include "longhaul/dtensor/dtensor.h"
#include "longhaul/dtensor/world.h"
#include "tests/support/tensors.h"

namespace longhaul::test {

using at::Tensor;
using dtensor::Mesh;
using dtensor::Placement;
using dtensor::Placements;
using dtensor::Reduction;

using testing::normal;

// `whole` in placements that may hold sums of terms: the terms are noise that adds up to it.
inline Tensor scatter(const Tensor& whole, const Mesh& mesh, const Placements& placements) {
  Placements without = placements;
  Tensor terms = whole;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_partial()) continue;
    without[i] = Placement::replicate();
    const auto& axis = mesh->axis(static_cast<int>(i));
    const double ranks = axis.size();
    const Tensor noise = normal(whole.sizes(), 77 + i).to(whole.scalar_type());
    // Rank r holds whole / n + noise * (r - mean of r).
    terms = terms / ranks + noise * (axis.rank() - (ranks - 1) / 2);
  }
  const Tensor parts = dtensor::distribute(terms, mesh, without);
  return dtensor::wrap(dtensor::local_of(parts), {mesh, placements}, whole.sizes(),
                       parts.strides());
}

// Every placement of a tensor with `dims` dims along one axis.
inline std::vector<Placement> all_placements(int64_t dims, bool with_partial = true) {
  std::vector<Placement> all = {Placement::replicate()};
  if (with_partial) all.push_back(Placement::partial());
  for (int64_t dim = 0; dim < dims; ++dim) all.push_back(Placement::shard(dim));
  return all;
}

// The whole of x on this rank, outside autograd.
inline Tensor whole_of(const Tensor& x) {
  const at::NoGradGuard no_grad;
  return dtensor::is_dtensor(x) ? dtensor::full_tensor(x) : x;
}

}  // namespace longhaul::test
