#include "longhaul/data/token_shard.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/hash.h"
#include "longhaul/base/json.h"
#include "longhaul/base/parallel.h"
#include "longhaul/data/tokenizer.h"

namespace longhaul::data {
namespace {

constexpr const char* kFormat = "longhaul tokens 1";

uint64_t padded_ids_bytes(uint64_t tokens) { return (tokens + tokens % 2) * sizeof(int32_t); }

template <typename T>
T number(const nlohmann::json& json, const char* key, const std::string& place) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number_integer()) {
    fail_user("{}: \"{}\" is missing or no number; run `longhaul data prepare` again", place, key);
  }
  return found->get<T>();
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
  const auto file = json.find("file"), hash = json.find("xxh3_128");
  if (file == json.end() || hash == json.end() || !file->is_string() || !hash->is_string()) {
    fail_user("{}: a shard has no file or no checksum; run `longhaul data prepare` again", place);
  }
  shard.path = folder / file->get<std::string>();
  shard.hash = hash->get<std::string>();
  shard.documents = number<uint64_t>(json, "documents", place);
  shard.tokens = number<uint64_t>(json, "tokens", place);
  shard.text_bytes = number<int64_t>(json, "text_bytes", place);
  shard.empty_documents = number<int64_t>(json, "empty_documents", place);
  shard.bad_documents = number<int64_t>(json, "bad_documents", place);
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
  if (!json.is_object() || json.value("format", "") != kFormat || !json.contains("shards") ||
      !json.at("shards").is_array() || !json.contains("token_bytes") ||
      !json.at("token_bytes").is_array()) {
    fail_user("{}: not the manifest of \"{}\"; run `longhaul data prepare` again", place, kFormat);
  }
  Prepared prepared;
  prepared.vocabulary.fingerprint = number<uint64_t>(json, "tokenizer", place);
  prepared.vocabulary.size = number<int32_t>(json, "vocab_size", place);
  for (const auto& bytes : json.at("token_bytes")) {
    prepared.vocabulary.token_bytes.push_back(bytes.is_number_unsigned() ? bytes.get<uint32_t>()
                                                                         : 0);
  }
  for (const auto& shard : json.at("shards")) {
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

void verify(const Prepared& prepared) {
  parallel_tasks(prepared.shards.size(), [&](size_t i) {
    const auto& shard = prepared.shards[i];
    if (hash_of_file(shard.path, shard.bytes()) == shard.hash) return;
    fail_user(
        "'{}' is damaged: its contents are not those of its checksum; remove it and the folder's "
        "{}, and run `longhaul data prepare` again",
        shard.path.string(), kPreparedManifest);
  });
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
    : TokenShard(shard.path, shard.documents, shard.tokens) {}

TokenShard::TokenShard(const fs::path& path, uint64_t documents, uint64_t tokens)
    : mapping_(std::make_shared<Mapping>(
          path, PreparedShard{.path = path, .documents = documents, .tokens = tokens, .hash = {}}
                    .bytes())),
      documents_(documents),
      tokens_(tokens) {}

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
