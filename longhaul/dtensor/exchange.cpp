#include "longhaul/dtensor/exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

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

}  // namespace longhaul::dtensor
