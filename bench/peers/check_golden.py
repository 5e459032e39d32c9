"""Checks the peer against the reference vectors of tests/golden: both sides are the same model.

    python bench/peers/check_golden.py [--compile] [tests/golden]

--compile: what torch.compile makes of it instead, for one checkpoint only (minutes).
Prints one line a comparison; exit status 1 if one is beyond its tolerance.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import deepseek_v32
import tensor_file

# Those of tests/golden/README.md with a little room, as longhaul's own test has it.
LOGITS = 4e-6  # absolute
LOSS = 3e-6  # absolute
GRADIENT = 3e-6  # of each tensor's maximum
NORM = 3e-6  # relative, where only a gradient's norm is stored
KL = 3e-6  # relative

DEFAULT_GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"


class Check:
    def __init__(self):
        self.failed = 0

    def within(self, what, difference, tolerance):
        fine = difference <= tolerance  # false for nan
        self.failed += not fine
        print(f"{'ok  ' if fine else 'FAIL'} {what}: {difference:.1e}, tolerance {tolerance:.0e}")


def difference(actual, expected):
    return (actual.double() - expected.double()).abs().max().item()


def relative(actual, expected):
    return difference(actual, expected) / max(expected.abs().max().item(), 1e-30)


def gradients(model):
    """By Hugging Face name; a parameter without a gradient is absent."""
    return {
        hf_name: part
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
        for hf_name, part in deepseek_v32.hf_views(name, parameter.grad)
    }


def check_gradients(check, what, actual, expected):
    largest, norms = (0.0, ""), (0.0, "")
    for name, value in expected.items():
        stored_norm = name.startswith("norm_of.")
        own = actual.get(name.removeprefix("norm_of."))
        if own is None:
            check.within(f"{what}: gradient of {name} is missing", float("inf"), 0)
        elif stored_norm:
            norms = max(norms, (abs(own.double().norm().item() / value.item() - 1), name))
        else:
            largest = max(largest, (relative(own, value), name))
    check.within(f"{what}: gradients, worst {largest[1]}", largest[0], GRADIENT)
    if norms[1]:
        check.within(f"{what}: norms of gradients, worst {norms[1]}", norms[0], NORM)
    beyond = set(actual) - {name.removeprefix("norm_of.") for name in expected}
    check.within(f"{what}: gradients without a counterpart", float(len(beyond)), 0)


def name_of(variant):
    blocks = f", blocks of {variant.query_block}" if variant.query_block else ""
    return blocks + (", gathered" if variant.gathered else "")


def check_variant(check, golden, checkpoint, variant, compiled=False):
    forward = tensor_file.read(golden / f"hf_{checkpoint}/forward.safetensors")
    titan = tensor_file.read(golden / f"tt_{checkpoint}/forward.safetensors")
    expected = tensor_file.read(golden / f"hf_{checkpoint}/grads.safetensors")
    expected |= tensor_file.read(golden / f"tt_{checkpoint}/indexer_grads.safetensors")
    model = deepseek_v32.load(golden / f"hf_{checkpoint}/checkpoint", variant)
    if compiled:
        deepseek_v32.compile_parts(model)
    ids = forward["input_ids"]
    (logits,), kl = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (loss + kl.sum()).backward()
    what = checkpoint + name_of(variant)
    check.within(f"{what}: logits", difference(logits, forward["logits"]), LOGITS)
    check.within(f"{what}: loss", difference(loss, forward["loss"]), LOSS)
    check.within(f"{what}: KL", (kl / titan["kl_per_layer"] - 1).abs().max().item(), KL)
    check_gradients(check, what, gradients(model), expected)


def check_mtp(check, golden):
    forward = tensor_file.read(golden / "tt_mtp_yarn/forward.safetensors")
    model = deepseek_v32.load(golden / "tt_mtp_yarn/checkpoint")
    tokens = forward["tokens"]
    S = tokens.size(1) - 2
    logits, kl = model(tokens[:, : S + 1], depth=1)
    losses = [
        F.cross_entropy(x.flatten(0, 1), tokens[:, k + 1 : k + 1 + S].flatten())
        for k, x in enumerate(logits)
    ]
    (losses[0] + 0.3 * losses[1] + kl.sum()).backward()
    check.within("mtp: logits", difference(logits[0], forward["logits"]), LOGITS)
    check.within("mtp: MTP logits", difference(logits[1], forward["mtp_logits"]), LOGITS)
    check.within("mtp: loss", difference(losses[0], forward["loss"]), LOSS)
    check.within("mtp: MTP loss", difference(losses[1], forward["mtp_loss"]), LOSS)
    check.within("mtp: KL", (kl / forward["kl_per_layer"] - 1).abs().max().item(), KL)
    expected = tensor_file.read(golden / "tt_mtp_yarn/grads.safetensors")
    check_gradients(check, "mtp", gradients(model), expected)


def check_all(check, golden):
    for checkpoint in ("base", "yarn"):
        for gathered in (None, torch.float32):
            for query_block in (0, 10):  # 10 does not divide the 48 tokens
                variant = deepseek_v32.Variant(query_block, gathered)
                check_variant(check, golden, checkpoint, variant)
    check_mtp(check, golden)


def main():
    torch.set_num_threads(1)
    compiled = "--compile" in sys.argv
    folders = [word for word in sys.argv[1:] if word != "--compile"]
    golden = Path(folders[0]) if folders else DEFAULT_GOLDEN
    check = Check()
    if compiled:
        for gathered in (None, torch.float32):
            variant = deepseek_v32.Variant(10, gathered)
            check_variant(check, golden, "base", variant, compiled)
    else:
        check_all(check, golden)
    print(f"{check.failed} beyond their tolerance" if check.failed else "all within tolerance")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
