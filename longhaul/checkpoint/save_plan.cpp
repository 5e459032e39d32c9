#include "longhaul/checkpoint/save_plan.h"

#include <fmt/format.h>

#include <algorithm>

namespace longhaul::checkpoint {
namespace {

int64_t bytes_of(const safetensors::TensorInfo& info) {
  return safetensors::tensor_bytes(info.dtype, info.shape, "tensor '" + info.name + "'");
}

// Cuts the tensors of one group, in the order of their names, into shards.
void plan_group(const std::vector<safetensors::TensorInfo>& tensors, bool optimizer,
                int64_t max_bytes, std::vector<Shard>& shards) {
  int number = 0;
  for (const auto& info : tensors) {
    if (info.name.starts_with(kOptimizerPrefix) != optimizer) continue;
    const int64_t bytes = bytes_of(info);
    if (number == 0 || shards.back().bytes + bytes > max_bytes) {
      const char* group = optimizer ? "optimizer" : "model";
      shards.push_back({fmt::format("{}-{:05}.safetensors", group, ++number), {}, 0, 0});
    }
    shards.back().tensors.push_back(info);
    shards.back().bytes += bytes;
  }
}

}  // namespace

std::vector<Shard> plan_shards(const TensorMap& tensors, bool shapes_only,
                               const SaveOptions& options) {
  std::vector<safetensors::TensorInfo> described;
  int64_t total = 0;
  for (const auto& [name, tensor] : tensors) {
    described.push_back(shapes_only ? describe_shape(name, tensor) : describe(name, tensor));
    total += bytes_of(described.back());
  }
  const int ranks = options.ranks == nullptr ? 1 : options.ranks->size();
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

}  // namespace longhaul::checkpoint
