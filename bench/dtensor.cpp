// Times one operator on a plain tensor and on a DTensor of one rank, whose decision is cached, and
// prints one JSON line each: name, microseconds plain, microseconds through the DTensor (medians
// over rounds of many calls, taken in turns). bench/dtensor.py calls it:
//   bench_dtensor ROUNDS
#include "longhaul/dtensor/dtensor.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "longhaul/dtensor/world.h"

namespace longhaul {
namespace {

using at::Tensor;
using Clock = std::chrono::steady_clock;

constexpr int kCalls = 20000;

double microseconds(const std::function<Tensor()>& f) {
  const auto start = Clock::now();
  for (int i = 0; i < kCalls; ++i) f();
  return std::chrono::duration<double>(Clock::now() - start).count() * 1e6 / kCalls;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void compare(const std::string& name, int rounds, const std::function<Tensor()>& plain,
             const std::function<Tensor()>& distributed) {
  std::vector<double> of_plain, of_distributed;
  for (int i = 0; i <= rounds; ++i) {
    const double a = microseconds(plain), b = microseconds(distributed);
    if (i == 0) continue;  // the caches are cold
    of_plain.push_back(a);
    of_distributed.push_back(b);
  }
  fmt::print("{{\"name\": \"{}\", \"plain\": {:.4f}, \"dtensor\": {:.4f}}}\n", name,
             median(of_plain), median(of_distributed));
}

void run(int rounds) {
  at::set_num_threads(1);
  dtensor::World world = dtensor::World::single();
  const dtensor::Mesh mesh = dtensor::DeviceMesh::make(world, {{"tp", 1}});
  const Tensor x = at::randn({8, 8}), y = at::randn({8, 8});
  const auto part = [&](const Tensor& whole) {
    return dtensor::distribute(whole, mesh, {dtensor::Placement::shard(0)});
  };
  const Tensor dx = part(x), dy = part(y);
  const Tensor dw = dtensor::distribute(y, mesh, {dtensor::Placement::replicate()});
  compare(
      "add", rounds, [&] { return x + y; }, [&] { return dx + dy; });
  compare(
      "mm", rounds, [&] { return at::mm(x, y); }, [&] { return at::mm(dx, dw); });
}

}  // namespace
}  // namespace longhaul

int main(int argc, char** argv) {
  longhaul::run(argc > 1 ? std::stoi(argv[1]) : 5);
  return 0;
}
