#include "longhaul/base/background.h"

namespace longhaul {

void Background::wait() {
  if (!under_way_.valid()) return;
  try {
    under_way_.get();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void Background::run(std::function<void()> action) {
  wait();
  if (!failure_) under_way_ = std::async(std::launch::async, std::move(action));
}

void Background::run_here(const std::function<void()>& action) {
  wait();
  if (failure_) return;
  try {
    action();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void Background::finish() {
  wait();
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace longhaul
