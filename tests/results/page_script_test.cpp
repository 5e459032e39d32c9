// The page's own script: its functions, where there is a Node.js to run them, and the whole page,
// where there is a browser.
#include "longhaul/train/results/report.h"
#include "longhaul/train/results/report_assets.h"
#include "tests/results/run_folder.h"
#include "tests/support/program.h"

namespace longhaul::train {
namespace {

using Words = std::vector<std::string>;

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

// Chromium without a screen.
class PageInABrowser : public ::testing::Test {
 protected:
  void SetUp() override {
    const bool there = test::Program({"--version"}, {}, "/usr/bin/chromium").wait().status == 0;
    if (!there) GTEST_SKIP() << "there is no /usr/bin/chromium to show the page in";
  }

  void write(const std::string& name, const std::vector<StepMetrics>& steps) const {
    test::write_run(folder_ / name, steps);
  }

  test::ProgramResult browse(const std::string& page, const Words& flags) const {
    Words words = {"120",
                   "chromium",
                   "--headless",
                   "--no-sandbox",
                   "--disable-gpu",
                   "--disable-dev-shm-usage",
                   "--user-data-dir=" + (folder_ / "browser").string()};
    words.insert(words.end(), flags.begin(), flags.end());
    words.push_back("file://" + (folder_ / page).string());
    const auto result = test::Program(words, {}, "/usr/bin/timeout").wait();
    EXPECT_EQ(result.status, 0) << result.err;
    return result;
  }

