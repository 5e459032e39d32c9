#include "longhaul/data/prepare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "longhaul/base/fault.h"
#include "longhaul/base/file.h"
#include "longhaul/data/statistics.h"
#include "tests/data/corpus_files.h"
#include "tests/support/log_capture.h"

namespace longhaul::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class Prepare : public ::testing::Test {
 protected:
  Prepare() {
    for (int i = 0; i < 7; ++i) {
      std::vector<std::string> texts;
      for (int j = 0; j <= 10 * i; ++j) texts.push_back(std::string(1 + i * j % 13, 'a' + i));
      folder_.write("corpus/" + std::to_string(i), jsonl(texts));
    }
    folder_.write("corpus/text", "a text");
    folder_.write("corpus/void", "");
  }

  std::string corpus() const { return (folder_.path() / "corpus").string(); }
  fs::path tokens() const { return folder_.path() / "tokens"; }
  // Every shard is one file.
  PrepareResult prepare_small(const PrepareOptions& more = {}) const {
    PrepareOptions options = more;
    options.shard_bytes = 1;
    return prepare(corpus(), bytes_tokenizer(), tokens(), options);
  }
  TokenizedCorpus read(const std::string& paths) const {
    BadDocuments bad(false);
    const auto sources = list_sources(paths, {}, bad);
    const auto tokenizer = bytes_tokenizer();
    return tokenize(sources, sources.needs_tokenizer() ? &tokenizer : nullptr, {}, bad).value();
  }

  TemporaryFolder folder_;
};

TEST_F(Prepare, TokensAreThoseOfTheText) {
  for (const uint64_t shard_bytes : {1, 1000, 1'000'000}) {
    fs::remove_all(tokens());
    const auto result = prepare(corpus(), bytes_tokenizer(), tokens(),
                                {.shard_bytes = shard_bytes, .num_threads = 3});
    EXPECT_EQ(result.kept_shards, 0u);
    const auto text = read(corpus()), prepared = read(tokens().string());
    EXPECT_EQ(prepared.ids, text.ids);
    EXPECT_EQ(prepared.document_ends, text.document_ends);
    EXPECT_EQ(prepared.token_bytes, text.token_bytes);
    EXPECT_EQ(prepared.text_bytes, text.text_bytes);
    for (const auto& shard : read_prepared(tokens()).shards) verify(shard);
  }
}

