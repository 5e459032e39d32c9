// Checksums of contents: XXH3-128 as 32 hexadecimal digits (the canonical, big-endian form, as
// `xxhsum -H2` prints it). Against damage, not against malice. Called by safetensors and
// checkpoint.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct XXH3_state_s;

namespace longhaul {

// Bytes that are still in the cache after they were hashed, or read to be hashed.
inline constexpr size_t kHashPiece = size_t{1} << 20;

// Takes bytes piece by piece; the pieces' borders do not matter.
class Hasher {
 public:
  Hasher();
  void update(const void* data, size_t bytes);
  // The hash of everything so far.
  std::string hex() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

std::string hash_hex(const void* data, size_t bytes);
inline std::string hash_hex(std::string_view bytes) { return hash_hex(bytes.data(), bytes.size()); }

}  // namespace longhaul
