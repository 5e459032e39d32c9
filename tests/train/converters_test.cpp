// Converters: what they need of a job and its model, and what is printed after they are applied.
#include "longhaul/converters/converters.h"

#include <fmt/ranges.h>
#include <gmock/gmock.h>

#include <map>
#include <set>

#include "longhaul/base/error.h"
#include "longhaul/config/names.h"
#include "longhaul/train/preflight.h"
#include "tests/models/model_fixture.h"
#include "tests/support/log_capture.h"
#include "tests/support/tensors.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Every converter by itself.
std::vector<std::string> all_names() {
  std::vector<std::string> names;
  for (const auto& converter : converters::registry()) names.push_back(converter.name);
  return names;
}

TEST(ConverterNeeds, EachRefusesAnotherDeviceAndFloat64) {
  for (const auto& name : all_names()) {
    EXPECT_EQ(message_of([&] { converters::check({name}, {}); }), "") << name;
    EXPECT_THAT(
        message_of([&] { converters::check({name}, {.device = at::Device(at::kCUDA, 0)}); }),
        AllOf(HasSubstr("converter '" + name + "' needs training.device = \"cpu\""),
              HasSubstr("got cuda:0"), HasSubstr("remove it")));
    EXPECT_THAT(message_of([&] { converters::check({name}, {.compute_dtype = at::kDouble}); }),
                AllOf(HasSubstr("converter '" + name + "' needs a compute dtype of float32"),
                      HasSubstr("got float64")));
  }
}

TEST(ConverterNeeds, HeadsAreOfDsaAlone) {
  const converters::Properties most = {.attention_heads = 128, .index_heads = 128};
  EXPECT_EQ(message_of([&] { converters::check(all_names(), most); }), "");
  const converters::Properties attention = {.attention_heads = 129, .index_heads = 1};
  EXPECT_THAT(message_of([&] { converters::check({"npu_dsa"}, attention); }),
              AllOf(HasSubstr("converter 'npu_dsa' needs at most 128 attention heads on a rank"),
                    HasSubstr("got 129"), HasSubstr("parallelism.tensor_parallel_degree")));
  const converters::Properties index = {.attention_heads = 1, .index_heads = 129};
  EXPECT_THAT(message_of([&] { converters::check({"dsa"}, index); }),
              HasSubstr("converter 'dsa' needs at most 128 heads of the indexer, got 129"));
  for (const auto& name : all_names()) {
    if (name == "dsa") continue;
    EXPECT_EQ(message_of([&] { converters::check({name}, attention); }), "") << name;
    EXPECT_EQ(message_of([&] { converters::check({name}, index); }), "") << name;
  }
}

// What a job file may name is what there is.
TEST(ConverterNeeds, NamesOfTheJobFileAreThoseOfTheRegistry) {
  std::set<std::string> expected;
  for (const auto& name : all_names()) expected.insert({name, "npu_" + name});
  std::set<std::string> named;
  for (const auto& name : converter_names()) {
    if (!name.starts_with("quantize.")) named.insert(name);  // TorchTitan's, refused by name
  }
  EXPECT_EQ(named, expected);
  EXPECT_THAT(message_of([] { converters::check({"DSA"}, {}); }),
              HasSubstr("converter 'DSA' is not there, did you mean 'dsa'?"));
}

// "module: operation" of what is fused in a model.
std::set<std::string> fused_in(deepseek_v3::Model& model) {
  std::set<std::string> fused;
  for (const auto& slot : model.kernels()) {
    if (*slot.kernel == ops::Kernel::kFused) fused.insert(slot.module + ": " + slot.operation);
  }
  return fused;
}

// The paths on which the models' tests compare with the golden vectors are those of jobs: each
// converter alone, and all of them.
TEST(ConverterPaths, OfTheModelsTestsAreThoseOfTheRegistry) {
  std::map<std::string, std::vector<std::string>> names_of = {{"all", all_names()}};
  for (const auto& converter : converters::registry()) {
    names_of[converter.operation].push_back(converter.name);
  }
  std::set<std::string> tested;
  for (const auto& path : fused_paths()) {
    SCOPED_TRACE(path.name);
    tested.insert(path.fused);
    ASSERT_EQ(names_of.count(path.fused), 1);
    for (const std::string folder : {"tt_mtp_yarn", "hf_base"}) {
      deepseek_v3::ModelSettings settings;
      settings.mla_form = path.form;
      const auto converted = golden_model(folder, settings);
      converters::apply(*converted, names_of.at(path.fused), {});
      EXPECT_EQ(fused_in(*model_on(folder, {}, path)), fused_in(*converted)) << folder;
    }
  }
  EXPECT_EQ(tested.size(), names_of.size()) << "a converter that the models' tests do not take";
}

