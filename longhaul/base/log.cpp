#include "longhaul/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

namespace longhaul::log {

void configure(bool color) {
  const auto mode = color ? spdlog::color_mode::automatic : spdlog::color_mode::never;
  auto logger = std::make_shared<spdlog::logger>(
      "longhaul", std::make_shared<spdlog::sinks::stderr_color_sink_mt>(mode));
  logger->set_pattern("%^[%H:%M:%S] %v%$");
  spdlog::set_default_logger(logger);
}

}  // namespace longhaul::log
