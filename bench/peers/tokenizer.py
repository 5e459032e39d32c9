"""What bench/tokenizer.py needs of Hugging Face's `tokenizers` package.

    tokenizer.py prepare FOLDER                     texts, and tokenizers trained on them
    tokenizer.py encode NAME TOKENIZER_JSON TEXT    as bench_tokenizer does, by the fastest call

English is the reference manual that comes with Python, code its standard library. For Chinese and
Japanese no text comes with it: characters are drawn with Zipf's frequencies, so that words repeat.
"""

import array
import json
import os
import random
import sys
import time
from pathlib import Path

import xxhash
from tokenizers import Tokenizer, pre_tokenizers, trainers

FAMILIES = Path(__file__).resolve().parents[2] / "tests/data/vectors/families"
BYTES, DOCUMENT, VOCABULARY = 4_000_000, 10_000, 16_000


def library():
    return Path(os.__file__).parent


def english():
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def code():
    files = sorted(library().rglob("*.py"))
    return "".join(path.read_text(errors="replace") for path in files if "site-packages" not in path.parts and "pydoc_data" not in path.parts)


def drawn(rnd, count, first, last):
    characters = [chr(c) for c in range(first, last)]
    rnd.shuffle(characters)
    weights = [1 / (i + 5) for i in range(len(characters))]
    return rnd.choices(characters, weights, k=count)


def cjk():
    rnd = random.Random(5)
    han, kana = drawn(rnd, 1_000_000, 0x4E00, 0x5A00), drawn(rnd, 200_000, 0x3041, 0x3094)
    words = ["".join(drawn_from[at : at + rnd.choice([1, 2, 2, 3])]) for drawn_from in (han, kana) for at in range(0, len(drawn_from), 40)]
    weights = [1 / (i + 10) for i in range(len(words))]
    out = []
    for word in rnd.choices(words, weights, k=700_000):
        out.append(word)
        if rnd.random() < 0.12:
            out.append(rnd.choice(["，", "。", "、", "。\n", "！", " 2024年", " API "]))
    return "".join(out)


def prepare(folder):
    for name, make in (("english", english), ("code", code), ("cjk", cjk)):
        text = make()
        while len(text.encode()) < BYTES:
            text += text
        data = text.encode()[:BYTES].decode(errors="ignore")
        documents = [data[at : at + DOCUMENT] for at in range(0, len(data), DOCUMENT)]
        (folder / f"{name}.txt").write_text("".join(document.replace("\0", " ") + "\0" for document in documents))
    texts = [(folder / f"{name}.txt").read_text() for name in ("english", "code", "cjk")]
    for path in sorted(FAMILIES.glob("*.json")):
        (folder / path.name).write_text(json.dumps(trained(json.loads(path.read_text()), texts), ensure_ascii=False))


def trained(file, texts):
    """The same components with a vocabulary of a usual size learnt from the texts."""
    special = [token["content"] for token in file["added_tokens"]]
    tokenizer = Tokenizer.from_str(json.dumps(file | {"added_tokens": [], "post_processor": None}))
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator((document for text in texts for document in text.split("\0")), trainer)
    learnt = json.loads(tokenizer.to_str())
    size = len(learnt["model"]["vocab"])
    learnt["added_tokens"] = [token | {"id": size + i} for i, token in enumerate(file["added_tokens"])]
    learnt["model"]["ignore_merges"] = file["model"]["ignore_merges"]
    assert len(special) == len(learnt["added_tokens"])
    return learnt


def encode(name, tokenizer_path, text_path):
    text = Path(text_path).read_bytes()
    documents = text.decode().split("\0")[:-1]
    best = None
    for call in ("encode_batch_fast", "encode_batch", "encode"):
        tokenizer = Tokenizer.from_file(tokenizer_path)  # a new one has an empty cache
        start = time.perf_counter()
        if call == "encode":
            encodings = [tokenizer.encode(document, add_special_tokens=False) for document in documents]
        else:
            encodings = getattr(tokenizer, call)(documents, add_special_tokens=False)
        rate = len(text) * 1e-6 / (time.perf_counter() - start)
        ids = array.array("i", [i for encoding in encodings for i in encoding.ids])
        row = {"name": name, "rate": rate, "ids": len(ids), "hash": xxhash.xxh32(ids.tobytes()).hexdigest(), "call": call}
        best = row if best is None or rate > best["rate"] else best
    print(json.dumps(best))


if __name__ == "__main__":
    prepare(Path(sys.argv[2])) if sys.argv[1] == "prepare" else encode(*sys.argv[2:])
