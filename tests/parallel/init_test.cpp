// Initial weights are a function of seed, name and global element: in every layout the bits of one
// rank, as the trainer makes them and a checkpoint holds them.
#include <gmock/gmock.h>

#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/train/resolve_model.h"
#include "longhaul/train/trainer.h"
#include "tests/parallel/layout_harness.h"

namespace longhaul::testing {
namespace {

// The checksums of the weights before the first step, by global name.
std::map<std::string, std::string> initial_weights(const LayoutJob& job, const Layout& layout,
                                                   const Overrides& overrides = {}) {
  const JobConfig config = job.config(layout, "run", overrides);
  const auto resolved = resolve_model(config);
  const fs::path folder = job.folder() / "initial" / layout.name();
  test::run_ranks(layout.ranks(), [&](dtensor::World& world) {
    const auto dims = parallel::ParallelDims::make(config, world);
    const train::Trainer trainer(config, resolved, dims);
    checkpoint::save(folder, trainer.snapshot(), {.ranks = dims.all.get()});
  });
  const checkpoint::CheckpointReader reader(checkpoint::step_path(folder, 0));
  std::map<std::string, std::string> checksums;
  for (const auto& name : reader.names()) {
    if (!name.starts_with("optimizer.")) checksums[name] = reader.checksum(name);
  }
  return checksums;
}

TEST(InitialWeights, AreThoseOfOneRankBitByBit) {
  const LayoutJob job;
  const auto expected = initial_weights(job, {});
  EXPECT_GT(expected.size(), 50u);
  EXPECT_EQ(expected.count("model.embed_tokens.weight"), 1u);
  for (const Layout& layout :
       {Layout{.tp = 4}, Layout{.cp = 2}, Layout{.dp_replicate = 2, .dp_shard = 3},
        Layout{.dp_shard = 2, .tp = 2, .ep = 4},
        Layout{.dp_replicate = 2, .cp = 2, .tp = 2, .ep = 2}}) {
    SCOPED_TRACE(layout.name());
    EXPECT_EQ(initial_weights(job, layout), expected);
  }
  EXPECT_NE(initial_weights(LayoutJob(), {}, {"--debug.seed", "1"}), expected);
}

}  // namespace
}  // namespace longhaul::testing
