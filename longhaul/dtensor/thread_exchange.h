// The data movement of one collective among ranks that share memory: what each rank brought, and
// the work in as many pieces as there are ranks, which may be done by any threads in any order. No
// locks: thread_backend.cpp says when all ranks are there. CPU only.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "longhaul/dtensor/communicator.h"

namespace longhaul::dtensor {

// What all ranks of a collective must agree on.
struct Operation {
  CollectiveKind kind;
  at::ScalarType dtype = at::kByte;
  int64_t elements = 0;  // of a rank's input; all_to_all: 0, ranks differ
  Reduction reduction = Reduction::kSum;
  int root = 0;

  bool operator==(const Operation&) const = default;
};

std::string describe(const Operation& operation);  // "all_reduce (sum) of 12 float32"

// What one rank brings. Flat tensors; all_reduce and broadcast have one tensor as both.
struct Part {
  at::Tensor input, output;
  std::vector<int64_t> input_counts, output_counts;  // all_to_all: elements to and from each rank
};

// Empty, or which two ranks of an all_to_all disagree on the elements between them (by `names`).
std::string find_count_mismatch(const std::vector<Part>& parts, const std::vector<int>& names);

// Piece `piece` of parts.size() of the collective; pieces touch different memory.
void move_piece(const Operation& operation, const std::vector<Part>& parts, int piece);

}  // namespace longhaul::dtensor
