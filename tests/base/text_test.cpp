#include "longhaul/base/text.h"

#include <gtest/gtest.h>

namespace longhaul {
namespace {

TEST(Text, NearestName) {
  const std::vector<std::string> names = {"seq_len", "steps", "local_batch_size"};
  EXPECT_EQ(nearest_name("seqlen", names), "seq_len");
  EXPECT_EQ(nearest_name("step", names), "steps");
  EXPECT_EQ(nearest_name("STEPS", names), "steps");
  EXPECT_EQ(nearest_name("zzzzzzzz", names), "");
  EXPECT_EQ(nearest_name("tp", {"lr"}), "") << "two letters, both others";
  EXPECT_EQ(nearest_name("lrr", {"lr"}), "lr");
  EXPECT_EQ(did_you_mean("sqe_len", names), ", did you mean 'seq_len'?");
}

TEST(Text, Formats) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(-1234567), "-1,234,567");
  EXPECT_EQ(human_bytes(512), "512 B");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_seconds(3.14), "3.1s");
  EXPECT_EQ(human_seconds(3723), "1h 02m 03s");
}

}  // namespace
}  // namespace longhaul
