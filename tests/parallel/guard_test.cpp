// A number that is not finite on one rank alone: all ranks leave the step out, or stop, together,
// and go on as one rank would.
#include <gmock/gmock.h>

#include "longhaul/train/trainer.h"
#include "tests/parallel/layout_harness.h"

namespace longhaul::testing {
namespace {

enum class Spoiled { kActivations, kGradients };

// Spoils what goes on from a block, or the gradient that comes back to it, while it is on.
class Spoiler : public nn::ModuleHook {
 public:
  Spoiler(nn::Module& block, Spoiled what) : block_(&block), what_(what) { block_->add_hook(this); }
  ~Spoiler() override { block_->remove_hook(this); }

  std::vector<at::Tensor> before(std::vector<at::Tensor> inputs) override { return inputs; }
  at::Tensor after(at::Tensor output) override {
    if (!on) return output;
    if (what_ == Spoiled::kActivations) return output * NAN;
    if (!output.requires_grad()) return output;  // of a pass that is recomputed
    output.register_hook([](const at::Tensor& grad) { return grad * NAN; });
    return output;
  }

  bool on = false;

 private:
  nn::Module* block_;
  Spoiled what_;
};

constexpr int64_t kSpoiledStep = 2;

// The steps of a job with the second spoiled on the last rank; f(rank, trainer, spoiler).
template <typename F>
void on_each_rank(const LayoutJob& job, const Layout& layout, Spoiled what,
                  const Overrides& overrides, const F& f) {
  const JobConfig config = job.config(layout, layout.name(), overrides);
  test::run_ranks(layout.ranks(), [&](dtensor::World& world) {
    const auto dims = parallel::ParallelDims::make(config, world);
    train::Trainer trainer(config, resolve_model(config), dims);
    Spoiler spoiler(*trainer.model().stages().trunk[1], what);
    for (int64_t step = 1; step <= kLayoutSteps; ++step) {
      spoiler.on = step == kSpoiledStep && world.rank() == world.size() - 1;
      f(world.rank(), trainer, step);
    }
  });
}

LayoutResult skipping(const Layout& layout, Spoiled what) {
  const LayoutJob job;
  on_each_rank(job, layout, what, {"--training.nonfinite", "skip"},
               [](int rank, train::Trainer& trainer, int64_t step) {
                 const auto metrics = trainer.step();
                 EXPECT_EQ(metrics.skipped, step == kSpoiledStep) << "rank " << rank;
                 EXPECT_FALSE(metrics.skipped && std::isfinite(metrics.grad_norm));
                 EXPECT_EQ(trainer.progress().rows, static_cast<uint64_t>(step * kRowsOfAStep));
               });
  LayoutResult result;
  for (int64_t step = 1; step <= kLayoutSteps; ++step) {
    result.steps.push_back(checkpoint::load_safetensors(
        job.folder() / layout.name() / fmt::format("dump/step-{}.safetensors", step)));
  }
  return result;
}

void expect_weights_untouched(const Tensors& before, const Tensors& after) {
  int64_t weights = 0;
  for (const auto& [name, value] : before) {
    if (!name.starts_with("param.")) continue;
    EXPECT_TRUE(same_bits(after.at(name), value)) << name;
    ++weights;
  }
  EXPECT_GT(weights, 0);
}

const std::vector<Layout> kLayouts = {
    {.dp_replicate = 2}, {.dp_shard = 3}, {.tp = 2}, {.dp_shard = 2, .cp = 2, .tp = 2, .ep = 4}};

class Guard : public ::testing::TestWithParam<Layout> {};

TEST_P(Guard, AllRanksSkipTheStepAsOneRankDoes) {
  for (const Spoiled what : {Spoiled::kActivations, Spoiled::kGradients}) {
    SCOPED_TRACE(what == Spoiled::kActivations ? "activations" : "gradients");
    const auto expected = skipping({}, what), actual = skipping(GetParam(), what);
    expect_weights_untouched(actual.steps[0], actual.steps[1]);
    expect_same_step(actual.steps[0], expected.steps[0], 1, {});
    expect_same_step(actual.steps[2], expected.steps[2], 3, {});
    EXPECT_FALSE(same_bits(actual.steps[2].at("param.lm_head.weight"),
                           actual.steps[1].at("param.lm_head.weight")));
  }
}

TEST_P(Guard, AllRanksStopWithOneError) {
  const LayoutJob job;
  std::mutex mutex;
  std::vector<std::string> errors;
  on_each_rank(job, GetParam(), Spoiled::kGradients, {},
               [&](int, train::Trainer& trainer, int64_t step) {
                 if (step > kSpoiledStep) return;
                 try {
                   trainer.step();
                   EXPECT_LT(step, kSpoiledStep);
                 } catch (const train::StepRefused& error) {
                   const std::lock_guard lock(mutex);
                   errors.emplace_back(error.what());
                   EXPECT_EQ(trainer.progress().step, kSpoiledStep - 1);
                 }
               });
  ASSERT_EQ(errors.size(), static_cast<size_t>(GetParam().ranks()));
  for (const auto& error : errors) EXPECT_EQ(error, errors[0]);
  EXPECT_THAT(errors[0], ::testing::HasSubstr("not finite, and nothing was updated"));
}

INSTANTIATE_TEST_SUITE_P(All, Guard, ::testing::ValuesIn(kLayouts),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace longhaul::testing
