"""Processes with known settings, and what else the machine did meanwhile. Called by benchmarks."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THREADS = 2

# Freed memory is kept and used again: glibc's default gives it back to the system, and every use
# faults it in anew.
TUNED_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "281474976710656"}

# The same in larger steps and in huge pages, which longhaul gives itself.
HUGE_PAGES = TUNED_ALLOCATOR | {
    "MALLOC_TOP_PAD_": "67108864",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

# What longhaul gives its own process (longhaul/cli/startup.h).
PROCESS_POLICY = HUGE_PAGES | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000"}

# What would change the speed of one side and comes from the caller's shell.
FOREIGN = (
    "GLIBC_TUNABLES",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "ONEDNN_",
    "DNNL_",
    "LD_PRELOAD",
    "TORCH_",
)


def environment(extra=None):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    return kept | {"OMP_NUM_THREADS": str(THREADS)} | (extra or {})


def memory_settings(variables):
    """What an environment says of the allocator and of waiting threads, for people."""
    names = ("MALLOC_", "GLIBC_TUNABLES", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    said = [f"{key}={value}" for key, value in variables.items() if key.startswith(names)]
    return " ".join(said) or "allocator as it comes"


def say(text):
    print(text, file=sys.stderr, flush=True)


def built(path, target, variable):
    """A file of the release build, or the one that the environment variable names instead."""
    chosen = Path(os.environ.get(variable, ROOT / "build/release" / path))
    if not chosen.exists():
        sys.exit(f"error: no {chosen}; build it: scripts/build.sh release {target}")
    return chosen


def peer_python():
    """The Python that runs bench/peers; installs it the first time."""
    return run([ROOT / "bench/peers/setup.sh"], environment()).stdout.strip()


def busy_seconds():
    """CPU seconds of all processes since the machine started."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def children_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Others:
    """What processes other than ours took of the CPU since this was made."""

    def __init__(self):
        self.busy, self.own, self.start = busy_seconds(), children_seconds(), time.monotonic()

    def share(self):
        foreign = busy_seconds() - self.busy - (children_seconds() - self.own)
        capacity = (time.monotonic() - self.start) * os.cpu_count()
        return min(max(foreign / capacity, 0.0), 1.0)


@dataclass
class Finished:
    stdout: str
    stderr: str
    others: float  # share of the machine's CPU time that other processes took meanwhile


def rows_of(command, env):
    """The JSON lines that a program prints, as they come; SystemExit if it fails."""
    others = Others()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=errors
        ) as process:
            yield from map(json.loads, process.stdout)
        errors.seek(0)
        check(command, process.returncode, errors.read())
    say(f"others took {others.share():.0%} of the CPU")


def figures_of(command):
    """The JSON lines that a program prints, by name; with longhaul's settings of a process."""
    return {row["name"]: row for row in rows_of(command, environment(PROCESS_POLICY))}


def check(command, status, errors):
    if status != 0:
        last = (errors.strip() or "no output").splitlines()[-1]
        sys.exit(f"error: {command[0]} ended with status {status}: {last}")


def run(command, env):
    """The process's output; SystemExit with its last words if it fails."""
    others = Others()
    done = subprocess.run(command, env=env, text=True, capture_output=True)
    check(command, done.returncode, done.stderr)
    return Finished(done.stdout, done.stderr, others.share())
