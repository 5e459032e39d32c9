// Activation checkpointing as a job file asks for it.
#include <gmock/gmock.h>

#include "longhaul/config/names.h"
#include "longhaul/ops/saved_results.h"
#include "longhaul/train/setup.h"
#include "tests/support/log_capture.h"
#include "tests/support/tensors.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Words = std::vector<std::string>;

const char* const kKey = "--activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns";

deepseek_v3::Recomputation asked(const std::string& lines) {
  const JobConfig config = parse_job("[activation_checkpoint]\n" + lines, "job.toml");
  return train::model_settings(config, at::kCPU).recompute;
}

TEST(RecomputeOfAJob, WhatTheKeysMean) {
  EXPECT_EQ(asked("mode = \"none\"\n").every, 0);
  EXPECT_EQ(asked("mode = \"full\"\nselective_ac_option = \"op\"\n").every, 1);
  EXPECT_THAT(asked("mode = \"full\"\nselective_ac_option = \"op\"\n").saved_operators, IsEmpty());
  EXPECT_EQ(asked("").every, 2) << "TorchTitan's default";
  EXPECT_EQ(asked("selective_ac_option = \"3\"\n").every, 3);
  EXPECT_THAT(asked("selective_ac_option = \"3\"\n").saved_operators, IsEmpty());
  const auto by_operator = asked("selective_ac_option = \"op\"\n");
  EXPECT_EQ(by_operator.every, 1);
  EXPECT_THAT(by_operator.saved_operators,
              ElementsAre("linear", "flash_attention", "sparse_flash_attention", "all_to_all",
                          "reduce_scatter"));
  EXPECT_THAT(by_operator.unsaved_linears, ElementsAre("mlp.gate")) << "TorchTitan's router";
  EXPECT_THAT(asked("selective_ac_option = \"op\"\nop_sac_save_list = [\"grouped_matmul\"]\n")
                  .saved_operators,
              ElementsAre("grouped_matmul"));
}

TEST(RecomputeOfAJob, EveryNameIsAnOperator) {
  EXPECT_EQ(savable_operator_names(), ops::savable_operators());
}

// Two micro-batches a step.
TEST(RecomputeOfAJob, TrainsTheSame) {
  const auto batches = load_golden("hf_base/train20.safetensors").at("batches");
  for (const std::string converters : {"", "dsa,rms_norm,rope,permute,gmm,cross_entropy"}) {
    const auto losses = [&](const Words& mode) {
      const GoldenJob job("hf_base", batches);
      Words words = {"--training.steps",
                     "3",
                     "--training.local_batch_size",
                     "1",
                     "--training.global_batch_size",
                     "2"};
      if (!converters.empty()) words.insert(words.end(), {"--model.converters", converters});
      words.insert(words.end(), mode.begin(), mode.end());
      run(job.config(words));
      std::vector<double> numbers;
      for (const auto& step : job.metrics()) {
        for (const char* name : {"loss", "lm_loss", "grad_norm"}) numbers.push_back(step.at(name));
      }
      return numbers;
    };
    const auto expected = losses({"--activation_checkpoint.mode", "none"});
    ASSERT_EQ(expected.size(), 9U);
    EXPECT_EQ(losses({}), expected) << "the default";
    EXPECT_EQ(losses({"--activation_checkpoint.mode", "full"}), expected);
    EXPECT_EQ(losses({"--activation_checkpoint.selective_ac_option", "1"}), expected);
    EXPECT_EQ(losses({"--activation_checkpoint.selective_ac_option", "op"}), expected);
  }
}

TEST(RecomputeOfAJob, TheStartupTableSaysWhat) {
  const auto table = [&](const Words& words) {
    const GoldenJob job("hf_base", load_golden("hf_base/train20.safetensors").at("batches"));
    Words all = {"--training.steps", "1"};
    all.insert(all.end(), words.begin(), words.end());
    const test::LogCapture log;
    run(job.config(all));
    return log.text();
  };
  EXPECT_THAT(table({}), HasSubstr("activations   1 block of 2 computed again"));
  EXPECT_THAT(table({"--activation_checkpoint.mode", "none"}), HasSubstr("activations   all kept"));
  EXPECT_THAT(table({"--activation_checkpoint.selective_ac_option", "op",
                     "--activation_checkpoint.op_sac_save_list", "linear,all_to_all"}),
              HasSubstr("activations   every block computed again in the backward pass, but for "
                        "linear, all_to_all"));
}

// Names of modules can be checked once the model is known, before anything is allocated.
TEST(RecomputeOfAJob, AProductThatIsNotThere) {
  const GoldenJob job("hf_base", load_golden("hf_base/train20.safetensors").at("batches"));
  const auto error = [&](const std::string& names, const std::string& option = "op") {
    return message_of([&] {
      run(job.config({"--training.steps", "1", "--activation_checkpoint.selective_ac_option",
                      option, kKey, names}));
    });
  };
  EXPECT_THAT(error("mlp.gate,self_attn.q_b_prj"),
              HasSubstr("per_op_sac_force_recompute_mm_shapes_by_fqns: no block has a product "
                        "called 'self_attn.q_b_prj', did you mean 'self_attn.q_b_proj'?"));
  EXPECT_THAT(error("mlp.gate,self_attn.q_b_prj", "2"), "") << "nobody reads it";
  fs::remove_all(job.folder.path() / "run");
  EXPECT_THAT(error("moe.router.gate,o_proj"), "");
}

}  // namespace
}  // namespace longhaul::testing
