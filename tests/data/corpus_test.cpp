#include "longhaul/data/corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "tests/data/corpus_files.h"

namespace longhaul::data {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> names(const std::vector<CorpusFile>& files,
                               const std::filesystem::path& folder) {
  std::vector<std::string> result;
  for (const auto& file : files) result.push_back(file.path.lexically_relative(folder).string());
  return result;
}

TEST(FileList, FoldersAreSortedAndHiddenFilesSkipped) {
  const TemporaryFolder folder;
  for (const char* name : {"b.txt", "a/z.txt", "a/b/c.txt", ".hidden", ".git/x", "a/.h", "a.txt"}) {
    folder.write(name, "x");
  }
  EXPECT_THAT(names(list_files(folder.path().string()), folder.path()),
              ElementsAre("a.txt", "a/b/c.txt", "a/z.txt", "b.txt"));
}

TEST(FileList, ListsKeepTheirOrder) {
  const TemporaryFolder folder;
  const auto b = folder.write("b.txt", "12"), a = folder.write("a.txt", "1");
  const auto comma = folder.write("x,y.txt", "123");
  const auto files = list_files(b + "," + a);
  EXPECT_THAT(names(files, folder.path()), ElementsAre("b.txt", "a.txt"));
  EXPECT_EQ(total_bytes(files), 3u);
  EXPECT_THAT(names(list_files(comma), folder.path()), ElementsAre("x,y.txt"));
}

TEST(FileList, GlobsAreSortedAndTakeFilesAndFolders) {
  const TemporaryFolder folder;
  for (const char* name : {"b2/x.txt", "a1.txt", "b1.txt", "c.txt", "[d].txt"}) {
    folder.write(name, "x");
  }
  const auto matched = [&](const std::string& glob) {
    return names(list_files((folder.path() / glob).string()), folder.path());
  };
  EXPECT_THAT(matched("[ab]*"), ElementsAre("a1.txt", "b1.txt", "b2/x.txt"));
  EXPECT_THAT(matched("?.txt"), ElementsAre("c.txt"));
  EXPECT_THAT(matched("[d].txt"), ElementsAre("[d].txt"));  // a name that exists
  EXPECT_TRUE(stands_for_something((folder.path() / "b*").string()));
  EXPECT_FALSE(stands_for_something((folder.path() / "z*").string()));
  EXPECT_THAT(user_error([&] { matched("z*"); }), HasSubstr("z*' does not exist"));
}

TEST(FileList, BadInput) {
  const TemporaryFolder folder;
  EXPECT_THAT(user_error([&] { list_files(folder.path().string()); }), HasSubstr("no files"));
  EXPECT_THAT(user_error([&] { list_files((folder.path() / "nothing").string()); }),
              AllOf(HasSubstr("nothing"), HasSubstr("does not exist")));
  EXPECT_THAT(user_error([&] { list_files(""); }), HasSubstr("no files"));
}

TEST(Corpus, EachFileIsADocumentWithAnEnd) {
  const TemporaryFolder folder;
  folder.write("1", "ab");
  folder.write("2", "");
  folder.write("3", "c\xFF");
  const auto tokenizer = bytes_tokenizer();
  const auto corpus = tokenize_files(list_files(folder.path().string()), tokenizer,
                                     {.documents = {.on_invalid = InvalidText::kReplace}});
  EXPECT_EQ(tokenizer.decode(corpus.ids), "ab<|endoftext|>c\uFFFD<|endoftext|>");
  EXPECT_THAT(corpus.document_ends, ElementsAre(3, 8));
  EXPECT_EQ(corpus.empty_documents, 1);
  EXPECT_EQ(corpus.replaced_documents, 1);
  EXPECT_EQ(corpus.text_bytes, 6);
  EXPECT_EQ(corpus.token_bytes.size(), 257u);
  EXPECT_EQ(corpus.token_bytes[256], 0u);
}

TEST(Corpus, TheNumberOfThreadsDoesNotMatter) {
  const TemporaryFolder folder;
  for (int i = 0; i < 100; ++i) {
    folder.write("f" + std::to_string(i),
                 std::string(static_cast<size_t>(i * 37 % 500), 'a') + "b");
  }
  const auto files = list_files(folder.path().string());
  const auto tokenizer = bytes_tokenizer();
  const auto one = tokenize_files(files, tokenizer, {.num_threads = 1});
  for (const int threads : {2, 5}) {
    int64_t last = 0;
    const auto many = tokenize_files(
        files, tokenizer, {.num_threads = threads, .progress = [&](int64_t done, int64_t total) {
                             EXPECT_GT(done, last);
                             EXPECT_EQ(total, static_cast<int64_t>(total_bytes(files)));
                             last = done;
                           }});
    EXPECT_EQ(many.ids, one.ids);
    EXPECT_EQ(many.document_ends, one.document_ends);
    EXPECT_EQ(last, static_cast<int64_t>(total_bytes(files)));
  }
}

TEST(Corpus, BadInput) {
  const TemporaryFolder folder;
  folder.write("a", "");
  folder.write("b", "");
  const auto empty = list_files(folder.path().string());
  EXPECT_THAT(user_error([&] { tokenize_files(empty, bytes_tokenizer()); }),
              HasSubstr("all 2 files of the corpus are empty"));
  EXPECT_THAT(user_error([&] { tokenize_files(empty, bytes_tokenizer({"<end>"})); }),
              AllOf(HasSubstr("end-of-text"), HasSubstr("eos_token")));
  folder.write("c", "x\xFF");
  EXPECT_THAT(
      user_error([&] { tokenize_files(list_files(folder.path().string()), bytes_tokenizer()); }),
      HasSubstr("/c:1: 0xFF is not UTF-8"));
  const std::vector<CorpusFile> gone = {{folder.path() / "gone", 5}};
  EXPECT_THAT(user_error([&] { tokenize_files(gone, bytes_tokenizer()); }), HasSubstr("gone"));
}

// Compressed text may be any multiple of its file; what is too large for memory is not read on.
TEST(Corpus, TooMuchTextIsNotHeld) {
  const TemporaryFolder folder;
  const auto path = folder.write("a", gzip(jsonl({std::string(500'000, 'a'), "b"})));
  ASSERT_LT(std::filesystem::file_size(path), 5000u);
  const auto tokenizer = bytes_tokenizer();
  for (const uint64_t most : {100'000, 500'000, 500'001}) {
    BadDocuments bad(false);
    const auto sources = list_sources(path, {}, bad);
    const auto corpus = tokenize(sources, &tokenizer, {.most_text_bytes = most}, bad);
    EXPECT_EQ(corpus.has_value(), most == 500'001) << most;
  }
}

TEST(Corpus, ABeginningThatIsAllBadIsFoundAtOnce) {
  const TemporaryFolder folder;
  const std::string rows = jsonl(std::vector<std::string>(2000, "x"));
  const auto path = folder.write("rows", rows);
  const auto check = [](const std::string& paths, const DocumentOptions& options) {
    BadDocuments bad(options.skip_bad);
    check_beginning(list_sources(paths, options, bad), options);
  };
  check(path, {});
  const DocumentOptions misspelt{.text_field = "txet", .skip_bad = true};
  for (const auto& file : {path, folder.write("zipped", gzip(rows))}) {
    EXPECT_THAT(user_error([&] { check(file, misspelt); }),
                AllOf(HasSubstr("the first 1,000 documents are all bad"),
                      HasSubstr(file + ":1: there is no field \"txet\"")));
  }
  EXPECT_THAT(user_error([&] { check(path, {.text_field = "txet"}); }), HasSubstr("rows:1: "));
  const auto few = folder.write("few", jsonl({"a", "b"}));
  EXPECT_THAT(user_error([&] { check(few, misspelt); }),
              AllOf(HasSubstr("all 2 documents"), HasSubstr("/few:1: there is no field")));
  check(folder.write("late", std::string("{}\n{}\n") + rows), {.skip_bad = true});
}

TEST(Corpus, IsTheSameWhereverItLies) {
  const TemporaryFolder folder;
  const auto fingerprint = [&](const std::string& paths) {
    BadDocuments bad(false);
    return list_sources((folder.path() / paths).string(), {}, bad).fingerprint();
  };
  folder.write("one/a", "x");
  folder.write("one/b", "yz");
  folder.write("two/a", "x");
  folder.write("two/b", "zy");
  folder.write("three/a", "x");
  folder.write("three/b", "yzz");
  EXPECT_EQ(fingerprint("one"), fingerprint("two"));
  EXPECT_NE(fingerprint("one"), fingerprint("three"));
  EXPECT_NE(fingerprint("one"), fingerprint("one/a"));
}

TEST(Corpus, AnUnreadableFileIsNamed) {
  // A regular file that opens but does not read, even for root.
  EXPECT_THAT(user_error([] { tokenize_files(list_files("/proc/self/mem"), bytes_tokenizer()); }),
              HasSubstr("/proc/self/mem"));
}

}  // namespace
}  // namespace longhaul::data
