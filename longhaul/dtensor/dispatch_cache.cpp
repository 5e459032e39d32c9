#include "longhaul/dtensor/dispatch_cache.h"

#include <algorithm>
#include <limits>

#include "longhaul/dtensor/dtensor.h"

namespace longhaul::dtensor {
namespace {

using Key = DispatchCache::Key;

constexpr int64_t kAnyDouble = std::numeric_limits<int64_t>::min() + 1;

void add_words(Key& key, at::IntArrayRef words) {
  key.push_back(static_cast<int64_t>(words.size()));
  key.append(words.begin(), words.end());
}

void add_tensor(Key& key, const Tensor& x) {
  if (!x.defined()) {
    key.push_back(-1);
    return;
  }
  key.push_back(static_cast<int64_t>(x.scalar_type()));
  if (is_dtensor(x)) {
    add_words(key, x.sizes());
    key.append(x.strides().begin(), x.strides().end());
    for (const auto& placement : spec_of(x).placements) key.push_back(placement.code());
  } else {
    key.push_back(-2 - x.dim());
  }
}

}  // namespace

bool DispatchCache::add(Key& key, const c10::IValue& value) {
  if (value.isTensor()) {
    add_tensor(key, value.toTensor());
  } else if (value.isInt()) {
    key.push_back(value.toInt());
  } else if (value.isNone()) {
    key.push_back(std::numeric_limits<int64_t>::min());
  } else if (value.isBool()) {
    key.push_back(value.toBool() ? 1 : 0);
  } else if (value.isDouble()) {
    key.push_back(kAnyDouble);  // no rule reads one, and a step's losses are divided by new ones
  } else if (value.isDevice()) {
    key.push_back(static_cast<int64_t>(value.toDevice().type()));
  } else if (value.isString()) {
    key.push_back(static_cast<int64_t>(std::hash<std::string_view>()(value.toStringView())));
  } else if (value.isList()) {
    const auto list = value.toListRef();
    key.push_back(static_cast<int64_t>(list.size()));
    for (const auto& element : list) {
      if (!add(key, element)) return false;
    }
  } else {
    return false;
  }
  return true;
}

const Decision* DispatchCache::find(const Key& key, uint64_t hash) const {
  const auto [begin, end] = entries_.equal_range(hash);
  for (auto entry = begin; entry != end; ++entry) {
    const auto& known = entry->second->key;
    if (known.size() == key.size() && std::equal(key.begin(), key.end(), known.begin())) {
      return &entry->second->decision;
    }
  }
  return nullptr;
}

const Decision& DispatchCache::insert(const Key& key, uint64_t hash, Decision decision) {
  auto entry = std::make_unique<Entry>(
      Entry{std::vector<int64_t>(key.begin(), key.end()), std::move(decision)});
  return entries_.emplace(hash, std::move(entry))->second->decision;
}

uint64_t DispatchCache::hash_of(const Key& key) {
  uint64_t hash = 0xcbf29ce484222325U;
  for (const int64_t word : key) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace longhaul::dtensor