// A chunk's documents are of several shards, of which only the last is open when they are copied.
TEST_F(Prepare, AChunkOfSeveralShards) {
  const std::string large(300'000, 'x');  // mapped by itself, so that it is gone when unmapped
  for (int i = 0; i < 3; ++i) folder_.write("corpus/z" + std::to_string(i), large);
  prepare_small();
  EXPECT_EQ(read(tokens().string()).ids, read(corpus()).ids);
}

TEST_F(Prepare, TellsHowFarItIs) {
  int64_t last = -1, all = 0;
  prepare_small({.progress = [&](int64_t done, int64_t total) {
    if (last < 0) {
      EXPECT_EQ(done, 0) << "told after the work began, so that a rate is none";
    }
    EXPECT_GE(done, last);
    last = done;
    all = total;
  }});
  EXPECT_GT(all, 0);
  EXPECT_EQ(last, all);
}

// Stopped at each of its renames: what is there is kept, and the end is the same.
TEST_F(Prepare, GoesOnAfterItWasStopped) {
  prepare_small({.num_threads = 1});
  const auto whole = read(tokens().string());
  const auto manifest = read_file(tokens() / kPreparedManifest);
  size_t stops = 0;
  for (int nth = 1; nth < 100; ++nth) {
    fs::remove_all(tokens());
    bool stopped = false;
    {
      const fault::Armed armed("file.rename:" + std::to_string(nth) + ":throw");
      try {
        prepare_small({.num_threads = 1});
      } catch (const fault::Injected&) {
        stopped = true;
      }
    }
    if (!stopped) break;
    ++stops;
    if (is_prepared(tokens())) {
      EXPECT_THAT(user_error([&] { read(tokens().string()); }),
                  HasSubstr("is not prepared to the end"));
    }
    // The first name to be given is the plan's.
    const auto leftover =
        tokens() / (nth == 1 ? ".longhaul_plan.json.tmp-1" : ".shard-00000.tokens.tmp-1");
    std::ofstream(leftover) << "left by a kill";
    const auto result = prepare_small({.num_threads = 1});
    EXPECT_EQ(result.kept_shards, nth < 4 ? 0u : static_cast<size_t>((nth - 2) / 2)) << nth;
    EXPECT_EQ(read_file(tokens() / kPreparedManifest), manifest) << nth;
    EXPECT_EQ(read(tokens().string()).ids, whole.ids) << nth;
    EXPECT_FALSE(fs::exists(leftover));
  }
  EXPECT_GT(stops, 10u);
}

TEST_F(Prepare, AgainIsDoneAtOnce) {
  const auto first = prepare_small();
  const auto again = prepare_small();
  EXPECT_EQ(again.kept_shards, first.prepared.shards.size());
}

TEST_F(Prepare, OtherInputIsRefused) {
  prepare_small();
  EXPECT_THAT(user_error([&] { prepare_small({.documents = {.text_field = "other"}}); }),
              HasSubstr("holds a preparation of other files"));
  folder_.write("corpus/0", jsonl({"changed"}));
  EXPECT_THAT(user_error([&] { prepare_small(); }), HasSubstr("files that have changed"));
  EXPECT_THAT(user_error([&] {
                prepare(tokens().string(), bytes_tokenizer(), folder_.path() / "twice", {});
              }),
              HasSubstr("is prepared already"));
  EXPECT_THAT(user_error([&] { prepare(corpus(), bytes_tokenizer(), folder_.path(), {}); }),
              HasSubstr("is not empty"));
}

// Another token that ends a text makes other tokens, though all else is the same.
TEST_F(Prepare, TheEndOfTextTokenCounts) {
  BpeTrainingOptions options;
  options.vocab_size = 258;
  options.special_tokens = {"<|endoftext|>", "</s>"};
  folder_.write("tokenizer/tokenizer.json", train_bpe({"x"}, options).json);
  const auto with_end = [&](const std::string& end) {
    folder_.write("tokenizer/tokenizer_config.json", "{\"eos_token\": \"" + end + "\"}");
    return Tokenizer::load(folder_.path() / "tokenizer");
  };
  const auto one = with_end("<|endoftext|>"), other = with_end("</s>");
  ASSERT_NE(one.eos_id(), other.eos_id());
  EXPECT_NE(one.fingerprint(), other.fingerprint());
  prepare(corpus(), one, tokens(), {});
  EXPECT_THAT(user_error([&] { prepare(corpus(), other, tokens(), {}); }),
              HasSubstr("another tokenizer"));
}

TEST_F(Prepare, DamageIsFound) {
  const auto shard = prepare_small().prepared.shards[3];
  std::string bytes = read_file(shard.path);
  std::string damaged = bytes;
  damaged[5] ^= 1;
  std::ofstream(shard.path, std::ios::binary) << damaged;
  EXPECT_THAT(user_error([&] { verify(read_prepared(tokens()).shards[3]); }),
              AllOf(HasSubstr("shard-00003.tokens"), HasSubstr("is damaged")));
  EXPECT_THAT(user_error([&] { read(tokens().string()); }),
              AllOf(HasSubstr("shard-00003.tokens"), HasSubstr("not those of its checksum")));
  // The same command makes that part anew, and keeps the others.
  EXPECT_EQ(prepare_small().kept_shards, 8u);
  EXPECT_EQ(read_file(shard.path), bytes);
  std::ofstream(shard.path, std::ios::binary) << bytes.substr(1);
  EXPECT_THAT(user_error([&] { read(tokens().string()); }), HasSubstr("expected"));
}

TEST_F(Prepare, DamageOfTheManifestIsFound) {
  prepare_small();
  const auto path = tokens() / kPreparedManifest;
  const auto manifest = nlohmann::json::parse(read_file(path));
  const auto error_with = [&](const std::string& pointer, const nlohmann::json& value) {
    auto changed = manifest;
    changed[nlohmann::json::json_pointer(pointer)] = value;
    std::ofstream(path) << changed;
    return user_error([&] { read(tokens().string()); });
  };
  EXPECT_THAT(error_with("/format", 7), HasSubstr("\"format\" is missing or makes no sense"));
  EXPECT_THAT(error_with("/format", "other"), HasSubstr("of the format \"other\""));
  EXPECT_THAT(error_with("/token_bytes", nlohmann::json::array({1, 2})),
              HasSubstr("\"token_bytes\""));
  EXPECT_THAT(error_with("/token_bytes/3", -1), HasSubstr("\"token_bytes\""));
  EXPECT_THAT(error_with("/token_bytes/3", "x"), HasSubstr("\"token_bytes\""));
  EXPECT_THAT(error_with("/vocab_size", -257), HasSubstr("\"vocab_size\""));
  EXPECT_THAT(error_with("/tokenizer", 0.5), HasSubstr("\"tokenizer\""));
  EXPECT_THAT(error_with("/shards", {{"a", 1}}), HasSubstr("\"shards\""));
  EXPECT_THAT(error_with("/shards/0", 1), HasSubstr("\"file\""));
  EXPECT_THAT(error_with("/shards/0/file", "../corpus/0"), HasSubstr("\"file\""));
  EXPECT_THAT(error_with("/shards/0/tokens", -2), HasSubstr("\"tokens\""));
  EXPECT_THAT(error_with("/shards/0/tokens", uint64_t{1} << 63), HasSubstr("\"tokens\""));
  EXPECT_THAT(error_with("/shards/0/documents", 1000), HasSubstr("expected"));
  // A smaller vocabulary than the ids are of.
  auto smaller = manifest;
  smaller["vocab_size"] = 97;
  smaller["token_bytes"] = std::vector<int>(97, 1);
  std::ofstream(path) << smaller;
  EXPECT_THAT(user_error([&] { read(tokens().string()); }), HasSubstr("damaged at document 0"));
}

// Wherever it stands, a folder of prepared tokens is no text.
TEST_F(Prepare, TokensInAFolderOrByAGlob) {
  prepare_small();
  const auto expected = read(tokens().string()).ids;
  fs::create_directories(folder_.path() / "all");
  fs::rename(tokens(), folder_.path() / "all/tokens");
  const std::string all = (folder_.path() / "all").string();
  for (const auto& paths : {all, all + "/*", all + "/tok*/*", all + "/tokens/shard-00001.tokens"}) {
    EXPECT_EQ(read(paths).ids, expected) << paths;
  }
  folder_.write("all/a", "text before");
  folder_.write("all/z", "text after");
  const auto mixed = read(all);
  EXPECT_EQ(mixed.ids.size(), expected.size() + 12 + 11);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), mixed.ids.begin() + 12));
  fs::remove(folder_.path() / "all/tokens" / kPreparedManifest);
  EXPECT_THAT(user_error([&] { read(all); }), HasSubstr("is not prepared to the end"));
}

