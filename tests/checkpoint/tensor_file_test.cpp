#include "longhaul/checkpoint/tensor_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/base/fault.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::TempFolder;
using ::testing::HasSubstr;

TEST(TensorFile, RoundTripOfEveryDtype) {
  const TempFolder folder;
  TensorMap tensors;
  const at::Tensor ramp = at::arange(-6, 6, at::kFloat).reshape({3, 4});
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                    at::kInt, at::kShort, at::kChar, at::kByte, at::kBool}) {
    tensors[at::toString(type)] = ramp.abs().to(type);
  }
  tensors["signed"] = ramp.to(at::kChar);
  tensors["nan"] = at::full({2}, std::nan(""));
  tensors["scalar"] = at::scalar_tensor(1.5);
  tensors["empty"] = at::empty({3, 0}, at::kLong);
  tensors["transposed"] = ramp.t();
  tensors["needs_grad"] = ramp.clone().requires_grad_();
  save_safetensors(folder / "x", tensors, {{"format", "pt"}});
  const TensorMap loaded = load_safetensors(folder / "x");
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor& other = loaded.at(name);
    EXPECT_EQ(other.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(other.sizes(), tensor.sizes()) << name;
    const bool same = name == "nan" || at::equal(other, tensor);
    EXPECT_TRUE(same) << name;
  }
  EXPECT_TRUE(at::isnan(loaded.at("nan")).all().item<bool>());
}

TEST(TensorFile, Fp8KeepsItsBits) {
  const TempFolder folder;
  const at::Tensor fp8 = at::arange(16, at::kFloat).div(3).to(at::kFloat8_e4m3fn);
  save_safetensors(folder / "x", {{"fp8", fp8}});
  const at::Tensor loaded = load_safetensors(folder / "x").at("fp8");
  EXPECT_EQ(loaded.scalar_type(), at::kFloat8_e4m3fn);
  EXPECT_TRUE(at::equal(loaded.view(at::kByte), fp8.view(at::kByte)));
}

TEST(TensorFile, WhatHasNoContentsIsRefusedByName) {
  const auto error = [](const at::Tensor& tensor) {
    return error_of<Error>([&] { describe("layers.0.x", tensor); });
  };
  EXPECT_THAT(error(at::empty({2}, at::TensorOptions(at::kMeta))),
              HasSubstr("'layers.0.x' on meta"));
  EXPECT_THAT(error(at::zeros({2}, at::kComplexFloat)), HasSubstr("dtype ComplexFloat"));
  EXPECT_THAT(error(at::Tensor()), HasSubstr("undefined"));
  EXPECT_THAT(error(at::eye(2).to_sparse()), HasSubstr("'layers.0.x'"));
}

TEST(TensorFile, FailedSaveKeepsTheOldFile) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  save_safetensors(folder / "x", {{"a", at::ones({4})}});
  {
    const fault::Armed armed("file.write:2:enospc");
    EXPECT_THROW(save_safetensors(folder / "x", {{"a", at::zeros({4})}}), FileError);
  }
  EXPECT_TRUE(at::equal(load_safetensors(folder / "x").at("a"), at::ones({4})));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace longhaul::checkpoint
