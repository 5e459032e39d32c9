"""scripts/bench.sh: what it prints and its exit status, with benchmarks made for the test."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/lib"))

import figure  # noqa: E402
import training  # noqa: E402

GOOD = """
import sys
print('{"name": "good.ratio", "value": 1.5, "goal": 1.3, "unit": "x", "holds": true}')
print('{"name": "good.speed", "value": 1234.0, "goal": null, "unit": "tokens/s", "holds": true}')
print("for people", file=sys.stderr)
"""
SHORT = """
print('{"name": "short.ratio", "value": 0.9, "goal": 1.0, "unit": "x", "holds": false}')
"""


class BenchScript(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def bench(self, benchmarks, *arguments):
        for name, text in benchmarks.items():
            (Path(self.folder.name) / f"{name}.py").write_text(text)
        # The last --folder counts.
        command = [ROOT / "scripts/bench.sh", "--folder", self.folder.name, *arguments]
        return subprocess.run(command, text=True, capture_output=True, timeout=60)

    def test_json_lines_and_status_zero_when_all_hold(self):
        result = self.bench({"good": GOOD}, "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        figures = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual([f["name"] for f in figures], ["good.ratio", "good.speed"])
        self.assertEqual(figures[0]["value"], 1.5)
        self.assertIn("for people", result.stderr)

    def test_table(self):
        result = self.bench({"good": GOOD, "short": SHORT})
        rows = [line.split() for line in result.stdout.splitlines()]
        self.assertEqual(rows[0], ["good.ratio", "1.5", "x", ">=", "1.3", "holds"])
        self.assertEqual(rows[1], ["good.speed", "1234", "tokens/s"])
        self.assertEqual(rows[2], ["short.ratio", "0.9", "x", ">=", "1", "FALLS", "SHORT"])

    def test_falling_short_is_a_failure(self):
        self.assertEqual(self.bench({"good": GOOD, "short": SHORT}).returncode, 1)

    def test_only_the_named_one_runs(self):
        result = self.bench({"good": GOOD, "short": SHORT}, "good", "--json")
        self.assertEqual(result.returncode, 0)
        self.assertNotIn("short", result.stdout)

    def test_unknown_name_lists_the_known(self):
        result = self.bench({"good": GOOD}, "god")
        self.assertEqual(result.returncode, 2)
        self.assertEqual(result.stderr, "error: no benchmark 'god'; there are good\n")

    def test_a_benchmark_that_fails_or_prints_something_else(self):
        broken = {
            "crash": (GOOD + "sys.exit(3)", "error: crash: exit status 3"),
            "silent": ("", "error: silent: no figures"),
            "chatty": ("print('hello')", "error: chatty: not a figure: hello"),
        }
        for name, (text, message) in broken.items():
            with self.subTest(name):
                result = self.bench({name: text}, name)
                self.assertEqual(result.returncode, 1)
                self.assertIn(message, result.stderr)


class Figure(unittest.TestCase):
    def test_a_goal_is_a_lower_bound(self):
        self.assertTrue(json.loads(figure.line("a", 1.3, "x", 1.3))["holds"])
        self.assertFalse(json.loads(figure.line("a", 1.2999, "x", 1.3))["holds"])
        self.assertFalse(json.loads(figure.line("a", float("nan"), "x", 1.3))["holds"])
        self.assertTrue(json.loads(figure.line("a", 0.1, "tokens/s"))["holds"])

    def test_four_digits(self):
        self.assertEqual(json.loads(figure.line("a", 1.23456, "x"))["value"], 1.235)


class Speeds(unittest.TestCase):
    def report(self, least_shares):
        def side(speed, mfu):
            made = training.Side("made", [], {}, warm_up=0)
            step = {"lm_loss": 9.0, "tokens_per_second": speed, "mfu": mfu}
            made.runs.append(training.Run([step], warm_up=0, others=0.0))
            return made

        sides = {"slow": side(500.0, None), "fast": side(800.0, None)}
        with contextlib.redirect_stdout(io.StringIO()) as out:
            training.report_speeds("made", side(1000.0, 0.5), sides, least_shares)
        return {row["name"]: row for row in map(json.loads, out.getvalue().splitlines())}

    def test_a_peer_below_its_least_share_falls_short(self):
        rows = self.report({"slow": 25.1, "fast": 39.9})
        self.assertEqual(rows["made.longhaul_peak_share"]["value"], 50.0)
        self.assertIsNone(rows["made.longhaul_peak_share"]["goal"])
        self.assertEqual(rows["made.peer_slow_peak_share"]["value"], 25.0)
        self.assertFalse(rows["made.peer_slow_peak_share"]["holds"])
        self.assertEqual(rows["made.peer_fast_peak_share"]["goal"], 39.9)
        self.assertTrue(rows["made.peer_fast_peak_share"]["holds"])

    def test_without_one_it_informs(self):
        for least_shares in (None, {"slow": None}):
            self.assertIsNone(self.report(least_shares)["made.peer_slow_peak_share"]["goal"])


class Profile(unittest.TestCase):
    LOG = """\
[10:00:00] step 5/5  loss 9.01
[10:00:00] 1 step up to 5, 60.0% of the peak; recorded in traces/rank0_trace.json
  operator                                       calls   ms a step    share
  longhaul::grouped_matmul                          30       400.0    80.0%
  outside of operators                                       100.0    20.0%
  a whole step                                               500.0   100.0%
  host, forward and backward (on shapes alone)                12.5     2.5%

[10:00:01] finished 5 steps
"""

    def test_the_table_and_the_share_of_the_host(self):
        profile = training.profile_in(self.LOG)
        self.assertEqual(profile.host_share, 2.5)
        lines = profile.table.splitlines()
        self.assertEqual(len(lines), 5)
        self.assertEqual(lines[1].split()[0], "longhaul::grouped_matmul")

    def test_a_run_without_a_table_is_an_error(self):
        with self.assertRaisesRegex(SystemExit, "no table of the time by operator"):
            training.profile_in("[10:00:00] step 5/5  loss 9.01\n")


if __name__ == "__main__":
    unittest.main()
