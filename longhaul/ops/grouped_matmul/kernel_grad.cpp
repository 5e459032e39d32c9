// The gradient of each group's matrix: dW = dy^T x over the group's rows. First dy is laid out so
// that a column's rows of a chunk lie next to each other as words; then each task makes a panel of
// columns of one matrix, chunk by chunk of rows, in a fixed order.
#include <omp.h>

#include <algorithm>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/dtype.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/grouped_matmul/panel.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_grouped_matmul_grad_args;

constexpr int64_t kChunkRows = 512;

// Rows of one group. `place` words of each column of dy come before theirs.
struct Chunk {
  int64_t begin, rows, words, place;
};

// The chunks of each group, one behind the other: those of group e are first[e] .. first[e + 1].
struct Chunks {
  int64_t* first;
  Chunk* of;
};

int64_t max_chunks(const Args& a) { return a.E + a.M / kChunkRows; }

template <typename T>
int64_t max_words(const Args& a) {
  return words_of<T>(a.M) + kLanes * max_chunks(a);
}

template <typename T>
void list_chunks(const Args& a, const Chunks& chunks) {
  int64_t count = 0, row = 0, place = 0;
  for (int64_t e = 0; e < a.E; ++e) {
    chunks.first[e] = count;
    for (int64_t done = 0; done < a.counts[e]; done += kChunkRows) {
      const int64_t rows = std::min(kChunkRows, a.counts[e] - done);
      const int64_t words = round_up(rows, kLanes * kPackOperand<T>) / kPackOperand<T>;
      chunks.of[count++] = {row + done, rows, words, place};
      place += words;
    }
    row += a.counts[e];
  }
  chunks.first[a.E] = count;
}

// What all threads work in.
template <typename T>
struct Buffers {
  Chunks chunks;
  int32_t* columns;  // of each chunk [N, rounded up to 16][words]: dy by columns
  int32_t* panels;   // [threads][kChunkRows / kPackOperand<T>][32]
  float* sums;       // [threads][N, rounded up to 16][32]

  Buffers(const Args& a, Workspace& workspace) {
    chunks.first = workspace.take<int64_t>(a.E + 1);
    chunks.of = workspace.take<Chunk>(max_chunks(a));
    columns = workspace.take<int32_t>(padded_rows(a) * max_words<T>(a));
    panels = workspace.take<int32_t>(panel_words() * omp_get_max_threads());
    sums = workspace.take<float>(padded_rows(a) * kPanel * omp_get_max_threads());
  }
  static int64_t padded_rows(const Args& a) { return round_up(a.N, kLanes); }
  static int64_t panel_words() { return kChunkRows / kPackOperand<T> * kPanel; }
};

template <typename T>
class WeightGradient {
 public:
  WeightGradient(const Args& a, const Buffers<T>& buffers) : a_(a), buffers_(buffers) {}

  // The words of a chunk of up to 16 columns of dy.
  void lay_out(const Chunk& chunk, int64_t column) const {
    const T* dy = static_cast<const T*>(a_.dy) + chunk.begin * a_.N + column;
    int32_t* to = columns_of(chunk, column);
    for (int64_t word = 0; word < chunk.words; word += kLanes) {
      Words x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t row = (word + i) * kPackOperand<T>;
        x[i] = pair_rows(dy + row * a_.N, a_.N, chunk.rows - row, a_.N - column);
      }
      transpose_words(x);
      for (int i = 0; i < kLanes; ++i) store_words(to + i * chunk.words + word, x[i]);
    }
  }

  // Up to 32 columns of the gradient of group e's matrix.
  void make_panel(int64_t e, int64_t column, int thread) const {
    const Chunk* chunk = buffers_.chunks.of + buffers_.chunks.first[e];
    const Chunk* end = buffers_.chunks.of + buffers_.chunks.first[e + 1];
    const int64_t columns = std::min<int64_t>(kPanel, a_.K - column);
    T* out = static_cast<T*>(a_.d_weight) + e * a_.N * a_.K + column;
    if (chunk == end) {
      for (int64_t n = 0; n < a_.N; ++n) std::fill_n(out + n * a_.K, columns, T{});
      return;
    }
    int32_t* panel = buffers_.panels + Buffers<T>::panel_words() * thread;
    float* sums = buffers_.sums + Buffers<T>::padded_rows(a_) * kPanel * thread;
    for (const Chunk* first = chunk; chunk != end; ++chunk) {
      const T* x = static_cast<const T*>(a_.x) + chunk->begin * a_.K + column;
      pack_columns(x, a_.K, chunk->rows, columns, chunk->words, panel);
      for (int64_t n = 0; n < a_.N; n += kRows) {
        Floats acc[kRows][kVectors] = {};
        if (chunk != first) load_sums(sums + n * kPanel, acc);
        add_rows(*chunk, n, panel, acc);
        if (chunk + 1 != end) {
          store_sums(acc, sums + n * kPanel);
          continue;
        }
        const int64_t count = std::min<int64_t>(kRows, a_.N - n);
        for (int64_t r = 0; r < count; ++r) store_columns(out + (n + r) * a_.K, acc[r], columns);
      }
    }
  }

 private:
  // Where the words of a column of dy are, those of the next one behind them.
  int32_t* columns_of(const Chunk& chunk, int64_t column) const {
    return buffers_.columns + chunk.place * buffers_.padded_rows(a_) + column * chunk.words;
  }

  // The sums of kRows rows over the chunks before.
  LONGHAUL_INLINE static void load_sums(const float* sums, Floats (&acc)[kRows][kVectors]) {
    for (int i = 0; i < kRows * kVectors; ++i) {
      acc[i / kVectors][i % kVectors] = load(sums + i * kLanes);
    }
  }
  LONGHAUL_INLINE static void store_sums(const Floats (&acc)[kRows][kVectors], float* sums) {
    for (int i = 0; i < kRows * kVectors; ++i) {
      store(sums + i * kLanes, acc[i / kVectors][i % kVectors]);
    }
  }

  // acc += kRows rows of the chunk's part, from n on.
  LONGHAUL_INLINE void add_rows(const Chunk& chunk, int64_t n, const int32_t* panel,
                                Floats (&acc)[kRows][kVectors]) const {
    multiply_panel<T>(reinterpret_cast<const char*>(columns_of(chunk, n)), chunk.words * 4, kRows,
                      panel, chunk.words, acc);
  }

  const Args& a_;
  const Buffers<T>& buffers_;
};

template <typename T>
void run(const Args& a, void* memory) {
  Workspace workspace(memory);
  const Buffers<T> buffers(a, workspace);
  const WeightGradient<T> gradient(a, buffers);
  list_chunks<T>(a, buffers.chunks);
  const int64_t chunks = buffers.chunks.first[a.E], strips = (a.N + kLanes - 1) / kLanes,
                panels = (a.K + kPanel - 1) / kPanel;
#pragma omp parallel
  {
    const FlushDenormals flush;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < chunks * strips; ++i) {
      gradient.lay_out(buffers.chunks.of[i / strips], i % strips * kLanes);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.E * panels; ++i) {
      gradient.make_panel(i / panels, i % panels * kPanel, omp_get_thread_num());
    }
  }
}

}  // namespace

size_t grouped_matmul_grad_workspace(const Args& a) {
  return with_dtype(a.dtype, [&]<typename T>() {
    Workspace workspace(nullptr);
    const Buffers<T> buffers(a, workspace);
    return workspace.bytes();
  });
}

void grouped_matmul_grad(const Args& a, void* workspace) {
  with_dtype(a.dtype, [&]<typename T>() { run<T>(a, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
