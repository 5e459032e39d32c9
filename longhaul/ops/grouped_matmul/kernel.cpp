// Products of each group's rows with its matrix, or with the transpose. A task packs a panel of a
// matrix once and takes up to kTaskRows rows through it.
#include <omp.h>

#include <algorithm>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/dtype.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/grouped_matmul/panel.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_grouped_matmul_args;

constexpr int64_t kTaskRows = 1024;

struct Task {
  int64_t expert, begin, rows;
};

int64_t in_width(const Args& a) { return a.transposed ? a.N : a.K; }
int64_t out_width(const Args& a) { return a.transposed ? a.K : a.N; }

int64_t max_tasks(const Args& a) { return a.E + a.M / kTaskRows; }

// Returns their number; `end` is where the last group ends.
int64_t list_tasks(const Args& a, Task* tasks, int64_t& end) {
  int64_t count = 0;
  end = 0;
  for (int64_t e = 0; e < a.E; ++e) {
    for (int64_t done = 0; done < a.counts[e]; done += kTaskRows) {
      tasks[count++] = {e, end + done, std::min(kTaskRows, a.counts[e] - done)};
    }
    end += a.counts[e];
  }
  return count;
}

template <typename T>
void pack_panel(const Args& a, int64_t expert, int64_t column, int32_t* panel) {
  const T* weight = static_cast<const T*>(a.weight) + expert * a.N * a.K;
  if (a.transposed) {
    pair_heads<Operand<T>>(weight + column, a.K, static_cast<int>(a.N), static_cast<int>(a.N),
                           kPanel, panel);
  } else {
    pack_rows(weight + column * a.K, a.K, a.K, panel);
  }
}

// What a thread works in.
template <typename T>
struct Buffers {
  int32_t* panel;  // [in_width words][32]
  int32_t* rows;   // [kRows][in_width words], only where rows are widened

  Buffers(const Args& a, Workspace& workspace) {
    const int64_t words = in_width(a) / kPackOperand<T>;
    panel = workspace.take<int32_t>(words * kPanel);
    rows = workspace.take<int32_t>(sizeof(T) == sizeof(Operand<T>) ? 0 : words * kRows);
  }
};

// `count` rows as operands, one behind the other.
template <typename T>
LONGHAUL_INLINE const char* operands(const T* in, int64_t count, int64_t width, int32_t* buffer) {
  if constexpr (sizeof(T) == sizeof(Operand<T>)) {
    return reinterpret_cast<const char*>(in);
  } else {
    for (int64_t i = 0; i < count * width; i += kLanes) {
      store_words(buffer + i, load_operands(in + i));
    }
    return reinterpret_cast<const char*>(buffer);
  }
}

template <typename T>
void multiply(const Args& a, const Task& task, int64_t column, const Buffers<T>& buffers) {
  const int64_t width = in_width(a), words = width / kPackOperand<T>;
  const T* in = static_cast<const T*>(a.in) + task.begin * width;
  T* out = static_cast<T*>(a.out) + task.begin * out_width(a) + column;
  for (int64_t row = 0; row < task.rows; row += kRows) {
    const int64_t count = std::min<int64_t>(kRows, task.rows - row);
    Floats acc[kRows][kVectors] = {};
    multiply_panel<T>(operands(in + row * width, count, width, buffers.rows), words * 4, count,
                      buffers.panel, words, acc);
    for (int64_t r = 0; r < count; ++r) {
      T* to = out + (row + r) * out_width(a);
      store_rounded(to, acc[r][0]);
      store_rounded(to + kLanes, acc[r][1]);
    }
  }
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
  Task* tasks = workspace.take<Task>(max_tasks(a));
  char* rest = static_cast<char*>(memory) + workspace.bytes();
  const size_t bytes = thread_bytes<T>(a);
  const int64_t panels = out_width(a) / kPanel;
  int64_t end = 0;
  const int64_t count = list_tasks(a, tasks, end);
#pragma omp parallel
  {
    const FlushDenormals flush;
    Workspace own(rest + bytes * static_cast<size_t>(omp_get_thread_num()));
    const Buffers<T> buffers(a, own);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count * panels; ++i) {
      const Task& task = tasks[i / panels];
      const int64_t column = i % panels * kPanel;
      pack_panel<T>(a, task.expert, column, buffers.panel);
      multiply<T>(a, task, column, buffers);
    }
  }
  std::fill(static_cast<T*>(a.out) + end * out_width(a),
            static_cast<T*>(a.out) + a.M * out_width(a), T{});
}

}  // namespace

size_t grouped_matmul_workspace(const Args& a) {
  Workspace workspace(nullptr);
  workspace.take<Task>(max_tasks(a));
  const size_t own = with_dtype(a.dtype, [&]<typename T>() { return thread_bytes<T>(a); });
  return workspace.bytes() + own * static_cast<size_t>(omp_get_max_threads());
}

void grouped_matmul(const Args& a, void* workspace) {
  with_dtype(a.dtype, [&]<typename T>() { run<T>(a, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
