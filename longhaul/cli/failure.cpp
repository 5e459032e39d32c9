#include "longhaul/cli/failure.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <string_view>

#include "longhaul/base/error.h"

namespace longhaul::cli {
namespace {

std::string first_line(std::string_view text) {
  return std::string(text.substr(0, text.find('\n')));
}

bool is_out_of_memory(const c10::Error& error) {
  const std::string_view text = error.what_without_backtrace();
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         text.find("DefaultCPUAllocator") != std::string_view::npos;
}

std::string out_of_memory(const std::string& details) {
  return fmt::format(
      "not enough memory: {}; lower training.local_batch_size or training.seq_len, or take a "
      "smaller model",
      details);
}

}  // namespace

std::string one_line(const std::exception& error) {
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error)) {
    const std::string line = first_line(torch_error->what_without_backtrace());
    return is_out_of_memory(*torch_error) ? out_of_memory(line) : line;
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return out_of_memory(error.what());
  return first_line(error.what());
}

void flush_standard_output() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    throw Error(fmt::format("cannot write to standard output: {}", std::strerror(errno)));
  }
}

}  // namespace longhaul::cli
