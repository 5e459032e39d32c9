#include "longhaul/data/prepare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "longhaul/base/fault.h"
#include "longhaul/base/file.h"
#include "longhaul/data/statistics.h"
#include "tests/data/corpus_files.h"

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
    return tokenize(sources, sources.needs_tokenizer() ? &tokenizer : nullptr, {}, bad);
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
    verify(read_prepared(tokens()));
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
  int64_t last = 0, all = 0;
  prepare_small({.progress = [&](int64_t done, int64_t total) {
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
    std::ofstream(tokens() / ".shard-00000.tokens.tmp-1") << "left by a kill";
    if (!is_prepared(tokens())) fs::remove_all(tokens());
    const auto result = prepare_small({.num_threads = 1});
    EXPECT_EQ(result.kept_shards, nth < 4 ? 0u : static_cast<size_t>((nth - 2) / 2)) << nth;
    EXPECT_EQ(read_file(tokens() / kPreparedManifest), manifest) << nth;
    EXPECT_EQ(read(tokens().string()).ids, whole.ids) << nth;
    EXPECT_FALSE(fs::exists(tokens() / ".shard-00000.tokens.tmp-1"));
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
  EXPECT_THAT(user_error([&] { prepare_small({.documents = {.skip_bad = true}}); }),
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
  EXPECT_THAT(user_error([&] { verify(read_prepared(tokens())); }),
              AllOf(HasSubstr("shard-00003.tokens"), HasSubstr("is damaged")));
  damaged = bytes;
  damaged[3] = '\x7F';  // far outside the vocabulary
  std::ofstream(shard.path, std::ios::binary) << damaged;
  EXPECT_THAT(user_error([&] { read(tokens().string()); }), HasSubstr("damaged at document 0"));
  std::ofstream(shard.path, std::ios::binary) << bytes.substr(1);
  EXPECT_THAT(user_error([&] { read(tokens().string()); }), HasSubstr("expected"));
}

TEST_F(Prepare, StatisticsOfTextAndOfTokensAgree) {
  prepare_small();
  folder_.write("corpus/twice", "a text");
  for (const auto& paths : {corpus(), tokens().string() + "," + corpus() + "/twice"}) {
    BadDocuments bad(true);
    const auto tokenizer = bytes_tokenizer();
    const auto statistics =
        collect(list_sources(paths, {}, bad), &tokenizer, {.sample_tokens = 5}, bad);
    EXPECT_EQ(statistics.documents, 219);
    EXPECT_EQ(statistics.tokens, statistics.text_bytes + 219);
    EXPECT_GT(statistics.duplicates, 100);
    EXPECT_EQ(statistics.length_at(0), 2u);
    EXPECT_EQ(statistics.length_at(1), 14u);
    EXPECT_THAT(statistics.sample, ElementsAre('a', 256, 'b', 256, 'b'));
  }
}

}  // namespace
}  // namespace longhaul::data
