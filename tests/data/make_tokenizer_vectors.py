"""Writes the tokenizer vectors in vectors/ that Hugging Face's `tokenizers` package makes:

    strings.jsonl.gz      10,000 texts: JSON strings, or {"hex": ...} for bytes that are not UTF-8
    families/NAME.json    tokenizer.json files with the components of GPT-2's, Llama 3's, Qwen 2's and
                          DeepSeek-V3's, and small vocabularies of our own
    components.json       small ones for one component or option each, by name
    *.crc                 of each text two CRC-32: of its ids (as int32) and of the decoded text
    unicode.json          sets of characters, small letters, normal forms

Not needed to build or test; run it to renew them (half an hour of one core is more than enough):
    pip install tokenizers && python tests/data/make_tokenizer_vectors.py

The patterns are those of the published tokenizer.json files of openai-community/gpt2,
meta-llama/Meta-Llama-3-8B, Qwen/Qwen2-7B and deepseek-ai/DeepSeek-V3.
"""

import array
import copy
import gzip
import json
import os
import pathlib
import random
import zlib

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

OUT = pathlib.Path(__file__).parent / "vectors"
LIBRARY = pathlib.Path(os.__file__).parent
COUNT, COMPONENT_COUNT = 10_000, 1_500

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
]

PHRASES = [
    "The quick brown fox jumps over the lazy dog.", "I've said they'll come; we'd better go, it's LATE!",
    "Größe, Übermut und Straße", "L'été à Nîmes, où ça?", "¿Qué tal, señor Muñoz?", "Zażółć gęślą jaźń",
    "Příliš žluťoučký kůň", "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία", "Съешь ещё этих мягких французских булок",
    "ქართული ენა", "Հայոց լեզու", "שלום עולם, מה שלומך?", "مرحبا بالعالم ١٢٣ كيف حالك", "سلام دنیا ۱۲۳",
    "नमस्ते दुनिया, क्षत्रिय १२३", "বাংলা ভাষা", "தமிழ் மொழி", "తెలుగు", "ಕನ್ನಡ", "മലയാളം", "ગુજરાતી", "ਪੰਜਾਬੀ",
    "สวัสดีชาวโลก ๑๒๓", "ສະບາຍດີ", "မြန်မာဘာသာ", "ភាសាខ្មែរ", "བོད་ཡིག", "አማርኛ ፊደል", "ᏣᎳᎩ", "ᠮᠣᠩᠭᠣᠯ", "ᜊᜌ᜔ᜊᜌᜒᜈ᜔",
    "你好,世界。今天我们去公园散步。", "繁體中文測試:龍門飛甲", "こんにちは、カタカナとひらがな。", "東京タワーへ行きました!",
    "안녕하세요 세계, 2024년", "가나다 각", "Tiếng Việt có dấu: đường", "ʻŌlelo Hawaiʻi", "Iñtërnâtiônàlizætiøn",
    "Ǆ ǅ ǆ ﬁ ﬂ ﬃ ﬆ ŉ ẞ ß İ ı ſ K Å", "½ ⅷ ² ³ Ⅻ ٣ ४ ๕ 𝟘𝟙 ①②", "∑∫√∞≠≤ ← → ⇒ €£¥₿", "«quoted» „unten“ ‘single’ “double” …—–",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒮𝒸𝓇𝒾𝓅𝓉", "x² + y³ = z⁴; H₂O", "naïve cafe\u0301 e\u0301\u0323 a\u030a\u0301 \u0344", "\u1e9b\u0323 \u212b \u2126 \uf900 \uac00\u11a8",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 🫨🩷 ❤️ 1️⃣", "😀😃😄😁😆", "🧑🏿‍🚀🚀✨", "don't WON'T y'All've 'S 'ſ 'K 'LL're 'tis",
]
CODE = [
    "for (int i = 0; i < 1234567; ++i) { sum += a[i] * b[i]; }\r\n\r\n#include <vector>\n", "\tif x:\n\t\treturn {'a': [1, 2.5e-3]}\n",
    "https://example.org/path?x=1&y=%20#frag", "user@example.com, +1 (555) 010-9999", "SELECT * FROM t WHERE a='b' AND c>=10;--x",
    "<div class=\"a b\">&nbsp;</div>", "0xDEADBEEF 0b1010 1_000_000 3.14159 -0.0 1e-9", "C:\\Users\\x\\y.txt ../../etc", "a+b=c&&d||!e~^|", "$\\frac{a}{b}$ \\alpha_{i,j}",
    "fn main() -> Result<(), Box<dyn Error>> { println!(\"{:?}\", x?); Ok(()) }\n", "camelCaseName snake_case_name SCREAMING_CASE kebab-case",
]
SPECIAL = [
    "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>user\n", "<|im_end|>\n", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    "<｜User｜>", "<|endoftext", "|>", "<s>", "</s>", "<unk>", "<one>", "one", "one two", " pad ", "[MASK]", "KEEP", "keep", "<L>", "<R>", "<B>", "<0x41>", "▁",
]
BLANKS = " " * 8 + "\n\n\t\t\r\x0b\x0c\u00a0\u3000\u2003\u2028\u2029\u0085\u180e\u200b\u200d\ufeff\u202f\u1680"
BLOCKS = [
    (0x20, 0x7E), (0xA0, 0x24F), (0x250, 0x2FF), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x58A), (0x591, 0x5F4), (0x600, 0x6FF),
    (0x900, 0x97F), (0x980, 0x9FE), (0xB82, 0xBFA), (0xE01, 0xE5B), (0xE81, 0xEDF), (0xF00, 0xFDA), (0x1000, 0x109F), (0x10A0, 0x10FF),
    (0x1100, 0x11FF), (0x1200, 0x137C), (0x13A0, 0x13FD), (0x1780, 0x17F9), (0x1AB0, 0x1ACE), (0x1C80, 0x1C8A), (0x1D00, 0x1DFF), (0x1E00, 0x1FFE), (0x2000, 0x206F), (0x2070, 0x218B),
    (0x2190, 0x2BFF), (0x3000, 0x30FF), (0x3131, 0x31EF), (0x3200, 0x33FF), (0x4E00, 0x9FFF), (0x9FA0, 0xA000), (0xA640, 0xA7FF), (0xAC00, 0xD7A3), (0xF900, 0xFAFF), (0xFB00, 0xFDFF),
    (0xFE00, 0xFFFD), (0x10400, 0x1044F), (0x10D40, 0x10D8F), (0x11080, 0x11FFF), (0x13430, 0x1345F), (0x16D40, 0x16EFF), (0x1CC00, 0x1CEB3), (0x1D100, 0x1D7FF), (0x1E100, 0x1E5FF),
    (0x1F000, 0x1FAFF), (0x20000, 0x20FFF), (0x2EBF0, 0x2EE5D), (0x31340, 0x323B0), (0xE0000, 0xE01EF), (0, 0x10FFFF),
]


