#include "longhaul/base/hash.h"

#include <xxhash.h>

#include <new>

#include "longhaul/base/error.h"

namespace longhaul {
namespace {

std::string to_hex(XXH128_hash_t hash) {
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace

void Hasher::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

Hasher::Hasher() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_128bits_reset(state_.get());
}

void Hasher::update(const void* data, size_t bytes) {
  if (bytes > 0) XXH3_128bits_update(state_.get(), data, bytes);
}

std::string Hasher::hex() const { return to_hex(XXH3_128bits_digest(state_.get())); }

std::string hash_hex(const void* data, size_t bytes) { return to_hex(XXH3_128bits(data, bytes)); }

}  // namespace longhaul
