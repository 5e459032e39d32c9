"""A tokenizer.json that `longhaul tokenizer train` writes: Hugging Face's `tokenizers` loads it, encodes
as we do and decodes what we encode. Called by package_test.sh with the program and a folder."""

import gzip
import json
import subprocess
import sys
import unittest
from pathlib import Path

from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROGRAM, WORK = sys.argv[1], Path(sys.argv[2])


def texts():
    rows = gzip.open(ROOT / "tests/data/vectors/strings.jsonl.gz", "rt")
    return [text for text in map(json.loads, rows) if isinstance(text, str)]


def longhaul(*arguments):
    return subprocess.run([PROGRAM, "tokenizer", *arguments], check=True, capture_output=True, text=True).stdout


class Trained(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.path = WORK / "tokenizer.json"
        longhaul("train", "--input", str(ROOT / "longhaul/data"), "--vocab-size", "3000", "--output", str(cls.path))
        cls.package = Tokenizer.from_file(str(cls.path))
        rows = WORK / "texts.jsonl"
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
        cls.ids_of_rows = longhaul("encode", "--tokenizer", str(cls.path), "--jsonl", str(rows))

    def test_the_package_loads_it(self):
        self.assertEqual(self.package.get_vocab_size(), 3000)
        self.assertEqual(self.package.token_to_id("<|endoftext|>"), 2999)

    def test_same_ids_and_texts(self):
        lines = self.ids_of_rows.split("\n")[:-1]
        self.assertEqual(len(lines), len(texts()))
        for line, text in zip(lines, texts()):
            ids = self.package.encode(text, add_special_tokens=False).ids
            self.assertEqual(line, json.dumps(ids, separators=(",", ":")), repr(text))
            self.assertEqual(self.package.decode(ids, skip_special_tokens=False), text)

    def test_decode_is_the_inverse(self):
        (WORK / "ids.jsonl").write_text(self.ids_of_rows)
        rows = longhaul("decode", "--tokenizer", str(self.path), "--input", str(WORK / "ids.jsonl"))
        self.assertEqual([json.loads(row)["text"] for row in rows.split("\n")[:-1]], texts())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
