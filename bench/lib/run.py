"""Runs benchmarks by name and says whether their figures reach the goals.

Knows nothing of what they measure: a benchmark is a file bench/NAME.py that prints one JSON line a
figure (figure.py) on stdout and everything for people on stderr. Called by scripts/bench.sh.

Exit status: 0 all goals hold, 1 one falls short or a benchmark failed, 2 the command is wrong.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

KEYS = {"name", "value", "goal", "unit", "holds"}


class Failed(Exception):
    """A benchmark did not give its figures."""


class Unknown(Exception):
    """There is no benchmark of that name."""


def parse_figure(text, name):
    try:
        figure = json.loads(text)
    except json.JSONDecodeError:
        figure = None
    if not isinstance(figure, dict) or set(figure) != KEYS:
        raise Failed(f"{name}: not a figure: {text.strip()}")
    return figure


def figures_of(path):
    """Runs one benchmark; yields its figures as they come."""
    name, count = path.stem, 0
    command = [sys.executable, "-u", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout:
            yield parse_figure(text, name)
            count += 1
    if process.returncode != 0:
        raise Failed(f"{name}: exit status {process.returncode}")
    if count == 0:
        raise Failed(f"{name}: no figures")


def table_row(figure):
    goal = "" if figure["goal"] is None else f">= {figure['goal']:g}"
    verdict = "" if figure["goal"] is None else ("holds" if figure["holds"] else "FALLS SHORT")
    value = f"{figure['value']:g}"
    return f"{figure['name']:<42} {value:>10} {figure['unit']:<10} {goal:<8} {verdict}".rstrip()


def select(folder, names):
    known = {path.stem: path for path in sorted(folder.glob("*.py"))}
    for name in names:
        if name not in known:
            raise Unknown(f"no benchmark '{name}'; there are {', '.join(known)}")
    return [known[name] for name in names or known]


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench.sh", description="Runs the benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--json", action="store_true", help="one JSON line a figure")
    parser.add_argument("--folder", type=Path, required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        paths = select(args.folder, args.names)
    except Unknown as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    fine = True
    for path in paths:
        try:
            for figure in figures_of(path):
                print(json.dumps(figure) if args.json else table_row(figure), flush=True)
                fine = fine and figure["holds"]
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            fine = False
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
