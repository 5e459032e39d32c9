// Collectives on plain tensors of any rank's own. All ranks of the
// group call them in the same order, and their backward passes too.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "longhaul/parallel/parallel_dims.h"

namespace longhaul::parallel {

using at::Tensor;

// The sum over the ranks of what each has, without gradient; `x` stays as it is.
Tensor sum_over(const Tensor& x, const Group& group);

// What this rank adds to a sum over all ranks that x lies on, without gradient: a plain tensor
// itself; of a DTensor its part or its term, and where all ranks of an axis have the same the
// first of them has it and the others 0. Error, which names `what`, for averages, maxima and
// minima.
Tensor own_term(const Tensor& x, const std::string& what);

// The rows (dim 0) of all ranks, rank after rank; each has as many. The backward pass adds up the
// ranks' gradients of this rank's rows.
Tensor all_gather_rows(const Tensor& x, const Group& group);

// Sends input_rows[r] rows to rank r and receives output_rows[r] from it, in the order of the ranks
// on both sides. The backward pass sends the gradients back.
Tensor all_to_all_rows(const Tensor& x, const std::vector<int64_t>& input_rows,
                       const std::vector<int64_t>& output_rows, const Group& group);

// Row order[i] of x as row i; `inverse` is the inverse permutation, both int64. Sums nothing in the
// backward pass, unlike index_select.
Tensor permute_rows(const Tensor& x, const Tensor& order, const Tensor& inverse);

}  // namespace longhaul::parallel
