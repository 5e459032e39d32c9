// Remembers the tokens of short pieces, for text repeats its words. A fixed table in which a newer
// piece takes the place of an older one: 64 bytes an entry, memory bounded, no ageing. One for each
// thread; called by Encoder.
#pragma once

#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace longhaul::data {

class PieceCache {
 public:
  // num_entries: a power of two.
  explicit PieceCache(size_t num_entries) : entries_(num_entries) {}

  // The tokens of `piece`, empty when it is not known; a piece without any is not remembered.
  std::span<const int32_t> find(std::string_view piece) const {
    if (piece.size() > kMaxBytes) return {};
    const Entry& entry = entries_[place(piece)];
    if (entry.num_bytes != piece.size()) return {};
    if (std::memcmp(entry.bytes, piece.data(), piece.size()) != 0) return {};
    return {entry.ids, entry.num_ids};
  }

  void store(std::string_view piece, std::span<const int32_t> ids) {
    if (piece.size() > kMaxBytes || ids.size() > kMaxIds || ids.empty()) return;
    Entry& entry = entries_[place(piece)];
    entry.num_bytes = static_cast<uint8_t>(piece.size());
    entry.num_ids = static_cast<uint8_t>(ids.size());
    std::memcpy(entry.bytes, piece.data(), piece.size());
    std::memcpy(entry.ids, ids.data(), ids.size_bytes());
  }

 private:
  static constexpr size_t kMaxBytes = 30;
  static constexpr size_t kMaxIds = 8;

  struct Entry {
    uint8_t num_bytes = 0, num_ids = 0;
    char bytes[kMaxBytes];
    int32_t ids[kMaxIds];
  };
  static_assert(sizeof(Entry) == 64);

  size_t place(std::string_view piece) const {
    return XXH3_64bits(piece.data(), piece.size()) & (entries_.size() - 1);
  }

  std::vector<Entry> entries_;
};

}  // namespace longhaul::data
