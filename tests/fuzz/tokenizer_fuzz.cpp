// Fuzzes the reading of tokenizer.json, and what a file that is accepted then does with texts. A
// libFuzzer target under AddressSanitizer and UndefinedBehaviorSanitizer.
//
//   scripts/build.sh fuzz tokenizer_fuzz
//   build/fuzz/bin/tokenizer_fuzz -max_total_time=600 -rss_limit_mb=2048 -timeout=20
//     -dict=tests/fuzz/tokenizer.dict CORPUS    # on one line; CORPUS: a folder of tokenizer.json
//     files
//   build/fuzz/bin/tokenizer_fuzz crash-...     # runs an input that failed once more
//
// An input is a tokenizer.json; behind a NUL byte, if there is one, stands a text of its own. A
// broken or hostile file has to end in a UserError. Beside the sanitizers' reports, other
// exceptions, hangs and memory over the limit it fails where one file or one text gives two
// results, and where an id comes out that the tokenizer does not contain.
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "longhaul/base/error.h"
#include "longhaul/data/tokenizer.h"

namespace longhaul::data {
namespace {

constexpr std::string_view kTexts[] = {
    "", "The cat's hat, 1234 and 5!  \n\n\t x <|endoftext|> <s> a\u0301 \u4f60\u597d \U0001F642",
    "\xF0\x9F broken \xFF bytes \xC3",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    "aa"
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    "ab"};

void fail(const char* what) {
  std::fprintf(stderr, "tokenizer_fuzz: %s\n", what);
  std::abort();
}

// A UserError is a result, too.
void try_text(const Tokenizer& tokenizer, Encoder& encoder, std::string_view text) {
  try {
    const std::vector<int32_t> ids = tokenizer.encode(text);
    std::vector<int32_t> again;
    encoder.encode(text, again);
    if (ids != again) fail("an encoder used before gives other ids");
    for (const int32_t id : ids) {
      if (!tokenizer.contains(id)) fail("an id is not in the vocabulary");
    }
    const std::string decoded = tokenizer.decode(ids);
    if (decoded != tokenizer.decode(ids)) fail("two texts from the same ids");
  } catch (const UserError&) {
  }
}

void try_file(std::string_view json, std::string_view text) {
  const Tokenizer tokenizer = Tokenizer::parse(json, "fuzzed");
  Encoder encoder(tokenizer, 16);
  for (const auto each : kTexts) try_text(tokenizer, encoder, each);
  try_text(tokenizer, encoder, text);
}

}  // namespace
}  // namespace longhaul::data

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), input.size());
  try {
    longhaul::data::try_file(input.substr(0, end), input.substr(std::min(end + 1, size)));
  } catch (const longhaul::UserError&) {
  }
  return 0;
}
