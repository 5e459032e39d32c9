"""The event files of a run that stops and goes on: TensorBoard's own reader shows each step once, with the
values of metrics.jsonl. Called by package_test.sh with the program and a folder."""

import json
import math
import subprocess
import sys
import unittest
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PROGRAM, WORK = sys.argv[1], Path(sys.argv[2])

JOB = """[job]
dump_folder = "run"
description = "a job for TensorBoard"
[model]
name = "deepseek_v32"
flavor = "tiny"
hf_assets_path = "tokenizer"
[training]
dataset = "files"
dataset_path = "corpus"
seq_len = 64
local_batch_size = 2
steps = 6
mixed_precision_param = "float32"
device = "cpu"
[checkpoint]
enable = true
interval = 2
last_save_model_only = false
[metrics]
log_freq = 1
indexer_recall_freq = 2
enable_tensorboard = true
"""


def longhaul(*arguments):
    subprocess.run([PROGRAM, *arguments], check=True, capture_output=True, cwd=WORK)


class Events(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        (WORK / "corpus").mkdir()
        words = "the quick model reads a long text and learns what comes next".split()
        for i in range(20):
            text = " ".join(words[(j * j + i * 7 + j // 3) % len(words)] for j in range(200))
            (WORK / f"corpus/{i}.txt").write_text(text)
        (WORK / "job.toml").write_text(JOB)
        longhaul("tokenizer", "train", "--input", "corpus", "--vocab-size", "320", "--output", "tokenizer/tokenizer.json")
        longhaul("train", "job.toml", "--training.steps", "4")
        # As after a crash in step 5: the run goes on from step 2.
        longhaul("train", "job.toml", "--checkpoint.load_step", "2")
        cls.lines = [json.loads(line) for line in (WORK / "run/metrics.jsonl").read_text().splitlines()]
        cls.events = EventAccumulator(str(WORK / "run/tb"))
        cls.events.Reload()

    def values(self, tag):
        return [(event.step, event.value) for event in self.events.Scalars(tag)]

    def test_each_step_once_with_its_value(self):
        self.assertEqual([line["step"] for line in self.lines], [1, 2, 3, 4, 5, 6])
        for tag, key in [("loss/total", "loss"), ("loss/lm", "lm_loss"), ("loss/mtp", "mtp_loss"),
                         ("loss/indexer", "indexer_loss"), ("loss/balance", "balance_loss"),
                         ("grad_norm", "grad_norm"), ("lr", "lr"), ("throughput/mfu", "mfu"),
                         ("throughput/tokens_per_second", "tokens_per_second")]:
            shown = self.values(tag)
            self.assertEqual([step for step, _ in shown], [1, 2, 3, 4, 5, 6], tag)
            for (_, value), line in zip(shown, self.lines):
                self.assertTrue(math.isclose(value, line[key], rel_tol=1e-6, abs_tol=1e-30), (tag, value, line[key]))

    def test_values_by_layer(self):
        for layer, losses in enumerate(zip(*(line["indexer_loss_per_layer"] for line in self.lines))):
            for (_, value), loss in zip(self.values(f"indexer_loss/layer_{layer}"), losses):
                self.assertAlmostEqual(value, loss, places=5)
        self.assertEqual([step for step, _ in self.values("indexer_recall/layer_0")], [1, 2, 4, 6])
        loads = self.lines[0]["expert_load"]
        for layer, load in loads.items():
            value = self.values(f"expert_load_max/layer_{layer}")[0][1]
            self.assertAlmostEqual(value, max(load) * len(load) / sum(load), places=5)

    def test_wall_times_are_those_of_the_steps(self):
        for event, line in zip(self.events.Scalars("lr"), self.lines):
            self.assertAlmostEqual(event.wall_time, line["time"], places=3)

    def test_the_job_is_a_text(self):
        self.assertIn("job", self.events.summary_metadata)
        self.assertEqual(self.events.summary_metadata["job"].plugin_data.plugin_name, "text")
        tensor = self.events.Tensors("job")[0].tensor_proto
        self.assertIn(b'description = "a job for TensorBoard"', tensor.string_val[0])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
