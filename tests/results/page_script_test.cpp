// The page's own script, where there is a Node.js to run it.
#include "longhaul/train/results/report_assets.h"
#include "tests/results/run_folder.h"
#include "tests/support/program.h"

namespace longhaul::train {
namespace {

// Up to what needs a document.
std::string functions_of_the_page() {
  const std::string all = kReportScript;
  return all.substr(0, all.find("const runs = JSON.parse"));
}

// What `script`, run after the page's functions, prints.
std::string printed(const test::TempFolder& folder, const std::string& script) {
  test::spill(folder / "script.js", functions_of_the_page() + script);
  // A script that does not end is ended.
  const auto result =
      test::Program({"20", "node", (folder / "script.js").string()}, {}, "/usr/bin/timeout").wait();
  EXPECT_EQ(result.status, 0) << result.err;
  return result.out;
}

class PageScript : public ::testing::Test {
 protected:
  void SetUp() override {
    const bool there = test::Program({"--version"}, {}, "/usr/bin/node").wait().status == 0;
    if (!there) GTEST_SKIP() << "there is no /usr/bin/node to run the page's script with";
  }
  std::string run(const std::string& script) const { return printed(folder_, script); }

  test::TempFolder folder_;
};

// The moving average of a constant differs from it in the last bits.
TEST_F(PageScript, AConstantCurveHasTicks) {
  EXPECT_EQ(run(R"(
const points = smoothed(Array.from({length: 3000}, (_, i) => [i, 0.1]), 0.97).map(([, y]) => y);
const low = Math.min(...points), high = Math.max(...points);
for (const log of [false, true]) {
  const scale = make_scale(low, high, 0, 100, log), ticks = scale.ticks(5);
  console.log(low < high, ticks.length > 0 && ticks.length <= 20, Math.abs(scale(0.1) - 50) < 10);
}
)"),
            "true true true\ntrue true true\n");
}

TEST_F(PageScript, TicksAreFewWhateverTheRange) {
  EXPECT_EQ(run(R"(
const next = (x) => x * (1 + 2 ** -52);
let most = 0;
for (const size of [1e-300, 1e-8, 1, 3e9, 1e15, 1e300]) {
  for (const high of [next(size), size * (1 + 1e-11), size * 1.5, size * 1e3]) {
    for (const log of [false, true]) most = Math.max(most, make_scale(size, high, 0, 1, log).ticks(5).length);
    most = Math.max(most, make_scale(-high, -size, 0, 1, false).ticks(5).length);
    most = Math.max(most, linear_ticks(size, high, 5).length);
  }
}
console.log(most <= 20);
console.log(make_scale(0, 10, 0, 1, false).ticks(5).join(" "));
console.log(make_scale(1, 1000, 0, 1, true).ticks(5).join(" "));
)"),
            "true\n0 2 4 6 8 10\n1 10 100 1000\n");
}

TEST_F(PageScript, SmoothingIsUnbiasedAtTheStart) {
  EXPECT_EQ(run("console.log(JSON.stringify(smoothed([[1, 4], [2, 4], [3, 0]], 0.5)));"),
            "[[1,4],[2,4],[3,1.7142857142857142]]\n");
}

}  // namespace
}  // namespace longhaul::train
