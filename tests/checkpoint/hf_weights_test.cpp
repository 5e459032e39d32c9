// FP8 weights with scales of blocks in files, against a plain loop.
#include "longhaul/checkpoint/hf_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "longhaul/checkpoint/tensor_file.h"
#include "tests/support/quantized.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::spill;
using test::TempFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class QuantizedFolder : public ::testing::Test {
 protected:
  void write(const TensorMap& tensors, const std::string& quantization = "") {
    save_safetensors(folder_ / "model.safetensors", tensors);
    if (quantization.empty()) return;
    spill(folder_ / "config.json", "{\"quantization_config\": " + quantization + "}");
  }
  std::string open_error() const {
    return error_of<UserError>([&] { HfWeights weights(folder_.path()); });
  }
  std::string problem() const { return HfWeights(folder_.path()).problem("w"); }

  TempFolder folder_;
  at::Tensor bf16_ = at::ones({2}, at::kBFloat16);
};

// Whole and ragged last blocks, one block, less than one, and nothing.
TEST_F(QuantizedFolder, EveryElementTimesTheScaleOfItsBlock) {
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
           {256, 384}, {300, 129}, {127, 128}, {1, 257}, {3, 5}, {0, 7}}) {
    const auto [weight, scales] = testing::quantized(testing::normal({rows, columns}, 3));
    write({{"w", weight}, {"w_scale_inv", scales}});
    const HfWeights weights(folder_.path());
    EXPECT_THAT(weights.names(), ElementsAre("w"));
    EXPECT_EQ(weights.dtype("w"), at::kFloat);
    EXPECT_EQ(weights.problem("w"), "");
    EXPECT_TRUE(at::equal(weights.load("w"), testing::dequantized(weight, scales)))
        << rows << " x " << columns;
  }
}

// Bytes that this process has asked the system for.
int64_t bytes_read() {
  std::ifstream in("/proc/self/io");
  std::string key;
  int64_t value = 0;
  in >> key >> value;
  return key == "rchar:" ? value : -1;
}

// Rows of part of a block, of several blocks, and none; those of others stay on the disk.
TEST_F(QuantizedFolder, RowsAreThoseOfTheWholeAndAllThatIsRead) {
  const auto [weight, scales] = testing::quantized(testing::normal({700, 1300}, 3));
  write({{"w", weight}, {"w_scale_inv", scales}, {"a", weight.to(at::kFloat)}});
  const HfWeights weights(folder_.path());
  for (const char* name : {"w", "a"}) {
    const at::Tensor whole = weights.load(name);
    const int64_t row_bytes = 1300 * (std::string(name) == "w" ? 1 : 4);
    for (const auto& [first, count] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 1}, {1, 127}, {100, 60}, {127, 2}, {128, 128}, {383, 1}, {300, 400}, {5, 0}}) {
      const int64_t before = bytes_read();
      EXPECT_TRUE(at::equal(weights.load_rows(name, first, count), whole.narrow(0, first, count)))
          << name << " " << first << " " << count;
      // The scales are looked at, too.
      EXPECT_LE(bytes_read() - before, count * row_bytes + 2000);
    }
  }
}

TEST_F(QuantizedFolder, OtherTensorsAreAsTheyAre) {
  const auto [weight, scales] = testing::quantized(testing::normal({4, 4}, 3));
  write({{"a", bf16_}, {"w", weight}, {"w_scale_inv", scales}, {"x_scale_inv", scales}},
        R"({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
            "activation_scheme": "dynamic", "scale_fmt": "ue8m0"})");
  const HfWeights weights(folder_.path());
  EXPECT_THAT(weights.names(), ElementsAre("a", "w", "x_scale_inv"));
  EXPECT_THAT(weights.quantized(), ElementsAre("w"));
  EXPECT_EQ(weights.dtype("a"), at::kBFloat16);
  EXPECT_TRUE(at::equal(weights.load("a"), bf16_));
  EXPECT_EQ(weights.problem("a"), "");
}

