#include "longhaul/parallel/data_parallel.h"

#include <set>

#include "longhaul/dtensor/dtensor.h"

namespace longhaul::parallel {
namespace {

using Parameters = std::vector<nn::NamedParameter>;

// Takes the parameters of `module` out of `rest`, under their names in the model.
Parameters take_parameters(const nn::Module& module, Parameters& rest) {
  std::set<const Tensor*> own;
  for (const auto& parameter : module.parameters()) own.insert(parameter.tensor);
  Parameters taken, left;
  for (auto& parameter : rest) {
    (own.count(parameter.tensor) > 0 ? taken : left).push_back(std::move(parameter));
  }
  rest = std::move(left);
  return taken;
}

// By tensor parallelism.
bool is_cut(const Tensor& parameter) {
  return dtensor::is_dtensor(parameter) && dtensor::spec_of(parameter).placements[0].is_shard();
}

std::vector<std::pair<Parameters, Group>> by_ranks(const Parameters& parameters,
                                                   const ParallelDims& dims) {
  Parameters whole, cut, experts;
  for (const auto& parameter : parameters) {
    (deepseek_v3::is_routed_expert(parameter.name) ? experts
     : is_cut(*parameter.tensor)                   ? cut
                                                   : whole)
        .push_back(parameter);
  }
  std::vector<std::pair<Parameters, Group>> groups;
  if (!cut.empty()) groups.emplace_back(cut, dims.fsdp);
  if (!whole.empty()) groups.emplace_back(whole, dims.degrees.tp > 1 ? dims.tokens : dims.fsdp);
  if (!experts.empty()) groups.emplace_back(experts, dims.efsdp);
  return groups;
}

}  // namespace

std::unique_ptr<Fsdp> apply_data_parallel(deepseek_v3::Model& model, const ParallelDims& dims,
                                          const JobConfig& config) {
  if (dims.all->size() == 1) return std::make_unique<Fsdp>();
  const std::string& policy = config.parallelism.fsdp_reshard_after_forward;
  const bool always = policy == "always", reshard = policy != "never";
  const auto stages = model.stages();
  Parameters rest = model.parameters();
  std::vector<Fsdp::Unit> units;
  const auto add_block = [&](nn::Module& block) {
    units.push_back({.modules = {&block},
                     .groups = by_ranks(take_parameters(block, rest), dims),
                     .reshard_after_forward = reshard});
  };
  if (stages.embedding != nullptr) {
    units.push_back({.modules = {stages.embedding},
                     .groups = by_ranks(take_parameters(*stages.embedding, rest), dims),
                     .reshard_after_forward = always || (reshard && stages.mtp.empty()),
                     .in_sequence = false,
                     .backward_needs_weights = false});
  }
  for (auto* block : stages.trunk) add_block(*block);
  const size_t head = units.size();
  for (auto* block : stages.mtp) add_block(*block);
  if (stages.norm != nullptr) {
    std::vector<nn::Module*> modules = {stages.norm};
    modules.insert(modules.end(), stages.head.begin(), stages.head.end());
    units.insert(units.begin() + static_cast<std::ptrdiff_t>(head),
                 {.modules = modules,
                  .groups = by_ranks(rest, dims),
                  .reshard_after_forward = always,
                  .in_sequence = false});
  }
  return std::make_unique<Fsdp>(units,
                                Fsdp::Options{.replicate = dims.mesh->shared_axis("dp_replicate"),
                                              .compute_dtype = model.settings().compute_dtype,
                                              .device = model.settings().device});
}

}  // namespace longhaul::parallel
