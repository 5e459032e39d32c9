#include "longhaul/parallel/parallel_dims.h"

namespace longhaul::parallel {
namespace {

// What the groups below do not know yet.
void refuse(const JobConfig& config, const Degrees& degrees) {
  if (degrees.pp > 1) {
    fail_setting(
        config, "parallelism.pipeline_parallel_degree",
        fmt::format("{}: the layers cannot be dealt to stages yet; set it to 1", degrees.pp));
  }
  if (degrees.etp > 1) {
    fail_setting(
        config, "parallelism.expert_tensor_parallel_degree",
        fmt::format("{}: an expert's matrices cannot be cut yet; set it to 1", degrees.etp));
  }
}

}  // namespace

ParallelDims ParallelDims::make(const JobConfig& config, dtensor::World& world) {
  ParallelDims dims;
  dims.degrees = resolve_degrees(config, world.size());
  const Degrees& d = dims.degrees;
  refuse(config, d);
  const std::vector<dtensor::DeviceMesh::AxisSize> dense = {{"pp", d.pp},
                                                            {"dp_replicate", d.replicate},
                                                            {"dp_shard", d.shard},
                                                            {"cp", d.cp},
                                                            {"tp", d.tp}};
  const std::vector<dtensor::DeviceMesh::AxisSize> sparse = {
      {"pp", d.pp}, {"dp_replicate", d.replicate}, {"efsdp", d.efsdp}, {"ep", d.ep}};
  dims.mesh = dtensor::DeviceMesh::make(world, dense);
  dims.tp = dims.mesh->slice({"tp"});
  const auto flatten = [&](const std::vector<std::string>& names, const char* name) {
    return dtensor::flattened_axis(world, dense, names, name);
  };
  dims.all = flatten({"pp", "dp_replicate", "dp_shard", "cp", "tp"}, "all");
  dims.dp = flatten({"dp_replicate", "dp_shard"}, "dp");
  dims.fsdp = flatten({"dp_shard", "cp"}, "fsdp");
  dims.tokens = flatten({"dp_shard", "cp", "tp"}, "tokens");
  dims.loss = flatten({"dp_replicate", "dp_shard", "cp"}, "loss");
  dims.efsdp = dtensor::flattened_axis(world, sparse, {"efsdp"}, "efsdp");
  dims.ep = dtensor::flattened_axis(world, sparse, {"ep"}, "ep");
  return dims;
}

}  // namespace longhaul::parallel