TEST_F(QuantizedFolder, ScalesThatAreWrongAreNamed) {
  const auto [weight, scales] = testing::quantized(testing::normal({200, 130}, 3));
  const at::Tensor nan = scales.clone().fill_(std::nan(""));
  write({{"w", weight}});
  EXPECT_EQ(problem(), "w_scale_inv is missing");
  EXPECT_THAT(error_of<UserError>([&] { HfWeights(folder_.path()).load("w"); }),
              HasSubstr("w_scale_inv is missing"));
  write({{"w", weight}, {"w_scale_inv", scales.narrow(1, 0, 1).contiguous()}});
  EXPECT_EQ(problem(), "w_scale_inv is [2, 1], [200, 130] has [2, 2] blocks of 128 x 128");
  write({{"w", weight}, {"w_scale_inv", scales.to(at::kBFloat16)}});
  EXPECT_EQ(problem(), "w_scale_inv is BF16, expected F32");
  write({{"w", weight}, {"w_scale_inv", nan}});
  EXPECT_EQ(problem(), "w_scale_inv holds values that are not finite");
  write({{"w", weight.view({2, 100, 130})}, {"w_scale_inv", scales}});
  EXPECT_EQ(problem(), "w is F8_E4M3 but no matrix");
}

TEST_F(QuantizedFolder, OtherMethodsAndBlocksAreRefused) {
  const auto [weight, scales] = testing::quantized(testing::normal({4, 4}, 3));
  const TensorMap tensors = {{"w", weight}, {"w_scale_inv", scales}};
  write(tensors, R"({"quant_method": "gptq"})");
  EXPECT_THAT(open_error(), AllOf(HasSubstr("config.json"), HasSubstr("quant_method is \"gptq\""),
                                  HasSubstr("only \"fp8\"")));
  write(tensors, R"({"quant_method": "fp8", "fmt": "e5m2"})");
  EXPECT_THAT(open_error(), HasSubstr("fmt is \"e5m2\""));
  write(tensors, R"({"quant_method": "fp8", "weight_block_size": [64, 128]})");
  EXPECT_THAT(open_error(), HasSubstr("weight_block_size is [64,128]"));
  write(tensors, "7");
  EXPECT_THAT(open_error(), HasSubstr("quantization_config is 7, no object"));
  // What a conversion to bfloat16 has left in the file says nothing of the tensors.
  write({{"a", bf16_}}, R"({"quant_method": "gptq"})");
  EXPECT_THAT(HfWeights(folder_.path()).names(), ElementsAre("a"));
}

TEST_F(QuantizedFolder, IntegersAreNoWeights) {
  write({{"a", bf16_}, {"b", at::ones({2}, at::kInt)}});
  EXPECT_THAT(open_error(), HasSubstr("b is I32"));
}

TEST_F(QuantizedFolder, EqualByValue) {
  const at::Tensor x = testing::normal({3, 4}, 1, 1.0, at::kFloat);
  const auto [weight, scales] = testing::quantized(x);
  write({{"a", x},
         {"b", x.clone()},
         {"c", x + 1},
         {"d", x.to(at::kDouble)},
         {"e", x.view({4, 3})},
         {"w", weight},
         {"w_scale_inv", scales},
         {"v", weight},
         {"v_scale_inv", scales * 2}});
  const HfWeights weights(folder_.path());
  EXPECT_TRUE(weights.equal("a", "b"));
  EXPECT_FALSE(weights.equal("a", "c"));
  EXPECT_TRUE(weights.equal("a", "d"));
  EXPECT_FALSE(weights.equal("a", "e"));
  EXPECT_TRUE(weights.equal("w", "w"));
  EXPECT_FALSE(weights.equal("w", "v"));
}

}  // namespace
}  // namespace longhaul::checkpoint