TEST_F(Prepare, TheOutputIsNoPartOfTheInput) {
  EXPECT_THAT(user_error([&] {
                prepare(corpus(), bytes_tokenizer(), folder_.path() / "corpus/tokens", {});
              }),
              AllOf(HasSubstr("corpus/tokens' lies inside the corpus"), HasSubstr("outside")));
  EXPECT_FALSE(fs::exists(folder_.path() / "corpus/tokens"));
}

// Also where a glob would match the output only once it is there.
TEST_F(Prepare, TheOutputIsNotWhatAGlobMatches) {
  const auto error = [&](const std::string& glob, const std::string& output) {
    return user_error([&] {
      prepare((folder_.path() / glob).string(), bytes_tokenizer(), folder_.path() / output, {});
    });
  };
  EXPECT_THAT(error("corpus/*", "corpus/tokens"), HasSubstr("inside the corpus"));
  EXPECT_THAT(error("corpus/*", "corpus/new/tokens"), HasSubstr("inside the corpus"));
  EXPECT_THAT(error("c*/[t-v]*", "corpus/../corpus/tokens"), HasSubstr("inside the corpus"));
  EXPECT_FALSE(fs::exists(folder_.path() / "corpus/tokens"));
  const auto num_shards = [&](const std::string& glob, const std::string& output) {
    const std::string paths = (folder_.path() / glob).string();
    return prepare(paths, bytes_tokenizer(), folder_.path() / output, {}).prepared.shards.size();
  };
  EXPECT_EQ(num_shards("corpus/*", "corpus7"), 1u);
  EXPECT_EQ(num_shards("corpus/*", "corpus/.tokens"), 1u);
  EXPECT_EQ(num_shards("corpus/[0-9]", "corpus/tokens"), 1u);
}

