#include "longhaul/train/results/run_files.h"

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/train/results/starts.h"

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
  return {.name = name_of(folder),
          .metrics = metrics,
          .job = read_if_there(folder / "job.toml"),
          .starts = read_starts(folder / "environment.json")};
}

}  // namespace longhaul::train
