#include "longhaul/dtensor/operators/placing.h"

#include "longhaul/base/log.h"
#include "longhaul/dtensor/dispatch_cache.h"

namespace longhaul::dtensor {

Placing::Placing(const char* op, const Mesh& mesh, std::vector<Tensor> inputs,
                 std::vector<std::vector<int64_t>> outputs)
    : op_(op), mesh_(mesh), outputs_(outputs.size()) {
  for (auto& input : inputs) inputs_.push_back({std::move(input), {}, {}});
  for (size_t i = 0; i < outputs.size(); ++i) outputs_[i].sizes = std::move(outputs[i]);
}

void Placing::replicate() {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    add(i, Placement::replicate(), Placement::replicate(),
        "every rank computes the same, as its parts cannot be computed alone");
  }
  for (auto& output : outputs_) output.placements.push_back(Placement::replicate());
}

void Placing::share(std::initializer_list<Placement> inputs,
                    std::initializer_list<Placement> outputs) {
  size_t i = 0;
  for (const Placement& placement : inputs) {
    add(i++, placement, placement.is_replicate() ? Placement::partial() : placement,
        "each rank's share needs the whole of it");
  }
  i = 0;
  for (const Placement& placement : outputs) outputs_[i++].placements.push_back(placement);
}

void Placing::add(size_t i, Placement placement, Placement grad, const char* reason) {
  const size_t axis = inputs_[i].placements.size();
  const Communicator& ranks = mesh_->axis(static_cast<int>(axis));
  if (placement.is_replicate() && placement_of(inputs_[i].tensor, axis).is_shard() &&
      ranks.size() > 1) {
    std::vector<Tensor> all;
    for (const auto& input : inputs_) all.push_back(input.tensor);
    const std::string line = fmt::format("{} on {}: input {} is gathered along axis {}: {}", op_,
                                         describe(all), i, ranks.axis(), reason);
    if (mesh_->cache().is_new(line)) log::info("{}", line);
  }
  inputs_[i].placements.push_back(placement);
  inputs_[i].grads.push_back(grad);
}

}  // namespace longhaul::dtensor
