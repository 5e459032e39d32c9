// The same job on any layout: ranks as threads that train a tiny model with all its parts, and what
// the job leaves in its folder, to be compared with what one rank leaves.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "longhaul/checkpoint/tensor_file.h"
#include "longhaul/config/load.h"
#include "longhaul/train/run.h"
#include "tests/models/tiny_model.h"
#include "tests/support/run_ranks.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {

// Degrees of parallelism.
struct Layout {
  int dp_replicate = 1, dp_shard = 1, cp = 1, tp = 1, ep = 1;

  int ranks() const { return dp_replicate * dp_shard * cp * tp; }
  std::string name() const {
    std::string text;
    const auto add = [&](const char* axis, int degree) {
      if (degree > 1) text += fmt::format("{}{}{}", text.empty() ? "" : "_", axis, degree);
    };
    add("replicate", dp_replicate);
    add("shard", dp_shard);
    add("cp", cp);
    add("tp", tp);
    add("ep", ep);
    return text.empty() ? "one_rank" : text;
  }
};

inline void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name(); }

using Overrides = std::vector<std::string>;

inline constexpr int64_t kLayoutSteps = 3;
inline constexpr int64_t kRowsOfAStep = 48;  // two micro-batches for each of 1, 2, 3, 4, 6, 8 ranks
inline constexpr int64_t kLayoutSeqLen = 16;

// tiny_config() with numbers of experts, heads and layers that the layouts here cut evenly and
// unevenly: a vocabulary of 23 and 12 hidden columns are short or empty pieces on 8 ranks.
inline v3::ModelConfig layout_model() {
  v3::ModelConfig c = tiny_config();
  c.num_hidden_layers = 3;
  c.num_attention_heads = 4;
  c.n_routed_experts = 12;
  c.num_nextn_predict_layers = 1;
  return c;
}

// Documents of unequal lengths, packed and padded. The first eighth of each step's rows has no
// label, the second no token at all, and others have few labels.
inline void write_layout_rows(const fs::path& path, int64_t seq_len) {
  std::string text;
  for (int64_t row = 0; row < kLayoutSteps * kRowsOfAStep; ++row) {
    const int64_t in_step = row % kRowsOfAStep;
    const bool no_labels = in_step < kRowsOfAStep / 8;
    const bool no_tokens = !no_labels && in_step < kRowsOfAStep / 4;
    const auto ids = integers({seq_len}, 23, 5000 + static_cast<uint64_t>(row));
    const int64_t first_document = 3 + row % 9, end = seq_len - row % 3;
    std::vector<int64_t> inputs, labels, positions;
    for (int64_t t = 0; t < seq_len; ++t) {
      const bool padding = no_tokens || t >= end;
      const bool last = t + 1 == first_document || t + 1 == end;
      const bool ignored = padding || last || no_labels || t < row % 5;
      inputs.push_back(ids[t].item<int64_t>());
      labels.push_back(ignored ? -100 : ids[t + 1].item<int64_t>());
      positions.push_back(padding ? -1 : t < first_document ? t : t - first_document);
    }
    text += nlohmann::json{{"input_ids", inputs}, {"labels", labels}, {"position_ids", positions}}
                .dump() +
            "\n";
  }
  write_text(path, text);
}

// What a run leaves behind: by step, the tensors of the dump, and the lines of metrics.jsonl.
struct LayoutResult {
  std::vector<Tensors> steps;
  std::vector<nlohmann::json> metrics;
};

class LayoutJob {
 public:
  explicit LayoutJob(const v3::ModelConfig& model = layout_model(), int64_t seq_len = kLayoutSeqLen)
      : seq_len_(seq_len) {
    write_text(folder_.path() / "model/config.json", v3::to_hf_json(model));
    write_layout_rows(folder_.path() / "rows.jsonl", seq_len);
  }

  // Into a run folder of this name.
  JobConfig config(const Layout& layout, const std::string& run, const Overrides& overrides) const {
    const auto path = [&](const std::string& name) { return (folder_.path() / name).string(); };
    const std::string text = fmt::format(
        "[job]\ndump_folder = \"{}\"\n[model]\nname = \"deepseek_v32\"\nhf_assets_path = \"{}\"\n"
        "init_std = 0.3\n[training]\ndataset = \"tokenized\"\ndataset_path = \"{}\"\n"
        "seq_len = {}\nlocal_batch_size = {}\nglobal_batch_size = {}\nsteps = {}\n"
        "dtype = \"float64\"\nmixed_precision_param = \"float32\"\ndevice = \"cpu\"\n"
        "[optimizer]\nlr = 1e-2\n[lr_scheduler]\nwarmup_steps = 0\n[debug]\ndump_steps = [1, 2, "
        "3]\n"
        "[moe]\nsequence_balance_loss_coeff = 0.01\nz_loss_coeff = 0.001\n[parallelism]\n"
        "data_parallel_replicate_degree = {}\ndata_parallel_shard_degree = {}\n"
        "context_parallel_degree = {}\ntensor_parallel_degree = {}\nexpert_parallel_degree = {}\n",
        path(run), path("model"), path("rows.jsonl"), seq_len_,
        kRowsOfAStep / (2 * layout.dp_replicate * layout.dp_shard), kRowsOfAStep, kLayoutSteps,
        layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.ep);
    return parse_job(text, "layout.toml", overrides);
  }

