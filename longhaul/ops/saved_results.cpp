#include "longhaul/ops/saved_results.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "longhaul/base/error.h"

namespace longhaul::ops {
namespace {

// A rank may be a thread, and autograd runs a recomputation on a thread of its choice.
thread_local SavedResults* current = nullptr;

template <typename T>
bool contains(const std::vector<T>& list, const auto& x) {
  return std::find(list.begin(), list.end(), x) != list.end();
}

}  // namespace

const std::vector<std::string>& savable_operators() {
  static const std::vector<std::string> names = {
      "linear",     "linear_by_head", "grouped_matmul", "flash_attention", "sparse_flash_attention",
      "all_to_all", "all_gather",     "reduce_scatter", "all_reduce"};
  return names;
}

SavedResults::Scope::Scope(SavedResults* results, Phase phase) : outer_(current) {
  if (results != nullptr && phase == Phase::kRecompute) {
    if (std::exchange(results->recomputed_, true)) results = nullptr;
  }
  if (results != nullptr) results->phase_ = phase;
  current = results;
}

SavedResults::Scope::~Scope() { current = outer_; }

bool SavedResults::saves(const SavableCall& call) {
  if (!contains(policy_.operators, call.op)) return false;
  if (call.op != "linear") return true;
  const std::array<int64_t, 2> sizes = {call.weight_NK[0], call.weight_NK[1]};
  return !contains(policy_.recomputed_weights, sizes) && products_++ % 2 == 0;
}

void SavedResults::save(const SavableCall& call, const std::vector<Tensor>& results) {
  Entry entry{call.op, saves(call), {}, {}};
  if (entry.saved) {
    for (const auto& x : results) {
      // A tensor of its own: what autograd hangs on the result must not be kept with it.
      entry.results.push_back(x.defined() ? x.detach() : x);
      entry.versions.push_back(x.defined() ? entry.results.back()._version() : 0);
    }
  }
  entries_.push_back(std::move(entry));
}

SavedResults::Entry SavedResults::take(const SavableCall& call) {
  LONGHAUL_CHECK(!entries_.empty(), "the recomputation calls {} where the forward pass had ended",
                 call.op);
  Entry entry = std::move(entries_.front());
  entries_.pop_front();
  LONGHAUL_CHECK(entry.op == call.op, "the recomputation calls {} where the forward pass called {}",
                 call.op, entry.op);
  for (size_t i = 0; i < entry.results.size(); ++i) {
    const auto& x = entry.results[i];
    LONGHAUL_CHECK(!x.defined() || x._version() == entry.versions[i],
                   "a saved result of {} was written to after the forward pass", call.op);
  }
  return entry;
}

std::vector<Tensor> saved_or_computed_list(const SavableCall& call,
                                           c10::function_ref<std::vector<Tensor>()> compute) {
  using Phase = SavedResults::Phase;
  SavedResults* const results = current;
  if (results == nullptr) return compute();
  // What an operator is made of is not saved beside it.
  const auto compute_alone = [&] {
    const SavedResults::Scope nothing(nullptr, results->phase_);
    return compute();
  };
  if (results->phase_ == Phase::kForward) {
    auto computed = compute_alone();
    results->save(call, computed);
    return computed;
  }
  auto entry = results->take(call);
  return entry.saved ? std::move(entry.results) : compute_alone();
}

}  // namespace longhaul::ops
