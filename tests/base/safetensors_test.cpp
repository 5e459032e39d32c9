#include "longhaul/base/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/support/temp_folder.h"

namespace longhaul::safetensors {
namespace {

using test::error_of;
using test::slurp;
using test::spill;
using test::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string with_length(const std::string& json, const std::string& data) {
  const uint64_t length = json.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + json + data;
}

// The error for a file with this header and this many bytes of data.
std::string header_error(const std::string& json, size_t data_bytes) {
  const std::string file = with_length(json, std::string(data_bytes, 'd'));
  return error_of<UserError>([&] { parse_header(file, static_cast<int64_t>(file.size()), "f"); });
}

TensorInfo spec(const std::string& name, DType dtype, std::vector<int64_t> shape) {
  TensorInfo info;
  info.name = name;
  info.dtype = dtype;
  info.shape = std::move(shape);
  return info;
}

TEST(Safetensors, RoundTripOfEveryDtype) {
  const TempFolder folder;
  const std::vector<DType> dtypes = {DType::kF64, DType::kF32,  DType::kF16,   DType::kBF16,
                                     DType::kI64, DType::kI32,  DType::kI16,   DType::kI8,
                                     DType::kU8,  DType::kBool, DType::kF8E4M3};
  std::vector<TensorInfo> specs;
  for (const DType dtype : dtypes) {
    specs.push_back(spec("t." + std::string(dtype_name(dtype)), dtype, {3, 5}));
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
  }
  specs.push_back(spec("scalar", DType::kF32, {}));
  specs.push_back(spec("empty", DType::kBF16, {0, 7}));
  const fs::path path = folder / "x.safetensors";
  Writer writer(path, specs, {{"format", "pt"}, {"quote\"", "ü"}});
  std::map<std::string, std::string> written;
  for (const TensorInfo& info : writer.tensors()) {
    std::string bytes(static_cast<size_t>(info.bytes()), '\0');
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + info.begin);
    EXPECT_EQ(writer.write(info.name, bytes.data(), bytes.size()), hash_hex(bytes));
    written[info.name] = bytes;
  }
  writer.finish();
  EXPECT_EQ(writer.file_bytes(), static_cast<int64_t>(fs::file_size(path)));
  const auto header_bytes = static_cast<size_t>(writer.data_start());
  EXPECT_EQ(writer.header_hash(), hash_hex(slurp(path).substr(0, header_bytes)));

  const Reader reader(path);
  ASSERT_EQ(reader.header().tensors.size(), specs.size());
  EXPECT_EQ(reader.header().metadata, (Metadata{{"format", "pt"}, {"quote\"", "ü"}}));
  EXPECT_EQ(reader.header().data_start % 8, 0);
  for (const TensorInfo& expected : specs) {
    const TensorInfo& info = reader.info(expected.name);
    EXPECT_EQ(info.dtype, expected.dtype);
    EXPECT_EQ(info.shape, expected.shape);
    EXPECT_EQ((reader.header().data_start + info.begin) % dtype_bytes(info.dtype), 0) << info.name;
    const auto bytes = reader.bytes(info);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
              written[info.name]);
  }
  EXPECT_EQ(reader.info("scalar").elements(), 1);
  EXPECT_EQ(reader.info("empty").elements(), 0);
}

TEST(Safetensors, FileWithoutTensors) {
  const TempFolder folder;
  Writer writer(folder / "x", {});
  writer.finish();
  EXPECT_TRUE(Reader(folder / "x").header().tensors.empty());
}

TEST(Safetensors, WriterRefusesWhatDoesNotFit) {
  const TempFolder folder;
  const auto f32 = [](const char* name) { return spec(name, DType::kF32, {2}); };
  EXPECT_THROW(Writer(folder / "x", {f32("a"), f32("a")}), Error);
  EXPECT_THROW(Writer(folder / "x", {f32("__metadata__")}), Error);
  EXPECT_THROW(Writer(folder / "x", {f32("\xff")}), UserError);
  {
    Writer writer(folder / "x", {f32("a"), f32("b")});
    const float data[2] = {1, 2};
    EXPECT_THROW(writer.write("b", data, 8), Error);
    EXPECT_THROW(writer.write("a", data, 4), Error);
    writer.write("a", data, 8);
    EXPECT_THROW(writer.finish(), Error);
  }
  EXPECT_FALSE(fs::exists(folder / "x"));
}

TEST(Safetensors, HeaderLengths) {
  const auto error = [](const std::string& file) {
    return error_of<UserError>([&] { parse_header(file, static_cast<int64_t>(file.size()), "f"); });
  };
  EXPECT_THAT(error(""),
              AllOf(HasSubstr("f: it has 0 bytes"), HasSubstr("fetch or write it again")));
  EXPECT_THAT(error("1234567"), HasSubstr("it has 7 bytes"));
  EXPECT_THAT(error(std::string("\x10\0\0\0\0\0\0\0{}", 10)), HasSubstr("truncated"));
  EXPECT_THAT(error(std::string(16, '\xff')), HasSubstr("the format allows 100000000"));
}

