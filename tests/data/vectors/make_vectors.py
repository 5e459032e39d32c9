"""Writes the tokenizer vectors beside this file with Hugging Face's `tokenizers` package.

Not needed to build or test; run it to renew them:
    pip install tokenizers && python tests/data/vectors/make_vectors.py
"""
import json
import pathlib
import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]

SCRIPTS = [
    "Привет, мир! Сегодня +25°C.", "你好,世界。今天我们去公园散步。", "こんにちは、カタカナとひらがな。",
    "안녕하세요 세계, 2024년", "مرحبا بالعالم ١٢٣", "नमस्ते दुनिया, क्षत्रिय", "שלום עולם", "สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 🫨🩷", "naïve café e\u0301cole", "½ ⅷ ² ³ Ⅻ", "ſ's 'S 'LL I'Ve don't we'd",
    "a\u00a0b\u2003c\u3000d\u180ee\u200bf\u0085g\u2028h\x0bi\x0cj", "\U00031350\U0002ebf0 \U00011f04", "\x00\x01\x7f\x00",
]
BLANKS = ["", " ", "  ", "\n", "\r\n\r\n", "   \n\t \n  x", " " * 300, "\t" * 9 + "x", "a" + " " * 40 + "b\n \n", "  trailing  "]
CODE = [
    "def f(x, y=None):\n    return {'a': x[0], \"b\": 1_000.5e-3}  # comment\n\n\nclass A(B):\n\tpass\n",
    "for (int i = 0; i < 1234567; ++i) { sum += a[i] * b[i]; }\r\n\r\n#include <vector>\n",
    "https://example.org/path?x=1&y=%20#frag 0xDEADBEEF 3.14159 --flag=true",
    "x" * 500, "ab" * 400, "=" * 200 + "\n", "abcabcabd" * 100,
]
SPECIAL = [
    "<|endoftext|>", "a<|endoftext|>b", "<|a|><|ab|><|a|b", "<|endoftext", "one  <M> two <R>  three", "self <Q self.x",
]
TEXTS = SCRIPTS + BLANKS + CODE + SPECIAL
DEEPSEEK_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def bytes_behind(*steps):
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def documents():
    """This repository's own sources, and the texts above."""
    files = sorted(ROOT.glob("longhaul/base/*.cpp")) + sorted(ROOT.glob("longhaul/base/*.h"))
    return [f.read_text() for f in files] + SCRIPTS * 3


def train(pre_tokenizer, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(documents(), trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"], show_progress=False))
    return json.loads(tokenizer.to_str())


def add_tokens(file):
    extra = [("<|a|>", {}), ("<|ab|>", {"normalized": True, "special": False}), ("<|a|><|a", {"special": False}),
             ("self", {"normalized": True, "special": False}), ("<M>", {"lstrip": True}), ("<R>", {"rstrip": True}), ("<Q", {})]
    vocab = file["model"]["vocab"]
    next_id = max(vocab.values()) + 1
    for content, flags in extra:
        token = {"id": vocab.get(content, next_id), "content": content, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False, "special": True, **flags}
        next_id += content not in vocab
        file["added_tokens"].append(token)
    return file


def thinned(file):
    """Whole pieces that no merge leads to any more, for ignore_merges."""
    file["model"]["ignore_merges"] = True
    file["model"]["merges"] = file["model"]["merges"][::2]
    return file


def string_merges(file):
    file["model"]["merges"] = [" ".join(m) if isinstance(m, list) else m for m in file["model"]["merges"]]
    return file


def random_texts(count):
    rnd = random.Random(7)
    def char():
        kind = rnd.random()
        if kind < .3: return rnd.choice(" \t\n\r  \u00a0\u3000\u2028\u0085\u180e\x0b")
        if kind < .7: return chr(rnd.randrange(33, 127))
        while True:
            c = rnd.randrange(0x2000) if kind < .9 else rnd.randrange(0x110000)
            if not 0xD800 <= c < 0xE000: return chr(c)
    return ["".join(char() for _ in range(rnd.randrange(1, 60))) for _ in range(count)]


def main():
    files = {
        "gpt2_like": add_tokens(string_merges(train(pre_tokenizers.ByteLevel(add_prefix_space=False), 700))),
        "deepseek_like": add_tokens(train(bytes_behind(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_SIGNS)), 700)),
        "ignore_merges": add_tokens(thinned(train(bytes_behind(split(CASELESS)), 700))),
        "digits": add_tokens(train(pre_tokenizers.Sequence([
            pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Digits(individual_digits=True),
            split(r"\w+|\W"), pre_tokenizers.ByteLevel(add_prefix_space=False)]), 500)),
    }
    files["deepseek_like"]["normalizer"] = {"type": "Sequence", "normalizers": []}
    texts = TEXTS + random_texts(60)
    for name, file in files.items():
        (HERE / f"{name}.json").write_text(json.dumps(file, ensure_ascii=False, indent=0))
        tokenizer = Tokenizer.from_str(json.dumps(file))
        rows = []
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            rows.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False)})
        (HERE / f"{name}.cases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = train(bytes_behind(split(CASELESS)), 600)
    merges = string_merges(trained)["model"]["merges"]
    (HERE / "trainer.json").write_text(json.dumps({"pattern": CASELESS, "documents": documents(), "merges": merges}, indent=0))


if __name__ == "__main__":
    main()
