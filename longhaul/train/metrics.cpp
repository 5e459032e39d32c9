#include "longhaul/train/metrics.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"

namespace longhaul::train {
namespace {

nlohmann::ordered_json number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

// For fmt, which prints a NaN's sign.
double unsigned_nan(double value) { return std::isnan(value) ? std::abs(value) : value; }

// The object of a line that to_json wrote; nothing for a torn or foreign one.
std::optional<nlohmann::json> parse_line(const std::string& line, const std::string& step_key) {
  auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return std::nullopt;
  if (!object.contains(step_key) || !object[step_key].is_number_integer()) return std::nullopt;
  return object;
}

// Calls visit(object, place, line) with each line that to_json wrote, in order. Others are told
// together, but for a last one without its end, which a run may be writing.
template <typename Visit>
void visit_lines(const std::filesystem::path& path, const std::string& step_key,
                 const Visit& visit) {
  std::ifstream in(path);
  int64_t place = 0, number = 0, first_damaged = 0, damaged = 0;
  for (std::string line; std::getline(in, line); place += narrow<int64_t>(line.size()) + 1) {
    ++number;
    if (const auto object = parse_line(line, step_key)) {
      visit(*object, place, line);
    } else if (!in.eof() && ++damaged == 1) {
      first_damaged = number;
    }
  }
  if (damaged > 0) {
    const std::string further =
        damaged > 1 ? fmt::format("; further lines like it: {}", damaged - 1) : "";
    log::warn("{}:{} is not a step; left out{}", path.string(), first_damaged, further);
  }
}

// The kept part of a metrics file: whole lines of steps up to `last_step`, as they stand, each step
// once.
std::string kept_lines(const std::filesystem::path& path, int64_t last_step,
                       const std::string& step_key) {
  if (last_step == 0) return "";
  std::string kept;
  int64_t newest = 0;
  visit_lines(path, step_key, [&](const nlohmann::json& object, int64_t, const std::string& line) {
    const auto step = object.at(step_key).get<int64_t>();
    if (step <= newest || step > last_step) return;
    kept += line + "\n";
    newest = step;
  });
  return kept;
}

bool holds_a_step(const std::filesystem::path& path, const std::string& step_key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (parse_line(line, step_key)) return true;
  }
  return false;
}

// A run that starts anew keeps what an earlier one left, under the next free name.
void move_aside(const std::filesystem::path& path, const std::string& step_key) {
  if (!holds_a_step(path, step_key)) return;
  for (int i = 1;; ++i) {
    const std::filesystem::path other = fmt::format("{}.{}", path.string(), i);
    if (std::filesystem::exists(other)) continue;
    log::warn("{} is from an earlier run; it is now {}", path.string(), other.string());
    return std::filesystem::rename(path, other);
  }
}

nlohmann::ordered_json to_json(const std::map<std::string, CommunicationMetrics>& comm) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const auto& [name, of] : comm) {
    json[name] = {{"count", of.count},
                  {"bytes", of.bytes},
                  {"seconds", number(of.seconds)},
                  {"waited", number(of.waited_seconds)}};
  }
  return json;
}

nlohmann::ordered_json numbers(const std::vector<double>& values) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const double value : values) json.push_back(number(value));
  return json;
}

nlohmann::ordered_json to_json(const MemoryByKind& memory) {
  nlohmann::ordered_json json = {{"weights", memory.weights},
                                 {"gradients", memory.gradients},
                                 {"optimizer", memory.optimizer}};
  if (memory.activations) json["activations"] = *memory.activations;
  return json;
}

void add_logged(const StepMetrics& m, nlohmann::ordered_json& json) {
  if (!m.indexer_recall_per_layer.empty()) {
    json["indexer_recall_per_layer"] = numbers(m.indexer_recall_per_layer);
  }
  for (const auto& [layer, load] : m.expert_load) json["expert_load"][std::to_string(layer)] = load;
  if (m.memory) json["memory"] = to_json(*m.memory);
  for (const auto& [part, seconds] : m.seconds) json["seconds"][part] = number(seconds);
}

}  // namespace

bool is_logged(const JobConfig& config, int64_t step) {
  return step == 1 || step % config.metrics.log_freq == 0;
}

