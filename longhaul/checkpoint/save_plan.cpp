#include "longhaul/checkpoint/save_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

namespace longhaul::checkpoint {
namespace {

// Cuts the tensors of one group, in the order of their names, into shards.
void plan_group(const std::vector<safetensors::TensorInfo>& tensors, bool optimizer,
                int64_t max_bytes, std::vector<Shard>& shards) {
  std::vector<safetensors::TensorInfo> of_group;
  for (const auto& info : tensors) {
    if (info.name.starts_with(kOptimizerPrefix) == optimizer) of_group.push_back(info);
  }
  int number = 0;
  for (Shard& shard : cut_into_shards(of_group, max_bytes)) {
    const char* group = optimizer ? "optimizer" : "model";
    shard.file = fmt::format("{}-{:05}.safetensors", group, ++number);
    shards.push_back(std::move(shard));
  }
}

// A shard's tensors by their turns.
std::vector<Turn> turns_of(const Shard& shard, const SourceOf& source) {
  std::vector<Turn> turns;
  const void* before = nullptr;
  for (size_t i = 0; i < shard.tensors.size(); ++i) {
    const void* of = source ? source(shard.tensors[i]) : nullptr;
    if (turns.empty() || of == nullptr || of != before) turns.push_back({.begin = i});
    turns.back().end = i + 1;
    before = of;
  }
  return turns;
}

}  // namespace

int64_t planned_bytes(const safetensors::TensorInfo& info) {
  return safetensors::tensor_bytes(info.dtype, info.shape, "tensor '" + info.name + "'");
}

std::vector<Shard> cut_into_shards(const std::vector<safetensors::TensorInfo>& tensors,
                                   int64_t max_bytes) {
  std::vector<Shard> shards;
  for (const auto& info : tensors) {
    const int64_t bytes = planned_bytes(info);
    if (shards.empty() || shards.back().bytes + bytes > max_bytes) shards.emplace_back();
    shards.back().tensors.push_back(info);
    shards.back().bytes += bytes;
  }
  return shards;
}

std::vector<Shard> plan_shards(const Snapshot& snapshot, const SaveOptions& options) {
  const int ranks = options.ranks == nullptr ? 1 : options.ranks->size();
  const bool shapes_only = ranks > 1 || snapshot.fetch || !snapshot.parts.empty();
  std::vector<safetensors::TensorInfo> described;
  int64_t total = 0;
  for (const auto& [name, tensor] : snapshot.tensors) {
    described.push_back(shapes_only ? describe_shape(name, tensor) : describe(name, tensor));
    total += planned_bytes(described.back());
  }
  const int64_t max_bytes = std::min(options.max_shard_bytes, ceil_div(total, ranks));
  std::vector<Shard> shards;
  plan_group(described, /*optimizer=*/false, max_bytes, shards);
  plan_group(described, /*optimizer=*/true, max_bytes, shards);
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].writer = static_cast<int>(i % static_cast<size_t>(ranks));
    safetensors::order_for_writing(shards[i].tensors);
  }
  return shards;
}

int64_t total_bytes(const std::vector<Shard>& shards) {
  int64_t total = 0;
  for (const Shard& shard : shards) total += shard.bytes;
  return total;
}

std::vector<Turn> plan_turns(const std::vector<Shard>& shards, int lanes, const SourceOf& source) {
  std::map<std::pair<int, int>, std::vector<Turn>> turns_of_lane;  // by writer and lane
  std::map<int, int> files_of_writer;
  size_t longest = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const int writer = shards[i].writer, lane = files_of_writer[writer]++ % lanes;
    auto& turns = turns_of_lane[{writer, lane}];
    for (const Turn& turn : turns_of(shards[i], source)) {
      turns.push_back({i, turn.begin, turn.end, writer, lane, turns.size()});
    }
    longest = std::max(longest, turns.size());
  }
  std::vector<Turn> order;
  for (size_t round = 0; round < longest; ++round) {
    for (const auto& [lane, turns] : turns_of_lane) {
      if (round < turns.size()) order.push_back(turns[round]);
    }
  }
  return order;
}

}  // namespace longhaul::checkpoint
