#include "longhaul/config/degrees.h"

#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "longhaul/config/load.h"

namespace longhaul {
namespace {

// The line for the degrees, or the error's.
std::string line(int64_t ranks, const Strings& words) {
  try {
    return check_degrees(parse_job("", "job.toml", words), ranks);
  } catch (const UserError& error) {
    return error.what();
  }
}

TEST(Degrees, TheShardDegreeIsWhatIsLeft) {
  EXPECT_EQ(line(8, {"--parallelism.tensor_parallel_degree", "2"}),
            "8 ranks = dp_replicate 1 x dp_shard 4 x cp 1 x tp 2 x pp 1");
  EXPECT_EQ(line(1, {}), "1 ranks = dp_replicate 1 x dp_shard 1 x cp 1 x tp 1 x pp 1");
}

TEST(Degrees, ProductsThatDoNotFit) {
  EXPECT_EQ(line(8, {"--parallelism.tensor_parallel_degree", "3",
                     "--parallelism.data_parallel_shard_degree", "2"}),
            "8 ranks = dp_replicate 1 x dp_shard 2 x cp 1 x tp 3 x pp 1: the product is 6, not 8");
  EXPECT_EQ(line(8, {"--parallelism.tensor_parallel_degree", "3"}),
            "8 ranks = dp_replicate 1 x dp_shard -1 x cp 1 x tp 3 x pp 1: the other degrees "
            "multiply to 3, which does not divide 8");
  EXPECT_EQ(line(0, {}), "--ranks: 0 is out of range, expected >= 1");
}

TEST(Degrees, ProductsThatAreTooLargeForANumber) {
  const std::string text = line(8, {"--parallelism.tensor_parallel_degree", "4611686018427387904",
                                    "--parallelism.context_parallel_degree", "4",
                                    "--parallelism.data_parallel_shard_degree", "2"});
  EXPECT_NE(text.find("the product is 9223372036854775807, not 8"), std::string::npos) << text;
}

TEST(Degrees, Experts) {
  const Strings recipe = {"--parallelism.tensor_parallel_degree",   "4",
                          "--parallelism.pipeline_parallel_degree", "2",
                          "--parallelism.context_parallel_degree",  "16",
                          "--parallelism.expert_parallel_degree",   "64"};
  EXPECT_EQ(line(128, recipe),
            "128 ranks = dp_replicate 1 x dp_shard 1 x cp 16 x tp 4 x pp 2; experts: dp_shard x cp "
            "x tp = 64 = efsdp 1 x ep 64 x etp 1");
  EXPECT_EQ(line(8, {"--parallelism.expert_parallel_degree", "3"}),
            "8 ranks = dp_replicate 1 x dp_shard 8 x cp 1 x tp 1 x pp 1: ep 3 x etp 1 must divide "
            "dp_shard x cp x tp = 8");
  EXPECT_EQ(
      line(8, {"--parallelism.tensor_parallel_degree", "4", "--parallelism.expert_parallel_degree",
               "2", "--parallelism.expert_tensor_parallel_degree", "2"}),
      "8 ranks = dp_replicate 1 x dp_shard 2 x cp 1 x tp 4 x pp 1: "
      "parallelism.expert_tensor_parallel_degree 2 must be 1 or tp 4");
}

TEST(Degrees, TheGlobalBatch) {
  EXPECT_EQ(line(4, {"--training.local_batch_size", "2", "--training.global_batch_size", "12"}),
            "4 ranks = dp_replicate 1 x dp_shard 4 x cp 1 x tp 1 x pp 1: "
            "training.global_batch_size 12 is not a multiple of local_batch_size x dp_replicate x "
            "dp_shard = 8");
}

}  // namespace
}  // namespace longhaul
