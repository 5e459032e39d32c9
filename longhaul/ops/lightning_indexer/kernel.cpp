// Scores and top-k in one pass. Keys are packed in tiles of 48 that lie on the lanes; relu, weights
// and the sum over heads follow each product while it is in registers. No score of a head reaches
// memory, and scores only if they are above the row's running threshold.
#include <omp.h>

#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/dtype.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/operands.h"
#include "longhaul/ops/cpu/tile.h"
#include "longhaul/ops/cpu/top_k.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_lightning_indexer_args;

constexpr int kTile = 3 * kLanes;  // keys
constexpr int kHeads = 8;          // of a register tile, of the largest
constexpr int64_t kQueries = 32;   // at most, that share a tile of keys while it is in the cache

int64_t padded_heads(const Args& a) { return round_up(a.H, kHeads); }

// Queries that share a tile of keys: as many as leave room for it in the second cache.
template <typename T>
int64_t queries_of_block(const Args& a) {
  constexpr int64_t kBytes = 256 << 10;
  const int64_t fit = kBytes / (padded_heads(a) * a.D * static_cast<int64_t>(sizeof(Operand<T>)));
  return fit < 4 ? 4 : fit > kQueries ? kQueries : fit;
}

// What a thread holds for each of the queries that it works on.
template <typename T>
struct Buffers {
  int64_t tiles, slots;
  int32_t* keys;     // [tiles][D words][48]
  int32_t* queries;  // [slots][heads][D words], only where heads are padded or widened
  float* weights;    // [slots][heads], padded with 0
  float* scores;     // [slots][buffer]
  int32_t* indices;  // likewise

  Buffers(const Args& a, Workspace& workspace)
      : tiles((a.L + kTile - 1) / kTile), slots(omp_get_max_threads() * kQueries) {
    keys = workspace.take<int32_t>(tiles * kTile * words(a));
    queries = workspace.take<int32_t>(copied(a) ? slots * padded_heads(a) * words(a) : 0);
    weights = workspace.take<float>(slots * padded_heads(a));
    scores = workspace.take<float>(slots * TopK::buffer_size(a.K));
    indices = workspace.take<int32_t>(slots * TopK::buffer_size(a.K));
  }
  // Of a head.
  static int64_t words(const Args& a) { return a.D / kPackOperand<T>; }
  static bool copied(const Args& a) { return kWidened<T> || a.H != padded_heads(a); }
};

// key [L, D] to [tiles][D words][48]; keys from L on are zero.
template <typename T>
void pack_keys(const T* key, int64_t L, int64_t D, int64_t tile, int32_t* out) {
  constexpr int kElements = kPackOperand<T>;
  const int64_t words = D / kElements;
  for (int64_t i = 0; i < kTile; ++i) {
    const int64_t s = tile * kTile + i;
    int32_t* to = out + tile * kTile * words + i;
    for (int64_t w = 0; w < words; ++w, to += kTile) {
      if (s < L) {
        copy_words<Operand<T>, 1>(key + s * D + w * kElements, to);
      } else {
        *to = 0;
      }
    }
  }
}

// scores[c] += sum over R heads of weight * relu(head . key), for the keys of C registers.
template <typename Operand, int R, int C>
LONGHAUL_TILE void add_heads(const char* heads, const float* weights, const int32_t* keys,
                             int64_t words, Register* scores) {
  const char* rows[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) rows[r] = heads + r * words * 4;
  Register dots[R][C] = {};
  multiply_tile<Operand, false, 1>(rows, keys, kTile, words, dots);
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) {
    Register sum = scores[c];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      sum = fma(max(Register{}, dots[r][c]), weights[r] + Register{}, sum);
    scores[c] = sum;
  }
}

// I of one query at 48 keys, of some of them for all heads before the next: those stay in the first
// cache. Its heads lie one after the other, H is a multiple of 8.
template <typename T>
LONGHAUL_INLINE void score_tile(const char* heads, const float* weights, int64_t H,
                                const int32_t* keys, int64_t words, Floats (&scores)[3]) {
  constexpr int kRows = kParts == 1 ? kHeads : kTileRows, kRegisters = 3;
  for (int c = 0; c < 3; ++c) scores[c] = Floats{};
  Register* const sums = reinterpret_cast<Register*>(scores);
  for (int c = 0; c < 3 * kParts; c += kRegisters) {
    for (int64_t h = 0; h < H; h += kRows) {
      add_heads<Operand<T>, kRows, kRegisters>(heads + h * words * 4, weights + h,
                                               keys + c * kRegisterLanes, words, sums + c);
    }
  }
}

// NaN counts as the largest score and -inf as a number, so that a visible key is always chosen
// before none.
LONGHAUL_INLINE Floats comparable(Floats scores) {
  const Floats numbers = max(scores, all(-3.402823466e38F));
  return choose(scores != scores, all(__builtin_inff()), numbers);
}

struct Query {
  const char* heads;
  const float* weights;
  int64_t first, last;  // the keys it sees
};

