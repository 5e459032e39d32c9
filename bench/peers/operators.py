"""Times the operators of liblonghaul_ops.so beside PyTorch's in one process, for bench/operators.py:

    python bench/peers/operators.py path/to/liblonghaul_ops.so

One JSON line a figure. Sizes are beyond the caches; bytes are those that an operator must read and
write once, forward and backward.
"""

import json
import os
import statistics
import sys
import time

import torch

ROWS, WIDTH, CHOICES = 16384, 2048, 8
REPEATS = int(os.environ.get("BENCH_REPEATS", 5))


def seconds(f):
    """The median of some, after one that does not count."""
    f()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def report(name, value, unit, kind=""):
    print(json.dumps({"name": name, "value": value, "unit": unit, "kind": kind}), flush=True)


def bandwidth():
    """Bytes a second: the faster of a copy and an addition in place. Measured beside each operator,
    since other users of the machine take a share that changes."""
    a, b = torch.zeros(ROWS * WIDTH), torch.ones(ROWS * WIDTH)
    size = a.numel() * a.element_size()
    return max(2 * size / seconds(lambda: a.copy_(b)), 3 * size / seconds(lambda: a.add_(b)))


def moving(name, f, inputs, forward_bytes, backward_bytes):
    """Share of the bandwidth, forward and backward (autograd's own passes count against it)."""
    peak = bandwidth()
    detached = [x.detach() for x in inputs]
    forward = seconds(lambda: f(*detached))
    report(f"{name}.forward", 100 * forward_bytes / forward / peak, "%", "bandwidth_share")
    leaves = [x.requires_grad_(x.is_floating_point()) for x in detached]
    out = f(*leaves)
    grad = torch.randn_like(out)
    wanted = [x for x in leaves if x.requires_grad]
    backward = seconds(lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True))
    report(f"{name}.backward", 100 * backward_bytes / backward / peak, "%", "bandwidth_share")


def moving_operators(ops, dtype, label):
    def random(*shape):
        return torch.randn(*shape).to(dtype)

    def norm(x, weight):
        return ops.rms_norm(x, weight)[0]

    one = ROWS * WIDTH * random(1).element_size()
    x, weight = random(ROWS, WIDTH), random(WIDTH)
    moving(f"rms_norm.{label}", norm, [x, weight], 2 * one, 3 * one)
    pair = random(2, ROWS, WIDTH)
    moving(f"swiglu.{label}", lambda x: ops.swiglu(x, 0), [pair], 3 * one, 5 * one)
    angle = torch.rand(1, ROWS, 1, 64)
    of_pairs = {"half": torch.cat([angle] * 2, -1), "interleave": angle.repeat_interleave(2, -1)}
    turned = random(1, ROWS, WIDTH // 128, 128)
    for mode, angles in of_pairs.items():
        cos, sin = angles.cos(), angles.sin()
        moving(
            f"rope_{mode}.{label}",
            lambda x, cos=cos, sin=sin, mode=mode: ops.rotary_mul(x, cos, sin, mode),
            [turned], 2 * one, 2 * one,
        )
    tokens = random(ROWS // CHOICES, WIDTH)
    experts = torch.rand(ROWS // CHOICES, 64).topk(CHOICES).indices
    small = one // CHOICES
    moving(
        f"permute.{label}",
        lambda x: ops.moe_token_permute(x, experts)[0],
        [tokens], one + small, one + small,
    )
    permuted, rows = ops.moe_token_permute(tokens, experts)
    probs = torch.rand(ROWS // CHOICES, CHOICES)
    # Backward: the gradient of a probability is a product with the row that it has weighted.
    moving(
        f"unpermute.{label}",
        lambda x, p: ops.moe_token_unpermute(x, rows, p),
        [permuted, probs], one + small, 2 * one + small,
    )


def counts_of(groups, skewed):
    """Even; or half of the rows in one group and a quarter of the groups empty."""
    if not skewed:
        return torch.full((groups,), ROWS // groups)
    counts = torch.zeros(groups, dtype=torch.long)
    counts[0] = ROWS // 2
    live = groups - groups // 4 - 1
    counts[1 : 1 + live] = ROWS // 2 // live
    counts[1] += ROWS // 2 - ROWS // 2 // live * live
    return counts


def limit(product_seconds, peak, *moved):
    """No grouped product is faster than one product of the same FLOPs, nor than its bytes."""
    return max(product_seconds, sum(x.nbytes for x in moved) / peak)


def by_onednn(x, weight):
    """x @ weight.T by oneDNN, in fp32 too, where PyTorch's own product is MKL's."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def seconds_of_product(x, weight):
    """Of x @ weight.T, by the faster library."""
    times = {"PyTorch": seconds(lambda: x @ weight.T)}
    if x.dtype == torch.float32:
        times = {"MKL": times["PyTorch"], "oneDNN": seconds(lambda: by_onednn(x, weight))}
    library = min(times, key=times.get)
    sizes = " x ".join(str(n) for n in (x.shape[0], *weight.shape[::-1]))
    others = ", ".join(f"{name} {1e3 * t:.3g} ms" for name, t in times.items())
    print(f"one product {sizes} in {x.dtype}: {library} ({others})", file=sys.stderr)
    return times[library]


def seconds_of_one_product(x, weight, dy):
    """One matrix for all rows, forward and backward. In bf16 only where oneDNN has kernels for it:
    elsewhere PyTorch's bf16 product takes up to fifty times as long as the one in fp32."""
    if x.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        x, weight, dy = x.float(), weight.float(), dy.float()
    backward = seconds_of_product(dy, weight.T) + seconds_of_product(dy.T, x.T)
    return seconds_of_product(x, weight), backward


def grouped_products(ops, dtype, label):
    """The time that the machine's limits leave over that of the groups."""
    for k, n, groups in ((512, 256, 16), (2048, 1408, 64)):
        peak = bandwidth()
        x = torch.randn(ROWS, k).to(dtype)
        weight = (0.05 * torch.randn(groups, n, k)).to(dtype)
        dy = torch.randn(ROWS, n).to(dtype)
        one = seconds_of_one_product(x, weight[0], dy)
        for skewed in (False, True):
            counts = counts_of(groups, skewed)
            name = f"gmm_{k}x{n}_{groups}_{'skewed' if skewed else 'even'}.{label}"
            forward = seconds(lambda: ops.grouped_matmul(x, weight, counts))
            used = weight[counts > 0]
            least = limit(one[0], peak, x, used, dy)
            report(f"{name}.forward", 100 * least / forward, "%", "product_share")
            leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
            out = ops.grouped_matmul(*leaves, counts)
            backward = seconds(lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True))
            # Gradients of empty groups are written, too.
            least = limit(one[1], peak, dy, x, used, x, weight)
            report(f"{name}.backward", 100 * least / backward, "%", "product_share")


def main():
    torch.ops.load_library(sys.argv[1])
    ops = torch.ops.longhaul
    report("bandwidth", bandwidth() / 1e9, "GB/s")
    for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        moving_operators(ops, dtype, label)
        grouped_products(ops, dtype, label)


if __name__ == "__main__":
    main()
