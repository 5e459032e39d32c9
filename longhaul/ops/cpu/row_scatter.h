// Gradients of rows that many queries share, added up without atomics and in an order that no
// number of threads changes. Queries come in superblocks. In the first phase (parallel over
// queries) each query leaves its weights for every selected row, and its own vectors as operands;
// in the second (parallel over chunks of rows) one thread owns a chunk's fp32 sums, which fit its
// L2 cache, walks the queries in ascending order and takes from each the keys that lie in its
// chunk.
#pragma once

#include "longhaul/ops/cpu/key_list.h"
#include "longhaul/ops/cpu/tile.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {

constexpr int kMaxTerms = 2;

// What the queries of a superblock leave for the second phase.
struct RowScatter {
  int64_t K, D, weight_words, paired_words;  // D columns of a row's sums
  int64_t queries;                           // of a superblock
  int64_t chunk, chunks;                     // rows of a chunk; their number
  RowTerm terms[kMaxTerms];                  // `paired` relative to a query's operands
  int64_t term_offsets[kMaxTerms];
  int num_terms;

  // Of two superblocks, if there are two, one behind the other:
  int32_t* keys;     // [queries][K rounded up to a block, and 16]
  int32_t* slots;    // likewise
  int32_t* bounds;   // [queries][chunks + 1]: of a query's keys, the first of each chunk
  int32_t* weights;  // [queries][K rounded up][weight_words]
  int32_t* paired;   // [queries][paired_words]

  float* sums;  // [L][D], of one row of the batch

  // Chooses the sizes of chunks and superblocks, once K, D, the words and the terms are set, and
  // takes the memory. Sums of 640 KiB a chunk, and at least 4 chunks a thread. Of a superblock's
  // queries some select the same row, so that its sums are worth bringing into the cache; together
  // they leave 2 to 16 MiB for the second phase, if that is at least 4 queries a thread.
  void take(Workspace& workspace, int64_t S, int64_t L, int64_t threads) {
    constexpr int64_t kLeastBytes = 2 << 20, kMostBytes = 16 << 20, kChunkBytes = 640 << 10;
    constexpr int64_t kQueriesOfRow = 8, kOfThread = 4;
    chunk = kChunkBytes / (4 * D) / 16 * 16;
    const int64_t least = kOfThread * threads, most = round_up((L + least - 1) / least, 16);
    chunk = chunk > most ? most : chunk;
    if (chunk < 16) chunk = 16;
    chunks = (L + chunk - 1) / chunk;
    const int64_t bytes = 4 * (round_up(K, kKeyBlock) * (weight_words + 2) + paired_words + chunks);
    queries = K == 0 ? 0 : kQueriesOfRow * L / K;
    if (queries < kLeastBytes / bytes) queries = kLeastBytes / bytes;
    if (queries > kMostBytes / bytes) queries = kMostBytes / bytes;
    if (queries < least) queries = least;
    if (queries > S) queries = S;

    const int64_t places = queries < S ? 2 * queries : queries;
    keys = workspace.take<int32_t>(places * room());
    slots = workspace.take<int32_t>(places * room());
    bounds = workspace.take<int32_t>(places * (chunks + 1));
    weights = workspace.take<int32_t>(places * round_up(K, kKeyBlock) * weight_words);
    paired = workspace.take<int32_t>(places * paired_words);
    sums = workspace.take<float>(L * D);
  }

  // The keys that a query has selected, and which of them each chunk has: for its first phase.
  KeyList fill_keys(int64_t place, const int32_t* indices) const {
    KeyList list{keys_of(place), slots + place * room()};
    list.fill(indices, K);
    int32_t* const first = bounds_of(place);
    for (int64_t c = 0, at = 0; c <= chunks; ++c) {
      while (at < list.size && list.keys[at] < c * chunk) ++at;
      first[c] = static_cast<int32_t>(at);
    }
    return list;
  }
  int64_t room() const { return round_up(K, kKeyBlock) + kLanes; }  // for a query's keys
  int32_t* keys_of(int64_t place) const { return keys + place * room(); }
  int32_t* bounds_of(int64_t place) const { return bounds + place * (chunks + 1); }
  int32_t* weights_of(int64_t place) const {
    return weights + place * round_up(K, kKeyBlock) * weight_words;
  }