TEST(Safetensors, BadHeaders) {
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_THAT(header_error("{" + a, 8), HasSubstr("f (header):1: not valid JSON"));
  EXPECT_THAT(header_error("[]", 0), HasSubstr("no JSON object"));
  EXPECT_THAT(header_error(R"({"a":1})", 0), HasSubstr("'a' is no object"));
  EXPECT_THAT(header_error("{" + a + "," + a + "}", 8), HasSubstr("'a' stands twice"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[2]}})", 8),
              HasSubstr("tensor 'a' has no 'data_offsets'"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F4","shape":[2],"data_offsets":[0,8]}})", 8),
              AllOf(HasSubstr("\"F4\""), HasSubstr("BF16")));
  EXPECT_THAT(header_error(R"({"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})", 8),
              HasSubstr("dtype 4"));
  EXPECT_THAT(header_error(R"({"__metadata__":{"x":1}})", 0), HasSubstr("'x' is no string"));
}

TEST(Safetensors, BadShapesAndOffsets) {
  const auto error = [](const char* shape, const char* offsets, size_t bytes) {
    return header_error(
        fmt::format(R"({{"a":{{"dtype":"F32","shape":{},"data_offsets":{}}}}})", shape, offsets),
        bytes);
  };
  EXPECT_THAT(error("[-2]", "[0,8]", 8), HasSubstr("shape holds -2"));
  EXPECT_THAT(error("[1.5]", "[0,8]", 8), HasSubstr("shape holds 1.5"));
  EXPECT_THAT(error("2", "[0,8]", 8), HasSubstr("shape is no array"));
  EXPECT_THAT(error("[18446744073709551615]", "[0,8]", 8), HasSubstr("18446744073709551615"));
  EXPECT_THAT(error("[4611686018427387904,4]", "[0,0]", 0), HasSubstr("impossible"));
  EXPECT_THAT(error("[3]", "[0,8]", 8), HasSubstr("takes 12 bytes but has 8"));
  EXPECT_THAT(error("[2]", "[8,0]", 8), HasSubstr("no begin and end"));
  EXPECT_THAT(error("[2]", "[0,8,9]", 8), HasSubstr("no begin and end"));
  EXPECT_THAT(error("[2]", "[0,8]", 7), HasSubstr("ends at byte 8 of the data, which has 7"));
  EXPECT_THAT(error("[2]", "[0,8]", 9), HasSubstr("1 bytes after the last tensor"));
  EXPECT_THAT(error("[2]", "[4,12]", 12), HasSubstr("bytes 0 to 4 before tensor 'a'"));
}

TEST(Safetensors, OverlapNamesBoth) {
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                           R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                           12),
              HasSubstr("'a' and 'b' overlap"));
}

TEST(Safetensors, ReaderNamesTheNearestTensor) {
  const TempFolder folder;
  Writer writer(folder / "x", {spec("model.norm.weight", DType::kF32, {1})});
  const float one = 1;
  writer.write("model.norm.weight", &one, 4);
  writer.finish();
  const Reader reader(folder / "x");
  EXPECT_THAT(error_of<UserError>([&] { reader.info("model.norm.wieght"); }),
              HasSubstr("did you mean 'model.norm.weight'?"));
  EXPECT_THROW(Reader(folder / "y"), FileError);
  EXPECT_THROW(Reader(folder.path()), UserError);
}

// Any damage to a header either is an error or leaves a header that fits the file.
TEST(Safetensors, RandomDamageNeverEscapes) {
  const TempFolder folder;
  const fs::path path = folder / "x";
  Writer writer(path, {spec("a", DType::kI32, {2, 2}), spec("b", DType::kU8, {3})});
  const std::string data(16, 'x');
  writer.write("a", data.data(), 16);
  writer.write("b", data.data(), 3);
  writer.finish();
  const std::string good = slurp(path);
  std::mt19937 random(5);
  int rejected = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string bytes = good;
    for (int i = 0; i < 1 + round % 3; ++i) bytes[random() % bytes.size()] = char(random());
    if (round % 5 == 0) bytes.resize(random() % bytes.size());
    try {
      const Header header = parse_header(bytes, static_cast<int64_t>(bytes.size()), "f");
      for (const auto& [name, info] : header.tensors) {
        ASSERT_LE(header.data_start + info.end, static_cast<int64_t>(bytes.size()));
      }
    } catch (const UserError&) {
      ++rejected;
    }
  }
  EXPECT_GT(rejected, 1500);
}

}  // namespace
}  // namespace longhaul::safetensors
