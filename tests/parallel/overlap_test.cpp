// FSDP on the model itself over a slow link: the weights of a unit are on their way before the unit
// asks for them, in both passes, and what other units compute meanwhile hides their way. Computing
// is made long against what the machine does beside it: a unit takes four times the link's delay.
//
// A gather ends when its unit has waited for it, so that its own length says nothing of when the
// data arrived. What counts is the time that units are kept waiting: from asking to that end, with
// gathering ahead and without.
#include <gmock/gmock.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>
#include <iostream>
#include <thread>

#include "tests/parallel/ranks_of_model.h"

namespace longhaul::testing {
namespace {

using dtensor::CollectiveRecord;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

constexpr double kLatencyMs = 2;
// In a backward pass a gather waits for the scatter before it.
constexpr std::chrono::milliseconds kUnitTime{8};

// When a unit begins to compute, forwards and backwards (with its recomputation, where there is
// one), and long computing at its end in both passes. Outermost of its hooks, so that weights that
// are not here yet are waited for afterwards.
class Arrival : public nn::ModuleHook {
 public:
  explicit Arrival(nn::Module& unit) : unit_(&unit) { unit_->add_hook(this); }

  std::vector<at::Tensor> before(std::vector<at::Tensor> inputs) override {
    begin(in_backward() ? backward_ns : forward_ns);
    const auto input = std::find_if(inputs.begin(), inputs.end(),
                                    [](const at::Tensor& x) { return x.requires_grad(); });
    if (input != inputs.end()) {
      *input = input->view_as(*input);  // the unit before has hooks on the tensor itself
      input->register_hook([](const at::Tensor& grad) {
        std::this_thread::sleep_for(kUnitTime);
        return grad;
      });
    }
    return inputs;
  }
  at::Tensor after(at::Tensor output) override {
    if (!in_backward()) std::this_thread::sleep_for(kUnitTime);
    if (output.requires_grad()) {
      output.register_hook([this](const at::Tensor& grad) {
        begin(backward_ns);
        return grad;
      });
    }
    return output;
  }

  // Collectives that gather it: by ranks that share its experts, and the rest.
  int64_t num_gathers() const {
    bool experts = false;
    for (const auto& parameter : unit_->parameters()) {
      experts |= v3::is_routed_expert("." + parameter.name);
    }
    return experts ? 2 : 1;
  }

  int64_t forward_ns = 0, backward_ns = 0;

 private:
  static bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }
  // Units that MTP modules come back to are there by then.
  static void begin(int64_t& first_ns) {
    if (first_ns == 0) first_ns = now_ns();
  }

  nn::Module* unit_;
};

// Gathers of one pass, unit by unit, and when each unit asked for them.
struct Gathered {
  std::vector<CollectiveRecord> gathers;
  int64_t asked_ns;
};

// How long the units wait for their weights, each from when it asks for them.
double exposed_ms(const std::vector<Gathered>& units) {
  int64_t exposed = 0;
  for (const auto& unit : units) {
    int64_t since = unit.asked_ns;
    for (const auto& gather : unit.gathers) {
      exposed += std::max<int64_t>(gather.end_ns - since, 0);
      since = std::max(since, gather.end_ns);
    }
  }
  return static_cast<double>(exposed) / 1e6;
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

// How long units wait in a pass, and of how many of them.
struct Exposed {
  double forward_ms = 0, backward_ms = 0;
  size_t forward_units = 0, backward_units = 0;
};

// What all the model's parts are: dense and expert layers, MTP modules. Those of the trunk and MTP
// let their weights go after the forward pass; embedding and final norm, which MTP uses again, do
// not.
Exposed measure_overlap(dtensor::World& world, Job job, bool ahead) {
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
  rank.fsdp().set_gather_ahead(ahead);
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
  if (ahead) {
    expect_on_their_way(forward, "forward");
    expect_on_their_way(backward, "backward");
  }
  return {exposed_ms(forward), exposed_ms(backward), forward.size(), backward.size()};
}

// As rank 0 sees it.
Exposed exposed_of(const Job& job, bool ahead) {
  Exposed exposed;
  test::run_ranks(2,
                  [&](dtensor::World& world) {
                    const auto own = measure_overlap(world, job, ahead);
                    if (world.rank() == 0) exposed = own;
                  },
                  {.link = {.latency_ms = kLatencyMs}});
  std::cout << fmt::format("gathers {}: units wait {:.1f} ms forward, {:.1f} ms backward\n",
                           ahead ? "ahead" : "when asked for", exposed.forward_ms,
                           exposed.backward_ms);
  return exposed;
}

// Nothing but the first gather of a pass has to be waited for, so that most of what units wait
// without gathering ahead, at least the link's delay each, is gone. A machine that stops one rank
// for long makes the other wait: then it is measured again.
void expect_hidden(const Job& job) {
  const auto without = exposed_of(job, false);
  EXPECT_GE(without.forward_ms, kLatencyMs * static_cast<double>(without.forward_units));
  EXPECT_GE(without.backward_ms, kLatencyMs * static_cast<double>(without.backward_units));
  const double forward_limit = 0.4 * without.forward_ms, backward_limit = 0.4 * without.backward_ms;
  Exposed with = without;
  for (int i = 0; i < 3 && (with.forward_ms > forward_limit || with.backward_ms > backward_limit);
       ++i) {
    with = exposed_of(job, true);
  }
  EXPECT_LE(with.forward_ms, forward_limit);
  EXPECT_LE(with.backward_ms, backward_limit);
}

Job overlap_job() {
  Job job;
  job.config.num_hidden_layers = 4;
  return job;
}

TEST(Overlap, ComputeHidesGathers) { expect_hidden(overlap_job()); }

TEST(Overlap, ComputeHidesGathersOfRecomputedBlocks) {
  Job job = overlap_job();
  job.settings.recompute.every = 1;
  expect_hidden(job);
}

}  // namespace
}  // namespace longhaul::testing
