#include "longhaul/dtensor/exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>

namespace longhaul::dtensor {

int64_t reduce_number(const Communicator& group, int64_t value, Reduction reduction) {
  Tensor number = at::full({1}, value, at::kLong);
  group.all_reduce(number, reduction).wait();
  return number.item<int64_t>();
}

std::vector<std::string> gather_text(const Communicator& group, const std::string& text) {
  const int64_t size = group.size(), own = narrow<int64_t>(text.size());
  Tensor lengths = at::empty({size}, at::kLong);
  group.all_gather(lengths, at::full({1}, own, at::kLong)).wait();
  // All send as many bytes as the longest text has.
  const int64_t room = std::max<int64_t>(lengths.max().item<int64_t>(), 1);
  Tensor bytes = at::zeros({room}, at::kByte), all = at::empty({size, room}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  group.all_gather(all, bytes).wait();
  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < size; ++rank) {
    const auto* begin = static_cast<const char*>(all.const_data_ptr()) + rank * room;
    texts.emplace_back(begin, static_cast<size_t>(lengths[rank].item<int64_t>()));
  }
  return texts;
}

std::vector<std::string> together(const Communicator* ranks,
                                  const std::function<std::string()>& step) {
  if (ranks == nullptr) return {step()};
  constexpr char kDone = '+', kFailed = '-';
  std::string result;
  std::exception_ptr failure;
  try {
    result = kDone + step();
  } catch (const CollectiveError&) {
    throw;
  } catch (const std::exception& error) {
    failure = std::current_exception();
    result = kFailed + std::string(error.what());
  }
  auto results = gather_text(*ranks, result);
  if (failure) std::rethrow_exception(failure);
  for (size_t rank = 0; rank < results.size(); ++rank) {
    if (results[rank][0] == kFailed) {
      fail_user("rank {}: {}", ranks->global_ranks()[rank], results[rank].substr(1));
    }
    results[rank].erase(0, 1);
  }
  return results;
}

}  // namespace longhaul::dtensor
