// Tokens on disk as `longhaul data prepare` leaves them (prepare.h writes them): a folder of shards
// and a manifest that vouches for them. A shard is mapped into memory, little-endian:
//   int32   ids[tokens], each document with the end-of-text token behind it; padded to 8 bytes
//   uint64  document_ends[documents], places in ids
//   uint64  text_hashes[documents], of each document's text (base/rng.h's stable_hash)
// Called where a corpus is opened and read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

namespace longhaul::data {

class Tokenizer;

inline constexpr const char* kPreparedManifest = "longhaul_tokens.json";
// Of a preparation under way.
inline constexpr const char* kPreparedPlan = "longhaul_plan.json";

// Of the tokenizer that ids belong to.
struct Vocabulary {
  uint64_t fingerprint = 0;
  int32_t size = 0;
  std::vector<uint32_t> token_bytes;  // text bytes of each id
};
Vocabulary vocabulary_of(const Tokenizer& tokenizer);

struct PreparedShard {
  std::filesystem::path path;
  uint64_t documents = 0, tokens = 0;
  int64_t text_bytes = 0;
  int64_t empty_documents = 0, bad_documents = 0;  // left out
  std::string hash;                                // of the file (base/hash.h)

  uint64_t bytes() const;  // of the file
};

struct Prepared {
  Vocabulary vocabulary;
  std::vector<PreparedShard> shards;
};

// Whether the folder holds prepared tokens, finished or not.
bool is_prepared(const std::filesystem::path& folder);

// UserError if the preparation is not finished, or if the manifest or a shard's size is not sound;
// what the shards hold is not looked at.
Prepared read_prepared(const std::filesystem::path& folder);

std::string manifest_text(const Prepared& prepared);

// Whether the file is there and its contents are those of its checksum. FileError if the disk does
// not deliver.
bool is_sound(const PreparedShard& shard);
// UserError if it is not.
void verify(const PreparedShard& shard);

nlohmann::json to_json(const PreparedShard& shard);
// `place` names the text in messages. UserError if something is missing or makes no sense.
PreparedShard shard_from(const nlohmann::json& json, const std::filesystem::path& folder,
                         const std::string& place);

// A shard, mapped as long as this or a copy of it lives.
class TokenShard {
 public:
  // UserError if the file is not there or has another size.
  explicit TokenShard(const PreparedShard& shard);

  std::span<const int32_t> ids() const;
  std::span<const uint64_t> document_ends() const;
  std::span<const uint64_t> text_hashes() const;

 private:
  struct Mapping;
  std::shared_ptr<const Mapping> mapping_;
  uint64_t documents_, tokens_;
};

}  // namespace longhaul::data
