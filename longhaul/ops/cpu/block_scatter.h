// Gradients of keys that all blocks of queries share, the dense counterpart of row_scatter.h: added
// up without atomics and in an order that no number of threads changes. Blocks come in superblocks.
// In the first phase (parallel over blocks) each block leaves its weights for every key that it
// sees, and its own vectors as operands; in the second (parallel over chunks of keys) one thread
// owns a chunk's fp32 sums and walks the blocks in order.
#pragma once

#include "longhaul/ops/cpu/query_block.h"

namespace longhaul::cpu::LONGHAUL_ISA {

struct BlockScatter {
  static constexpr int kMaxTerms = 2;

  int64_t L, lanes, weight_words, paired_words, blocks;  // blocks of a superblock
  KeyRange* ranges;                                      // [blocks]
  int32_t* weights;                                      // [blocks][L + kTile][weight_words]
  int32_t* paired;                                       // [blocks][paired_words]

  // Chooses the number of blocks, once the sizes above are set, and takes the memory: as many as
  // keep their weights in 32 MiB, but no thread without one.
  void take(Workspace& workspace, int64_t all_blocks, int64_t threads) {
    constexpr int64_t kBytes = int64_t{32} << 20;
    const int64_t words = (L + kTile) * weight_words + paired_words;  // none without a query
    blocks = words == 0 ? threads : kBytes / (4 * words) / threads * threads;
    if (blocks < threads) blocks = threads;
    if (blocks > all_blocks) blocks = all_blocks;
    ranges = workspace.take<KeyRange>(blocks);
    weights = workspace.take<int32_t>(blocks * (L + kTile) * weight_words);
    paired = workspace.take<int32_t>(blocks * paired_words);
  }

  // A block's weights for `key`, which it sees, and those that follow.
  int32_t* weights_of(int64_t block, int64_t key) const {
    return weights + (block * (L + kTile) + key - ranges[block].low) * weight_words;
  }
  int32_t* paired_of(int64_t block) const { return paired + block * paired_words; }

  // Second phase: adds to sums [L][D] of keys [from, to) what blocks [first, last) left for them.
  template <typename T>
  void add(int64_t first, int64_t last, int64_t from, int64_t to, const RowTerm* terms,
           const int64_t* offsets, int num_terms, int64_t D, float* sums) const {
    for (int64_t block = first; block < last; ++block) {
      const KeyRange& keys = ranges[block];
      const int64_t low = keys.low > from ? keys.low : from;
      const int64_t high = keys.high < to ? keys.high : to;
      if (low >= high) continue;
      RowTerm mine[kMaxTerms];
      for (int i = 0; i < num_terms; ++i) {
        mine[i] = terms[i];
        mine[i].paired = paired_of(block) + offsets[i];
      }
      const int32_t* words = weights_of(block, low);
      add_terms<T>(mine, num_terms, high - low,
                   [&](int64_t j, float*& row, const int32_t*& row_weights) {
                     row = sums + (low + j) * D;
                     row_weights = words + j * weight_words;
                   });
    }
  }
};

}  // namespace longhaul::cpu::LONGHAUL_ISA
