// `longhaul train --ranks N` of the reference's checkpoint on its batches: the losses and norms of
// the reference at each step, and the tensors that one process dumps, by name.
#include <cmath>
#include <cstring>

#include "longhaul/base/safetensors.h"
#include "tests/cli/small_job.h"
#include "tests/support/source_folder.h"

namespace longhaul::test {
namespace {

using Numbers = std::map<std::string, std::vector<double>>;

template <typename T>
std::vector<double> as_doubles(std::span<const std::byte> bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return {values.begin(), values.end()};
}

Numbers read_numbers(const fs::path& path) {
  const safetensors::Reader reader(path);
  Numbers numbers;
  for (const auto& [name, info] : reader.header().tensors) {
    const auto bytes = reader.bytes(info);
    switch (info.dtype) {
      case safetensors::DType::kF64:
        numbers[name] = as_doubles<double>(bytes);
        break;
      case safetensors::DType::kF32:
        numbers[name] = as_doubles<float>(bytes);
        break;
      case safetensors::DType::kI64:
        numbers[name] = as_doubles<int64_t>(bytes);
        break;
      case safetensors::DType::kI32:
        numbers[name] = as_doubles<int32_t>(bytes);
        break;
      default:
        ADD_FAILURE() << path << ": " << name << " is of a dtype that is not compared";
    }
  }
  return numbers;
}

double largest(const std::vector<double>& x) {
  double largest = 0;
  for (const double value : x) largest = std::max(largest, std::abs(value));
  return largest;
}

// The largest difference, as a share of the largest element.
double relative_to_max(const std::vector<double>& actual, const std::vector<double>& expected) {
  if (actual.size() != expected.size()) return INFINITY;
  auto difference = actual;
  for (size_t i = 0; i < difference.size(); ++i) difference[i] -= expected[i];
  return largest(difference) / std::max(largest(expected), 1e-30);
}

constexpr size_t kSteps = 3;

// With the indexer's loss and the routers' biases moving.
class GoldenRanks : public ::testing::Test {
 protected:
  GoldenRanks() : golden_(read_numbers(golden("tt_yarn/train20_bias_update.safetensors"))) {
    write_rows();
    const std::string assets = golden("hf_yarn/checkpoint").string();
    spill(folder_ / "job.toml",
          "[model]\nname = \"deepseek_v32\"\nhf_assets_path = \"" + assets +
              "\"\n[training]\ndataset = \"tokenized\"\ndataset_path = \"rows.jsonl\"\n"
              "seq_len = 48\nglobal_batch_size = 2\nsteps = 3\ndtype = \"float64\"\n"
              "mixed_precision_param = \"float32\"\ndevice = \"cpu\"\n[optimizer]\nlr = 1e-3\n"
              "[lr_scheduler]\nwarmup_steps = 0\nmin_lr_factor = 1.0\n[checkpoint]\n"
              "enable = true\ninterval = 1000\ninitial_load_path = \"" +
              assets + "\"\ninitial_load_in_hf = true\n[debug]\ndump_steps = [1, 3]\n");
  }

  static fs::path golden(const std::string& name) {
    return fs::path(test::source_folder()) / "tests/golden" / name;
  }

  void write_rows() const {
    const safetensors::Reader reader(golden("tt_yarn/train20_bias_update.safetensors"));
    const auto width = static_cast<size_t>(reader.info("batches").shape.back());
    const auto& ids = golden_.at("batches");
    std::string text;
    for (size_t row = 0; row < ids.size(); row += width) {
      std::vector<int64_t> own;
      for (size_t i = row; i < row + width; ++i) own.push_back(static_cast<int64_t>(ids[i]));
      text += nlohmann::json{{"input_ids", own}}.dump() + "\n";
    }
    spill(folder_ / "rows.jsonl", text);
  }

  struct Result {
    std::vector<nlohmann::json> metrics;
    Numbers first_dump, last_dump;
  };

  // On `ranks` processes; those that have whole sequences have rows_per_rank of the two.
  Result train(int ranks, int rows_per_rank, const Words& degrees) const {
    const std::string run = "run" + std::to_string(ranks);
    Words words = {"train",
                   "job.toml",
                   "--ranks",
                   std::to_string(ranks),
                   "--job.dump_folder",
                   run,
                   "--training.local_batch_size",
                   std::to_string(rows_per_rank)};
    words.insert(words.end(), degrees.begin(), degrees.end());
    const auto result =
        Program(words, {.folder = folder_.path(),
                        .environment = {"OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=passive"},
                        .out = {},
                        .err = {}})
            .wait();
    EXPECT_EQ(result.status, 0) << result.err;
    Result found;
    std::ifstream in(folder_ / run / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) {
      found.metrics.push_back(nlohmann::json::parse(line));
    }
    const fs::path dumps = folder_ / run / "dump";
    if (result.status != 0) return found;
    found.first_dump = read_numbers(dumps / "step-1.safetensors");
    found.last_dump = read_numbers(dumps / "step-3.safetensors");
    return found;
  }

  void expect_golden(const Result& result) const {
    ASSERT_EQ(result.metrics.size(), kSteps);
    for (size_t i = 0; i < kSteps; ++i) {
      SCOPED_TRACE(::testing::Message() << "step " << i + 1);
      const auto& line = result.metrics[i];
      EXPECT_NEAR(line["lm_loss"].get<double>(), golden_.at("loss")[i], 3e-6);
      EXPECT_NEAR(line["grad_norm"].get<double>() / golden_.at("grad_norm")[i], 1, 1.5e-6);
      const auto& kl = line["indexer_loss_per_layer"];
      ASSERT_EQ(kl.size(), 2u);
      for (size_t layer = 0; layer < 2; ++layer) {
        EXPECT_NEAR(kl[layer].get<double>() / golden_.at("kl_per_layer")[2 * i + layer], 1, 3e-6);
      }
    }
  }

  // In fp64 only the order of sums differs; 1e-10 leaves room for AdamW, which divides gradients by
  // their size.
  static void expect_same(const Numbers& actual, const Numbers& expected) {
    ASSERT_FALSE(expected.empty());
    for (const auto& [name, value] : actual) EXPECT_EQ(expected.count(name), 1u) << name;
    for (const auto& [name, value] : expected) {
      const auto found = actual.find(name);
      ASSERT_NE(found, actual.end()) << name;
      EXPECT_LE(relative_to_max(found->second, value), 1e-10) << name;
    }
  }

  TempFolder folder_;
  Numbers golden_;
};

TEST_F(GoldenRanks, ProcessesTrainLikeTheReferenceAndLikeOneProcess) {
  const auto one = train(1, 2, {});
  expect_golden(one);
  struct Case {
    int ranks, rows_per_rank;
    Words degrees;
  };
  const std::string cp = "--parallelism.context_parallel_degree",
                    tp = "--parallelism.tensor_parallel_degree",
                    ep = "--parallelism.expert_parallel_degree";
  // The ranks that are left share the weights: 1, 2 and 2.
  for (const Case& c : {Case{2, 2, {tp, "2", ep, "2"}}, Case{4, 1, {cp, "2"}},
                        Case{8, 1, {cp, "2", tp, "2", ep, "4"}}}) {
    SCOPED_TRACE(::testing::Message() << c.ranks << " ranks");
    const auto many = train(c.ranks, c.rows_per_rank, c.degrees);
    expect_golden(many);
    expect_same(many.first_dump, one.first_dump);
    expect_same(many.last_dump, one.last_dump);
  }
}

}  // namespace
}  // namespace longhaul::test