// The query's heads and weights, padded in the slot's buffers where that is needed.
template <typename T>
Query prepare(const Args& a, const Buffers<T>& buffers, int64_t row, int64_t slot) {
  const int64_t padded = padded_heads(a), words = Buffers<T>::words(a);
  const T* heads = static_cast<const T*>(a.query) + row * a.H * a.D;
  Query query = {.heads = reinterpret_cast<const char*>(heads),
                 .weights = buffers.weights + slot * padded,
                 .first = a.first_key[row],
                 .last = a.last_key[row]};
  float* weights = buffers.weights + slot * padded;
  for (int64_t h = 0; h < padded; ++h) weights[h] = h < a.H ? a.weights[row * a.H + h] : 0;
  if (Buffers<T>::copied(a)) {
    int32_t* copy = buffers.queries + slot * padded * words;
    for (int64_t word = 0; word < padded * words; ++word) {
      copy[word] = 0;
      if (word >= a.H * words) continue;
      copy_words<Operand<T>, 1>(heads + word * kPackOperand<T>, copy + word);
    }
    query.heads = reinterpret_cast<const char*>(copy);
  }
  return query;
}

// A tile's keys that the query sees are offered to its top-k.
template <typename T>
LONGHAUL_INLINE void offer_tile(const Args& a, const Query& query, const int32_t* keys,
                                int64_t tile, TopK& best) {
  Floats scores[3];
  score_tile<T>(query.heads, query.weights, padded_heads(a), keys, Buffers<T>::words(a), scores);
  for (int c = 0; c < 3; ++c) scores[c] = comparable(scores[c]);
  const auto key = static_cast<int32_t>(tile * kTile);
  Mask visible[3] = {0xffff, 0xffff, 0xffff};
  if (query.first > key || query.last < (tile + 1) * kTile - 1) {
    const Words seen_to = all_words(static_cast<int32_t>(query.last));
    const Words not_seen = all_words(static_cast<int32_t>(query.first) - 1);
    for (int c = 0; c < 3; ++c) {
      const Words numbers = lane_numbers() + (key + c * kLanes);
      visible[c] = at_most(numbers, seen_to) & ~at_most(numbers, not_seen);
    }
  }
  best.add(visible, scores, key);
}

// Queries [t0, t1) of row b of the batch: each tile of keys is read once for all of them.
template <typename T>
void select_block(const Args& a, const Buffers<T>& buffers, int64_t b, int64_t t0, int64_t t1) {
  const int64_t size = TopK::buffer_size(a.K), slot0 = omp_get_thread_num() * kQueries;
  Query queries[kQueries];
  TopK best[kQueries];
  int64_t first = a.L, last = -1;
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t i = t - t0, slot = slot0 + i;
    queries[i] = prepare(a, buffers, b * a.S + t, slot);
    best[i] = TopK(a.K, buffers.scores + slot * size, buffers.indices + slot * size);
    if (queries[i].first > queries[i].last) continue;
    first = queries[i].first < first ? queries[i].first : first;
    last = queries[i].last > last ? queries[i].last : last;
  }
  for (int64_t tile = first / kTile; tile * kTile <= last; ++tile) {
    const int32_t* keys = buffers.keys + tile * kTile * Buffers<T>::words(a);
    for (int64_t i = 0; i < t1 - t0; ++i) {
      const bool seen = queries[i].first < (tile + 1) * kTile && queries[i].last >= tile * kTile;
      if (seen) offer_tile<T>(a, queries[i], keys, tile, best[i]);
    }
  }
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t row = b * a.S + t;
    best[t - t0].finish(a.indices + row * a.K, a.scores + row * a.K);
  }
}

template <typename T>
void run(const Args& a, void* memory) {
  Workspace workspace(memory);
  const Buffers<T> buffers(a, workspace);
  const int64_t queries = queries_of_block<T>(a), blocks = (a.S + queries - 1) / queries;
  for (int64_t b = 0; b < a.B; ++b) {
    const T* key = static_cast<const T*>(a.key) + b * a.L * a.D;
#pragma omp parallel
    {
      const FlushDenormals flush;
#pragma omp for schedule(static)
      for (int64_t tile = 0; tile < buffers.tiles; ++tile) {
        pack_keys(key, a.L, a.D, tile, buffers.keys);
      }
      // The longest first, so that the threads end together.
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = blocks - 1; i >= 0; --i) {
        const int64_t end = (i + 1) * queries;
        select_block<T>(a, buffers, b, i * queries, end < a.S ? end : a.S);
      }
    }
  }
}

}  // namespace

size_t lightning_indexer_workspace(const Args& a) {
  return with_dtype(a.dtype, [&]<typename T>() {
    Workspace workspace(nullptr);
    const Buffers<T> buffers(a, workspace);
    return workspace.bytes();
  });
}

void lightning_indexer(const Args& a, void* workspace) {
  with_dtype(a.dtype, [&]<typename T>() { run<T>(a, workspace); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
