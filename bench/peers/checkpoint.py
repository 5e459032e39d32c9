"""torch.distributed.checkpoint on the tensors of bench/checkpoint.cpp, in one process: a JSON line
each with the GB/s of saving (synced) and of loading from the disk (medians over rounds).

  checkpoint.py FOLDER ROUNDS MEGABYTES
"""

import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def make_state(megabytes):
    state = {}
    for index in range(max(1, megabytes // 3 // 8)):
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            state[f"model.layers.{index}.{kind}"] = torch.randn(2048, 1024)
    return state


def forget(folder):
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def erase(folder):
    """Its blocks are free again before anything else is measured."""
    shutil.rmtree(folder)
    parent = os.open(folder.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def main():
    folder, rounds, megabytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    state = make_state(megabytes)
    gigabytes = sum(tensor.nbytes for tensor in state.values()) * 1e-9
    saved, loaded = [], []
    for index in range(rounds + 1):
        place = folder / str(index)
        writer = dcp.FileSystemWriter(place, sync_files=True)
        saved.append(seconds(lambda: dcp.save(state, storage_writer=writer, no_dist=True)))
        forget(place)
        reader = dcp.FileSystemReader(place)
        loaded.append(seconds(lambda: dcp.load(state, storage_reader=reader, no_dist=True)))
        erase(place)
    for name, times in (("save", saved[1:]), ("load", loaded[1:])):
        print(json.dumps({"name": name, "rate": gigabytes / statistics.median(times)}))


main()
