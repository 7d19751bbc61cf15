#!/usr/bin/env python3
"""Makes the golden data of tests/test_tokenizer.c with Hugging Face `tokenizers`.

    python3 scripts/make_tokenizer_golden.py                        the committed sample

trains a byte-level BPE of about a thousand pieces on the lines below, writes it in OPT's file format to
tests/golden/tokenizer/ (ids 0..3 = <s> <pad> </s> <unk>, the other ids shuffled, with gaps) and a few hundred lines
with their ids to tests/golden/tokenizer.jsonl: {"text": ..., "words": [...], "ids": [...]}, or {"hex": ...} where the text
has a NUL; words are the bytes of each word.

    python3 scripts/make_tokenizer_golden.py --model models/opt-tiny --lines 20000 --text FILE --base build/big
    TOKENIZER_GOLDEN=build/big build/test_tokenizer             a large comparison, with any OPT vocabulary

writes build/big.jsonl and copies vocab.json and merges.txt to build/big/. Half of the lines come from the text files where
some are given, the others are made up to be nasty. Of the special pieces </s> and <pad> are added ones, as in the published OPTs.

    python3 scripts/make_tokenizer_golden.py --forms           with transformers 4, and then with transformers 5

makes tests/golden/forms/: directories as people have them, with a vocabulary of 320 pieces. Each version makes the
directories that it saves itself, and asserts that it reads those of the other one as that has written to their
golden.jsonl: the ids that end a text, and then a line {"text", "ids", "back"} for each prompt; back is what the ids are
decoded to without special pieces.

Needs: tokenizers (0.23.3 made the committed files); with --forms transformers (4.57.6 and 5.24.0).
"""
import argparse
import json
import os
import random
import shutil

from tokenizers import ByteLevelBPETokenizer

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
SENTENCES = """The weights of the next layer are loaded while this layer computes.
A small computer can run a large model if it has the patience to wait for its disk.
It's the reader's book, and they'll say that we've done what we'd promised; I'm sure you're right.
She didn't know whether he could've come, so she couldn't have said they weren't there.
IT'S LOUD, DON'T SHOUT! I'LL TRY; WE'RE DONE; YOU'VE WON; HE'D KNOW; I'M OUT.
In 1987 there were 1,234,567 trees; by 2024 only 89% were left, which is 3.14159 times fewer than hoped.
for (int i = 0; i < n; i++) { sum += x[i] * w[i]; } /* the inner loop */
def forward(self, x):\n\treturn self.w @ x + self.b  # a layer
https://example.org/path/to?query=1&other=two#part and someone@example.com
Le garçon a mangé une crêpe à l'île, où l'été fut très doux, naïvement.
Der große Bär läuft über die schöne Straße, während die Vögel zwitschern.
El niño pequeño soñó con un pingüino en la montaña. ¿Qué pasó? ¡Nada!
Żółta łódź płynie powoli; příliš žluťoučký kůň; čeština má háčky.
Быстрая лиса перепрыгнула через ленивую собаку в тёмном лесу.
Η γρήγορη αλεπού πήδηξε πάνω από το τεμπέλικο σκυλί.
השועל המהיר קפץ מעל הכלב העצלן בבוקר.
الثعلب السريع يقفز فوق الكلب الكسول في الصباح ١٢٣٤٥.
तेज़ लोमड़ी आलसी कुत्ते के ऊपर कूद गई १२३।
快い狐がのろまな犬を飛び越えた。カタカナとひらがな。
敏捷的棕色狐狸跳过了懒狗，今天天气很好。
빠른 갈색 여우가 게으른 개를 뛰어넘었다.
สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ
🦊 jumps over 🐶🐶 and 👩‍👩‍👧‍👦 smiles 😀😃😄 👍🏽 🇫🇷🇯🇵 ❤️""".replace("\\n", "\n").replace("\\t", "\t").split("\n")
WORDS = [word for sentence in SENTENCES for word in sentence.split()]

# every Unicode blank, the ones that look like blanks and are none, joiners, marks, directions, controls
BLANKS = [" ", "  ", "\t", "\n", "\r", "\r\n", "\v", "\f", "\x85", "\xa0", "\u1680", *map(chr, range(0x2000, 0x200B)),
          "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"]
