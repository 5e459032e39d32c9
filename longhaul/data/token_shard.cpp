#include "longhaul/data/token_shard.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <limits>
#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/hash.h"
#include "longhaul/base/json.h"
#include "longhaul/data/tokenizer.h"

namespace longhaul::data {
namespace {

constexpr const char* kFormat = "longhaul tokens 1";

uint64_t padded_ids_bytes(uint64_t tokens) { return (tokens + tokens % 2) * sizeof(int32_t); }

[[noreturn]] void fail_manifest(const std::string& place, const char* key) {
  fail_user(
      "{}: \"{}\" is missing or makes no sense: the file is damaged; remove it and run "
      "`longhaul data prepare` again",
      place, key);
}

// What no count of tokens or bytes comes near, and a product of which does not overflow.
constexpr uint64_t kLargestCount = uint64_t{1} << 48;

const nlohmann::json& value_of(const nlohmann::json& json, const char* key,
                               const std::string& place) {
  if (!json.is_object() || !json.contains(key)) fail_manifest(place, key);
  return json.at(key);
}

uint64_t number(const nlohmann::json& json, const char* key, const std::string& place,
                uint64_t largest = kLargestCount) {
  const auto& value = value_of(json, key, place);
  if (!value.is_number_unsigned() || value.get<uint64_t>() > largest) fail_manifest(place, key);
  return value.get<uint64_t>();
}

std::string text(const nlohmann::json& json, const char* key, const std::string& place) {
  const auto& value = value_of(json, key, place);
  if (!value.is_string()) fail_manifest(place, key);
  return value.get<std::string>();
}

const nlohmann::json& list(const nlohmann::json& json, const char* key, const std::string& place) {
  const auto& value = value_of(json, key, place);
  if (!value.is_array()) fail_manifest(place, key);
  return value;
}

Vocabulary vocabulary_from(const nlohmann::json& json, const std::string& place) {
  constexpr uint64_t kLargestId = std::numeric_limits<int32_t>::max();
  Vocabulary vocabulary{number(json, "tokenizer", place, std::numeric_limits<uint64_t>::max()),
                        static_cast<int32_t>(number(json, "vocab_size", place, kLargestId)),
                        {}};
  for (const auto& bytes : list(json, "token_bytes", place)) {
    if (!bytes.is_number_unsigned() || bytes.get<uint64_t>() > kLargestId) {
      fail_manifest(place, "token_bytes");
    }
    vocabulary.token_bytes.push_back(bytes.get<uint32_t>());
  }
  if (vocabulary.token_bytes.size() != static_cast<size_t>(vocabulary.size)) {
    fail_manifest(place, "token_bytes");
  }
  return vocabulary;
}

std::string hash_of_file(const fs::path& path, uint64_t bytes) {
  const FileReader file(path);
  Hasher hasher;
  std::vector<std::byte> piece(kHashPiece);
  for (uint64_t at = 0; at < bytes; at += piece.size()) {
    const size_t count = std::min<uint64_t>(piece.size(), bytes - at);
    file.read(static_cast<int64_t>(at), {piece.data(), count});
    hasher.update(piece.data(), count);
  }
  return hasher.hex();
}

}  // namespace

Vocabulary vocabulary_of(const Tokenizer& tokenizer) {
  Vocabulary vocabulary{tokenizer.fingerprint(), tokenizer.vocab_size(), {}};
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    vocabulary.token_bytes.push_back(narrow<uint32_t>(tokenizer.text_bytes(id)));
  }
  return vocabulary;
}

uint64_t PreparedShard::bytes() const {
  return padded_ids_bytes(tokens) + 2 * documents * sizeof(uint64_t);
}

bool is_prepared(const fs::path& folder) {
  std::error_code error;
  return fs::exists(folder / kPreparedManifest, error) || fs::exists(folder / kPreparedPlan, error);
}

nlohmann::json to_json(const PreparedShard& shard) {
  return {{"file", shard.path.filename().string()},
          {"documents", shard.documents},
          {"tokens", shard.tokens},
          {"text_bytes", shard.text_bytes},
          {"empty_documents", shard.empty_documents},
          {"bad_documents", shard.bad_documents},
          {"xxh3_128", shard.hash}};
}

