// The layouts that fit 8 ranks and are trained.
#pragma once

#include <vector>

#include "tests/parallel/layout_harness.h"

namespace longhaul::testing {

inline const std::vector<Layout> kDataParallel = {
    {.dp_replicate = 2},
    {.dp_replicate = 3},
    {.dp_replicate = 4},
    {.dp_replicate = 6},
    {.dp_replicate = 8},
    {.dp_shard = 2},
    {.dp_shard = 3},
    {.dp_shard = 4},
    {.dp_shard = 6},
    {.dp_shard = 8},
    {.dp_replicate = 2, .dp_shard = 2},
    {.dp_replicate = 3, .dp_shard = 2},
    {.dp_replicate = 2, .dp_shard = 4},
    {.dp_replicate = 4, .dp_shard = 2},
};

inline const std::vector<Layout> kContextAndExperts = {
    {.cp = 2},
    {.cp = 4},
    {.cp = 8},
    {.dp_shard = 2, .cp = 2},
    {.dp_shard = 3, .cp = 2},
    {.dp_shard = 2, .cp = 4},
    {.dp_replicate = 2, .cp = 2},
    {.dp_replicate = 2, .cp = 4},
    {.dp_replicate = 2, .dp_shard = 2, .cp = 2},
    {.dp_shard = 2, .ep = 2},
    {.dp_shard = 3, .ep = 3},
    {.dp_shard = 4, .ep = 2},
    {.dp_replicate = 2, .dp_shard = 2, .ep = 2},
    {.dp_shard = 6, .ep = 6},
    {.dp_shard = 3, .cp = 2, .ep = 6},
    {.cp = 2, .ep = 2},
    {.cp = 4, .ep = 4},
    {.dp_shard = 2, .cp = 2, .ep = 4},
    {.dp_replicate = 2, .dp_shard = 2, .cp = 2, .ep = 2},
};

inline const std::vector<Layout> kTensor = {
    {.tp = 2},
    {.tp = 4},
    {.dp_shard = 2, .tp = 2},
    {.dp_replicate = 2, .tp = 2},
    {.dp_shard = 4, .tp = 2},
    {.dp_replicate = 2, .dp_shard = 2, .tp = 2},
    {.dp_shard = 2, .tp = 4},
    {.dp_replicate = 2, .tp = 4},
    {.cp = 2, .tp = 2},
    {.cp = 4, .tp = 2},
    {.cp = 2, .tp = 4},
    {.dp_shard = 2, .cp = 2, .tp = 2},
    {.dp_replicate = 2, .cp = 2, .tp = 2},
    {.tp = 2, .ep = 2},
    {.tp = 4, .ep = 2},
    {.tp = 4, .ep = 4},
    {.dp_shard = 2, .tp = 2, .ep = 2},
    {.dp_shard = 2, .tp = 2, .ep = 4},
    {.dp_replicate = 2, .dp_shard = 2, .tp = 2, .ep = 4},
    {.cp = 2, .tp = 2, .ep = 4},
    {.cp = 4, .tp = 2, .ep = 2},
    {.cp = 4, .tp = 2, .ep = 4},
    {.dp_replicate = 2, .cp = 2, .tp = 2, .ep = 2},
    {.dp_replicate = 2, .cp = 2, .tp = 2, .ep = 4},
    {.dp_shard = 2, .cp = 2, .tp = 2, .ep = 2},
    {.dp_shard = 3, .tp = 2, .ep = 3},
};

}  // namespace longhaul::testing