TEST_F(Prepare, NamesThatAreNotUtf8) {
  folder_.write("corpus/\xE9", "named in Latin 1");
  EXPECT_EQ(prepare_small().kept_shards, 0u);
  EXPECT_EQ(prepare_small().kept_shards, 9u);  // the empty file has none of its own
}

TEST_F(Prepare, BadFilesAndRowsAreCounted) {
  folder_.write("corpus/cut.parquet", "PAR1 and then nothing");
  folder_.write("corpus/rows", "{\"text\": 1}\n" + jsonl({"good"}));
  const fs::path list = tokens() / "bad_documents.txt";
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(prepare_small({.documents = {.skip_bad = true}}).bad_documents, 2);
    const std::string listed = read_file(list);
    EXPECT_THAT(listed, AllOf(HasSubstr("corpus/cut.parquet: "), HasSubstr("corpus/rows:1: ")));
    EXPECT_EQ(std::count(listed.begin(), listed.end(), '\n'), 2);
  }
}

// The first ten of all shards, not of each.
TEST_F(Prepare, TheFirstBadDocumentsAreTold) {
  for (int i = 0; i < 12; ++i) folder_.write("corpus/bad" + std::to_string(i), "{\"text\": 1}\n");
  test::LogCapture log;
  EXPECT_EQ(prepare_small({.documents = {.skip_bad = true}}).bad_documents, 12);
  EXPECT_THAT(log.text(), HasSubstr("further ones are only counted"));
  EXPECT_EQ(prepare_small({.documents = {.skip_bad = true}}).bad_documents, 12);
  const std::string text = log.text(), told = ": left out";
  size_t times = 0;
  for (size_t at = text.find(told); at != std::string::npos; at = text.find(told, at + 1)) ++times;
  EXPECT_EQ(times, 10u);
}

// What was made before the error is kept; and what left some out is not taken for whole.
TEST_F(Prepare, GoesOnByLeavingOutWhatIsBad) {
  folder_.write("corpus/rows", "{\"text\": 1}\n" + jsonl({"good"}));
  const PrepareOptions error = {.num_threads = 1};
  const PrepareOptions skip = {.documents = {.skip_bad = true}, .num_threads = 1};
  EXPECT_THAT(user_error([&] { prepare_small(error); }), HasSubstr("rows:1: the field"));
  auto result = prepare_small(skip);
  EXPECT_EQ(result.kept_shards, 7u);  // those before it
  EXPECT_EQ(result.bad_documents, 1);
  EXPECT_THAT(user_error([&] { prepare_small(error); }), HasSubstr("rows:1: the field"));
  // A plan of an earlier version.
  auto plan = nlohmann::json::parse(read_file(tokens() / kPreparedPlan));
  plan["bad_documents"] = "error";
  std::ofstream(tokens() / kPreparedPlan) << plan;
  result = prepare_small(skip);
  EXPECT_EQ(result.kept_shards, 10u);
  EXPECT_EQ(result.bad_documents, 1);
}

TEST_F(Prepare, StatisticsOfTextAndOfTokensAgree) {
  prepare_small();
  folder_.write("corpus/twice", "a text");
  for (const auto& paths : {corpus(), tokens().string() + "," + corpus() + "/twice"}) {
    BadDocuments bad(true);
    const auto tokenizer = bytes_tokenizer();
    std::vector<int64_t> told;
    const auto statistics = collect(
        list_sources(paths, {}, bad), &tokenizer,
        {.sample_tokens = 5, .progress = [&](int64_t done, int64_t) { told.push_back(done); }},
        bad);
    ASSERT_GE(told.size(), 2u);
    EXPECT_EQ(told.front(), 0);
    EXPECT_EQ(statistics.documents, 219);
    EXPECT_EQ(statistics.tokens, statistics.text_bytes + 219);
    EXPECT_GT(statistics.duplicates, 100);
    EXPECT_EQ(statistics.length_at(0), 2u);
    EXPECT_EQ(statistics.length_at(1), 14u);
    EXPECT_EQ(tokenizer.decode(statistics.sample), "a<|endoftext|>b<|endoftext|>b");
    EXPECT_THAT(statistics.sample_ends, ElementsAre(2u, 4u));
  }
}

}  // namespace
}  // namespace longhaul::data
