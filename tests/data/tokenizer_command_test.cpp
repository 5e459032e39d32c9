// The tokenizer command as users call it: files, pipes, exit status.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "tests/data/corpus_files.h"

namespace longhaul::data {
namespace {

using nlohmann::json;
using testing::HasSubstr;

struct Outcome {
  int status;
  std::string out, err;
};

class TokenizerCommand : public testing::Test {
 protected:
  Outcome run(const std::string& arguments, const std::string& input = "") {
    const std::string in = folder_.write("stdin", input), err = folder_.write("stderr", "");
    const std::string command =
        LONGHAUL_TOKENIZER_BINARY " tokenizer " + arguments + " < " + in + " 2> " + err;
    FILE* pipe = popen(command.c_str(), "r");
    std::string out;
    std::array<char, 4096> buffer;
    for (size_t got; (got = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
      out.append(buffer.data(), got);
    }
    const int status = pclose(pipe);
    return {WEXITSTATUS(status), out, read_file(err)};
  }

  std::string trained() {
    folder_.write("src/a.py", "def f(x):\n    return x\n\ndef g(x):\n    return f(x)\n");
    folder_.write("src/b.py", "");
    const std::string output = (folder_.path() / "tokenizer.json").string();
    const Outcome outcome = run("train --input " + (folder_.path() / "src").string() +
                                " --vocab-size 270 --output " + output);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, HasSubstr("learning merges: 270 in "));
    return output;
  }

  TemporaryFolder folder_;
};

TEST_F(TokenizerCommand, TrainEncodeDecode) {
  const std::string tokenizer = " --tokenizer " + trained();
  const std::string rows =
      "{\"text\":\"return f(x)\"}\n{\"text\":\"é\\u0000\\n\"}\n{\"text\":\"\"}\n";
  const std::string file = folder_.write("rows.jsonl", rows);
  const Outcome ids = run("encode" + tokenizer + " --jsonl " + file);
  ASSERT_EQ(ids.status, 0) << ids.err;
  EXPECT_THAT(ids.out, testing::EndsWith("\n[]\n"));
  EXPECT_EQ(ids.out.find(' '), std::string::npos);
  const Outcome text = run("decode" + tokenizer, ids.out);
  EXPECT_EQ(text.out, rows);
  EXPECT_EQ(run("decode --plain" + tokenizer, ids.out).out, std::string("return f(x)é\0\n", 15));
}

TEST_F(TokenizerCommand, TheThreeInputsAgree) {
  const std::string tokenizer = " --tokenizer " + trained();
  const Outcome text = run("encode --text 'return f(x)'" + tokenizer);
  EXPECT_EQ(run("encode" + tokenizer, "return f(x)").out, text.out);
  EXPECT_EQ(run("encode --jsonl -" + tokenizer, "{\"text\": \"return f(x)\"}").out, text.out);
  EXPECT_LT(json::parse(text.out).size(), 11u);
  EXPECT_EQ(run("encode --text ''" + tokenizer, "not read").out, "[]\n");
}

TEST_F(TokenizerCommand, ErrorsNameThePlaceAndExitWithTwo) {
  const std::string tokenizer = " --tokenizer " + trained();
  const auto expect = [&](const Outcome& outcome, const std::string& text) {
    EXPECT_EQ(outcome.status, 2);
    EXPECT_THAT(outcome.err, HasSubstr(text));
  };
  expect(run("encode --text x --tokenizer /nowhere.json"), "/nowhere.json");
  expect(run("encode --jsonl -" + tokenizer, "{\"text\": \"a\"}\n{\"txt\": 1}\n"),
         "standard input:2: expected an object");
  expect(run("encode --jsonl -" + tokenizer, "\n{\"text\""), "standard input:2: not valid JSON");
  expect(run("encode --jsonl /nowhere.jsonl" + tokenizer), "/nowhere.jsonl");
  expect(run("encode --jsonl a --text b" + tokenizer), "--text");
  expect(run("decode" + tokenizer, "[0]\n[270]\n"), "standard input:2: 270 is not an id");
  expect(run("decode" + tokenizer, "[0.5]"), "0.5 is not an id");
  expect(run("decode" + tokenizer, "{}"), "expected an array");
  expect(run("train --input /nowhere --vocab-size 300 --output x"), "'/nowhere' does not exist");
  const std::string empty = folder_.write("empty/a", "");
  expect(run("train --input " + empty + " --vocab-size 300 --output x"), "are empty");
  expect(run("train --input " + empty + " --vocab-size 3 --output x"), "too small");
}

// Whatever holds the documents, they are the same words.
TEST_F(TokenizerCommand, TrainsOnEveryKindOfCorpus) {
  const std::vector<std::string> texts = {"the quick model reads", "a long text and learns",
                                          "what comes next after the long text"};
  std::string rows;
  for (size_t i = 0; i < texts.size(); ++i) {
    folder_.write("text/" + std::to_string(i), texts[i]);
    rows += json{{"body", texts[i]}, {"id", i}}.dump() + "\n";
  }
  folder_.write("plain/rows", rows);
  folder_.write("gz/rows", gzip(rows));
  folder_.write("zst/rows", zstd(rows));
  write_parquet(folder_, "parquet/rows", "body", strings({texts.begin(), texts.end()}), 2);
  folder_.write("bad/rows", rows + "{\"body\": 3}\n");
  const auto train = [&](const std::string& name, const std::string& more = "") {
    const std::string output = (folder_.path() / (name + ".json")).string();
    const Outcome outcome = run("train --vocab-size 290 --text-field body --output " + output +
                                " --input " + (folder_.path() / name).string() + more);
    return outcome.status == 0 ? read_file(output) : outcome.err;
  };
  const std::string wanted = train("text");
  EXPECT_THAT(wanted, HasSubstr("merges"));
  for (const char* name : {"plain", "gz", "zst", "parquet"}) EXPECT_EQ(train(name), wanted) << name;
  EXPECT_THAT(train("bad"), HasSubstr("rows:4: the field \"body\" is a number"));
  EXPECT_EQ(train("bad", " --bad-documents skip"), wanted);
}

TEST_F(TokenizerCommand, HelpEndsWithAnExample) {
  for (const char* command : {"", "train", "encode", "decode"}) {
    const Outcome help = run(std::string(command) + " --help");
    EXPECT_EQ(help.status, 0);
    EXPECT_THAT(help.out, HasSubstr("Example:\n  ")) << command;
  }
}

}  // namespace
}  // namespace longhaul::data
