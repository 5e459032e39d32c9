#include "longhaul/checkpoint/part_gather.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "longhaul/dtensor/exchange.h"

namespace longhaul::checkpoint {
namespace {

at::Tensor box_of(at::Tensor whole, const std::vector<int64_t>& offsets,
                  const std::vector<int64_t>& sizes) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    whole = whole.narrow(static_cast<int64_t>(dim), offsets[dim], sizes[dim]);
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

}  // namespace

PartGather::PartGather(const Snapshot& snapshot, const std::vector<Shard>& shards,
                       const dtensor::Communicator& ranks)
    : snapshot_(snapshot), ranks_(ranks) {
  at::Tensor own;
  dtensor::together(&ranks, [&] {
    own = own_boxes(snapshot);
    return "";
  });
  at::Tensor all = at::empty({ranks.size(), own.numel()}, at::kLong);
  ranks.all_gather(all, own).wait();
  std::map<std::string, const int64_t*> boxes;  // of the first rank
  const auto* next = all.const_data_ptr<int64_t>();
  for (const auto& [name, whole] : snapshot.tensors) {
    boxes[name] = next;
    next += 2 * whole.dim();
  }
  for (const Shard& shard : shards) {
    for (const auto& info : shard.tensors) {
      pieces_[info.name] = pieces_of(info, boxes.at(info.name), own.numel(), shard.writer);
      check_cover(info, pieces_[info.name]);
    }
  }
}

// The distinct boxes, each with the rank that sends it: the writer if it is one of those that hold
// it, else they are dealt to writers in turn.
PartGather::Pieces PartGather::pieces_of(const safetensors::TensorInfo& info, const int64_t* boxes,
                                         int64_t stride, int writer) const {
  const size_t dims = info.shape.size();
  std::map<std::vector<int64_t>, std::vector<int>> holders;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    const int64_t* box = boxes + rank * stride;
    if (c10::multiply_integers(box + dims, box + 2 * dims) > 0)
      holders[{box, box + 2 * dims}].push_back(rank);
  }
  Pieces pieces;
  for (const auto& [box, of] : holders) {
    const bool own = std::find(of.begin(), of.end(), writer) != of.end();
    const auto middle = box.begin() + static_cast<int64_t>(dims);
    pieces.push_back({.sender = own ? writer : of[static_cast<size_t>(writer) % of.size()],
                      .offsets = {box.begin(), middle},
                      .sizes = {middle, box.end()}});
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.sender < b.sender; });
  return pieces;
}

// Whether two boxes overlap is not looked at.
void PartGather::check_cover(const safetensors::TensorInfo& info, const Pieces& pieces) const {
  int64_t covered = 0;
  bool inside = true;
  for (const Piece& piece : pieces) {
    covered += c10::multiply_integers(piece.sizes);
    for (size_t dim = 0; dim < info.shape.size(); ++dim) {
      inside &= piece.offsets[dim] >= 0 && piece.offsets[dim] + piece.sizes[dim] <= info.shape[dim];
    }
  }
  LONGHAUL_CHECK(inside && covered == c10::multiply_integers(info.shape),
                 "the ranks' parts of '{}' [{}] have {} elements or lie outside of it", info.name,
                 fmt::join(info.shape, ", "), covered);
}

bool PartGather::takes_own(const std::string& name) const {
  const Pieces& pieces = pieces_.at(name);
  return std::any_of(pieces.begin(), pieces.end(),
                     [&](const Piece& piece) { return piece.sender == ranks_.rank(); });
}

at::Tensor PartGather::gather(const std::vector<const safetensors::TensorInfo*>& written) const {
  const auto ranks = static_cast<size_t>(ranks_.size()), own = static_cast<size_t>(ranks_.rank());
  std::vector<int64_t> sent(ranks, 0), received(ranks, 0);
  std::vector<at::Tensor> outgoing = {at::empty({0}, at::kByte)};
  for (size_t writer = 0; writer < ranks; ++writer) {
    if (written[writer] == nullptr) continue;
    const auto& info = *written[writer];
    const at::ScalarType dtype = to_scalar_type(info.dtype);
    const auto bytes = static_cast<int64_t>(at::elementSize(dtype));
    for (const Piece& piece : pieces_.at(info.name)) {
      const auto sender = static_cast<size_t>(piece.sender);
      if (writer == own && sender != own)
        received[sender] += c10::multiply_integers(piece.sizes) * bytes;
      if (sender != own || writer == own) continue;
      outgoing.push_back(as_bytes(snapshot_.parts.at(info.name).tensor, dtype));
      sent[writer] += outgoing.back().numel();
    }
  }
  const int64_t coming = std::accumulate(received.begin(), received.end(), int64_t{0});
  at::Tensor bytes = at::empty({coming}, at::kByte);
  ranks_.all_to_all(bytes, at::cat(outgoing), received, sent).wait();
  if (written[own] == nullptr) return {};
  at::Tensor whole = empty_tensor(*written[own]);
  fill(whole, written[own]->name, bytes);
  return whole;
}

// `bytes` has what the other ranks have sent.
void PartGather::fill(at::Tensor& whole, const std::string& name, const at::Tensor& bytes) const {
  int64_t at = 0;
  for (const Piece& piece : pieces_.at(name)) {
    at::Tensor box = box_of(whole, piece.offsets, piece.sizes);
    if (piece.sender == ranks_.rank()) {
      box.copy_(snapshot_.parts.at(name).tensor);
      continue;
    }
    const int64_t size = box.numel() * whole.element_size();
    box.copy_(bytes.narrow(0, at, size).view(whole.scalar_type()).view(piece.sizes));
    at += size;
  }
}

}  // namespace longhaul::checkpoint
