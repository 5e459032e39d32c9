#include "longhaul/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

#include "longhaul/base/progress.h"

namespace longhaul::log {
namespace {

// Lines of the log stand above a progress line, not behind it.
class Sink : public spdlog::sinks::stderr_color_sink_mt {
  using Base = spdlog::sinks::stderr_color_sink_mt;

 public:
  explicit Sink(spdlog::color_mode mode) : Base(mode) {}
  void log(const spdlog::details::log_msg& message) override {
    ProgressLine::erase_open_line();
    Base::log(message);
  }
};

}  // namespace

void configure(bool color) {
  const auto mode = color ? spdlog::color_mode::automatic : spdlog::color_mode::never;
  auto logger = std::make_shared<spdlog::logger>("longhaul", std::make_shared<Sink>(mode));
  logger->set_pattern("%^[%H:%M:%S] %v%$");
  spdlog::set_default_logger(logger);
}

}  // namespace longhaul::log