def character(rnd, block):
    while True:
        c = rnd.randint(*block)
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def library_files():
    names = sorted(LIBRARY.glob("*.py"))
    return [p.read_text(errors="replace") for p in names if p.stat().st_size < 60_000]


class Texts:
    """One text after the other, of all kinds, from one seed."""

    def __init__(self):
        self.rnd = random.Random(20240607)
        self.lines = [line for text in library_files() for line in text.splitlines(keepends=True)]

    def one(self):
        r = self.rnd
        makers = [self.phrases, self.code, self.block_words, self.block_words, self.blanks, self.runs, self.numbers, self.specials, self.mixed, self.mixed]
        return r.choice(makers)()

    def phrases(self):
        r = self.rnd
        text = r.choice(["", " ", "  ", "\n"]).join(r.choice(PHRASES) for _ in range(r.randint(1, 4)))
        begin = r.randrange(len(text))
        return text[begin : begin + r.randint(1, 80)]

    def code(self):
        r = self.rnd
        if r.random() < 0.3:
            return "".join(r.choice(CODE) for _ in range(r.randint(1, 3)))
        begin = r.randrange(len(self.lines))
        return "".join(self.lines[begin : begin + r.randint(1, 6)])[:400]

    def word(self, block):
        return "".join(character(self.rnd, block) for _ in range(self.rnd.randint(1, 9)))

    def block_words(self):
        r = self.rnd
        blocks = r.choices(BLOCKS, k=r.randint(1, 2))
        return r.choice([" ", " ", "", "\n", ", "]).join(self.word(r.choice(blocks)) for _ in range(r.randint(1, 8)))

    def blanks(self):
        r = self.rnd
        parts = []
        for _ in range(r.randint(1, 4)):
            parts.append(r.choice(BLANKS) * r.choice([1, 1, 2, 3, 4, 7, 16, 33, 150]) if r.random() < 0.5 else "".join(r.choices(BLANKS, k=r.randint(1, 12))))
            parts.append(r.choice(["", "x", "a b", "é", "好", "1", "."]))
        return "".join(parts)

    def runs(self):
        r = self.rnd
        unit = r.choice(["x", "ab", "=", "-", "0", "12", "aaab", "哈", "ха", "🙂", "\u0301", "<", "abcabcabd", "ﬁ", "'s"])
        return r.choice(["", " "]) + unit * r.choice([2, 5, 17, 64, 127, 128, 129, 200, 500]) + r.choice(["", " end"])

    def numbers(self):
        r = self.rnd
        digits = r.choice(["0123456789"] * 4 + ["٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "𝟘𝟙𝟚", "ⅠⅡⅢ½¼²"])
        return r.choice([" ", ",", ".", ""]).join("".join(r.choices(digits, k=r.randint(1, 12))) for _ in range(r.randint(1, 6)))

    def specials(self):
        r = self.rnd
        return "".join(r.choice(SPECIAL) if r.random() < 0.5 else r.choice([" ", "  ", "a", "\n", "Word", self.phrases()[:12], "é", "_", "9"]) for _ in range(r.randint(1, 9)))

    def mixed(self):
        r = self.rnd
        makers = [self.phrases, self.code, self.block_words, self.blanks, self.numbers, self.specials]
        return "".join(r.choice(makers)()[: r.randint(1, 40)] for _ in range(r.randint(2, 5)))

    def broken(self):
        r = self.rnd
        data = bytearray(self.one().encode())
        for _ in range(r.randint(1, 5)):
            at = r.randrange(len(data) + 1)
            if r.random() < 0.5:
                data[at : at + r.randint(1, 2)] = b""
            else:
                data[at:at] = r.choice([b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\x80", b"\xf5", b"\xe0\x80", b"\xf4\x90"])
        return bytes(data)


def make_texts():
    texts = Texts()
    rows = ["", " ", "\n", "a"]
    while len(rows) < COUNT:
        rows.append(texts.broken() if len(rows) % 25 == 0 else texts.one())
    return rows


# --- the families


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(pattern if isinstance(pattern, str) else Regex(pattern[0]), behavior, invert)


def regex(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level(use_regex=False, add_prefix_space=False, trim_offsets=True):
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, trim_offsets=trim_offsets, use_regex=use_regex)


def sequence(*parts):
    return pre_tokenizers.Sequence(list(parts))


def corpus():
    return library_files()[:60] + PHRASES * 3 + CODE * 3


def trained(pre_tokenizer, vocab_size, normalizer=None, alphabet=True, first_tokens=(), limit_alphabet=None, texts=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    options = {"continuing_subword_prefix": model.get("continuing_subword_prefix"), "end_of_word_suffix": model.get("end_of_word_suffix"), "limit_alphabet": limit_alphabet}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, special_tokens=list(first_tokens), max_token_length=24 if not pre_tokenizer else None,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [], **{k: v for k, v in options.items() if v is not None})
    tokenizer.train_from_iterator(texts or corpus(), trainer)
    return json.loads(tokenizer.to_str())


def added(file, content, **flags):
    vocab = file["model"]["vocab"]
    known = {t["content"]: t for t in file["added_tokens"]}
    if content in known:
        known[content].update(flags)
        return
    next_id = max([*vocab.values(), *(t["id"] for t in file["added_tokens"])]) + 1
    token = {"id": vocab.get(content, next_id), "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    file["added_tokens"].append(token | flags)
    file["added_tokens"].sort(key=lambda t: t["id"])


def string_merges(file):
    file["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in file["model"]["merges"]]


def template(before):
    return {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": before, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {before: {"id": before, "ids": [0], "tokens": [before]}},
    }


def byte_level_json(add_prefix_space=True, trim_offsets=True, use_regex=True):
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": trim_offsets, "use_regex": use_regex}


def families():
    gpt2 = trained(byte_level(use_regex=True), 1500)
    string_merges(gpt2)
    gpt2["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    gpt2 |= {"decoder": byte_level_json(), "post_processor": byte_level_json(trim_offsets=False)}
    added(gpt2, "<|endoftext|>", normalized=True)

    llama3 = trained(sequence(regex(LLAMA3), byte_level()), 1500)
    string_merges(llama3)
    llama3["model"] |= {"ignore_merges": True, "merges": [m for i, m in enumerate(llama3["model"]["merges"]) if i % 5 != 4 or i < 300]}
    llama3["decoder"] = byte_level_json()
    for token in ["<|begin_of_text|>", "<|end_of_text|>"]:
        added(llama3, token)
    llama3["post_processor"] = {"type": "Sequence", "processors": [byte_level_json(trim_offsets=False), template("<|begin_of_text|>")]}

    qwen2 = trained(sequence(regex(QWEN2), byte_level(trim_offsets=False)), 1500, normalizers.NFC())
    string_merges(qwen2)
    qwen2["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    qwen2 |= {"decoder": byte_level_json(False, False, False), "post_processor": byte_level_json(False, False, False)}
    for token in ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]:
        added(qwen2, token)

    names = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    deepseek = trained(sequence(*map(regex, DEEPSEEK), byte_level()), 1500, first_tokens=names)
    string_merges(deepseek)
    deepseek |= {"normalizer": {"type": "Sequence", "normalizers": []}, "decoder": byte_level_json(), "post_processor": template(names[0])}
    for name in names:
        added(deepseek, name, normalized=True)
    for name in ["<｜User｜>", "<｜Assistant｜>"]:
        added(deepseek, name, normalized=True, special=False)
    return {"gpt2": gpt2, "llama3": llama3, "qwen2": qwen2, "deepseek_v3": deepseek}


# --- one component each


def with_fallback(file):
    """The 256 byte tokens of a vocabulary with byte_fallback."""
    vocab = file["model"]["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    file["model"]["byte_fallback"] = True
    return file


def components():
    few = corpus()[:6] + PHRASES * 2
    bpe = trained(byte_level(use_regex=True), 360, texts=few)
    bpe["decoder"] = byte_level_json()
    alike = trained(None, 330, alphabet=False, limit_alphabet=130, texts=few, unk_token="<unk>", first_tokens=["<unk>"])
    out = {}

    def byte_variant(name, pre=None, **parts):
        file = copy.deepcopy(bpe)
        if pre is not None:
            file["pre_tokenizer"] = json.loads(pre.__getstate__()) if not isinstance(pre, dict) else pre
        file |= parts
        out[name] = file
        return file

    def plain_variant(name, pre=None, model=None, **parts):
        file = copy.deepcopy(alike)
        file["pre_tokenizer"] = json.loads(pre.__getstate__()) if pre is not None else None
        file["model"] |= model or {}
        file |= parts
        out[name] = file
        return file

    def state(part):
        return json.loads(part.__getstate__())

    for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        byte_variant(form, normalizer={"type": form})
    for left, right in ((True, True), (True, False), (False, True)):
        byte_variant(f"Strip {left} {right}", normalizer=state(normalizers.Strip(left, right)))
    byte_variant("Replace string", normalizer=state(normalizers.Replace(" ", "_")))
    byte_variant("Replace regex", normalizer=state(normalizers.Replace(Regex(r"\s+|(?=b)"), "~")))
    byte_variant("normalizers in sequence", normalizer=state(normalizers.Sequence([
        normalizers.NFKD(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\p{M}"), ""), normalizers.Strip(), normalizers.Prepend(">")])))
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            byte_variant(f"Split {behavior} {invert}", sequence(regex(r"\p{N}|[aeiou]+|(?=x)|\s", behavior, invert), byte_level()))
        byte_variant(f"Split string {behavior}", sequence(split(" ", behavior), byte_level()))
        byte_variant(f"Punctuation {behavior}", sequence(pre_tokenizers.Punctuation(behavior), byte_level()))
    byte_variant("Split at every place", sequence(split(""), byte_level()))
    byte_variant("Digits one by one", sequence(pre_tokenizers.Digits(True), byte_level(use_regex=True)))
    byte_variant("Digits together", sequence(pre_tokenizers.Digits(False), byte_level()))
    byte_variant("Whitespace", sequence(pre_tokenizers.Whitespace(), byte_level()))
    byte_variant("WhitespaceSplit", sequence(pre_tokenizers.WhitespaceSplit(), byte_level()))
    byte_variant("prefix blank", byte_level(use_regex=True, add_prefix_space=True))
    byte_variant("prefix blank to every piece", sequence(regex("[0-9]"), byte_level(add_prefix_space=True)))
    byte_variant("behind ByteLevel", sequence(pre_tokenizers.Punctuation("contiguous"), byte_level(use_regex=True), pre_tokenizers.Digits(), regex("[0-9][0-9][0-9]")))
    byte_variant("nested sequences", sequence(sequence(sequence(regex(r"\d")), pre_tokenizers.Digits(True)), byte_level()))
    byte_variant("no decoder", decoder=None)
    patterns = {
        "boundary": r"\b\w+\b|\B.", "words": r"\w+|\W", "possessive": r"[a-z]++|\S*+\s?+", "behind": r"(?<=[a-z])[A-Z]|(?<!\s)\s", "counts": r"a{,2}b|\p{L}{2,}|\p{N}{3}",
        "opposites": r"[^\S\n]+|[\P{L}]{2}|[^\P{N}5]+|[\W_]", "dots": r"(?m:a.)|.$|^.", "escapes": r"\x41\x{4e00}|\u3002|\h{2}|\H|\t|\v|\e", "scripts": r"\p{Han}+|\p{Hiragana}+|\p{Katakana}+|[\p{Latin}\p{Cyrillic}]+|\p{^Greek}",
        "caseless": r"(?i:'[sdmt]|'ll|ab|k)|\s", "atomic": r"(?>a+|ab)b|(?:x|y)+?z", "categories": r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{Sc}\d+|\p{Zs}",
    }
    for name, pattern in patterns.items():
        byte_variant(f"pattern {name}", sequence(regex(pattern), byte_level()))

    flags = byte_variant("added tokens", normalizer={"type": "Lowercase"})
    added(flags, "<one>"), added(flags, "one", single_word=True, special=False), added(flags, "<L>", lstrip=True), added(flags, "<R>", rstrip=True)
    added(flags, "<B>", lstrip=True, rstrip=True, special=False), added(flags, "KEEP", normalized=True, special=False), added(flags, "one two"), added(flags, " pad ", normalized=True)
    added(flags, "é", special=False)

    thin = byte_variant("unknown bytes vanish")
    for token in ["Ġ", "é", "Ã", "9"]:
        thin["model"]["vocab"].pop(token, None)
    thin["model"]["merges"] = [m for m in thin["model"]["merges"] if all(t in thin["model"]["vocab"] for t in [*m, "".join(m)])]
    unk = copy.deepcopy(thin)
    unk["model"] |= {"unk_token": "!", "fuse_unk": True}
    out["unknown bytes are a token"] = unk
    pairs = byte_variant("merges as strings")
    string_merges(pairs)

    for scheme in ("always", "first", "never"):
        plain_variant(f"Metaspace {scheme}", pre_tokenizers.Metaspace(prepend_scheme=scheme), decoder=state(decoders.Metaspace(prepend_scheme=scheme)))
    plain_variant("Metaspace whole", pre_tokenizers.Metaspace(prepend_scheme="first", split=False), decoder=state(decoders.Metaspace()))
    first = plain_variant("Metaspace behind others", sequence(pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")), normalizer=state(normalizers.Strip()))
    added(first, "<one>"), added(first, "keep", normalized=True)
    plain_variant("fused unknowns", pre_tokenizers.WhitespaceSplit(), {"fuse_unk": True})
    plain_variant("unknowns vanish", pre_tokenizers.Whitespace(), {"unk_token": None})
    with_fallback(plain_variant("byte_fallback", decoder=state(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])),
        normalizer=state(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])), model={"fuse_unk": True}))
    with_fallback(plain_variant("MergedWithPrevious and fallback", split(" ", "merged_with_previous"), decoder=state(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])), normalizer=state(normalizers.Replace(" ", "▁"))))
    half = with_fallback(plain_variant("some bytes to fall back to", decoder=state(decoders.ByteFallback())))
    half["model"]["vocab"] = {t: i for t, i in half["model"]["vocab"].items() if not t.startswith("<0xE") or t in ("<0xE4>", "<0xE0>")}
    out["continuing_subword_prefix"] = trained(pre_tokenizers.Whitespace(), 400, alphabet=False, texts=few, limit_alphabet=150, unk_token="<unk>", first_tokens=["<unk>"], continuing_subword_prefix="##")
    out["end_of_word_suffix"] = trained(pre_tokenizers.WhitespaceSplit(), 400, alphabet=False, texts=few, limit_alphabet=150, unk_token="<unk>", first_tokens=["<unk>"], end_of_word_suffix="</w>")
    plain_variant("strip and replace in the decoder", decoder=state(decoders.Sequence([decoders.Strip("e", 2, 0), decoders.Replace(Regex("[aeiou]"), "V"), decoders.Fuse()])))
    plain_variant("ignore_merges of characters", pre_tokenizers.WhitespaceSplit(), {"ignore_merges": True, "merges": alike["model"]["merges"][::2]})
    return out


# --- results


def sums(file, texts):
    tokenizer = Tokenizer.from_str(json.dumps(file))
    out = array.array("I")
    for text in texts:
        ids = tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text, add_special_tokens=False).ids
        out.append(zlib.crc32(array.array("i", ids).tobytes()))
        out.append(zlib.crc32(tokenizer.decode(ids, skip_special_tokens=False).encode()))
    return out.tobytes()


def ranges(characters):
    out = []
    for c in sorted(map(ord, characters)):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def unicode_tables():
    every = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    names = "L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp Cc Cf Co Han Hiragana Katakana Hangul Latin Greek Cyrillic Arabic Hebrew Thai Devanagari"
    sets = {}
    for pattern, opposite in [*((rf"\p{{{n}}}", rf"\P{{{n}}}") for n in names.split()), *((f"\\{c}", f"\\{c.upper()}") for c in "swdh")]:
        sets[pattern] = ranges(normalizers.Replace(Regex(opposite), "").normalize_str(every))
    lower = normalizers.Lowercase()
    small = {f"{ord(c):x}": lower.normalize_str(c) for c in every if lower.normalize_str(c) != c and ord(c) > 127}
    marks = [0x334, 0x345, 0x300, 0x323, 0x3099]
    forms = {}
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        normalizer = getattr(normalizers, form)()
        forms[form] = []
        for block in range(0, 0x30000, 0x1000):
            text = "".join(f"{chr(c)}a{chr(c)}{chr(m)}{chr(m)}{chr(c)}" for c in range(block, block + 0x1000) if not 0xD800 <= c < 0xE000 for m in marks)
            forms[form].append(zlib.crc32(normalizer.normalize_str(text).encode()))
    return {"sets": sets, "small": small, "forms": forms}


def main():
    texts = make_texts()
    rows = "".join(json.dumps({"hex": t.hex()} if isinstance(t, bytes) else t) + "\n" for t in texts)
    (OUT / "families").mkdir(exist_ok=True)
    (OUT / "strings.jsonl.gz").write_bytes(gzip.compress(rows.encode(), 9, mtime=0))
    for name, file in families().items():
        (OUT / "families" / f"{name}.json").write_text(json.dumps(file, ensure_ascii=False, separators=(",", ":")) + "\n")
        (OUT / "families" / f"{name}.crc").write_bytes(sums(file, texts))
    files = components()
    (OUT / "components.json").write_text("{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(f, ensure_ascii=False, separators=(',', ':'))}" for n, f in files.items()) + "\n}\n")
    (OUT / "components.crc").write_bytes(b"".join(sums(file, texts[:COMPONENT_COUNT]) for _, file in sorted(files.items())))
    (OUT / "unicode.json").write_text(json.dumps(unicode_tables(), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