ODD = ["\u180e", "\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u0301", "\u0308\u0323", "\u20dd", "\ufe0f",
       "\u202e", "\u200f", "\u061c", "\u2066", "\u2069", "\U000e0041", "\ue000", "\uffff", "\U0010ffff", "\ufffd",
       *map(chr, range(1, 32)), "\x7f", "\x80", "\x9f"]
TOUCHY = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "''", "'", "’s", " 's", "' s", "'sx", "</s>", "<s>",
          "<unk>", "<pad>", "<|endoftext|>", "½", "²", "Ⅷ", "٣", "①", "_", "__init__", "Ġ", "Ċ", "#version",
          "ǅ", "ª", "ﬁ", "İ", "ẞ"]


def any_character(rng):
    return chr(rng.choice([rng.randrange(0x80, 0x800), rng.randrange(0x800, 0xD800), rng.randrange(0xE000, 0x32400)]))


def nasty_line(rng):
    """A made-up line: a few parts, each of a kind that has broken some tokenizer."""
    def part():
        kind = rng.randrange(12)
        if kind < 3:
            return rng.choice(WORDS)
        if kind == 3:
            return rng.choice(BLANKS)
        if kind == 4:
            return rng.choice([" ", " ", "\t", "\n", rng.choice(BLANKS)]) * rng.choice([2, 3, 4, 7, 16, 40])
        if kind == 5:
            return "".join(rng.choice(BLANKS) for _ in range(rng.randint(2, 6)))
        if kind == 6:
            return rng.choice(ODD)
        if kind == 7:
            return rng.choice(TOUCHY)
        if kind == 8:
            return str(rng.randrange(10 ** rng.randint(1, 20)))
        if kind == 9:
            return "".join(chr(rng.randrange(33, 127)) for _ in range(rng.randint(1, 8)))
        if kind == 10:  # any characters, often letters
            return "".join(any_character(rng) for _ in range(rng.randint(1, 4)))
        return rng.choice(WORDS)[:3] * rng.randint(1, 6)
    return "".join(part() + rng.choice(["", "", " "]) for _ in range(rng.randint(1, 9)))


def special_lines(rng):
    """Lines that are there whatever the seed: empty, one character, a NUL, very long words."""
    lines = ["", " ", "  ", "\n", "a", "é", "🦊", "\0", "a\0b \0\0 c", " \u180e a", "\u1680a",
             "x\u3000\u3000y", "a \n b", "\r\n\r\nx"]
    lines += SENTENCES + [blank + "a" + blank * 3 + "b" + blank * 2 for blank in BLANKS]
    lines += ["the" * 300, "a" * 700, " " * 500 + "x", "\n" * 300, "1" * 400, "!" * 300, "é" * 300, "狐" * 200]
    return lines + ["\u200d" * 100, "".join(rng.choice("etaoinshrdlu") for _ in range(1500))]