  // On the page of these runs: the errors of the page's scripts, then what the JavaScript `answer`,
  // a function's body that runs after them, returns.
  std::string ask(const std::vector<std::filesystem::path>& runs, const std::string& answer,
                  const Words& flags = {}) const {
    std::string page = report_page(runs);
    const auto insert = [&](const std::string& place, const std::string& script) {
      page.insert(page.find(place), "<script>" + script + "</script>");
    };
    insert("<main", R"(
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
)");
    insert("</body>", R"(
let told = "";
const drawn = () => [...document.querySelectorAll("polyline.curve")];
const all_finite = () => drawn().every((one) => /^[-0-9. ,]+$/.test(one.getAttribute("points")));
try { told = (() => {)" + answer +
                          R"(})(); } catch (error) { errors.push(error.message); }
document.documentElement.textContent = ["", ...errors, told, ""].join("\n");
)");
    test::spill(folder_ / "page.html", page);
    return text_of("page.html", flags);
  }

  // The lines that the page's script has put in the place of the document.
  std::string text_of(const std::string& page, const Words& flags) const {
    Words all = flags;
    all.push_back("--dump-dom");
    const auto result = browse(page, all);
    const size_t begin = result.out.find("\n", result.out.find("<html")) + 1;
    return result.out.substr(begin, result.out.rfind("\n</html>") - begin);
  }

  test::TempFolder folder_;
};

TEST_F(PageInABrowser, DrawsEveryCurveAndAnswersTheControls) {
  write("run", {test::small_step(1), test::small_step(2), test::small_step(3)});
  EXPECT_EQ(ask({folder_ / "run"}, R"(
const said = [drawn().length, all_finite()];
const map = [...document.querySelectorAll("canvas")].at(-1).getContext("2d");
said.push(new Set([0, 1, 2].map((expert) => map.getImageData(expert, 0, 1, 1).data.join())).size);
document.getElementById("log").click();
said.push(drawn().length);
const smoothing = document.getElementById("smoothing");
smoothing.value = 0.5;
smoothing.dispatchEvent(new Event("input"));
said.push(drawn().length);
document.querySelector(".legend button").click();
said.push(drawn().length, all_finite());
const chart = document.querySelector("figure svg"), box = chart.getBoundingClientRect();
const middle = {clientX: box.left + box.width / 2, clientY: box.top + 50};
chart.dispatchEvent(new PointerEvent("pointermove", middle));
said.push(document.querySelector(".tip b").textContent);
const slider = document.querySelector("figure input");
slider.value = 0;
slider.dispatchEvent(new Event("input"));
said.push(slider.closest("figure").querySelector("p").textContent.split(":")[0]);
return said.join(", ");
)"),
            // Five figures and two of both layers beside the loss; three loads, three colours;
            // smooth curves before the raw ones; one layer hidden.
            "10, true, 3, 10, 20, 18, true, step 2, step 1");
}

TEST_F(PageInABrowser, ShowsRunsThatHaveLittleInCommon) {
  StepMetrics bare;
  bare.step = 1;
  bare.loss = NAN;
  write("bare", {bare});
  write("run", {test::small_step(1), test::small_step(2)});
  test::spill(folder_ / "run/job.toml", "[optimizer]\nlr = 0.001\n");
  test::spill(folder_ / "run/environment.json", R"({"starts": [
      {"first_step": 1, "time": 1, "host": "one", "memory_bytes": 1024},
      {"first_step": 2, "time": 2, "host": "two", "memory_bytes": 1024}]})");
  EXPECT_EQ(ask({folder_ / "bare", folder_ / "run"}, R"(
const of = (row) => [...row.children].map((cell) => cell.textContent).join(" ");
const rows = [...document.querySelectorAll("tr")].map(of);
const found = ["optimizer.lr", "host", "memory"].map((name) => rows.find((row) => row.startsWith(name)));
return [all_finite(), document.querySelectorAll("canvas").length > 0, ...found].join(", ");
)"),
            "true, true, optimizer.lr - 0.001, host one two, memory 1.0 KiB 1.0 KiB");
}

TEST_F(PageInABrowser, ShowsALossThatIsNoNumber) {
  std::vector<StepMetrics> steps = {test::small_step(1), test::small_step(2)};
  steps[1].lm_loss = NAN;
  write("run", steps);
  EXPECT_EQ(ask({folder_ / "run"}, R"(return document.querySelectorAll("td")[3].textContent;)"),
            "nan");
}

// A window of the browser cannot be as narrow as a phone; a frame in it can.
TEST_F(PageInABrowser, IsNoWiderThanAPhone) {
  write("run", {test::small_step(1), test::small_step(2)});
  test::spill(folder_ / "run/job.toml",
              "[training]\ndataset_path = \"" + std::string(300, 'x') + "\"\n");
  test::spill(folder_ / "page.html", report_page({folder_ / "run"}));
  test::spill(folder_ / "phone.html", R"(<!doctype html>
<iframe src="page.html" width="390" height="844" style="border: 0"></iframe>
<script>
onload = () => {
  const page = frames[0].document.documentElement;
  const said = [frames[0].innerWidth, page.scrollWidth <= 390,
                page.querySelectorAll("polyline.curve").length > 0];
  document.documentElement.textContent = ["", said.join(", "), ""].join("\n");
};
</script>
)");
  EXPECT_EQ(text_of("phone.html", {"--allow-file-access-from-files"}), "390, true, true");
}

TEST_F(PageInABrowser, IsDarkWhereTheSystemIs) {
  write("run", {test::small_step(1), test::small_step(2)});
  const std::string darkness = R"(
const light = (color) => color.match(/[0-9]+/g).slice(0, 3).reduce((sum, part) => sum + +part, 0) / 765;
const style = getComputedStyle(document.body);
return [light(style.backgroundColor) < 0.2, light(style.color) > 0.6].join(", ");
)";
  const auto with_scheme = [&](const std::string& number) {
    return ask({folder_ / "run"}, darkness, {"--blink-settings=preferredColorScheme=" + number});
  };
  EXPECT_EQ(with_scheme("0"), "true, true");
  EXPECT_EQ(with_scheme("1"), "false, false");
}

TEST_F(PageInABrowser, IsPrinted) {
  write("run", {test::small_step(1), test::small_step(2)});
  test::spill(folder_ / "page.html", report_page({folder_ / "run"}));
  browse("page.html", {"--print-to-pdf=" + (folder_ / "page.pdf").string()});
  const std::string pdf = test::slurp(folder_ / "page.pdf");
  EXPECT_EQ(pdf.substr(0, 5), "%PDF-");
  EXPECT_GT(pdf.size(), 10'000u);
}

}  // namespace
}  // namespace longhaul::train
