// The bytes of TensorBoard's event files. That TensorBoard itself reads them is the test
// `tensorboard` (label slow).
#include "longhaul/train/results/event_file.h"

#include "tests/results/run_folder.h"

namespace longhaul::train {
namespace {

using ::testing::HasSubstr;

// The records of a file, their checksums checked.
std::vector<std::string> records(const std::string& bytes) {
  const auto number = [&](size_t at, int size) {
    uint64_t value = 0;
    for (int i = 0; i < size; ++i) {
      value |= uint64_t{static_cast<uint8_t>(bytes.at(at + static_cast<size_t>(i)))} << 8 * i;
    }
    return value;
  };
  std::vector<std::string> found;
  for (size_t at = 0; at < bytes.size();) {
    const uint64_t size = number(at, 8);
    EXPECT_EQ(number(at + 8, 4), masked_crc32c(bytes.substr(at, 8)));
    found.push_back(bytes.substr(at + 12, size));
    EXPECT_EQ(number(at + 12 + size, 4), masked_crc32c(found.back()));
    at += 16 + size;
  }
  return found;
}

// RFC 3720, appendix B.4.
TEST(EventFile, Checksums) {
  EXPECT_EQ(crc32c(""), 0U);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
}

TEST(EventFile, RecordsAsProtobufs) {
  const test::TempFolder folder;
  EventFile file(folder / "tb", 7);
  file.add_scalars(300, 2.0, {{"lr", 0.5}});
  file.add_text(6, 2.0, "job", "steps = 9");
  const auto all = records(test::slurp(file.path()));
  ASSERT_EQ(all.size(), 4u);
  EXPECT_THAT(all[0], HasSubstr("\x1a\x0d"
                                "brain.Event:2"));  // field 3
  // Step 7, and field 7: a message with status START.
  EXPECT_THAT(all[1], ::testing::EndsWith(std::string("\x10\x07\x3a\x02\x08\x01")));
  // wall_time 2.0; step 300 in two bytes; summary { value { tag: "lr" simple_value: 0.5 } }.
  EXPECT_EQ(all[2], std::string("\x09\0\0\0\0\0\0\0\x40\x10\xac\x02\x2a\x0b\x0a\x09\x0a\x02"
                                "lr\x15\0\0\0\x3f",
                                25));
  EXPECT_THAT(all[3], HasSubstr("steps = 9"));
}

TEST(EventFile, ALaterFileSortsAfterEarlierOnes) {
  const test::TempFolder folder;
  const EventFile first(folder / "tb", 1), second(folder / "tb", 4), third(folder / "tb", 4);
  EXPECT_LT(first.path().string(), second.path().string());
  EXPECT_LT(second.path().string(), third.path().string());
}

// One that was written while the clock ran ahead, and by another program.
TEST(EventFile, ANewFileSortsAfterOneOfTheFuture) {
  const test::TempFolder folder;
  const auto future = folder / "tb/events.out.tfevents.9000000000.host.7.0";
  fs::create_directories(folder / "tb");
  test::spill(future, "");
  test::spill(folder / "tb/events.out.tfevents.other", "");
  const EventFile file(folder / "tb", 1);
  EXPECT_GT(file.path().string(), future.string());
  EXPECT_EQ(file.path().filename(), "events.out.tfevents.9000000001.longhaul");
}

}  // namespace
}  // namespace longhaul::train
