// What is refused, what passes because it has no effect, and what is only mentioned.
#include "longhaul/config/capability.h"

#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "longhaul/config/load.h"
#include "tests/support/source_folder.h"

namespace longhaul {
namespace {

const char* const kData = "[training]\ndataset = \"files\"\ndataset_path = \"data\"\n";

Strings keys_of(const std::vector<Remark>& remarks) {
  Strings keys;
  for (const auto& remark : remarks) keys.push_back(remark.key);
  return keys;
}

Strings missing(const Strings& words) {
  return keys_of(missing_behaviour(parse_job(kData, "job.toml", words)));
}

std::string data_file(const std::string& name) {
  return test::source_folder() + "/tests/config/data/" + name;
}

TEST(Capability, ThePlainJobIsFine) {
  EXPECT_EQ(missing({}), Strings{});
  EXPECT_NO_THROW(refuse_missing_behaviour(parse_job(kData, "job.toml")));
}

TEST(Capability, EverySettingThatIsNotThere) {
  const std::vector<std::pair<Strings, std::string>> cases = {
      {{"--training.dataset", "c4", "--training.dataset_path", "None"}, "training.dataset"},
      {{"--validation.enable"}, "validation.dataset"},
      {{"--training.enable_cpu_offload"}, "training.enable_cpu_offload"},
      {{"--optimizer.name", "Adam"}, "optimizer.name"},
      {{"--optimizer.swap_optimizer"}, "optimizer.swap_optimizer"},
      {{"--optimizer.early_step_in_backward"}, "optimizer.early_step_in_backward"},
      {{"--activation_checkpoint.mode", "memory_budget"}, "activation_checkpoint.mode"},
      {{"--activation_checkpoint.mode", "memory_budget"}, "activation_checkpoint.mode"},
      {{"--compile.enable"}, "compile.enable"},
      {{"--parallelism.data_parallel_replicate_degree", "2"},
       "parallelism.data_parallel_replicate_degree"},
      {{"--parallelism.data_parallel_shard_degree", "2"}, "parallelism.data_parallel_shard_degree"},
      {{"--parallelism.tensor_parallel_degree", "2"}, "parallelism.tensor_parallel_degree"},
      {{"--parallelism.pipeline_parallel_degree", "2"}, "parallelism.pipeline_parallel_degree"},
      {{"--parallelism.context_parallel_degree", "2"}, "parallelism.context_parallel_degree"},
      {{"--parallelism.expert_parallel_degree", "2"}, "parallelism.expert_parallel_degree"},
      {{"--comm.mode", "fake_backend"}, "comm.mode"},
      {{"--fault_tolerance.enable"}, "fault_tolerance.enable"},
      {{"--activation_checkpoint.debug"}, "activation_checkpoint.debug"},
      {{"--activation_checkpoint.mode", "full", "--activation_checkpoint.debug"},
       "activation_checkpoint.debug"},
      {{"--model.converters", "npu_dsa,quantize.linear.float8"}, "model.converters"},
      {{"--model.converters", "rms_norm,quantize.grouped_mm.mx"}, "model.converters"},
      {{"--memory_estimation.enable"}, "memory_estimation.enable"},
      {{"--experimental.custom_import", "a.b"}, "experimental.custom_import"},
  };
  for (const auto& [words, key] : cases) EXPECT_EQ(missing(words), Strings{key}) << key;
}

// Whether the degrees multiply to the number of ranks is another question (degrees.h).
TEST(Capability, DataParallelismNeedsMoreThanOneRank) {
  const Strings words = {"--parallelism.data_parallel_shard_degree", "2",
                         "--parallelism.data_parallel_replicate_degree", "2"};
  const auto config = parse_job(kData, "job.toml", words);
  EXPECT_EQ(keys_of(missing_behaviour(config, 1)),
            (Strings{"parallelism.data_parallel_replicate_degree",
                     "parallelism.data_parallel_shard_degree"}));
  EXPECT_NO_THROW(refuse_missing_behaviour(config, 4));
}

TEST(Capability, ConvertersThatAreThere) {
  EXPECT_EQ(missing({"--model.converters", "dsa,npu_rms_norm,rope,npu_permute"}), Strings{});
  EXPECT_EQ(missing({"--model.converters", "npu_dsa,rms_norm,npu_rope,permute,cross_entropy"}),
            Strings{});
}

TEST(Capability, WhatHasNoEffectPasses) {
  EXPECT_EQ(missing({"--parallelism.pipeline_parallel_schedule",
                     "DualPipeV",
                     "--parallelism.pipeline_parallel_microbatch_size",
                     "4",
                     "--parallelism.enable_custom_context_parallel",
                     "--parallelism.custom_context_parallel_path",
                     "a.b.C",
                     "--parallelism.expert_tensor_parallel_degree",
                     "4",
                     "--parallelism.expert_parallel_comm_backend",
                     "deepep",
                     "--parallelism.enable_async_tensor_parallel",
                     "--parallelism.fsdp_reshard_after_forward",
                     "always",
                     "--quantize.linear.float8.filter_fqns",
                     "output",
                     "--job.custom_config_module",
                     "a.b",
                     "--validation.dataset",
                     "c4_validation",
                     "--checkpoint.async_mode",
                     "async",
                     "--checkpoint.initial_load_path",
                     "x",
                     "--optimizer.swap_optimizer_times",
                     "4",
                     "--compile.components",
                     "loss",
                     "--profiling.profile_freq",
                     "1",
                     "--metrics.save_for_all_ranks",
                     "--fault_tolerance.group_size",
                     "2",
                     "--training.gc_freq",
                     "1",
                     "--comm.trace_buf_size",
                     "0"}),
            Strings{});
  EXPECT_EQ(missing({"--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.async_mode",
                     "async"}),
            Strings{});
}

TEST(Capability, TensorParallelSettingsThatWouldTakeEffect) {
  const JobConfig config =
      parse_job(kData, "job.toml",
                {"--parallelism.tensor_parallel_degree", "2", "--parallelism.disable_loss_parallel",
                 "--parallelism.enable_async_tensor_parallel"});
  EXPECT_EQ(
      keys_of(missing_behaviour(config, 2)),
      (Strings{"parallelism.disable_loss_parallel", "parallelism.enable_async_tensor_parallel"}));
}

TEST(Capability, NotesNameWhatIsNotActive) {
  EXPECT_EQ(keys_of(notes(parse_job(kData, "job.toml"))), Strings{});
  EXPECT_EQ(keys_of(notes(parse_job(kData, "job.toml",
                                    {"--activation_checkpoint.mode", "none", "--training.dtype",
                                     "float64", "--training.mixed_precision_param", "bfloat16"}))),
            (Strings{"training.mixed_precision_param"}));
  const Strings seed = {"--checkpoint.enable", "--checkpoint.create_seed_checkpoint"};
  EXPECT_EQ(missing(seed), Strings{});
  EXPECT_EQ(keys_of(notes(parse_job(kData, "job.toml", seed))),
            (Strings{"checkpoint.create_seed_checkpoint"}));
}

TEST(Capability, OfADataLoaderOnlyTheThreadsAreUsed) {
  for (const std::string section : {"training.dataloader", "validation.dataloader"}) {
    const std::string option = "--" + section + ".";
    EXPECT_EQ(keys_of(notes(parse_job(kData, "job.toml", {option + "num_workers", "3"}))),
              Strings{});
    EXPECT_EQ(keys_of(notes(parse_job(kData, "job.toml",
                                      {option + "persistent_workers", option + "pin_memory",
                                       option + "prefetch_factor", "4"}))),
              (Strings{section + ".persistent_workers", section + ".pin_memory",
                       section + ".prefetch_factor"}));
  }
}

TEST(Capability, AttentionIsKeptOfTheFusedKernelOnly) {
  const auto noted = [](const Strings& words) {
    Strings all = {"--activation_checkpoint.selective_ac_option", "op"};
    all.insert(all.end(), words.begin(), words.end());
    return keys_of(notes(parse_job(kData, "job.toml", all)));
  };
  EXPECT_EQ(noted({}), Strings{"activation_checkpoint.op_sac_save_list"});
  EXPECT_EQ(noted({"--model.converters", "rms_norm,npu_dsa"}), Strings{});
  EXPECT_EQ(noted({"--activation_checkpoint.op_sac_save_list", "linear"}), Strings{});
  EXPECT_EQ(noted({"--activation_checkpoint.mode", "full"}), Strings{});
}

TEST(Capability, TheRefusalNamesPlaceSettingAndRemedy) {
  const JobConfig config = parse_job(std::string(kData) + "[compile]\nenable = true\n", "job.toml",
                                     {"--memory_estimation.enable"});
  try {
    refuse_missing_behaviour(config);
    FAIL() << "not refused";
  } catch (const UserError& error) {
    EXPECT_STREQ(error.what(),
                 "job.toml:5: compile.enable = true: there is no graph compiler yet; set it to "
                 "false (1 more: `longhaul config check` lists them)");
  }
}

TEST(Capability, TheTorchTitanFile) {
  const JobConfig config = load_job(data_file("torchtitan_deepseek_v3_671b.toml"));
  EXPECT_EQ(config.lr_scheduler.decay_ratio, 0.8);
  EXPECT_EQ(config.quantize.grouped_mm.float8.fqns, Strings{"experts"});
  EXPECT_EQ(keys_of(missing_behaviour(config)), (Strings{"training.dataset", "compile.enable"}));
}

TEST(Capability, TheRecipeFile) {
  const JobConfig config = load_job(data_file("recipe_v32_671b_128die.toml"));
  EXPECT_EQ(config.model.flavor, "671B_debug_128die");
  EXPECT_EQ(keys_of(missing_behaviour(config)),
            (Strings{"optimizer.swap_optimizer", "parallelism.context_parallel_degree",
                     "parallelism.expert_parallel_degree", "parallelism.tensor_parallel_degree",
                     "parallelism.pipeline_parallel_degree"}));
  EXPECT_EQ(keys_of(missing_behaviour(config, 1024)),
            (Strings{"optimizer.swap_optimizer", "parallelism.pipeline_parallel_degree"}));
}

TEST(Capability, TokensTravelByAllToAll) {
  const auto config = parse_job(kData, "job.toml",
                                {"--parallelism.expert_parallel_degree", "2",
                                 "--parallelism.expert_parallel_comm_backend", "deepep"});
  EXPECT_EQ(keys_of(missing_behaviour(config, 2)),
            Strings{"parallelism.expert_parallel_comm_backend"});
}

}  // namespace
}  // namespace longhaul
