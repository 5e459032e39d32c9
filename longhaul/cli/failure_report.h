// What a rank that fails tells whoever started it, so that the first cause is shown and not the
// last echo. The file is torchrun's: where TORCHELASTIC_ERROR_FILE names one, torchrun shows its
// message.
#pragma once

#include <exception>
#include <optional>
#include <string>

namespace longhaul::cli {

inline constexpr const char* kErrorFileVariable = "TORCHELASTIC_ERROR_FILE";

struct FailureReport {
  std::string message;
  bool of_another_rank = false;  // this rank only waited in vain for another
};

// Writes the report to the file that the environment names; nothing where it names none or the file
// cannot be written.
void report_failure(const FailureReport& report) noexcept;

// nullopt where there is no sound report, as after a kill.
std::optional<FailureReport> read_failure_report(const std::string& path);

}  // namespace longhaul::cli