  train::Outcome train(const Layout& layout, const std::string& run,
                       const Overrides& overrides = {}, const test::RankOptions& ranks = {}) const {
    const JobConfig job = config(layout, run, overrides);
    const std::atomic<bool> stop{false};
    std::atomic<train::Outcome> outcome{};
    test::run_ranks(
        layout.ranks(),
        [&](dtensor::World& world) { outcome = train::run_training(job, stop, world); }, ranks);
    return outcome;
  }

  LayoutResult result(const std::string& run) const {
    LayoutResult result;
    for (int64_t step = 1; step <= kLayoutSteps; ++step) {
      const auto path = folder_.path() / run / fmt::format("dump/step-{}.safetensors", step);
      if (fs::exists(path)) result.steps.push_back(checkpoint::load_safetensors(path));
    }
    result.metrics = train::read_metrics(folder_.path() / run / "metrics.jsonl");
    return result;
  }

  LayoutResult run(const Layout& layout, const Overrides& overrides = {}) const {
    train(layout, layout.name(), overrides);
    return result(layout.name());
  }

  const fs::path& folder() const { return folder_.path(); }

 private:
  TemporaryFolder folder_;
  int64_t seq_len_;
};

// What a layout leaves, once for all tests with these overrides.
inline const LayoutResult& trained(const Layout& layout, const Overrides& overrides) {
  static std::map<std::pair<std::string, Overrides>, LayoutResult> results;
  const auto key = std::pair(layout.name(), overrides);
  const auto found = results.find(key);
  if (found != results.end()) return found->second;
  return results[key] = LayoutJob().run(layout, overrides);
}
inline const LayoutResult& one_rank(const Overrides& overrides) { return trained({}, overrides); }

struct Tolerances {
  double loss = 1e-10;                    // relative; losses and the norm
  double gradient = 1e-10;                // of the tensor's largest element
  double weight = 1e-10;                  // relative Frobenius norm
  int64_t gradient_steps = kLayoutSteps;  // how many of the first steps' gradients are compared
};

inline double relative(const at::Tensor& actual, const at::Tensor& expected) {
  const auto a = actual.to(at::kDouble), e = expected.to(at::kDouble);
  const double difference = (a - e).norm().item<double>();
  return difference == 0 ? 0 : difference / std::max(e.norm().item<double>(), 1e-30);
}

inline void expect_same_step(const Tensors& actual, const Tensors& expected, int64_t step,
                             const Tolerances& tolerances) {
  for (const auto& [name, value] : actual) {
    EXPECT_EQ(expected.count(name), 1u) << "step " << step << ": one rank has no " << name;
  }
  for (const auto& [name, value] : expected) {
    const auto found = actual.find(name);
    ASSERT_NE(found, actual.end()) << "step " << step << ": no " << name;
    if (name.starts_with("grad.")) {
      if (step > tolerances.gradient_steps) continue;
      EXPECT_LE(relative_to_max(found->second, value), tolerances.gradient)
          << "step " << step << " " << name;
    } else {
      const bool weight = name.starts_with("param.");
      EXPECT_LE(relative(found->second, value), weight ? tolerances.weight : tolerances.loss)
          << "step " << step << " " << name;
    }
  }
}

inline void expect_same(const LayoutResult& actual, const LayoutResult& expected,
                        const Tolerances& tolerances = {}) {
  ASSERT_EQ(expected.steps.size(), static_cast<size_t>(kLayoutSteps));
  ASSERT_EQ(actual.steps.size(), expected.steps.size());
  ASSERT_EQ(actual.metrics.size(), expected.metrics.size());
  for (size_t i = 0; i < expected.steps.size(); ++i) {
    expect_same_step(actual.steps[i], expected.steps[i], static_cast<int64_t>(i) + 1, tolerances);
    EXPECT_EQ(actual.metrics[i]["tokens"], expected.metrics[i]["tokens"]);
  }
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.is_contiguous() &&
         b.is_contiguous() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Losses, gradients and weights of every step bit for bit.
inline void expect_identical(const LayoutResult& actual, const LayoutResult& expected) {
  ASSERT_EQ(actual.steps.size(), static_cast<size_t>(kLayoutSteps));
  ASSERT_EQ(expected.steps.size(), static_cast<size_t>(kLayoutSteps));
  for (size_t i = 0; i < expected.steps.size(); ++i) {
    EXPECT_EQ(actual.steps[i].size(), expected.steps[i].size()) << "step " << i + 1;
    for (const auto& [name, value] : expected.steps[i]) {
      const auto found = actual.steps[i].find(name);
      ASSERT_NE(found, actual.steps[i].end()) << "step " << i + 1 << ": no " << name;
      EXPECT_TRUE(same_bits(found->second, value)) << "step " << i + 1 << " " << name;
    }
  }
}

}  // namespace longhaul::testing
