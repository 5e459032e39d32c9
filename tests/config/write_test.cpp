#include "longhaul/config/write.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "longhaul/config/load.h"
#include "longhaul/config/option.h"

namespace longhaul {
namespace {

// Another value of the same type and within the limits.
struct Changed {
  const Option& option;

  Value operator()(bool value) const { return !value; }
  Value operator()(int64_t value) const { return std::max<int64_t>(value, 1) + 1; }
  Value operator()(double value) const { return value == 0.25 ? 0.125 : 0.25; }
  Value operator()(const std::string&) const { return text(); }
  Value operator()(const Strings&) const { return Strings{text(), text()}; }
  Value operator()(const Integers&) const { return Integers{1, 1'000'000'007}; }
  Value operator()(const Mix&) const { return Mix{{text(), 0.25}, {"b", 3}}; }
  Value operator()(const std::optional<int64_t>&) const { return std::optional<int64_t>(3); }
  Value operator()(const std::optional<double>&) const { return std::optional<double>(1e-7); }
  Value operator()(const std::optional<std::string>&) const {
    return std::optional<std::string>(text());
  }
  Value operator()(const std::optional<StringLists>&) const {
    return std::optional<StringLists>(StringLists{{"a", "b"}, {}});
  }

  std::string text() const {
    const auto& choices = option.limits.choices;
    if (choices.empty()) return "q\"uo\\te\n\ttab é";
    return Value(choices.back()) == option.default_value() ? choices.front() : choices.back();
  }
};

JobConfig everything_changed() {
  // These would contradict others or name things that must exist.
  const std::set<std::string> kept = {"model.converters",
                                      "model.tokenizer_path",
                                      "training.global_batch_size",
                                      "training.mix",
                                      "training.dataset",  // with a path it is "files"
                                      "validation.dataset",
                                      "training.packing",
                                      "validation.split",
                                      "checkpoint.initial_load_model_only",
                                      "checkpoint.last_save_model_only",
                                      "training.mixed_precision_reduce",
                                      "quantize.grouped_mm.mx.recipe_name"};
  JobConfig config;
  for (const auto& option : options()) {
    if (kept.count(option.key)) continue;
    option.set(config, std::visit(Changed{option}, option.default_value()));
    if (option.key != "compile.components") {
      EXPECT_NE(option.get(config), option.default_value()) << option.key;
    }
  }
  config.model.converters = {"npu_dsa", "gmm"};
  config.training.dataset = config.validation.dataset = "files";
  return config;
}

TEST(Write, TomlLoadsBackToTheSameJob) {
  const JobConfig changed = everything_changed();
  const JobConfig back = parse_job(to_toml(changed), "written.toml");
  for (const auto& option : options()) {
    EXPECT_EQ(toml_text(option.get(back)), toml_text(option.get(changed))) << option.key;
  }
  EXPECT_TRUE(same_values(back, changed));
  EXPECT_FALSE(same_values(JobConfig{}, changed));
  EXPECT_TRUE(same_values(parse_job(to_toml(JobConfig{}), "written.toml"), JobConfig{}));
}

TEST(Write, AMixtureLoadsBack) {
  JobConfig config;
  config.training.mix = {{"a \"folder\"/*.jsonl", 0.25}, {"b", 3}};
  const JobConfig again = parse_job(to_toml(config), "written.toml");
  EXPECT_EQ(again.training.mix, config.training.mix);
}

TEST(Write, InfinityLoadsBack) {
  JobConfig config;
  config.training.max_norm = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(same_values(parse_job(to_toml(config), "written.toml"), config));
}

TEST(Write, ShowsValuesWithTheirOrigin) {
  const JobConfig config =
      parse_job("[training]\nsteps = 5\nseq_len = 2048\n", "job.toml", {"--optimizer.lr", "1e-4"});
  EXPECT_EQ(show_values(config, true),
            "training.steps = 5                             # job.toml:2\n"
            "optimizer.lr   = 0.0001                        # command line\n");
  const std::string all = show_values(config, false);
  EXPECT_NE(all.find("# job.toml:3\n"), std::string::npos);
  EXPECT_NE(all.find("(not set)"), std::string::npos);
  EXPECT_EQ(static_cast<size_t>(std::count(all.begin(), all.end(), '\n')), options().size());
}

}  // namespace
}  // namespace longhaul
