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

std::vector<std::string> profiled(std::vector<std::string> more = {}) {
  for (const char* word :
       {"--training.steps", "8", "--profiling.enable_profiling", "--profiling.profile_freq", "4",
        "--profiling.profiler_active", "2", "--profiling.profiler_warmup", "1",
        "--model.converters", "dsa,rms_norm,rope,permute,gmm,cross_entropy"}) {
    more.push_back(word);
  }
  return more;
}

// The names of the events of a Chrome trace.
std::set<std::string> names_in(const fs::path& trace) {
  std::ifstream in(trace);
  std::set<std::string> names;
  for (const auto& event : nlohmann::json::parse(in).at("traceEvents")) {
    names.insert(event.value("name", ""));
  }
  return names;
}

TEST(Profiler, LeavesATraceACycleAndTheLossesAsTheyAre) {
  const GoldenJob plain = golden_job(), job = golden_job();
  run(job.config(profiled()));
  run(plain.config(profiled({"--profiling.no_enable_profiling"})));
  const auto expected = plain.metrics(), actual = job.metrics();
  ASSERT_EQ(actual.size(), 8U);
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_EQ(actual[i]["loss"], expected[i]["loss"]);

  for (const char* step : {"iteration_4", "iteration_8"}) {
    const auto names =
        names_in(job.folder.path() / "run/profile_traces" / step / "rank0_trace.json");
    for (const char* name : {"longhaul::sparse_flash_attention", "longhaul::adam_w", "aten::mm"}) {
      EXPECT_EQ(names.count(name), 1U) << name << " in " << step;
    }
  }
  EXPECT_FALSE(fs::exists(plain.folder.path() / "run/profile_traces"));
}

TEST(Profiler, RefusesACycleThatIsTooShort) {
  const GoldenJob job = golden_job();
  const auto config = job.config(profiled({"--profiling.profile_freq", "2"}));
  EXPECT_THROW(train::Profiler{config}, UserError);
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

TEST(Profiler, TheHostsPartIsLessThanAStep) {
  const GoldenJob job = golden_job();
  const auto config = job.config(profiled());
  const auto resolved = train::resolve_model(config);
  const auto ids = load_golden("hf_base/train20.safetensors").at("batches")[0].to(at::kLong);
  const auto positions = at::arange(ids.size(1), at::kLong).expand_as(ids).contiguous();
  const auto batch = deepseek_v3::prepare_batch(ids, ids, positions, ids.size(1));
  const double seconds = train::measure_host_seconds(config, resolved, batch);
  EXPECT_GT(seconds, 0);
}

}  // namespace
}  // namespace longhaul::testing
