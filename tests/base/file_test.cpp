#include "longhaul/base/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "longhaul/base/fault.h"
#include "tests/support/temp_folder.h"

namespace longhaul {
namespace {

using test::error_of;
using test::TempFolder;
using ::testing::HasSubstr;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  return names;
}

TEST(File, WriteAtomicReplacesAndLeavesNothingElse) {
  const TempFolder folder;
  write_atomic(folder / "a.txt", "first");
  EXPECT_EQ(read_file(folder / "a.txt"), "first");
  write_atomic(folder / "a.txt", std::string("sec\0nd", 6));
  EXPECT_EQ(read_file(folder / "a.txt"), std::string("sec\0nd", 6));
  write_atomic(folder / "empty", "");
  EXPECT_EQ(read_file(folder / "empty"), "");
  EXPECT_THAT(names_in(folder.path()), ::testing::UnorderedElementsAre("a.txt", "empty"));
}

// The file that the link names is replaced, and the link stays.
TEST(File, WriteAtomicFollowsLinks) {
  const TempFolder folder;
  fs::create_directories(folder / "far");
  write_atomic(folder / "far/file", "old");
  fs::create_symlink("far/file", folder / "link");
  fs::create_symlink(folder / "link", folder / "link_to_link");
  fs::create_symlink("far/absent", folder / "link_to_nothing");
  write_atomic(folder / "link_to_link", "new");
  write_atomic(folder / "link_to_nothing", "made");
  EXPECT_EQ(read_file(folder / "far/file"), "new");
  EXPECT_EQ(read_file(folder / "far/absent"), "made");
  for (const char* link : {"link", "link_to_link", "link_to_nothing"}) {
    EXPECT_TRUE(fs::is_symlink(folder / link)) << link;
  }
  EXPECT_THAT(names_in(folder / "far"), ::testing::UnorderedElementsAre("file", "absent"));
  fs::create_symlink("round", folder / "round");
  EXPECT_THAT(error_of<FileError>([&] { write_atomic(folder / "round", "1"); }),
              HasSubstr("Too many levels of symbolic links"));
}

TEST(File, WriteAtomicReplacesRegularFilesOnly) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  fs::create_directories(folder / "folder");
  fs::create_symlink("/dev/full", folder / "device");
  for (const char* name : {"pipe", "folder", "device"}) {
    const fs::path path = folder / name;
    EXPECT_EQ(error_of<FileError>([&] { write_atomic(path, "1"); }),
              "'" + path.string() + "' is no regular file; name another");
  }
  EXPECT_TRUE(fs::is_fifo(folder / "pipe"));
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  EXPECT_THAT(names_in(folder.path()), ::testing::UnorderedElementsAre("pipe", "folder", "device"));
}

// A folder is durable when the one that holds its name is synced, and so on up to one that was
// there.
TEST(File, FoldersAreDurableUpToTheOneThatWasThere) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  for (const auto& [name, nth, parent] :
       {std::tuple{"a/b/c", 1, "a/b"}, std::tuple{"d/e/f/", 3, ""}}) {
    const fault::Armed armed(fmt::format("file.sync_parent:{}:enospc", nth));
    const fs::path synced = *parent == 0 ? folder.path() : folder / parent;
    EXPECT_THAT(error_of<FileError>([&] { create_folders(folder / name); }),
                HasSubstr("cannot sync the folder '" + synced.string() + "'"));
    EXPECT_TRUE(fs::is_directory(folder / name));
  }
  const fault::Armed armed("file.sync_parent:1:enospc");
  create_folders(folder / "a/b/c");
}

TEST(File, ReadsFilesOfUnknownSize) {
  EXPECT_THAT(read_file("/proc/self/status"), HasSubstr("Name:"));
}

TEST(File, ReadsPartsFromTheirPlaces) {
  const TempFolder folder;
  write_atomic(folder / "a", "0123456789");
  const FileReader reader(folder / "a");
  std::string part(4, ' ');
  const auto bytes = std::as_writable_bytes(std::span(part));
  reader.read(3, bytes);
  EXPECT_EQ(part, "3456");
  reader.read(0, bytes);
  EXPECT_EQ(part, "0123");
  EXPECT_THAT(error_of<UserError>([&] { reader.read(8, bytes); }),
              HasSubstr("a' is truncated: it ends at byte 10"));
  EXPECT_THROW(FileReader(folder / "missing"), FileError);
}

// More than the disk is told of at a time, in pieces that do not fit.
TEST(File, LargeFilesAreWholeHoweverTheyAreWritten) {
  const TempFolder folder;
  std::string text(30'000'000, ' ');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>('a' + i * i % 23);
  for (const size_t piece : {text.size(), size_t{9'999'991}, size_t{1} << 20}) {
    FileWriter writer(folder / "large");
    for (size_t at = 0; at < text.size(); at += piece) {
      writer.write(std::string_view(text).substr(at, piece));
    }
    writer.finish();
    EXPECT_EQ(read_file(folder / "large"), text) << piece;
  }
}

TEST(File, ErrorsNamePathReasonAndRemedy) {
  const TempFolder folder;
  const std::string missing = error_of<FileError>([&] { read_file(folder / "missing"); });
  EXPECT_THAT(missing, HasSubstr((folder / "missing").string()));
  EXPECT_THAT(missing, HasSubstr("No such file or directory; check the path"));
  EXPECT_THAT(error_of<FileError>([&] { read_file(folder.path()); }), HasSubstr("directory"));
  EXPECT_THAT(error_of<FileError>([&] { write_atomic(folder / "none/x", "1"); }),
              HasSubstr("cannot create '" + (folder / "none").string()));
}

TEST(File, FailedReplacementKeepsTheOldContents) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  write_atomic(folder / "state", "old");
  for (const std::string place : {"file.write", "file.sync", "file.rename"}) {
    for (const std::string kind : {"enospc", "throw"}) {
      const fault::Armed armed(place + ":" + kind);
      EXPECT_THROW(write_atomic(folder / "state", "new"), Error) << place << kind;
      EXPECT_EQ(read_file(folder / "state"), "old") << place << kind;
      EXPECT_THAT(names_in(folder.path()), ::testing::ElementsAre("state")) << place << kind;
    }
  }
}

TEST(File, FullDiskIsExplained) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  const fault::Armed armed("file.write:enospc");
  const std::string text = error_of<FileError>([&] { write_atomic(folder / "state", "new"); });
  EXPECT_THAT(text, HasSubstr(folder.path().string()));
  EXPECT_THAT(text, HasSubstr("No space left on device; free space there ("));
}

// A write that the system itself cuts short: the limit on a file's size lies within the block.
TEST(File, ShortWriteLeavesNoFile) {
  const TempFolder folder;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const struct rlimit limit { 10000, 10000 };
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      write_atomic(folder / "big", std::string(20000, 'x'));
      ::_exit(1);
    } catch (const FileError& error) {
      ::_exit(error.code() == EFBIG ? 0 : 2);
    }
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(names_in(folder.path()).empty());
}

TEST(File, WriterWithoutFinishRemovesItsFile) {
  const TempFolder folder;
  {
    FileWriter writer(folder / "x");
    writer.write("half");
    EXPECT_EQ(writer.size(), 4);
    EXPECT_TRUE(fs::exists(folder / "x"));
  }
  EXPECT_FALSE(fs::exists(folder / "x"));
  FileWriter writer(folder / "x");
  writer.write("whole");
  writer.finish();
  EXPECT_EQ(read_file(folder / "x"), "whole");
  EXPECT_THROW(writer.write("more"), Error);
}

}  // namespace
}  // namespace longhaul
