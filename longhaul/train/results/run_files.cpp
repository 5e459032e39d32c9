#include "longhaul/train/results/run_files.h"

#include "longhaul/base/file.h"
#include "longhaul/train/metrics.h"

namespace longhaul::train {
namespace {

std::string read_if_there(const fs::path& path) { return fs::exists(path) ? read_file(path) : ""; }

// "runs/a/" is called a, and "." by the folder's own name.
std::string name_of(const fs::path& folder) {
  const fs::path whole = fs::weakly_canonical(folder);
  return whole.has_filename() ? whole.filename().string() : whole.parent_path().filename().string();
}

}  // namespace

RunFiles read_run(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    fail_user("'{}' is not a folder; name the job.dump_folder of a run", folder.string());
  }
  const fs::path metrics = folder / "metrics.jsonl";
  if (!fs::exists(metrics)) {
    fail_user(
        "'{}' is not a run folder: it holds no metrics.jsonl; name the job.dump_folder of a "
        "run",
        folder.string());
  }
  RunFiles run{.name = name_of(folder),
               .steps = read_metrics(metrics),
               .job = read_if_there(folder / "job.toml"),
               .environment = nlohmann::ordered_json::object()};
  if (run.steps.empty()) fail_user("'{}' holds no step yet", metrics.string());
  const auto environment = nlohmann::ordered_json::parse(read_if_there(folder / "environment.json"),
                                                         nullptr, /*allow_exceptions=*/false);
  if (environment.is_object()) run.environment = environment;
  return run;
}

}  // namespace longhaul::train
