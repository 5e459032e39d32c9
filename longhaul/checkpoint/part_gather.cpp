#include "longhaul/checkpoint/part_gather.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "longhaul/dtensor/exchange.h"

namespace longhaul::checkpoint {
namespace {

at::Tensor narrowed(at::Tensor whole, const PartPlan::Box& box) {
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    whole = whole.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
  }
  return whole;
}

at::Tensor as_bytes(const at::Tensor& tensor, at::ScalarType dtype) {
  return on_host(tensor.to(dtype)).view(-1).view(at::kByte);
}

// Offsets and sizes of this rank's part of each tensor, in the order of the names.
at::Tensor own_boxes(const Snapshot& snapshot) {
  std::vector<int64_t> boxes;
  for (const auto& [name, whole] : snapshot.tensors) {
    const auto part = snapshot.parts.find(name);
    LONGHAUL_CHECK(part != snapshot.parts.end(), "tensor '{}' has no part on this rank", name);
    const auto& [tensor, offsets] = part->second;
    LONGHAUL_CHECK(tensor.dim() == whole.dim() && offsets.size() == tensor.sizes().size(),
                   "the part of '{}' has another number of dims", name);
    boxes.insert(boxes.end(), offsets.begin(), offsets.end());
    boxes.insert(boxes.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  return at::tensor(boxes, at::kLong);
}

// The distinct ones of a tensor of so many dims; that of rank r is at `first` + r * `stride`.
std::vector<PartPlan::Box> distinct(const int64_t* first, size_t dims, int64_t stride, int ranks) {
  std::map<std::vector<int64_t>, std::vector<int>> holders;
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t* box = first + rank * stride;
    if (c10::multiply_integers(box + dims, box + 2 * dims) > 0) {
      holders[{box, box + 2 * dims}].push_back(rank);
    }
  }
  std::vector<PartPlan::Box> boxes;
  for (const auto& [box, of] : holders) {
    const auto middle = box.begin() + static_cast<int64_t>(dims);
    boxes.push_back(
        {.offsets = {box.begin(), middle}, .sizes = {middle, box.end()}, .holders = of});
  }
  return boxes;
}

// Whether two boxes overlap is not looked at.
void check_cover(const std::string& name, at::IntArrayRef shape,
                 const std::vector<PartPlan::Box>& boxes) {
  int64_t covered = 0;
  bool inside = true;
  for (const auto& box : boxes) {
    covered += c10::multiply_integers(box.sizes);
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      inside &= box.offsets[dim] >= 0 && box.offsets[dim] + box.sizes[dim] <= shape[dim];
    }
  }
  LONGHAUL_CHECK(inside && covered == c10::multiply_integers(shape),
                 "the ranks' parts of '{}' [{}] have {} elements or lie outside of it", name,
                 fmt::join(shape, ", "), covered);
}

// The writer if it is one of those that hold the box, else they are dealt to writers in turn.
int sender_of(const PartPlan::Box& box, int writer) {
  const auto& of = box.holders;
  const bool own = std::find(of.begin(), of.end(), writer) != of.end();
  return own ? writer : of[static_cast<size_t>(writer) % of.size()];
}

// What `sender` gives to `writer`: bytes, or nothing.
at::Tensor sent(const PartPlan& plan, const Snapshot& snapshot, const std::string& name, int sender,
                int writer) {
  if (name.empty() || sender == writer || !plan.takes_from(sender, name, writer)) return {};
  return as_bytes(snapshot.parts.at(name).tensor, snapshot.tensors.at(name).scalar_type());
}

// `bytes` has what the other ranks have sent.
void fill(at::Tensor& whole, const std::vector<PartPlan::Piece>& pieces, const at::Tensor& own,
          int rank, const at::Tensor& bytes) {
  int64_t at = 0;
  for (const auto& [sender, of] : pieces) {
    at::Tensor box = narrowed(whole, *of);
    if (sender == rank) {
      box.copy_(own);
      continue;
    }
    const int64_t size = box.numel() * whole.element_size();
    box.copy_(bytes.narrow(0, at, size).view(whole.scalar_type()).view(of->sizes));
    at += size;
  }
}

}  // namespace

PartPlan::PartPlan(const Snapshot& snapshot, const dtensor::Communicator& ranks) {
  at::Tensor own;
  dtensor::together(&ranks, [&] {
    own = own_boxes(snapshot);
    return "";
  });
  at::Tensor all = at::empty({ranks.size(), own.numel()}, at::kLong);
  ranks.all_gather(all, own).wait();
  const auto* first = all.const_data_ptr<int64_t>();
  for (const auto& [name, whole] : snapshot.tensors) {
    const auto dims = static_cast<size_t>(whole.dim());
    boxes_[name] = distinct(first, dims, own.numel(), ranks.size());
    check_cover(name, whole.sizes(), boxes_[name]);
    first += 2 * dims;
  }
}

std::vector<PartPlan::Piece> PartPlan::pieces(const std::string& name, int writer) const {
  std::vector<Piece> pieces;
  for (const Box& box : boxes_.at(name)) pieces.push_back({sender_of(box, writer), &box});
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.sender < b.sender; });
  return pieces;
}

bool PartPlan::takes_from(int rank, const std::string& name, int writer) const {
  const auto& boxes = boxes_.at(name);
  return std::any_of(boxes.begin(), boxes.end(),
                     [&](const Box& box) { return sender_of(box, writer) == rank; });
}

at::Tensor gather_parts(const PartPlan& plan, const Snapshot& snapshot,
                        const dtensor::Communicator& ranks,
                        const std::vector<std::string>& written) {
  const int own = ranks.rank();
  const std::string& name = written[static_cast<size_t>(own)];
  std::vector<int64_t> sent_bytes(written.size(), 0), received_bytes(written.size(), 0);
  std::vector<at::Tensor> outgoing = {at::empty({0}, at::kByte)};
  for (size_t writer = 0; writer < written.size(); ++writer) {
    const auto bytes = sent(plan, snapshot, written[writer], own, static_cast<int>(writer));
    if (!bytes.defined()) continue;
    outgoing.push_back(bytes);
    sent_bytes[writer] = bytes.numel();
  }
  const at::Tensor shape = name.empty() ? at::Tensor() : snapshot.tensors.at(name);
  const auto pieces = name.empty() ? std::vector<PartPlan::Piece>() : plan.pieces(name, own);
  for (const auto& [sender, box] : pieces) {
    if (sender == own) continue;
    received_bytes[static_cast<size_t>(sender)] =
        c10::multiply_integers(box->sizes) * shape.element_size();
  }
  const int64_t coming = std::accumulate(received_bytes.begin(), received_bytes.end(), int64_t{0});
  at::Tensor bytes = at::empty({coming}, at::kByte);
  ranks.all_to_all(bytes, at::cat(outgoing), received_bytes, sent_bytes).wait();
  if (name.empty()) return {};
  at::Tensor whole = at::empty(shape.sizes(), at::device(at::kCPU).dtype(shape.scalar_type()));
  fill(whole, pieces, snapshot.parts.at(name).tensor, own, bytes);
  return whole;
}

}  // namespace longhaul::checkpoint
