// Encodes the documents of a file (with a NUL byte behind each) once on one thread, with an encoder
// that has seen nothing yet. Prints one JSON line: MB/s, ids, and a hash of them. Called by
// bench/tokenizer.py:
//   bench_tokenizer NAME TOKENIZER_JSON TEXT
#include "longhaul/data/tokenizer.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <chrono>
#include <iostream>
#include <vector>

#include "longhaul/base/file.h"

namespace {

std::vector<std::string_view> documents_of(std::string_view text) {
  std::vector<std::string_view> documents;
  for (size_t begin = 0, end; (end = text.find('\0', begin)) != text.npos; begin = end + 1) {
    documents.push_back(text.substr(begin, end - begin));
  }
  return documents;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: bench_tokenizer NAME TOKENIZER_JSON TEXT\n";
    return 2;
  }
  const auto tokenizer = longhaul::data::Tokenizer::load(argv[2]);
  const std::string text = longhaul::read_file(argv[3]);
  const auto documents = documents_of(text);
  longhaul::data::Encoder encoder(tokenizer);
  std::vector<int32_t> ids;
  const auto start = std::chrono::steady_clock::now();
  for (const auto document : documents) encoder.encode(document, ids);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::cout << fmt::format(R"({{"name": "{}", "rate": {}, "ids": {}, "hash": "{:08x}"}})", argv[1],
                           static_cast<double>(text.size()) * 1e-6 / took.count(), ids.size(),
                           XXH32(ids.data(), ids.size() * sizeof(int32_t), 0))
            << '\n';
}
