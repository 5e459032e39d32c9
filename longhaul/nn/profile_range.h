// A named stretch of time in a profiler's trace: a part of the step, a layer, a module. Costs a
// look at a thread-local flag where nobody profiles. Called by models and by the trainer.
#pragma once

#include <ATen/record_function.h>
#include <fmt/format.h>

#include <utility>

namespace longhaul::nn {

class ProfileRange {
 public:
  // From here to the end of the scope. The name is made only where a profiler listens.
  template <typename... Args>
  explicit ProfileRange(fmt::format_string<Args...> name, Args&&... args)
      : record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive()) record_.before(fmt::format(name, std::forward<Args>(args)...));
  }

 private:
  at::RecordFunction record_;
};

}  // namespace longhaul::nn