def train_small(base, rng):
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=False)
    lines = SENTENCES * 4 + [" ".join(rng.choice(WORDS) for _ in range(12)) for _ in range(400)]
    tokenizer.train_from_iterator(lines, vocab_size=1000, min_frequency=2, show_progress=False)
    os.makedirs(base, exist_ok=True)
    tokenizer.save_model(base)
    with open(f"{base}/vocab.json", encoding="utf-8") as f:
        pieces = list(json.load(f))
    ids = [i for i in range(4, len(pieces) + 24) if not 300 <= i < 320]  # a gap, as OPT's ids have one
    rng.shuffle(ids)  # OPT's ids do not follow the merges either
    vocab = {piece: i for i, piece in enumerate(SPECIALS)} | dict(zip(pieces, ids))
    with open(f"{base}/vocab.json", "w", encoding="utf-8") as f:
        json.dump(dict(sorted(vocab.items(), key=lambda item: item[1])), f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")


# ------------------------------------------------------------- directories as people have them

FORMS = "tests/golden/forms"
PARTS = ["</s>", "<pad>", "<s>", "<unk>", " Zorgon", "Zorgon", "<img>", "<end>", "<both>", "the<", "ab", " ", "  ", "\n", "\t", "\u3000",
         "the", " the", "'s", "1987", "狐", "é", "!", "x"]


def put(where, **files):
    for name, content in files.items():
        with open(f"{where}/{name}.json", "w", encoding="utf-8") as f:
            json.dump(content, f, ensure_ascii=False)
            f.write("\n")


def fresh(name, source=None, leave=(), **files):
    """A directory with a model's sizes, a vocabulary and more files, or with those of another one but for some."""
    where = f"{FORMS}/{name}"
    shutil.rmtree(where, ignore_errors=True)
    os.makedirs(where)
    for file in os.listdir(source) if source else ():
        if file not in leave and file != "golden.jsonl":
            shutil.copyfile(f"{source}/{file}", f"{where}/{file}")
    put(where, config={"model_type": "opt", "num_hidden_layers": 1, "hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 1,
                       "vocab_size": 330, "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": 2})
    put(where, **files)
    return where


def saved(name, tokenizer, **files):
    """A directory in which transformers has saved a tokenizer; what it has written is put on one line each."""
    where = fresh(name)
    tokenizer.save_pretrained(where)
    for file in os.listdir(where):
        if file.endswith(".json"):
            with open(f"{where}/{file}", encoding="utf-8") as f:
                files.setdefault(file[:-len(".json")], json.load(f))
    put(where, **files)


def published():
    """The files that a published OPT has."""
    def added(text):
        return {"content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    names = ("unk_token", "bos_token", "eos_token")
    where = fresh("published", tokenizer_config={
        "errors": "replace", **{name: {**added("</s>"), "__type": "AddedToken"} for name in names}, "pad_token": "<pad>",
        "add_prefix_space": False, "add_bos_token": True, "special_tokens_map_file": None, "tokenizer_class": "GPT2Tokenizer"},
        special_tokens_map={**{name: added("</s>") for name in names}, "pad_token": "<pad>"})
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=False)
    tokenizer.train_from_iterator(SENTENCES * 4, vocab_size=316, min_frequency=2, show_progress=False)
    tokenizer.save_model(where)
    with open(f"{where}/vocab.json", encoding="utf-8") as f:
        put(where, vocab={piece: i for i, piece in enumerate(SPECIALS + list(json.load(f)))})
    return where


def make_forms(transformers):
    """Makes the directories of this version."""
    old = transformers.__version__.startswith("4.")
    base = published() if old else f"{FORMS}/published"

    def opened(where=base, slow=False, **changes):
        """The tokenizer of a directory, after changes of its configuration."""
        here = fresh("changed", where)
        with open(f"{here}/tokenizer_config.json", encoding="utf-8") as f:
            config = json.load(f)
        os.remove(f"{here}/special_tokens_map.json")  # it would undo the changes
        put(here, tokenizer_config={**config, **changes})
        tokenizer = (transformers.GPT2Tokenizer if slow else transformers.AutoTokenizer).from_pretrained(here)
        shutil.rmtree(here)
        return tokenizer

    def grown(tokenizer):
        """The same with added tokens."""
        tokenizer.add_tokens([" Zorgon", transformers.AddedToken("<both>", lstrip=True, rstrip=True, normalized=False),
                              transformers.AddedToken("the<", normalized=True), "<img>!"])
        more = "additional_special_tokens" if old else "extra_special_tokens"
        tokenizer.add_special_tokens({more: ["<img>", transformers.AddedToken("<end>", rstrip=True, normalized=False)]})
        return tokenizer

    if not old:
        saved("saved-5", opened(), generation_config={"eos_token_id": [2, 0, 5]})
        saved("grown-5", grown(opened()))
        saved("bos-5", opened(bos_token="<s>"))
        saved("no-bos-5", opened(add_bos_token=False))
        return
    saved("saved-4", opened(), generation_config={"eos_token_id": 202, "do_sample": True})  # a newline, as models of captions have
    saved("grown-4", grown(opened()))
    saved("slow-4", grown(opened(slow=True)))
    saved("bos-4", opened(bos_token="<s>"))
    fresh("no-bos", base, tokenizer_config={"add_bos_token": False, "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"})
    # as versions before 4.34 saved added tokens, and tokenizers before 0.20 the merges
    fresh("legacy", base, added_tokens={" Zorgon": 321, "<img>": 320, "x<": 322}, special_tokens_map={
        "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}, tokenizer_config={
            "add_bos_token": True, "bos_token": "<s>", "additional_special_tokens": ["<img>"], "tokenizer_class": "GPT2Tokenizer"})
    where = fresh("merges-as-strings", f"{FORMS}/grown-4", leave=("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"))
    with open(f"{where}/tokenizer.json", encoding="utf-8") as f:
        whole = json.load(f)
    whole["model"]["merges"] = [" ".join(pair) for pair in whole["model"]["merges"]]
    put(where, tokenizer=whole)
    # two vocabularies: that of tokenizer.json counts
    where = fresh("two-vocabularies", f"{FORMS}/saved-4")
    put(where, vocab={piece: i for i, piece in enumerate(SPECIALS + sorted(whole["model"]["vocab"])[4:])})


def golden_lines(transformers, where):
    """What this version makes of a directory."""
    rng = random.Random(where)
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    found = transformers.AutoConfig.from_pretrained(where)
    if os.path.exists(f"{where}/generation_config.json"):
        found = transformers.GenerationConfig.from_pretrained(where)
    ends = found.eos_token_id
    yield {"eos": ends if isinstance(ends, list) else [ends]}
    for _ in range(30):
        text = "".join(rng.choice(PARTS) for _ in range(rng.randint(1, 12)))
        ids = tokenizer(text)["input_ids"]
        yield {"text": text, "ids": ids, "back": tokenizer.decode(ids, skip_special_tokens=True)}


def forms():
    import transformers
    make_forms(transformers)
    for name in sorted(os.listdir(FORMS)):
        if name == "grown-5" and transformers.__version__.startswith("4."):
            continue  # version 4 fails: it expects a dictionary of extra_special_tokens
        path, old = f"{FORMS}/{name}/golden.jsonl", None
        lines = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"
                        for line in golden_lines(transformers, f"{FORMS}/{name}"))
        if os.path.exists(path):
            with open(path, encoding="utf-8", newline="\n") as f:
                assert f.read() == lines, f"{name}: transformers {transformers.__version__} reads it in another way"
        else:
            with open(path, "w", encoding="utf-8", newline="\n") as f:
                f.write(lines)
    print(f"{len(os.listdir(FORMS))} directories, read by transformers {transformers.__version__}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="tests/golden/tokenizer", help="writes BASE.jsonl, BASE/{vocab.json,merges.txt}")
    parser.add_argument("--model", help="a directory with vocab.json and merges.txt; default: train a small one")
    parser.add_argument("--text", nargs="*", default=[], help="files whose lines are used beside the made-up ones")
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--forms", action="store_true", help="makes tests/golden/forms, and nothing else")
    args = parser.parse_args()
    if args.forms:
        return forms()
    rng = random.Random(args.seed)
    if args.model:
        os.makedirs(args.base, exist_ok=True)
        for name in ("vocab.json", "merges.txt"):
            shutil.copyfile(f"{args.model}/{name}", f"{args.base}/{name}")
    else:
        train_small(args.base, rng)
    tokenizer = ByteLevelBPETokenizer(f"{args.base}/vocab.json", f"{args.base}/merges.txt", add_prefix_space=False)
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    lines = special_lines(rng)
    for path in args.text:
        with open(path, encoding="utf-8", newline="\n") as f:
            some = f.read().split("\n")
        lines += rng.sample(some, min(len(some), args.lines // 2 // len(args.text)))
    lines += [nasty_line(rng) for _ in range(args.lines - len(lines))]
    with open(f"{args.base}.jsonl", "w", encoding="utf-8", newline="\n") as f:
        for line in lines:
            text = {"hex": line.encode().hex()} if "\0" in line else {"text": line}
            text["words"] = [len(word) for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(line)]  # a symbol is a byte
            text["ids"] = tokenizer.encode(line).ids
            f.write(json.dumps(text, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{len(lines)} lines, {tokenizer.get_vocab_size()} pieces")


if __name__ == "__main__":
    main()
