#include "longhaul/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

#include "longhaul/base/progress.h"
#include "longhaul/base/quiet.h"

namespace longhaul {
namespace {

thread_local bool quiet_thread = false;

}  // namespace

Quiet::Quiet(bool quiet) : before_(quiet_thread) { quiet_thread = quiet || before_; }
Quiet::~Quiet() { quiet_thread = before_; }
bool is_quiet() { return quiet_thread; }

}  // namespace longhaul

namespace longhaul::log {
namespace {

// Lines of the log stand above a progress line, not behind it.
class Sink : public spdlog::sinks::stderr_color_sink_mt {
  using Base = spdlog::sinks::stderr_color_sink_mt;

 public:
  explicit Sink(spdlog::color_mode mode) : Base(mode) {}
  void log(const spdlog::details::log_msg& message) override {
    if (is_quiet() && message.level < spdlog::level::err) return;
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
