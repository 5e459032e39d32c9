// What the dispatcher decided for an operator on a mesh, by everything that the decision depends
// on, and what has been said of such decisions. One rank's thread at a time.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "longhaul/dtensor/placement.h"

namespace longhaul::dtensor {

struct Decision {
  std::vector<Placements> inputs;  // of all inputs in order; of a plain number, Replicate
  const struct RuleEntry* entry = nullptr;
  bool redistributes = false;  // some input lies otherwise
  struct Output {
    Placements placements;
    std::vector<int64_t> sizes, strides;  // of the whole
  };
  std::vector<Output> outputs;
  std::vector<int> written;          // by result: the argument that it is, or -1
  std::vector<int64_t> local_sizes;  // for the size argument, where there is one
};

class DispatchCache {
 public:
  using Key = c10::SmallVector<int64_t, 96>;

  DispatchCache();  // in dispatch.cpp, so that whoever has a mesh has the dispatcher's
                    // registrations

  // Appends what a decision depends on of an argument. False if it holds something else than
  // tensors, numbers, names, devices and lists of them.
  static bool add(Key& key, const c10::IValue& value);

  const Decision* find(const Key& key, uint64_t hash) const;
  const Decision& insert(const Key& key, uint64_t hash, Decision decision);
  size_t size() const { return entries_.size(); }

  // Whether this is the first call with this text: of lines for the log that are said once.
  bool is_new(const std::string& line) { return said_.insert(line).second; }

  static uint64_t hash_of(const Key& key);

 private:
  struct Entry {
    std::vector<int64_t> key;
    Decision decision;
  };
  std::unordered_multimap<uint64_t, std::unique_ptr<Entry>> entries_;
  std::set<std::string> said_;
};

}  // namespace longhaul::dtensor