TEST(ConverterNeeds, PermuteWantsExperts) {
  const auto check = [](int64_t experts, int64_t mtp, int64_t dense) {
    deepseek_v3::ModelConfig shape;
    shape.num_hidden_layers = 2;
    shape.n_routed_experts = experts;
    shape.num_nextn_predict_layers = mtp;
    shape.first_k_dense_replace = dense;
    const JobConfig config = parse_job(
        "[model]\nname = \"deepseek_v32\"\nconverters = [\"permute\"]\n"
        "[training]\ndevice = \"cpu\"\n",
        "job.toml", {});
    return message_of([&] { train::check_converters(config, shape); });
  };
  EXPECT_EQ(check(8, 0, 1), "");
  EXPECT_EQ(check(8, 1, 2), "");
  for (const auto& without : {check(0, 1, 1), check(8, 0, 2)}) {
    EXPECT_THAT(without,
                HasSubstr("job.toml:3: model.converters: converter 'permute' needs a model "
                          "with routed experts"));
  }
}

// The kernels have 128 heads at most, which is what a check of the job has to find: a job that
// passes trains without the reference.
TEST(ConverterNeeds, AreFoundInTheJobAndTheShape) {
  const auto check = [](const std::vector<std::string>& overrides, int64_t heads,
                        int64_t index_heads) {
    const JobConfig config = parse_job(
        "[model]\nname = \"deepseek_v32\"\nconverters = [\"dsa\"]\n[training]\ndevice = \"cpu\"\n",
        "job.toml", overrides);
    deepseek_v3::ModelConfig shape;
    shape.num_attention_heads = heads;
    shape.index_n_heads = index_heads;
    return message_of([&] { train::check_converters(config, shape); });
  };
  EXPECT_EQ(check({}, 128, 64), "");
  EXPECT_THAT(check({}, 256, 64),
              AllOf(HasSubstr("job.toml:3: model.converters: converter 'dsa' needs at most 128"),
                    HasSubstr("got 256")));
  EXPECT_EQ(check({"--parallelism.tensor_parallel_degree", "2"}, 256, 64), "");
  EXPECT_THAT(check({}, 128, 256), HasSubstr("heads of the indexer, got 256"));
  EXPECT_EQ(check({"--dsa.stage", "off"}, 128, 256), "");
  EXPECT_THAT(check({"--training.device", "cuda"}, 128, 64),
              HasSubstr("converter 'dsa' needs training.device = \"cpu\", got cuda:0"));
}

TEST(PrintAfterConversion, ShowsWhatComputesEachModule) {
  const auto batches = load_golden("hf_base/train20.safetensors").at("batches");
  const auto printed = [&](const std::vector<std::string>& more) {
    const GoldenJob job("hf_base", batches);
    std::vector<std::string> overrides = {"--training.steps", "1"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    const test::LogCapture log;
    run(job.config(overrides));
    return log.text();
  };
  const auto text = printed(
      {"--model.print_after_conversion", "--model.converters", "dsa,permute,cross_entropy"});
  EXPECT_THAT(text,
              AllOf(HasSubstr("the model\n"), HasSubstr("self_attn [rope: reference] [dsa: fused]"),
                    HasSubstr("[cross_entropy: fused]"), HasSubstr("[permute: fused]"),
                    HasSubstr("[rms_norm: reference]"), HasSubstr("[gmm: reference]")));
  EXPECT_THAT(text, AllOf(Not(HasSubstr("[dsa: reference]")), Not(HasSubstr("[gmm: fused]"))));
  EXPECT_THAT(text, HasSubstr("weight ["));
  EXPECT_THAT(printed({"--model.print_after_conversion"}), Not(HasSubstr("fused]")));
  // Each operation is in the pattern of one of them.
  const std::string all = fmt::format("{}", fmt::join(all_names(), ","));
  EXPECT_THAT(printed({"--model.print_after_conversion", "--model.converters", all}),
              AllOf(HasSubstr("fused]"), Not(HasSubstr("reference]"))));
  EXPECT_THAT(printed({"--model.converters", "dsa"}), Not(HasSubstr("the model\n")));
}

}  // namespace
}  // namespace longhaul::testing
