"""Trains the peer and prints one JSON line a step, with the keys of longhaul's metrics.jsonl.

    python bench/peers/train.py FOLDER --steps N [--lr X] [options, see --help]

FOLDER is what make_inputs.py wrote. One row a step, fp32 if not told otherwise, the indexer's loss
on, gradient norm clipped at 1, AdamW on every parameter, router biases updated: a whole step is
timed, from reading the row to the loss as a number. OMP_NUM_THREADS sets the threads.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import deepseek_v32


def read_rows(path):
    with open(path) as file:
        return [json.loads(line)["input_ids"] for line in file]


def lm_loss_of(logits, ids):
    return F.cross_entropy(logits[0, :-1], ids[0, 1:])


def step(model, optimizer, row, loss_of):
    ids = torch.tensor(row).unsqueeze(0)
    (logits,), kl = model(ids)
    lm_loss = loss_of(logits, ids)
    (lm_loss + kl.sum()).backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for router in model.routers():
        router.update_bias(1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return {
        "lm_loss": lm_loss.item(),
        "indexer_loss": kl.mean().item(),
        "grad_norm": grad_norm.item(),
    }


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--onednn",
        action="store_true",
        help="send fp32 products to oneDNN (on a CPU with AMX this rounds them to bf16)",
    )
    parser.add_argument(
        "--query-block",
        type=int,
        default=0,
        help="attend N queries at a time, to the keys up to theirs only",
    )
    parser.add_argument(
        "--gathered",
        choices=["bfloat16", "float32"],
        help="attend over copies of the chosen latents in this dtype instead of with a mask",
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--autocast", action="store_true", help="products in bf16")
    return parser.parse_args()


def main():
    args = arguments()
    if args.onednn:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    gathered = getattr(torch, args.gathered) if args.gathered else None
    model = deepseek_v32.load(args.folder, deepseek_v32.Variant(args.query_block, gathered))
    loss_of = lm_loss_of
    if args.compile:
        deepseek_v32.compile_parts(model)
        loss_of = torch.compile(lm_loss_of, fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    rows = read_rows(args.folder / "rows.jsonl")
    for i in range(args.steps):
        row = rows[i % len(rows)]
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            values = step(model, optimizer, row, loss_of)
        seconds = time.perf_counter() - start
        line = {"step": i + 1, **values, "tokens_per_second": len(row) / seconds}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
