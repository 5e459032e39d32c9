// The tokenizer command as users call it: files, pipes, exit status.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "tests/data/temporary_folder.h"

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

TEST_F(TokenizerCommand, HelpEndsWithAnExample) {
  for (const char* command : {"", "train", "encode", "decode"}) {
    const Outcome help = run(std::string(command) + " --help");
    EXPECT_EQ(help.status, 0);
    EXPECT_THAT(help.out, HasSubstr("Example:\n  ")) << command;
  }
}

}  // namespace
}  // namespace longhaul::data
