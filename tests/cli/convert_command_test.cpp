// `longhaul convert`, as a user meets it.
#include "tests/cli/small_job.h"

namespace longhaul::test {
namespace {

using ::testing::HasSubstr;

class ConvertCommand : public SmallJob {};

TEST_F(ConvertCommand, ARunsWeightsThereAndBack) {
  expect_trained(train({"--validation.no_enable", "--checkpoint.last_save_in_hf"}));
  const fs::path exported = path("run/checkpoint/step-6-hf");
  EXPECT_EQ(slurp(exported / "tokenizer.json"), small_tokenizer());

  const auto out = run({"convert", "run/checkpoint", "hf", "--max-shard-size", "1MB"});
  EXPECT_EQ(out.status, 0) << out.err;
  EXPECT_THAT(out.err, HasSubstr("converting"));
  EXPECT_THAT(out.err, HasSubstr("wrote hf"));
  EXPECT_EQ(slurp(path("hf/tokenizer.json")), small_tokenizer());
  const auto same = run({"checkpoint", "diff", "hf", "run/checkpoint/step-6-hf"});
  EXPECT_EQ(same.status, 0) << same.out << same.err;

  EXPECT_EQ(run({"convert", "hf", "weights/step-0"}).status, 0);
  const auto back = run({"checkpoint", "diff", "weights", "run/checkpoint/step-6"});
  EXPECT_EQ(back.status, 0) << back.out << back.err;

  EXPECT_EQ(run({"convert", "hf/", "step-3"}).status, 0);  // also right here
  EXPECT_EQ(run({"checkpoint", "verify", "step-3"}).status, 0);

  // Weights of either form start another run, and text.
  for (const Words& start :
       {Words{"--checkpoint.initial_load_path", "weights"},
        Words{"--checkpoint.initial_load_path", "hf", "--checkpoint.initial_load_in_hf"}}) {
    fs::remove_all(path("again"));
    Words words = {"--validation.no_enable", "--job.dump_folder", "again"};
    words.insert(words.end(), start.begin(), start.end());
    expect_trained(train(words));
  }
  const auto text = run({"generate", "job.toml", "--checkpoint", "hf", "--prompt", "the "});
  EXPECT_EQ(text.status, 0) << text.err;
}

TEST_F(ConvertCommand, IntoFp8) {
  expect_trained(train({"--validation.no_enable", "--checkpoint.last_save_in_hf",
                        "--checkpoint.export_dtype", "float8_e4m3fn"}));
  const auto out = run({"convert", "run/checkpoint", "fp8", "--dtype", "float8_e4m3fn"});
  EXPECT_EQ(out.status, 0) << out.err;
  const auto same = run({"checkpoint", "diff", "fp8", "run/checkpoint/step-6-hf"});
  EXPECT_EQ(same.status, 0) << same.out << same.err;
  const auto listed = run({"checkpoint", "show", "fp8"});
  EXPECT_THAT(listed.out, HasSubstr("_scale_inv"));
  EXPECT_THAT(listed.out, HasSubstr("F8_E4M3"));
  fs::remove_all(path("again"));
  expect_trained(train({"--validation.no_enable", "--job.dump_folder", "again",
                        "--checkpoint.initial_load_path", "fp8", "--checkpoint.initial_load_in_hf",
                        "--checkpoint.initial_load_in_hf_quantized"}));
  expect_user_error(run({"convert", "fp8", "weights/step-0", "--dtype", "float8_e4m3fn"}),
                    {"'weights/step-0': a step folder is never FP8", "leave --dtype out"});
}

TEST_F(ConvertCommand, Mistakes) {
  expect_user_error(run({"convert", "nowhere", "weights/step-0"}), {"'nowhere' does not exist"});
  expect_user_error(run({"convert", "nowhere"}), {"to is required"});
  expect_user_error(run({"convert", "a", "b", "--dtype", "float8"}), {"--dtype", "bfloat16"});
  expect_user_error(run({"convert", "a", "b", "--max-shard-size", "5XB"}), {"--max-shard-size"});
  expect_user_error(run({"convert", "corpus", "b"}), {"'corpus' is no checkpoint"});
}

}  // namespace
}  // namespace longhaul::test