PreparedShard shard_from(const nlohmann::json& json, const fs::path& folder,
                         const std::string& place) {
  PreparedShard shard;
  const fs::path file = text(json, "file", place);
  if (file.empty() || file.has_parent_path()) fail_manifest(place, "file");
  shard.path = folder / file;
  shard.hash = text(json, "xxh3_128", place);
  shard.documents = number(json, "documents", place);
  shard.tokens = number(json, "tokens", place);
  shard.text_bytes = static_cast<int64_t>(number(json, "text_bytes", place));
  shard.empty_documents = static_cast<int64_t>(number(json, "empty_documents", place));
  shard.bad_documents = static_cast<int64_t>(number(json, "bad_documents", place));
  return shard;
}

Prepared read_prepared(const fs::path& folder) {
  const fs::path path = folder / kPreparedManifest;
  if (!fs::exists(path)) {
    fail_user(
        "'{}' is not prepared to the end; the same `longhaul data prepare` command goes on from "
        "where it stopped",
        folder.string());
  }
  const std::string place = path.string();
  const auto json = parse_json(read_file(path), place);
  if (const auto format = text(json, "format", place); format != kFormat) {
    fail_user("{}: of the format \"{}\", not \"{}\"; run `longhaul data prepare` anew", place,
              format, kFormat);
  }
  Prepared prepared{vocabulary_from(json, place), {}};
  for (const auto& shard : list(json, "shards", place)) {
    prepared.shards.push_back(shard_from(shard, folder, place));
    TokenShard{prepared.shards.back()};  // its size
  }
  return prepared;
}

std::string manifest_text(const Prepared& prepared) {
  nlohmann::ordered_json json = {{"format", kFormat},
                                 {"tokenizer", prepared.vocabulary.fingerprint},
                                 {"vocab_size", prepared.vocabulary.size}};
  json["shards"] = nlohmann::json::array();
  for (const auto& shard : prepared.shards) json["shards"].emplace_back(to_json(shard));
  json["token_bytes"] = prepared.vocabulary.token_bytes;
  return json.dump() + "\n";
}

bool is_sound(const PreparedShard& shard) {
  std::error_code error;
  return fs::file_size(shard.path, error) == shard.bytes() && !error &&
         hash_of_file(shard.path, shard.bytes()) == shard.hash;
}

void verify(const PreparedShard& shard) {
  if (is_sound(shard)) return;
  fail_user(
      "'{}' is damaged: its contents are not those of its checksum; remove the folder's {} and run "
      "the same `longhaul data prepare` again, which makes this part anew",
      shard.path.string(), kPreparedManifest);
}

struct TokenShard::Mapping {
  void* data = nullptr;
  size_t bytes = 0;

  Mapping(const fs::path& path, uint64_t expected) : bytes(expected) {
    const FileDescriptor fd = open_file(path, O_RDONLY, "read");
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0) fail_file("read", path, errno);
    if (static_cast<uint64_t>(status.st_size) != expected) {
      fail_user("'{}' has {} bytes, expected {}: it is damaged; run `longhaul data prepare` again",
                path.string(), status.st_size, expected);
    }
    if (bytes == 0) return;
    data = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (data == MAP_FAILED) fail_file("map", path, errno);
  }
  ~Mapping() {
    if (bytes > 0) ::munmap(data, bytes);
  }
  Mapping(const Mapping&) = delete;
};

TokenShard::TokenShard(const PreparedShard& shard)
    : mapping_(std::make_shared<Mapping>(shard.path, shard.bytes())),
      documents_(shard.documents),
      tokens_(shard.tokens) {}

std::span<const int32_t> TokenShard::ids() const {
  return {static_cast<const int32_t*>(mapping_->data), tokens_};
}

std::span<const uint64_t> TokenShard::document_ends() const {
  const auto* bytes = static_cast<const std::byte*>(mapping_->data);
  if (documents_ == 0) return {};
  return {reinterpret_cast<const uint64_t*>(bytes + padded_ids_bytes(tokens_)), documents_};
}

std::span<const uint64_t> TokenShard::text_hashes() const {
  const auto ends = document_ends();
  return {ends.data() + documents_, documents_};
}

}  // namespace longhaul::data
