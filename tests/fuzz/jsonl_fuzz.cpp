// Fuzzes the reading of JSONL corpora: plain, gzip and Zstandard, told apart by content. A
// libFuzzer target under AddressSanitizer and UndefinedBehaviorSanitizer.
//
//   scripts/build.sh fuzz jsonl_fuzz
//   build/fuzz/bin/jsonl_fuzz -max_total_time=600 -rss_limit_mb=2048 -timeout=20 CORPUS
//                                          # CORPUS: a folder of files, such as tests/fuzz/rows
//   build/fuzz/bin/jsonl_fuzz crash-...    # runs an input that failed once more
//
// An input is a file. Whatever it holds, reading it ends, with bad documents counted. Beside the
// sanitizers' reports, exceptions, hangs and memory over the limit it fails where a document is not
// valid UTF-8 or holds NUL, and where a plain file's documents depend on the units it is read in.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "longhaul/base/log.h"
#include "longhaul/data/document_reader.h"

namespace longhaul::data {
namespace {

void fail(const char* what) {
  std::fprintf(stderr, "jsonl_fuzz: %s\n", what);
  std::abort();
}

// The documents of a file, read in units of `size` bytes.
std::vector<std::string> read_in_units(const SourceFile& file, uint64_t size,
                                       const DocumentOptions& options, BadDocuments& bad) {
  std::vector<std::string> texts;
  for (uint64_t begin = 0; begin < file.bytes; begin += size) {
    const Unit unit{.begin = begin,
                    .end = std::min(begin + size, file.bytes),
                    .disk_bytes = std::min(size, file.bytes - begin)};
    const auto reader = open_documents(file, unit, options, bad);
    for (Document document; reader->next(document);) {
      if (!what_is_invalid(document.text).empty()) fail("a document is not valid text");
      texts.push_back(document.text);
    }
  }
  return texts;
}

void try_file(const std::string& path, uint64_t bytes) {
  for (const InvalidText on_invalid : {InvalidText::kStop, InvalidText::kReplace}) {
    const DocumentOptions options{.on_invalid = on_invalid, .skip_bad = true};
    BadDocuments bad(true), bad_in_units(true);
    const SourceFile file{.path = path, .bytes = bytes, .format = recognize(path)};
    const auto whole = read_in_units(file, std::max<uint64_t>(bytes, 1), options, bad);
    const auto [compression, content] = file.format;
    if (compression != Compression::kNone || content != Content::kJsonl) continue;
    // A few of them, whatever the size: opening one costs more than reading it.
    const uint64_t unit = std::max<uint64_t>(7, bytes / 5);
    if (read_in_units(file, unit, options, bad_in_units) != whole) {
      fail("other documents in other units");
    }
    if (bad.count() != bad_in_units.count()) fail("other bad documents in other units");
  }
}

}  // namespace
}  // namespace longhaul::data

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  spdlog::set_level(spdlog::level::off);
  // Parquet is Arrow's to read.
  if (size >= 4 && std::string(data, data + 4) == "PAR1") return -1;
  const int file = memfd_create("input", 0);
  if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) std::abort();
  longhaul::data::try_file("/proc/self/fd/" + std::to_string(file), size);
  close(file);
  return 0;
}
