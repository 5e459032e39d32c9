// One of the processes of two_processes_test.cpp: peer <what> <rank> <size> <port> <timeout in ms>.
// Prints what it received, or the error, and ends with 1 for an error.
//   exchange: an all_gather, an averaged all_reduce and an uneven all_to_all among all
//   leave:    makes the group and ends without a word
#include <ATen/ATen.h>

#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "longhaul/dtensor/world.h"

namespace {

using at::Tensor;
using longhaul::dtensor::Communicator;
using longhaul::dtensor::Reduction;
using longhaul::dtensor::World;

void print(const char* name, const Tensor& tensor) {
  std::printf("%s:", name);
  const Tensor values = tensor.to(at::kDouble).contiguous();
  for (int64_t i = 0; i < values.numel(); ++i) std::printf(" %g", values.data_ptr<double>()[i]);
  std::printf("\n");
}

// Rank r sends r + t rows, each holding 10 r + t, to rank t.
void exchange(const Communicator& group) {
  const int rank = group.rank(), size = group.size();
  Tensor gathered = at::empty({size}, at::kLong);
  group.all_gather(gathered, at::full({1}, rank + 1, at::kLong)).wait();
  print("gathered", gathered);
  Tensor average = at::full({2}, rank, at::kFloat);
  group.all_reduce(average, Reduction::kAvg).wait();
  print("average", average);
  std::vector<int64_t> rows;
  std::vector<Tensor> sent;
  for (int other = 0; other < size; ++other) {
    rows.push_back(rank + other);
    sent.push_back(at::full({rank + other}, 10 * rank + other, at::kFloat));
  }
  Tensor received = at::zeros({std::accumulate(rows.begin(), rows.end(), int64_t{0})});
  group.all_to_all(received, at::cat(sent), rows, rows).wait();
  print("received", received);
  group.barrier();
}

void run(const std::vector<std::string>& words) {
  const int rank = std::stoi(words.at(1)), size = std::stoi(words.at(2));
  World world = World::process({.rank = rank,
                                .size = size,
                                .host = "127.0.0.1",
                                .port = std::stoi(words.at(3)),
                                .timeout = std::chrono::milliseconds(std::stoi(words.at(4))),
                                .job = words.size() > 5 ? words[5] : ""});
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  const Communicator group = world.make_group("dp", ranks);
  if (words.at(0) == "exchange") exchange(group);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