nlohmann::ordered_json to_json(const StepMetrics& m) {
  nlohmann::ordered_json json = {{"step", m.step},
                                 {"loss", number(m.loss)},
                                 {"lm_loss", number(m.lm_loss)},
                                 {"mtp_loss", number(m.mtp_loss)},
                                 {"indexer_loss", number(m.indexer_loss)},
                                 {"indexer_loss_per_layer", numbers(m.indexer_loss_per_layer)},
                                 {"balance_loss", number(m.balance_loss)},
                                 {"z_loss", number(m.z_loss)},
                                 {"grad_norm", number(m.grad_norm)},
                                 {"lr", number(m.lr)},
                                 {"tokens", m.tokens},
                                 {"tokens_per_second", number(m.tokens_per_second)},
                                 {"mfu", number(m.mfu)},
                                 {"memory_peak_bytes", m.memory_peak_bytes},
                                 {"time", number(m.time)}};
  if (m.skipped) json["skipped"] = true;
  if (!m.comm.empty()) {
    json["comm"] = to_json(m.comm);
    json["comm_wait_share"] = number(m.comm_wait_share);
  }
  if (m.validation) {
    json["validation_loss"] = number(m.validation->loss);
    if (m.validation->bits_per_byte) {
      json["validation_bits_per_byte"] = number(*m.validation->bits_per_byte);
    }
  }
  add_logged(m, json);
  return json;
}

std::string to_line(const StepMetrics& m, int64_t steps, double seconds_left) {
  std::string line = fmt::format("step {:>{}}/{}  loss {:.4f}", m.step,
                                 std::to_string(steps).size(), steps, unsigned_nan(m.loss));
  if (m.loss != m.lm_loss) line += fmt::format("  lm {:.4f}", unsigned_nan(m.lm_loss));
  if (!m.indexer_loss_per_layer.empty()) {
    line += fmt::format("  indexer {:.3g}", unsigned_nan(m.indexer_loss));
  }
  line +=
      fmt::format("  grad {:.3f}  lr {:.2e}  {} tokens/s  mfu {:.0f}%  {}",
                  unsigned_nan(m.grad_norm), m.lr, with_commas(std::llround(m.tokens_per_second)),
                  100 * m.mfu, human_bytes(static_cast<double>(m.memory_peak_bytes)));
  if (!m.comm.empty()) line += fmt::format("  comm {:.0f}%", 100 * m.comm_wait_share);
  if (m.validation) {
    line += fmt::format("  validation {:.4f}", unsigned_nan(m.validation->loss));
    if (m.validation->bits_per_byte) {
      line += fmt::format(" ({:.3f} bits/byte)", unsigned_nan(*m.validation->bits_per_byte));
    }
  }
  if (m.skipped) line += "  not finite: skipped";
  return line + fmt::format("  ETA {}", human_seconds(seconds_left));
}

std::string short_line(const StepMetrics& m, double seconds_left) {
  return fmt::format("loss {:.4f}, {} tokens/s, {}, {} left", unsigned_nan(m.loss),
                     with_commas(std::llround(m.tokens_per_second)),
                     human_bytes(static_cast<double>(m.memory_peak_bytes)),
                     human_seconds(seconds_left));
}

StepLines::StepLines(const std::filesystem::path& path, int64_t last_step,
                     const std::string& step_key)
    : path_(path) {
  create_folders(path.parent_path());
  if (last_step == 0) move_aside(path, step_key);
  write_atomic(path, kept_lines(path, last_step, step_key));
  out_.open(path, std::ios::app);
  if (!out_) fail_file("open", path, errno);
}

void StepLines::append(const nlohmann::ordered_json& object) {
  out_.seekp(0, std::ios::end);
  last_ = out_.tellp();
  out_ << object.dump() << '\n' << std::flush;
  if (!out_) fail_file("write", path_, errno);
}

void for_each_step(const std::filesystem::path& path,
                   const std::function<void(const nlohmann::json&, int64_t)>& visit) {
  visit_lines(path, "step", [&](const nlohmann::json& object, int64_t place, const std::string&) {
    visit(object, place);
  });
}

void StepLines::replace_last(const nlohmann::ordered_json& object) {
  std::filesystem::resize_file(path_, narrow<uintmax_t>(last_));
  append(object);
}

std::vector<nlohmann::json> read_metrics(const std::filesystem::path& path,
                                         const std::string& step_key) {
  std::vector<nlohmann::json> objects;
  visit_lines(path, step_key, [&](const nlohmann::json& object, int64_t, const std::string&) {
    objects.push_back(object);
  });
  return objects;
}

double number_from(const nlohmann::json& value) {
  if (value.is_number()) return value.get<double>();
  const double infinity = std::numeric_limits<double>::infinity();
  if (value == "inf") return infinity;
  return value == "-inf" ? -infinity : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace longhaul::train
