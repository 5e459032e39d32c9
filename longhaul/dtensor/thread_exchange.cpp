#include "longhaul/dtensor/thread_exchange.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

namespace longhaul::dtensor {
namespace {

template <typename T>
struct Wide {
  using type = T;
};
template <>
struct Wide<at::BFloat16> {
  using type = float;
};
template <>
struct Wide<at::Half> {
  using type = float;
};

const char* name_of(Reduction reduction) {
  static constexpr std::array kNames = {"sum", "avg", "max", "min"};
  return kNames[static_cast<size_t>(reduction)];
}

// total = total <reduction> x, element by element. A NaN in either stays.
template <typename T, typename W>
void accumulate(W* total, const T* x, int64_t count, Reduction reduction) {
  if (reduction == Reduction::kMax) {
    for (int64_t i = 0; i < count; ++i) {
      const W value = static_cast<W>(x[i]);
      if (value > total[i] || value != value) total[i] = value;
    }
  } else if (reduction == Reduction::kMin) {
    for (int64_t i = 0; i < count; ++i) {
      const W value = static_cast<W>(x[i]);
      if (value < total[i] || value != value) total[i] = value;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) total[i] += static_cast<W>(x[i]);
  }
}

// Elements [begin, end) of the inputs, reduced, into elements [0, end - begin) at each of
// `outputs`. The outputs may be the inputs' own places.
template <typename T>
void reduce(const std::vector<Part>& parts, Reduction reduction, int64_t begin, int64_t end,
            const std::vector<T*>& outputs) {
  using W = typename Wide<T>::type;
  constexpr int64_t kBlock = 1024;  // elements; stays in the first cache
  std::array<W, kBlock> total;
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    const T* first = parts[0].input.const_data_ptr<T>() + at;
    for (int64_t i = 0; i < count; ++i) total[i] = static_cast<W>(first[i]);
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      accumulate(total.data(), parts[rank].input.const_data_ptr<T>() + at, count, reduction);
    }
    if (reduction == Reduction::kAvg) {
      for (int64_t i = 0; i < count; ++i) total[i] /= static_cast<W>(parts.size());
    }
    for (T* output : outputs) {
      T* out = output + (at - begin);
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(total[i]);
    }
  }
}

template <typename T>
void reduce_piece(const Operation& operation, const std::vector<Part>& parts, int piece) {
  const int64_t size = static_cast<int64_t>(parts.size());
  const int64_t begin = operation.elements * piece / size;
  const int64_t end = operation.elements * (piece + 1) / size;
  std::vector<T*> outputs;
  if (operation.kind == CollectiveKind::kReduceScatter) {
    outputs = {parts[piece].output.mutable_data_ptr<T>()};
  } else {
    for (const Part& part : parts) outputs.push_back(part.output.mutable_data_ptr<T>() + begin);
  }
  reduce<T>(parts, operation.reduction, begin, end, outputs);
}

void reduce_piece_of_dtype(const Operation& operation, const std::vector<Part>& parts, int piece) {
  switch (operation.dtype) {
    case at::kDouble:
      return reduce_piece<double>(operation, parts, piece);
    case at::kFloat:
      return reduce_piece<float>(operation, parts, piece);
    case at::kBFloat16:
      return reduce_piece<at::BFloat16>(operation, parts, piece);
    case at::kHalf:
      return reduce_piece<at::Half>(operation, parts, piece);
    case at::kLong:
      return reduce_piece<int64_t>(operation, parts, piece);
    case at::kInt:
      return reduce_piece<int32_t>(operation, parts, piece);
    case at::kByte:
      return reduce_piece<uint8_t>(operation, parts, piece);
    default:
      LONGHAUL_CHECK(false, "ranks as threads do not reduce {}", c10::toString(operation.dtype));
  }
}

// `count` elements from `from` at from_at to `to` at to_at, unless that is the same place.
void copy(const at::Tensor& to, int64_t to_at, const at::Tensor& from, int64_t from_at,
          int64_t count) {
  const size_t width = from.element_size();
  char* target = static_cast<char*>(to.mutable_data_ptr()) + to_at * width;
  const char* source = static_cast<const char*>(from.const_data_ptr()) + from_at * width;
  if (count > 0 && target != source) std::memcpy(target, source, count * width);
}

int64_t sum_before(const std::vector<int64_t>& counts, int index) {
  return std::accumulate(counts.begin(), counts.begin() + index, int64_t{0});
}

}  // namespace

std::string describe(const Operation& operation) {
  using enum CollectiveKind;
  std::string text = name_of(operation.kind);
  if (operation.kind == kReduceScatter || operation.kind == kAllReduce) {
    text += fmt::format(" ({})", name_of(operation.reduction));
  }
  if (operation.kind == kBroadcast) text += fmt::format(" from {}", operation.root);
  if (operation.kind == kBarrier) return text;
  const std::string dtype = c10::getDtypeNames(operation.dtype).first;
  if (operation.kind == kAllToAll) return text + " of " + dtype;
  return text + fmt::format(" of {} {}", operation.elements, dtype);
}

std::string find_count_mismatch(const std::vector<Part>& parts, const std::vector<int>& names) {
  for (size_t from = 0; from < parts.size(); ++from) {
    if (parts[from].input_counts.empty()) continue;
    for (size_t to = 0; to < parts.size(); ++to) {
      const int64_t sent = parts[from].input_counts[to], expected = parts[to].output_counts[from];
      if (sent != expected) {
        return fmt::format("rank {} sends {} elements to rank {}, which expects {}", names[from],
                           sent, names[to], expected);
      }
    }
  }
  return "";
}

void move_piece(const Operation& operation, const std::vector<Part>& parts, int piece) {
  const int size = narrow<int>(parts.size());
  const Part& mine = parts[piece];
  switch (operation.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceScatter:
      return reduce_piece_of_dtype(operation, parts, piece);
    case CollectiveKind::kAllGather:
      for (int rank = 0; rank < size; ++rank) {
        copy(mine.output, rank * operation.elements, parts[rank].input, 0, operation.elements);
      }
      return;
    case CollectiveKind::kAllToAll:
      for (int rank = 0; rank < size; ++rank) {
        copy(mine.output, sum_before(mine.output_counts, rank), parts[rank].input,
             sum_before(parts[rank].input_counts, piece), mine.output_counts[rank]);
      }
      return;
    case CollectiveKind::kBroadcast:
      return copy(mine.output, 0, parts[operation.root].input, 0, operation.elements);
    case CollectiveKind::kBarrier:
      return;
  }
}

}  // namespace longhaul::dtensor
