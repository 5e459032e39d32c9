"""Times the core of sparse attention in small operators of PyTorch, forward and backward, for
bench/dsa.py:

    python bench/peers/dsa.py S H C R Hi Di K usual|masked|gathered [options, see --help]

Prints one JSON object with the seconds of all queries. The inputs are those of bench_dsa: bf16, one
row, the absorbed form, in which all heads share a key and value of C + R.
usual: as small operators are usually written, over all S keys for every query, masked after that.
masked, gathered: the two forms of deepseek_v32.py in blocks of queries, over the keys up to theirs.

--sample N times N blocks only and scales by their number. A query of `usual` costs the same
wherever it stands. In the other forms the cost grows with the position: the N blocks stand at equal
distances, so that their mean is that of all blocks.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F

import deepseek_v32
from deepseek_v32 import MASKED


@dataclass
class Inputs:
    query: torch.Tensor  # [1, T, H, C + R]
    key: torch.Tensor  # [1, S, C + R]
    index_query: torch.Tensor  # [1, T, Hi, Di]
    index_key: torch.Tensor  # [1, S, Di]
    index_weights: torch.Tensor  # [1, T, Hi], fp32

    def tensors(self):
        return [self.query, self.key, self.index_query, self.index_key, self.index_weights]

    def block(self, t, e, num_keys):
        """The queries t to e and the first keys, as leaves of their own."""
        keys = slice(0, num_keys)
        cuts = [slice(t, e), keys, slice(t, e), keys, slice(t, e)]
        return Inputs(*(x[:, cut].requires_grad_() for x, cut in zip(self.tensors(), cuts)))


def make_inputs(S, H, C, R, Hi, Di):
    torch.manual_seed(1)

    def normal(*sizes):
        return torch.randn(*sizes).to(torch.bfloat16)

    weights = torch.randn(1, S, Hi) / math.sqrt(Hi * Di)
    key, index_key = normal(1, S, C + R), normal(1, S, Di)
    return Inputs(normal(1, S, H, C + R), key, normal(1, S, Hi, Di), index_key, weights)


@dataclass(frozen=True)
class Core:
    """The output [1, T, H, C] and the sum of the indexer's losses of queries that begin at t."""

    topk: int
    value_dim: int
    scale: float
    dtype: torch.dtype  # of products in masked and gathered

    def usual(self, x, t):
        dots = torch.einsum("bthd,bsd->bths", x.index_query, x.index_key).relu()
        scores = torch.einsum("bths,bth->bts", dots, x.index_weights.to(dots.dtype)).float()
        scores = scores + torch.full(scores.shape[1:], MASKED).triu(t + 1)
        chosen, indices = scores.topk(self.topk, dim=-1)
        rows = x.key[0][indices]  # [1, T, K, C + R]
        logits = torch.einsum("bthw,btkw->bthk", x.query, rows).float() * self.scale
        p = logits.masked_fill((chosen < 0.5 * MASKED).unsqueeze(2), MASKED).softmax(-1)
        out = torch.einsum("bthk,btkc->bthc", p.to(rows.dtype), rows[..., : self.value_dim])
        target = p.detach().sum(2)
        target = target / target.sum(-1, keepdim=True)
        return out, F.kl_div(F.log_softmax(chosen, dim=-1), target, reduction="sum")

    def masked(self, x, t):
        _, T, H, _ = x.query.shape
        future = torch.full((T, x.key.size(1)), MASKED).triu(t + 1)
        index_query, index_key, weights = (y.to(self.dtype) for y in x.tensors()[2:])
        scores = deepseek_v32.index_scores(index_query, index_key, weights).float() + future
        query = x.query[0].transpose(0, 1).to(self.dtype)
        key = x.key.to(self.dtype).expand(H, -1, -1)
        value = key[..., : self.value_dim]
        out, loss = deepseek_v32.masked_attention(
            query, key, value, scores, self.topk, future, self.scale
        )
        return out.transpose(0, 1).unsqueeze(0), loss

    def gathered(self, x, t):
        future = torch.full((x.query.size(1), x.key.size(1)), MASKED).triu(t + 1)
        query, key, index_query, index_key = (y.to(self.dtype) for y in x.tensors()[:4])
        index = index_query, index_key, x.index_weights
        return deepseek_v32.gathered_attention(
            query, key, self.value_dim, index, self.topk, future, self.scale
        )


def block_seconds(core, x, t):
    """Forward and backward."""
    start = time.perf_counter()
    out, loss = core(x, t)
    torch.autograd.grad([out, loss], x.tensors(), [torch.ones_like(out), None])
    return time.perf_counter() - start


def sampled(blocks, count):
    """`count` of the blocks at equal distances; all if 0."""
    n = len(blocks)
    return blocks if count == 0 else [blocks[(2 * i + 1) * n // (2 * count)] for i in range(count)]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", type=int, nargs=7, metavar="N", help="S H C R Hi Di K")
    parser.add_argument("form", choices=["usual", "masked", "gathered"])
    parser.add_argument("--query-block", type=int, default=0, help="0: all queries at once")
    parser.add_argument("--sample", type=int, default=0, help="time N blocks and scale")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    return parser.parse_args()


def main():
    args = arguments()
    S, H, C, R, Hi, Di, K = args.sizes
    core = Core(min(K, S), C, (C + R) ** -0.5, getattr(torch, args.dtype))
    x = make_inputs(S, H, C, R, Hi, Di)
    size = args.query_block or S
    blocks = [(t, min(t + size, S)) for t in range(0, S, size)]
    timed = sampled(blocks, args.sample)

    def round_seconds():
        return sum(
            block_seconds(
                getattr(core, args.form), x.block(t, e, S if args.form == "usual" else e), t
            )
            for t, e in timed
        )

    round_seconds()  # warm-up
    seconds = median(round_seconds() for _ in range(args.repeats)) * len(blocks) / len(timed)
    print(json.dumps({"seconds": seconds, "blocks": len(blocks), "timed": len(timed)}))


if __name__ == "__main__":
    main()
