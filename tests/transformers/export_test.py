"""Folders that longhaul exports load in transformers and compute the reference's logits.

export_test.py LONGHAUL WORK: each model goes from a reference checkpoint to a step folder and back to
a folder, which transformers reads without a missing or unexpected tensor.
"""

import json
import os
import shutil
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "golden")
TOLERANCE = 1e-5  # of the largest logit, in fp32


def golden(name):
    return os.path.join(GOLDEN, name)


def write_dense_copy(folder):
    """hf_base as a DeepSeek-V3 model: the same weights without the indexer."""
    os.makedirs(folder)
    source = golden("hf_base/checkpoint")
    tensors = load_file(os.path.join(source, "model.safetensors"))
    tensors = {name: x for name, x in tensors.items() if ".indexer." not in name}
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(source, "config.json")) as file:
        config = json.load(file)
    config = {key: x for key, x in config.items() if not key.startswith("index_")}
    config.update(model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"])
    for key in ("layer_types", "mlp_layer_types"):
        config.pop(key)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)


def write_copy_without_q_lora(folder, dense):
    """dense without a query latent: q_proj is the product of q_b_proj and q_a_proj."""
    os.makedirs(folder)
    tensors = load_file(os.path.join(dense, "model.safetensors"))
    for name in [name for name in tensors if name.endswith("q_a_proj.weight")]:
        attention = name.removesuffix("q_a_proj.weight")
        q_a, q_b = (tensors.pop(f"{attention}q_{x}_proj.weight") for x in "ab")
        del tensors[f"{attention}q_a_layernorm.weight"]
        tensors[f"{attention}q_proj.weight"] = q_b @ q_a
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(dense, "config.json")) as file:
        config = json.load(file)
    config["q_lora_rank"] = None
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)


def export(longhaul, source, work, dtype, name="exported"):
    """source, converted to a step folder and back."""
    step, folder = os.path.join(work, "step-0"), os.path.join(work, name)
    for path in (step, folder):
        shutil.rmtree(path, ignore_errors=True)
    for command in (
        [longhaul, "convert", source, step],
        [longhaul, "convert", step, folder, "--max-shard-size", "300KB", "--dtype", dtype],
    ):
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return folder


def load(folder, spare):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, dtype="auto"
    )
    assert not report["missing_keys"], report
    assert not report["mismatched_keys"], report
    unexpected = [name for name in report["unexpected_keys"] if not name.startswith(spare)]
    assert not unexpected, unexpected
    return model.eval()


def check_logits(longhaul, work, source, reference, spare=("none.",)):
    expected = load_file(golden(reference))
    model = load(export(longhaul, source, work, "float32"), spare)
    assert model.dtype == torch.float32, model.dtype
    ids = expected.get("input_ids")
    if ids is None:  # of the multi-token prediction: as many as there are logits
        ids = expected["tokens"][:, : expected["logits"].shape[1]]
    with torch.no_grad():
        logits = model(ids.long(), use_cache=False).logits
    error = ((logits - expected["logits"]).abs().max() / expected["logits"].abs().max()).item()
    print(f"{type(model).__name__}, {reference}: logits differ by {error:.1e} of the largest")
    assert error < TOLERANCE, error

    bf16 = load(export(longhaul, source, work, "bfloat16"), spare)
    assert bf16.dtype == torch.bfloat16, bf16.dtype
    a, b = bf16.state_dict(), model.state_dict()
    for name, x in b.items():
        assert torch.equal(a[name].float(), x.to(a[name].dtype).float()), name


def logits_of(model):
    ids = torch.arange(24).reshape(2, 12) % model.config.vocab_size
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def check_without_q_lora(longhaul, work, source):
    """The export computes, bit by bit, what transformers computes with the source."""
    model = load(export(longhaul, source, work, "float32"), ("none.",))
    assert model.config.q_lora_rank is None, model.config.q_lora_rank
    assert torch.equal(logits_of(model), logits_of(load(source, ("none.",))))
    print(f"{type(model).__name__} without q_lora: the logits are the source's")


def check_fp8(longhaul, work, source, spare=("none.",)):
    """What transformers makes of FP8 without a GPU, bf16, is what longhaul makes of it."""
    folder = export(longhaul, source, work, "float8_e4m3fn", "fp8")
    fp8 = load(folder, spare)
    a, b = fp8.state_dict(), load(export(longhaul, folder, work, "float32"), spare).state_dict()
    assert a.keys() == b.keys()
    for name, x in b.items():
        assert torch.equal(a[name].float(), x.to(a[name].dtype).float()), name
    print(f"{type(fp8).__name__}: {len(a)} tensors of FP8 are the same")


def main():
    longhaul, work = sys.argv[1:]
    torch.set_num_threads(2)
    dense = os.path.join(work, "dense")
    write_dense_copy(dense)
    without_q_lora = os.path.join(work, "without_q_lora")
    write_copy_without_q_lora(without_q_lora, dense)
    check_logits(longhaul, work, dense, "tt_base_dense/forward.safetensors")
    check_without_q_lora(longhaul, work, without_q_lora)
    for source in (dense, without_q_lora, golden("hf_base/checkpoint")):
        check_fp8(longhaul, work, source)
    check_fp8(longhaul, work, golden("tt_mtp_yarn/checkpoint"), spare=("model.layers.2.",))
    check_logits(longhaul, work, golden("hf_base/checkpoint"), "hf_base/forward.safetensors")
    check_logits(longhaul, work, golden("hf_yarn/checkpoint"), "hf_yarn/forward.safetensors")
    check_logits(
        longhaul,
        work,
        golden("tt_mtp_yarn/checkpoint"),
        "tt_mtp_yarn/forward.safetensors",
        spare=("model.layers.2.",),
    )


main()
