// Small jobs that run in a folder of their own.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "longhaul/config/load.h"
#include "longhaul/train/metrics.h"
#include "longhaul/train/run.h"
#include "tests/support/golden.h"

namespace longhaul::testing {

namespace fs = std::filesystem;

// A temporary folder, removed at the end of the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "longhaul-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline void write_text(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

// The batches [steps, B, S] of a reference trajectory as rows of JSONL.
inline void write_batches(const fs::path& path, const at::Tensor& batches) {
  const auto rows = batches.reshape({-1, batches.size(-1)}).to(at::kLong).contiguous();
  std::string text;
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const auto row = rows[i];
    const std::vector<int64_t> ids(row.data_ptr<int64_t>(), row.data_ptr<int64_t>() + row.numel());
    text += nlohmann::json{{"input_ids", ids}}.dump() + "\n";
  }
  write_text(path, text);
}

// 20 steps from a reference checkpoint over the reference's batches.
struct GoldenJob {
  TemporaryFolder folder;
  std::string checkpoint;  // "hf_base", ...

  explicit GoldenJob(const std::string& name, const at::Tensor& batches) : checkpoint(name) {
    write_batches(folder.path() / "rows.jsonl", batches);
  }

  JobConfig config(const std::vector<std::string>& overrides = {}) const {
    const std::string assets = (golden_path(checkpoint) / "checkpoint").string();
    const std::string text =
        "[job]\ndump_folder = \"" + (folder.path() / "run").string() +
        "\"\n[model]\nname = \"deepseek_v32\"\nhf_assets_path = \"" + assets +
        "\"\n[training]\ndataset = \"tokenized\"\ndataset_path = \"" +
        (folder.path() / "rows.jsonl").string() +
        "\"\nlocal_batch_size = 2\nseq_len = 48\nsteps = 20\nmixed_precision_param = \"float32\"\n"
        "device = \"cpu\"\n[optimizer]\nlr = 1e-3\n[lr_scheduler]\nwarmup_steps = 0\n"
        "min_lr_factor = 1.0\n[checkpoint]\nenable = true\ninterval = 1000\n"
        "initial_load_path = \"" +
        assets + "\"\ninitial_load_in_hf = true\n";
    return parse_job(text, "golden.toml", overrides);
  }

  std::vector<nlohmann::json> metrics() const {
    return train::read_metrics(folder.path() / "run/metrics.jsonl");
  }
};

inline train::Outcome run(const JobConfig& config) {
  const std::atomic<bool> stop{false};
  dtensor::World world = dtensor::World::single();
  return train::run_training(config, stop, world);
}

}  // namespace longhaul::testing
