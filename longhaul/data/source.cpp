#include "longhaul/data/source.h"

#include <algorithm>
#include <map>

#include "longhaul/base/error.h"
#include "longhaul/base/hash.h"
#include "longhaul/base/parallel.h"
#include "longhaul/data/parquet.h"

namespace longhaul::data {
namespace {

// What text compressed by gzip or Zstandard grows to, about.
constexpr uint64_t kGrowth = 4;

void cut_into_bytes(size_t file, uint64_t bytes, std::vector<Unit>& units) {
  for (uint64_t begin = 0; begin < bytes; begin += kUnitBytes) {
    const uint64_t end = std::min(begin + kUnitBytes, bytes);
    units.push_back({.file = file,
                     .begin = begin,
                     .end = end,
                     .disk_bytes = end - begin,
                     .text_bytes = end - begin});
  }
}

void cut_into_groups(size_t file, const SourceFile& source, const DocumentOptions& options,
                     BadDocuments& bad, std::vector<Unit>& units) {
  uint64_t first_row = 0, number = 0;
  try {
    for (const auto& group : list_row_groups(source.path, options.text_field)) {
      units.push_back({.file = file,
                       .begin = number,
                       .end = ++number,
                       .first_row = first_row,
                       .disk_bytes = group.disk_bytes,
                       .text_bytes = group.text_bytes});
      first_row += group.rows;
    }
  } catch (const BrokenData& error) {
    bad.add([&] { return source.path.string(); }, error.what());
  }
}

void cut_into_documents(size_t file, const PreparedShard& shard, std::vector<Unit>& units) {
  const TokenShard tokens(shard);
  const auto ends = tokens.document_ends();
  constexpr uint64_t kUnitTokens = kUnitBytes / sizeof(int32_t);
  for (uint64_t begin = 0; begin < ends.size();) {
    const uint64_t before = begin == 0 ? 0 : ends[begin - 1];
    const auto after = std::upper_bound(ends.begin() + static_cast<ptrdiff_t>(begin), ends.end(),
                                        before + kUnitTokens);
    const auto end = std::max<uint64_t>(begin + 1, static_cast<uint64_t>(after - ends.begin()));
    const uint64_t bytes = (ends[end - 1] - before) * sizeof(int32_t);
    units.push_back(
        {.file = file, .begin = begin, .end = end, .disk_bytes = bytes, .text_bytes = bytes});
    begin = end;
  }
}

void cut(size_t file, const SourceFile& source, const DocumentOptions& options, BadDocuments& bad,
         std::vector<Unit>& units) {
  const auto [compression, content] = source.format;
  if (content == Content::kParquet) return cut_into_groups(file, source, options, bad, units);
  if (content == Content::kJsonl && compression == Compression::kNone) {
    return cut_into_bytes(file, source.bytes, units);
  }
  const uint64_t growth = compression == Compression::kNone ? 1 : kGrowth;
  units.push_back({.file = file,
                   .end = source.bytes,
                   .disk_bytes = source.bytes,
                   .text_bytes = growth * source.bytes});
}

void add_files(const std::vector<CorpusFile>& files, const DocumentOptions& options,
               BadDocuments& bad, Sources& sources) {
  std::vector<SourceFile> found(files.size());
  std::vector<std::vector<Unit>> units(files.size());
  const size_t first = sources.files.size();
  parallel_tasks(files.size(), [&](size_t i) {
    found[i] = {.path = files[i].path, .bytes = files[i].bytes, .format = recognize(files[i].path)};
    cut(first + i, found[i], options, bad, units[i]);
  });
  for (size_t i = 0; i < files.size(); ++i) {
    sources.files.push_back(found[i]);
    sources.units.insert(sources.units.end(), units[i].begin(), units[i].end());
  }
}

void add_prepared(const std::filesystem::path& folder, Sources& sources) {
  const Prepared prepared = read_prepared(folder);
  if (sources.vocabulary && sources.vocabulary->fingerprint != prepared.vocabulary.fingerprint) {
    fail_user(
        "'{}' was prepared with another tokenizer than the folders before it; prepare it anew",
        folder.string());
  }
  sources.vocabulary = prepared.vocabulary;
  for (const auto& shard : prepared.shards) {
    cut_into_documents(sources.files.size(), shard, sources.units);
    sources.files.push_back({.path = shard.path,
                             .bytes = shard.bytes(),
                             .format = {.content = Content::kTokens},
                             .shard = shard});
  }
}

}  // namespace

uint64_t Sources::disk_bytes() const {
  uint64_t sum = 0;
  for (const auto& unit : units) sum += unit.disk_bytes;
  return sum;
}

uint64_t Sources::text_bytes() const {
  uint64_t sum = 0;
  for (const auto& unit : units) sum += unit.text_bytes;
  return sum;
}

bool Sources::needs_tokenizer() const {
  return std::any_of(files.begin(), files.end(), [](const SourceFile& file) {
    return file.format.content != Content::kTokens;
  });
}

std::string Sources::fingerprint() const {
  Hasher hasher;
  for (const auto& file : files) {
    const std::string line = fmt::format("{} {}\n", file.path.filename().string(), file.bytes);
    hasher.update(line.data(), line.size());
  }
  return hasher.hex();
}

Vocabulary vocabulary_of(const Sources& sources, const Tokenizer* tokenizer) {
  if (tokenizer) return vocabulary_of(*tokenizer);
  return sources.vocabulary.value_or(Vocabulary{});
}

Sources list_sources(const std::vector<CorpusFile>& files, const DocumentOptions& options,
                     BadDocuments& bad) {
  Sources sources;
  std::vector<CorpusFile> text;                   // that stand together
  std::map<std::filesystem::path, bool> folders;  // whether they hold prepared tokens
  for (const auto& file : files) {
    const auto [folder, is_new] = folders.try_emplace(file.path.parent_path());
    if (is_new) folder->second = is_prepared(folder->first);
    if (!folder->second) {
      text.push_back(file);
    } else if (is_new) {
      add_files(text, options, bad, sources);
      text.clear();
      add_prepared(folder->first, sources);
    }
  }
  add_files(text, options, bad, sources);
  return sources;
}

Sources list_sources(const std::string& paths, const DocumentOptions& options, BadDocuments& bad) {
  return list_sources(list_files(paths), options, bad);
}

}  // namespace longhaul::data
