"""PyTorch's own DTensor on the operators of bench/dtensor.cpp, on one rank: a JSON line each with
the microseconds of the plain call and of the call through the DTensor (medians over rounds)."""

import json
import statistics
import sys
import time

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

CALLS = 5000


def microseconds(f):
    start = time.perf_counter()
    for _ in range(CALLS):
        f()
    return (time.perf_counter() - start) * 1e6 / CALLS


def compare(name, rounds, plain, distributed):
    pairs = [(microseconds(plain), microseconds(distributed)) for _ in range(rounds + 1)][1:]
    row = {
        "name": name,
        "plain": statistics.median(a for a, _ in pairs),
        "dtensor": statistics.median(b for _, b in pairs),
    }
    print(json.dumps(row))


def main():
    rounds = int(sys.argv[1])
    torch.set_num_threads(1)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    dx, dy = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y))
    dw = distribute_tensor(y, mesh, [Replicate()])
    compare("add", rounds, lambda: x + y, lambda: dx + dy)
    compare("mm", rounds, lambda: torch.mm(x, y), lambda: torch.mm(dx, dw))
    torch.distributed.destroy_process_group()


main()
