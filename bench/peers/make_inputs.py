"""Makes what both sides of a benchmark start from: weights and rows of random ids.

    python bench/peers/make_inputs.py CONFIG.json FOLDER --rows N --seq-len S [--seed X]

FOLDER gets config.json, model.safetensors (normal with initializer_range; norms 1, biases 0) and
rows.jsonl, the dataset "tokenized" of longhaul.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch

import deepseek_v32
import tensor_file


def initial_weights(config, seed):
    model = deepseek_v32.Model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                parameter.normal_(0, config.initializer_range, generator=generator)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {hf: part for name, tensor in named for hf, part in deepseek_v32.hf_views(name, tensor)}


def write_rows(path, rows, seq_len, vocab_size, seed):
    generator = torch.Generator().manual_seed(seed)
    with open(path, "w") as file:
        for _ in range(rows):
            ids = torch.randint(vocab_size, (seq_len,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(args.config, args.folder / "config.json")
    config = deepseek_v32.Config.read(args.config)
    tensor_file.write(args.folder / "model.safetensors", initial_weights(config, args.seed))
    rows_path = args.folder / "rows.jsonl"
    write_rows(rows_path, args.rows, args.seq_len, config.vocab_size, args.seed)


if __name__ == "__main__":
    main()
