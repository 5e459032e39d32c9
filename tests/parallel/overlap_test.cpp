// FSDP on the model itself over a slow link: the weights of a unit are on their way before the unit
// asks for them, in both passes. How much of their way the other units' computing hides is printed.
#include <gmock/gmock.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>
#include <iostream>

#include "tests/parallel/ranks_of_model.h"

namespace longhaul::testing {
namespace {

using dtensor::CollectiveRecord;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// When a unit begins to compute, forwards and backwards (with its recomputation, where there is
// one). Outermost of its hooks, so that weights that are not here yet are waited for afterwards.
class Arrival : public nn::ModuleHook {
 public:
  explicit Arrival(nn::Module& unit) : unit_(&unit) { unit_->add_hook(this); }

  std::vector<at::Tensor> before(std::vector<at::Tensor> inputs) override {
    if (torch::autograd::get_current_graph_task_id() == -1) {
      forward_ns = now_ns();
    } else {
      begin_backward();
    }
    return inputs;
  }
  at::Tensor after(at::Tensor output) override {
    if (output.requires_grad()) {
      output.register_hook([this](const at::Tensor& grad) {
        begin_backward();
        return grad;
      });
    }
    return output;
  }

  // Collectives that gather it: by ranks that share its dense weights, its router, its experts.
  int64_t num_gathers() const {
    bool experts = false;
    for (const auto& parameter : unit_->parameters()) {
      experts |= v3::is_routed_expert("." + parameter.name);
    }
    return experts ? 3 : 1;
  }

  int64_t forward_ns = 0, backward_ns = 0;

 private:
  void begin_backward() {
    if (backward_ns == 0) backward_ns = now_ns();
  }

  nn::Module* unit_;
};

// Gathers of one pass, unit by unit, and when each unit asked for them.
struct Gathered {
  std::vector<CollectiveRecord> gathers;
  int64_t asked_ns;
};

double hidden_share(const std::vector<Gathered>& units) {
  double hidden = 0, all = 0;
  for (const auto& unit : units) {
    for (const auto& gather : unit.gathers) {
      all += static_cast<double>(gather.end_ns - gather.start_ns);
      hidden += static_cast<double>(std::clamp(unit.asked_ns, gather.start_ns, gather.end_ns) -
                                    gather.start_ns);
    }
  }
  return hidden / all;
}

// All but the first unit's.
void expect_on_their_way(const std::vector<Gathered>& units, const char* pass) {
  for (size_t i = 1; i < units.size(); ++i) {
    for (const auto& gather : units[i].gathers) {
      EXPECT_LT(gather.start_ns, units[i].asked_ns) << pass << ", unit " << i << " of the pass";
    }
  }
}

std::vector<CollectiveRecord> gathers_of(const dtensor::World& world) {
  std::vector<CollectiveRecord> found;
  for (const auto& record : world.log().records()) {
    if (record.kind == dtensor::CollectiveKind::kAllGather) found.push_back(record);
  }
  return found;
}

// What all the model's parts are: dense and expert layers, MTP modules. Those of the trunk and MTP
// let their weights go after the forward pass; embedding and final norm, which MTP uses again, do
// not.
void check_overlap(dtensor::World& world, Job job) {
  std::vector<std::unique_ptr<Arrival>> arrivals;
  size_t trunk = 0;
  job.prepare = [&](v3::Model& model) {
    const auto stages = model.stages();
    const auto add = [&](nn::Module& unit) { arrivals.push_back(std::make_unique<Arrival>(unit)); };
    add(*stages.embedding);
    for (auto* block : stages.trunk) add(*block);
    trunk = stages.trunk.size();
    add(*stages.norm);
    for (auto* block : stages.mtp) add(*block);
  };
  RankOfModel rank(world, {.dp = world.size(), .fsdp = true}, job);
  world.log().clear();
  rank.forward();
  const auto forward_gathers = gathers_of(world);
  world.log().clear();
  rank.backward();
  const auto backward_gathers = gathers_of(world);

  const auto by_unit = [](const std::vector<Arrival*>& units, bool backward,
                          const std::vector<CollectiveRecord>& gathers) {
    std::vector<Gathered> result;
    auto next = gathers.begin();
    for (const Arrival* unit : units) {
      const int64_t count = std::min<int64_t>(unit->num_gathers(), gathers.end() - next);
      result.push_back({{next, next + count}, backward ? unit->backward_ns : unit->forward_ns});
      next += count;
    }
    EXPECT_TRUE(next == gathers.end()) << gathers.end() - next << " gathers more";
    return result;
  };
  std::vector<Arrival*> forwards, backwards;
  for (const auto& unit : arrivals) forwards.push_back(unit.get());
  for (size_t i = arrivals.size(); i-- > 1;) {
    if (i != trunk + 1) backwards.push_back(arrivals[i].get());
  }
  const auto forward = by_unit(forwards, false, forward_gathers);
  const auto backward = by_unit(backwards, true, backward_gathers);
  expect_on_their_way(forward, "forward");
  expect_on_their_way(backward, "backward");
  if (world.rank() == 0) {
    std::cout << fmt::format("gathers hidden by compute: forward {:.0f}%, backward {:.0f}%\n",
                             100 * hidden_share(forward), 100 * hidden_share(backward));
  }
}

Job overlap_job() {
  Job job;
  job.config.num_hidden_layers = 4;
  return job;
}

TEST(Overlap, WeightsAreOnTheirWayBeforeTheyAreAskedFor) {
  test::run_ranks(2, [](dtensor::World& world) { check_overlap(world, overlap_job()); },
                  {.link = {.latency_ms = 2}});
}

TEST(Overlap, RecomputedBlocks) {
  Job job = overlap_job();
  job.settings.recompute.every = 1;
  test::run_ranks(2, [&](dtensor::World& world) { check_overlap(world, job); },
                  {.link = {.latency_ms = 2}});
}

}  // namespace
}  // namespace longhaul::testing
