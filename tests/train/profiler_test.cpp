// Recorded steps: which ones, what they leave, and that nothing changes through them.
#include "longhaul/train/profiler.h"

#include <gmock/gmock.h>

#include "longhaul/base/error.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;

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
         {"longhaul::sparse_flash_attention", "longhaul::adam_w", "longhaul::matmul"}) {
      EXPECT_EQ(names.count(name), 1U)
          << name << " in " << step << " of " << names.size() << " names";
    }
  }
  EXPECT_FALSE(fs::exists(plain.folder.path() / "run/profile_traces"));
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
  const auto ids = load_golden("hf_base/train20.safetensors").at("batches")[0].to(at::kLong);
  const auto positions = at::arange(ids.size(1), at::kLong).expand_as(ids).contiguous();
  const auto batch = deepseek_v3::prepare_batch(ids, ids, positions, ids.size(1));
  const double seconds = train::measure_host_seconds(config, resolved, batch);
  EXPECT_GT(seconds, 0);
}

}  // namespace
}  // namespace longhaul::testing
