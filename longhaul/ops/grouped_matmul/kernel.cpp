// Products of each group's rows with its matrix, or with the transpose. A task takes a block of
// rows of a group through a few panels of its matrix: panels are packed for a task, and rows copied
// where they must be.
#include <omp.h>

#include <algorithm>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/dtype.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/grouped_matmul/panel.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_grouped_matmul_args;

constexpr int64_t kBlockRows = 1024, kTaskPanels = 8;

// Rows of a group.
struct Block {
  int64_t expert, begin, rows;
};

int64_t in_width(const Args& a) { return a.transposed ? a.N : a.K; }
int64_t out_width(const Args& a) { return a.transposed ? a.K : a.N; }

int64_t panels_of(const Args& a) { return (out_width(a) + kPanel - 1) / kPanel; }

// Whether rows must be copied to be read as words: to be widened, or for the end of the last word.
template <typename T>
bool copies_rows(const Args& a) {
  return kWidened<T> || in_width(a) % kPackOperand<T> != 0;
}

// At most. Where rows are copied so few that a copy takes 4 MiB at most, but kRows.
template <typename T>
int64_t rows_of_block(const Args& a) {
  if (!copies_rows<T>(a)) return kBlockRows;
  const int64_t row_bytes = round_up(words_of<T>(in_width(a)), kLanes) * 4;
  const int64_t fit = (int64_t{4} << 20) / row_bytes / kRows * kRows;
  return std::clamp<int64_t>(fit, kRows, kBlockRows);
}

template <typename T>
int64_t max_blocks(const Args& a) {
  return a.E + a.M / rows_of_block<T>(a);
}

// Returns their number; `end` is where the last group ends.
template <typename T>
int64_t list_blocks(const Args& a, Block* blocks, int64_t& end) {
  const int64_t most = rows_of_block<T>(a);
  int64_t count = 0;
  end = 0;
  for (int64_t e = 0; e < a.E; ++e) {
    for (int64_t done = 0; done < a.counts[e]; done += most) {
      blocks[count++] = {e, end + done, std::min(most, a.counts[e] - done)};
    }
    end += a.counts[e];
  }
  return count;
}

// What a thread works in.
template <typename T>
struct Buffers {
  int64_t words;   // of a row
  int32_t* panel;  // [words, rounded up to 16][32]
  int32_t* rows;   // [a block's][words, rounded up to 16], where rows are copied

  Buffers(const Args& a, Workspace& workspace) : words(words_of<T>(in_width(a))) {
    panel = workspace.take<int32_t>(padded() * kPanel);
    const int64_t copied = copies_rows<T>(a) ? std::min(a.M, rows_of_block<T>(a)) : 0;
    rows = workspace.take<int32_t>(copied * padded());
  }
  int64_t padded() const { return round_up(words, kLanes); }
};

// Up to 32 columns of a group's matrix from `column` on.
template <typename T>
void pack_panel(const Args& a, int64_t expert, int64_t column, const Buffers<T>& buffers) {
  const T* weight = static_cast<const T*>(a.weight) + expert * a.N * a.K;
  const int64_t columns = std::min<int64_t>(kPanel, out_width(a) - column);
  if (a.transposed) {
    pack_columns(weight + column, a.K, a.N, columns, buffers.words, buffers.panel);
  } else {
    pack_rows(weight + column * a.K, a.K, columns, a.K, buffers.panel);
  }
}

// Rows as operands, `bytes` apart.
struct OperandRows {
  const char* rows;
  int64_t bytes;
};

template <typename T>
OperandRows operands(const Args& a, const Block& block, const Buffers<T>& buffers) {
  const int64_t width = in_width(a);
  const T* in = static_cast<const T*>(a.in) + block.begin * width;
  if (!copies_rows<T>(a)) {
    return {reinterpret_cast<const char*>(in), width * static_cast<int64_t>(sizeof(T))};
  }
  constexpr int64_t kElements = kLanes * kPackOperand<T>;
  for (int64_t row = 0; row < block.rows; ++row) {
    int32_t* to = buffers.rows + row * buffers.padded();
    for (int64_t i = 0; i < width; i += kElements, to += kLanes) {
      store_words(to, load_operands(in + row * width + i, width - i));
    }
  }
  return {reinterpret_cast<const char*>(buffers.rows), buffers.padded() * 4};
}

template <typename T>
void multiply(const Args& a, const Block& block, const OperandRows& in, int64_t column,
              const Buffers<T>& buffers) {
  const int64_t columns = std::min<int64_t>(kPanel, out_width(a) - column);
  T* out = static_cast<T*>(a.out) + block.begin * out_width(a) + column;
  for (int64_t row = 0; row < block.rows; row += kRows) {
    const int64_t count = std::min<int64_t>(kRows, block.rows - row);
    Floats acc[kRows][kVectors] = {};
    multiply_panel<T>(in.rows + row * in.bytes, in.bytes, count, buffers.panel, buffers.words, acc);
    for (int64_t r = 0; r < count; ++r) {
      store_columns(out + (row + r) * out_width(a), acc[r], columns);
    }
  }
}

// The panels of a task: fewer where threads would have none.
int64_t panels_of_task(int64_t blocks, int64_t panels) {
  constexpr int64_t kTasksOfThread = 4;
  const int64_t most = blocks * panels / (kTasksOfThread * omp_get_max_threads());
  return std::clamp<int64_t>(most, 1, kTaskPanels);
}

template <typename T>
size_t thread_bytes(const Args& a) {
  Workspace workspace(nullptr);
  const Buffers<T> buffers(a, workspace);
  return workspace.bytes();
}

template <typename T>
void run(const Args& a, void* memory) {
  Workspace workspace(memory);
  Block* blocks = workspace.take<Block>(max_blocks<T>(a));
  char* rest = static_cast<char*>(memory) + workspace.bytes();
  const size_t bytes = thread_bytes<T>(a);
  int64_t end = 0;
  const int64_t count = list_blocks<T>(a, blocks, end), panels = panels_of(a);
  const int64_t at_once = panels_of_task(count, panels);
  const int64_t tasks_of_block = (panels + at_once - 1) / at_once;
#pragma omp parallel
  {
    const FlushDenormals flush;
    Workspace own(rest + bytes * static_cast<size_t>(omp_get_thread_num()));
    const Buffers<T> buffers(a, own);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count * tasks_of_block; ++i) {
      const Block& block = blocks[i / tasks_of_block];
      const OperandRows rows = operands(a, block, buffers);
      const int64_t first = i % tasks_of_block * at_once;
      for (int64_t panel = first; panel < std::min(first + at_once, panels); ++panel) {
        pack_panel(a, block.expert, panel * kPanel, buffers);
        multiply(a, block, rows, panel * kPanel, buffers);
      }
    }
  }
  std::fill(static_cast<T*>(a.out) + end * out_width(a),
            static_cast<T*>(a.out) + a.M * out_width(a), T{});
}

}  // namespace

size_t grouped_matmul_workspace(const Args& a) {
  Workspace workspace(nullptr);
  const size_t own = with_dtype(a.dtype, [&]<typename T>() {
    workspace.take<Block>(max_blocks<T>(a));
    return thread_bytes<T>(a);
  });
  return workspace.bytes() + own * static_cast<size_t>(omp_get_max_threads());
}

void grouped_matmul(const Args& a, void* workspace) {
  with_dtype(a.dtype, [&]<typename T>() { run<T>(a, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
