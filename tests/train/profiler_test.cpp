// Recorded steps: which ones, what they leave, and that nothing changes through them.
#include "longhaul/train/profiler.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "longhaul/base/error.h"
#include "tests/support/log_capture.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

GoldenJob golden_job() {
  return GoldenJob("hf_base", load_golden("hf_base/train20.safetensors").at("batches"));
}

// Eight steps on the fused kernels; recorded if `freq` says how often.
std::vector<std::string> eight_steps(const std::string& freq = "") {
  std::vector<std::string> words = {"--training.steps", "8", "--model.converters",
                                    "dsa,rms_norm,rope,permute,gmm,cross_entropy"};
  if (freq.empty()) return words;
  words.insert(words.end(),
               {"--profiling.enable_profiling", "--profiling.profile_freq", freq,
                "--profiling.profiler_active", "2", "--profiling.profiler_warmup", "1"});
  return words;
}

// The names of the events of a Chrome trace.
std::set<std::string> names_in(const fs::path& trace) {
  std::ifstream in(trace);
  const auto whole = nlohmann::json::parse(in);
  std::set<std::string> names;
  for (const auto& event : whole.at("traceEvents")) {
    names.insert(event.value("name", ""));
  }
  return names;
}

TEST(Profiler, LeavesATraceACycleAndTheLossesAsTheyAre) {
  const GoldenJob plain = golden_job(), job = golden_job();
  run(job.config(eight_steps("4")));
  run(plain.config(eight_steps()));
  const auto expected = plain.metrics(), actual = job.metrics();
  ASSERT_EQ(actual.size(), 8U);
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_EQ(actual[i]["loss"], expected[i]["loss"]);

  for (const char* step : {"iteration_4", "iteration_8"}) {
    const auto names =
        names_in(job.folder.path() / "run/profile_traces" / step / "rank0_trace.json");
    for (const char* name :
         {"longhaul::sparse_flash_attention", "longhaul::adam_w", "data", "forward", "backward",
          "optimizer", "model.layers.0.self_attn.indexer", "model.layers.1.mlp",
          "model.layers.1.mlp.gate", "model.layers.1.mlp.dispatch", "model.layers.1.mlp.experts",
          "model.layers.1.mlp.combine", "model.layers.1.mlp.shared_experts", "lm_head and loss"}) {
      EXPECT_EQ(names.count(name), 1U)
          << name << " in " << step << " of " << names.size() << " names";
    }
  }
  EXPECT_FALSE(fs::exists(plain.folder.path() / "run/profile_traces"));
}

// The parts of a step stand in no row of the table, which is of operators. Which of those it names
// depends on the clock, but some are ours.
TEST(Profiler, NamedRangesAreNoOperators) {
  const GoldenJob job = golden_job();
  const test::LogCapture log;
  run(job.config(eight_steps("8")));
  EXPECT_THAT(log.text(), HasSubstr("  longhaul::"));
  for (const char* name : {"  forward ", "  backward ", "  ProfilerStep#", "  model.layers."}) {
    EXPECT_THAT(log.text(), Not(HasSubstr(name)));
  }
}

TEST(Profiler, AMemorySnapshotSaysWhoHeldWhat) {
  const GoldenJob job = golden_job();
  auto words = eight_steps("8");
  *std::find(words.begin(), words.end(), "--profiling.enable_profiling") =
      "--profiling.enable_memory_snapshot";
  run(job.config(words));
  const auto folder = job.folder.path() / "run/memory_snapshot/iteration_8";
  std::ifstream in(folder / "rank0_memory_snapshot.json");
  const auto snapshot = nlohmann::json::parse(in);
  const auto peak = snapshot.at("peak_bytes").get<int64_t>();
  int64_t held = snapshot.at("held_before_bytes"), most = 0;
  bool of_the_model = false;
  for (const auto& one : snapshot.at("held_at_peak")) {
    held += one.at("bytes").get<int64_t>();
    of_the_model = of_the_model || one.at("owner").get<std::string>().starts_with("model.layers.");
  }
  EXPECT_EQ(held, peak);
  EXPECT_TRUE(of_the_model) << snapshot.at("held_at_peak").dump();
  for (const auto& point : snapshot.at("timeline_ms_bytes")) {
    most = std::max(most, point.at(1).get<int64_t>());
  }
  EXPECT_EQ(most, peak);
  EXPECT_TRUE(fs::exists(folder / "rank0_memory_snapshot.svg"));
  EXPECT_FALSE(fs::exists(job.folder.path() / "run/profile_traces"));
}

TEST(Profiler, AFolderThatCannotBeWrittenEndsTheRunBeforeItsFirstStep) {
  const std::pair<const char*, const char*> cases[] = {
      {"--profiling.enable_profiling", "profile_traces"},
      {"--profiling.enable_memory_snapshot", "memory_snapshot"}};
  for (const auto& [key, folder] : cases) {
    const GoldenJob job = golden_job();
    write_text(job.folder.path() / "run" / folder, "a file in its place");
    auto words = eight_steps("8");
    *std::find(words.begin(), words.end(), "--profiling.enable_profiling") = key;
    const auto config = job.config(words);
    try {
      run(config);
      ADD_FAILURE() << key;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(folder));
    }
    EXPECT_TRUE(job.metrics().empty());
  }
}

TEST(Profiler, RefusesACycleThatIsTooShort) {
  const GoldenJob job = golden_job();
  EXPECT_THROW(job.config(eight_steps("2")), UserError);
}

TEST(Profiler, TheTableAddsUp) {
  const train::StepProfile profile = {
      .operators = {{"aten::mm", 20, 0.6}, {"aten::add", 4, 0.2}}, .seconds = 1.0, .steps = 2};
  const std::string table = train::to_table(profile, /*host_seconds=*/0.05);
  EXPECT_THAT(
      table,
      HasSubstr("aten::mm                                          10       300.0    60.0%"));
  EXPECT_THAT(
      table,
      HasSubstr("outside of operators                                       100.0    20.0%"));
  EXPECT_THAT(
      table,
      HasSubstr("a whole step                                               500.0   100.0%"));
  EXPECT_THAT(table, HasSubstr(" 50.0    10.0%"));
}

TEST(Profiler, MeasuresTheHostsPart) {
  const GoldenJob job = golden_job();
  const auto config = job.config(eight_steps());
  const auto resolved = resolve_model(config);
  for (const int64_t rows : {1, 3}) {
    EXPECT_GT(train::measure_host_seconds(config, resolved, rows), 0);
  }
}

}  // namespace
}  // namespace longhaul::testing
