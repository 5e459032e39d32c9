#include "longhaul/dtensor/trace_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>

#include "longhaul/base/text.h"

namespace longhaul::dtensor {
namespace {

using State = TracedCollective::State;
using BySequence = std::map<uint64_t, const TracedCollective*>;

// One group as its ranks saw it. A rank whose trace is missing has no entry.
struct GroupHistory {
  CollectiveGroup group;
  std::map<int, BySequence> by_rank;
};

std::vector<GroupHistory> histories(const std::vector<Trace>& traces) {
  std::map<std::string, GroupHistory> groups;
  for (const auto& trace : traces) {
    for (const auto& record : trace.records) {
      auto& history = groups[record.group.name];
      history.group = record.group;
      history.by_rank[trace.rank][record.sequence] = &record;
    }
  }
  std::vector<GroupHistory> result;
  for (auto& [name, history] : groups) {
    for (const auto& trace : traces) {  // those that never began one
      const auto& ranks = history.group.global_ranks;
      if (std::find(ranks.begin(), ranks.end(), trace.rank) != ranks.end()) {
        history.by_rank[trace.rank];
      }
    }
    result.push_back(std::move(history));
  }
  return result;
}

// Whether two ranks may have called these as one collective.
bool agree(const TracedCollective& a, const TracedCollective& b) {
  const bool of_one_size = a.kind != "all_to_all";
  return a.kind == b.kind && a.dtype == b.dtype && (!of_one_size || a.bytes == b.bytes);
}

struct Difference {
  double start = 0;  // of the collective on the first rank that began it
  std::string text;
};

// What the group's ranks made of number `sequence`.
std::optional<Difference> difference_at(const GroupHistory& history, uint64_t sequence) {
  const TracedCollective* first = nullptr;
  std::vector<int> began, absent, traceless;
  std::string others;
  double start = std::numeric_limits<double>::infinity();
  for (const int rank : history.group.global_ranks) {
    const auto known = history.by_rank.find(rank);
    if (known == history.by_rank.end()) {
      traceless.push_back(rank);
      continue;
    }
    const auto found = known->second.find(sequence);
    if (found == known->second.end()) {
      // The oldest are forgotten.
      const bool forgotten = !known->second.empty() && known->second.begin()->first > sequence;
      if (!forgotten) absent.push_back(rank);
      continue;
    }
    const TracedCollective& record = *found->second;
    start = std::min(start, record.start);
    if (first == nullptr) first = &record;
    if (agree(*first, record)) {
      began.push_back(rank);
    } else {
      others += fmt::format("; rank {} began {}", rank, record.text());
    }
  }
  // One that has ended did so on all.
  if (first == nullptr || (first->state == State::kDone && others.empty())) return std::nullopt;
  if (absent.empty() && traceless.empty() && others.empty()) return std::nullopt;
  const auto list = [](const char* verb, const std::vector<int>& ranks) {
    return ranks.empty() ? ""
                         : fmt::format("; {} {} {}", ranks.size() == 1 ? "rank" : "ranks",
                                       fmt::join(ranks, ", "), verb);
  };
  return Difference{start, first->text() + " of ranks " +
                               fmt::format("{}", fmt::join(history.group.global_ranks, ", ")) +
                               list("began it", began) + others + list("did not begin it", absent) +
                               list("left no trace", traceless)};
}

std::optional<Difference> first_difference(const GroupHistory& history) {
  std::vector<uint64_t> sequences;
  for (const auto& [rank, records] : history.by_rank) {
    for (const auto& [sequence, record] : records) sequences.push_back(sequence);
  }
  std::sort(sequences.begin(), sequences.end());
  sequences.erase(std::unique(sequences.begin(), sequences.end()), sequences.end());
  for (const uint64_t sequence : sequences) {
    if (auto difference = difference_at(history, sequence)) return difference;
  }
  return std::nullopt;
}

std::vector<int> without_trace(const std::vector<Trace>& traces) {
  std::vector<int> missing;
  for (int rank = 0; rank < traces.front().ranks; ++rank) {
    const bool known = std::any_of(traces.begin(), traces.end(),
                                   [&](const Trace& trace) { return trace.rank == rank; });
    if (!known) missing.push_back(rank);
  }
  return missing;
}

const char* word_of(State state) {
  return state == State::kDone ? "done" : state == State::kFailed ? "failed" : "under way";
}

std::string line_of(const std::string& rank, const std::string& state,
                    const TracedCollective& record, double until) {
  return fmt::format("{:>5}  {:<9}  {:<12}  {:>8}  {:<14}  {:>10}  {:<9}  {:<16}  {:>9.3f}\n", rank,
                     state, record.group.axis, record.sequence, record.kind,
                     human_bytes(static_cast<double>(record.bytes)), record.dtype,
                     fmt::format("[{}]", fmt::join(record.sizes, ", ")),
                     record.end.value_or(until) - record.start);
}

std::string heading() {
  return fmt::format("{:>5}  {:<9}  {:<12}  {:>8}  {:<14}  {:>10}  {:<9}  {:<16}  {:>9}\n", "rank",
                     "state", "axis", "number", "collective", "bytes", "dtype", "sizes", "seconds");
}

std::string row_of(const Trace& trace) {
  const std::string rank = std::to_string(trace.rank);
  if (const auto* current = current_of(trace)) {
    return line_of(rank, word_of(current->state), *current, trace.written);
  }
  if (trace.records.empty()) return fmt::format("{:>5}  none yet\n", rank);
  return line_of(rank, "after", trace.records.back(), trace.written);
}

}  // namespace

const TracedCollective* current_of(const Trace& trace) {
  const TracedCollective* current = nullptr;
  for (const auto& record : trace.records) {
    if (record.state == State::kFailed) return &record;
    if (record.state == State::kUnderWay && current == nullptr) current = &record;
  }
  return current;
}

std::string positions_text(const std::vector<Trace>& traces) {
  std::string text;
  for (const auto& trace : traces) {
    text += fmt::format("{}rank {} was in ", text.empty() ? "" : "; ", trace.rank);
    if (const auto* current = current_of(trace)) {
      text += current->text();
    } else {
      text += trace.records.empty() ? "no collective yet"
                                    : "none, the last was " + trace.records.back().text();
    }
  }
  const auto missing = without_trace(traces);
  if (missing.empty()) return text;
  return text + fmt::format("; {} {} left no trace", missing.size() == 1 ? "rank" : "ranks",
                            fmt::join(missing, ", "));
}

std::string difference_text(const std::vector<Trace>& traces) {
  std::optional<Difference> earliest;
  for (const auto& history : histories(traces)) {
    const auto difference = first_difference(history);
    if (difference && (!earliest || difference->start < earliest->start)) earliest = difference;
  }
  return earliest ? earliest->text : "";
}

std::string report_table(const std::vector<Trace>& traces) {
  std::string text = heading();
  for (const auto& trace : traces) text += row_of(trace);
  for (const int rank : without_trace(traces)) text += fmt::format("{:>5}  left no trace\n", rank);
  const std::string difference = difference_text(traces);
  return text + (difference.empty() ? "the ranks agree on every collective that they remember\n"
                                    : "first that not all began: " + difference + "\n");
}

std::string records_table(const Trace& trace, size_t count) {
  std::string text = heading();
  const size_t first = trace.records.size() - std::min(count, trace.records.size());
  for (size_t i = first; i < trace.records.size(); ++i) {
    const auto& record = trace.records[i];
    text += line_of(std::to_string(trace.rank), word_of(record.state), record, trace.written);
  }
  return text;
}

}  // namespace longhaul::dtensor
