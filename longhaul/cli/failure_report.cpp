#include "longhaul/cli/failure_report.h"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

namespace longhaul::cli {

void report_failure(const FailureReport& report) noexcept {
  const char* path = std::getenv(kErrorFileVariable);
  if (path == nullptr || *path == '\0') return;
  try {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    // The first two are what torchrun reads.
    const nlohmann::json text = {
        {"message", report.message},
        {"timestamp", std::chrono::duration_cast<std::chrono::seconds>(now).count()},
        {"of_another_rank", report.of_another_rank}};
    std::ofstream(path) << text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  } catch (const std::exception&) {
    // The error itself stands on stderr.
  }
}

std::optional<FailureReport> read_failure_report(const std::string& path) {
  std::ifstream file(path);
  const auto text = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!text.is_object() || !text.contains("message") || !text["message"].is_string()) {
    return std::nullopt;
  }
  return FailureReport{.message = text["message"],
                       .of_another_rank = text.value("of_another_rank", false)};
}

}  // namespace longhaul::cli
