// Where the time of a step goes: each part is named in a profiler's trace, and timed where that is
// asked for. Called by the trainer.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <map>
#include <string>

#include "longhaul/nn/profile_range.h"

namespace longhaul::train {

class StepTimer {
 public:
  // Timing waits for the device at the end of each part: to be asked for in few steps only.
  StepTimer(at::Device device, bool measure) : device_(device), measure_(measure) {}
  StepTimer(const StepTimer&) = delete;

  // A part of the step, from here to the end of the scope. Parts of one name add up, and none lies
  // within another.
  class Part {
   public:
    Part(StepTimer& timer, const char* name);
    ~Part();
    Part(const Part&) = delete;

   private:
    StepTimer& timer_;
    const char* name_;
    nn::ProfileRange range_;
    std::chrono::steady_clock::time_point start_;
  };
  Part part(const char* name) { return Part(*this, name); }

  // The seconds of each part so far, and as "other" what is left of `whole`. Empty if nothing was
  // measured.
  std::map<std::string, double> seconds(double whole) const;

 private:
  at::Device device_;
  bool measure_;
  std::map<std::string, double> seconds_;
};

}  // namespace longhaul::train