  // The gradients of one row of the batch, shared among the threads of the enclosing parallel
  // region. differentiate(t, place) is the first phase of query t, which leaves its part at that
  // place. The first phase of a superblock and the second phase of the one before share a loop:
  // threads wait for each other half as often, and for a query, not for a chunk.
  template <typename Operand, typename T, typename F>
  void run(int64_t S, int64_t L, const F& differentiate, T* out) const {
    clear_sums(L);
    int64_t pending = 0;  // queries of the superblock before, not yet added
    for (int64_t t0 = 0; t0 < S || pending > 0; t0 += queries) {
      const int64_t count = t0 >= S ? 0 : S - t0 < queries ? S - t0 : queries;
      const int64_t here = t0 / queries % 2 * queries, before = queries - here;
      const int64_t to_add = pending > 0 ? chunks : 0;
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < to_add + count; ++i) {
        if (i < to_add) {
          add<Operand>(before, before + pending, i);
        } else {
          differentiate(t0 + i - to_add, here + i - to_add);
        }
      }
      pending = count;
    }
    store_rows(L, out);
  }

 private:
  // Ends with a barrier, as store_rows() does.
  void clear_sums(int64_t L) const {
#pragma omp for schedule(static)
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t end = (c + 1) * chunk < L ? (c + 1) * chunk : L;
      std::memset(sums + c * chunk * D, 0, static_cast<size_t>((end - c * chunk) * D) * 4);
    }
  }

  // The sums rounded to T.
  template <typename T>
  void store_rows(int64_t L, T* out) const {
#pragma omp for schedule(static)
    for (int64_t s = 0; s < L; ++s) {
      for (int64_t d = 0; d < D; d += kLanes)
        store_rounded(out + s * D + d, load(sums + s * D + d));
    }
  }

  // Second phase for a chunk of rows: adds what the queries at places [first, last) left for them.
  template <typename T>
  void add(int64_t first, int64_t last, int64_t c) const {
    for (int64_t place = first; place < last; ++place) {
      if (place + 1 < last) prefetch_query(place + 1, c);
      const int32_t* const bound = bounds_of(place) + c;
      if (bound[0] == bound[1]) continue;
      RowTerm mine[kMaxTerms];
      for (int i = 0; i < num_terms; ++i) {
        mine[i] = terms[i];
        mine[i].paired = paired + place * paired_words + term_offsets[i];
      }
      add_query<T>(keys_of(place), weights_of(place), bound[0], bound[1], mine);
    }
  }

  // Asks for what add() reads of a query.
  LONGHAUL_INLINE void prefetch_query(int64_t place, int64_t c) const {
    const int32_t* const bound = bounds_of(place) + c;
    const int64_t from = bound[0], count = bound[1] - from;
    if (count == 0) return;
    prefetch(paired + place * paired_words, paired_words);
    prefetch(keys_of(place) + from, count);
    prefetch(weights_of(place) + from * weight_words, count * weight_words);
  }

  template <typename T>
  void add_query(const int32_t* row_keys, const int32_t* row_weights, int64_t from, int64_t to,
                 const RowTerm* mine) const {
    add_terms<T>(mine, num_terms, to - from, [&](int64_t j, float*& row, const int32_t*& words) {
      row = sums + row_keys[from + j] * D;
      words = row_weights + (from + j) * weight_words;
      constexpr int kAhead = 8;
      if (from + j + kAhead < to) __builtin_prefetch(words + kAhead * weight_words);
    });
  }
};

}  // namespace longhaul::cpu::LONGHAUL_ISA
