#include "longhaul/dtensor/flight_recorder.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"
#include "longhaul/dtensor/world.h"

namespace longhaul::dtensor {
namespace {

using Json = nlohmann::ordered_json;
using State = TracedCollective::State;

template <typename Clock>
double seconds_now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

const char* name_of(State state) {
  return state == State::kDone ? "done" : state == State::kFailed ? "failed" : "under way";
}

State state_of(const CollectiveRecord& record) {
  return record.end_ns != 0 ? State::kDone : record.failed ? State::kFailed : State::kUnderWay;
}

// Groups by number, in the order in which they are met.
class Groups {
 public:
  size_t number_of(const CollectiveGroup& group) {
    const auto [known, is_new] = numbers_.emplace(group.name, numbers_.size());
    if (is_new) {
      json_.push_back({{"name", group.name}, {"axis", group.axis}, {"ranks", group.global_ranks}});
    }
    return known->second;
  }
  const Json& json() const { return json_; }

 private:
  std::map<std::string, size_t> numbers_;
  Json json_ = Json::array();
};

Json to_json(const CollectiveRecord& record, size_t group, double offset) {
  const auto time = [&](int64_t ns) { return 1e-9 * static_cast<double>(ns) + offset; };
  return {{"group", group},
          {"sequence", record.sequence},
          {"kind", name_of(record.kind)},
          {"bytes", record.bytes},
          {"sizes", record.sizes},
          {"dtype", record.dtype},
          {"start", time(record.start_ns)},
          {"end", record.end_ns == 0 ? Json() : Json(time(record.end_ns))},
          {"state", name_of(state_of(record))}};
}

Json to_json(const World& world, const std::string& reason) {
  const double now = seconds_now<std::chrono::system_clock>();
  const double offset = now - seconds_now<std::chrono::steady_clock>();
  Groups groups;
  Json records = Json::array();
  for (const auto& record : world.log().records()) {
    records.push_back(to_json(record, groups.number_of(*record.group), offset));
  }
  return {{"run", world.run()},
          {"rank", world.rank()},
          {"ranks", world.size()},
          {"written", now},
          {"reason", reason},
          {"groups", groups.json()},
          {"records", std::move(records)}};
}

State state_named(const std::string& name) {
  for (const State state : {State::kDone, State::kFailed}) {
    if (name == name_of(state)) return state;
  }
  return State::kUnderWay;
}

TracedCollective collective_from(const Json& json, const std::vector<CollectiveGroup>& groups) {
  TracedCollective record{.group = groups.at(json.at("group").get<size_t>()),
                          .sequence = json.at("sequence"),
                          .kind = json.at("kind"),
                          .bytes = json.at("bytes"),
                          .sizes = json.at("sizes"),
                          .dtype = json.at("dtype"),
                          .start = json.at("start"),
                          .end = std::nullopt,
                          .state = state_named(json.at("state"))};
  if (!json.at("end").is_null()) record.end = json.at("end").get<double>();
  return record;
}

Trace trace_from(const Json& json) {
  std::vector<CollectiveGroup> groups;
  for (const auto& group : json.at("groups")) {
    groups.push_back({group.at("name"), group.at("axis"), group.at("ranks")});
  }
  Trace trace{.run = json.at("run"),
              .rank = json.at("rank"),
              .ranks = json.at("ranks"),
              .written = json.at("written"),
              .reason = json.at("reason"),
              .records = {}};
  for (const auto& record : json.at("records")) {
    trace.records.push_back(collective_from(record, groups));
  }
  return trace;
}

// Nothing for a file that is no trace.
std::optional<Trace> read_trace(const fs::path& path) {
  try {
    return trace_from(Json::parse(read_file(path)));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

FlightRecorder::FlightRecorder(const World& world, Options options)
    : world_(world), options_(std::move(options)) {
  world.log().set_limit(options_.records);
}

std::optional<fs::path> FlightRecorder::dump_failure(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  of_failure_ = dump(reason);
  return of_failure_;
}

std::optional<fs::path> FlightRecorder::dump_asked(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  return of_failure_ ? of_failure_ : dump(reason);
}

std::optional<fs::path> FlightRecorder::dump(const std::string& reason) const noexcept {
  if (world_.size() == 1 || options_.records == 0) return std::nullopt;
  const fs::path path = options_.folder / fmt::format("{}{}.json", options_.prefix, world_.rank());
  try {
    create_folders(options_.folder);
    write_atomic(
        path, to_json(world_, reason).dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
    return path;
  } catch (const std::exception& error) {
    log::warn("rank {}: its collectives are not recorded: {}", world_.rank(), error.what());
    return std::nullopt;
  }
}

std::string TracedCollective::text() const {
  const std::string what =
      dtype.empty() ? ""
                    : fmt::format(" ({}, {} [{}])", human_bytes(static_cast<double>(bytes)), dtype,
                                  fmt::join(sizes, ", "));
  return fmt::format("{} #{} on axis {}{}", kind, sequence, group.axis, what);
}

std::vector<Trace> read_traces(const fs::path& folder) {
  std::vector<Trace> traces;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() != ".json") continue;
    if (auto trace = read_trace(entry.path())) traces.push_back(*std::move(trace));
  }
  if (traces.empty()) {
    fail_user(
        "{}: holds no traces of collectives; they are in <job.dump_folder>/"
        "<comm.save_traces_folder> of a run that failed on several ranks",
        folder.string());
  }
  const auto newest = std::max_element(traces.begin(), traces.end(),
                                       [](auto& a, auto& b) { return a.written < b.written; });
  const std::string run = newest->run;
  std::erase_if(traces, [&](const Trace& trace) { return trace.run != run; });
  std::sort(traces.begin(), traces.end(), [](auto& a, auto& b) { return a.rank < b.rank; });
  return traces;
}

}  // namespace longhaul::dtensor
