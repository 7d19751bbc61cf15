#!/usr/bin/env python3
"""Time flexgen beside Hugging Face transformers and CTranslate2, on the same model, prompts and cores, and compare tokens.

    python3 scripts/compare_transformers.py [--flexgen ./flexgen] [--threads N] [--runs 3] [--max-ratio 1.3]

A random checkpoint of OPT-125M's size is written as fp16 safetensors to a temporary directory (--keep DIR keeps it and uses it
again). Both sides generate GEN tokens greedily for BATCH prompts of PROMPT random tokens, all in memory: transformers in
float32 (the same, fp16-rounded weights), flexgen with its fp16 weights and cache. The runs alternate, the model is loaded and
warmed up beforehand, and no sequence stops early. Where CTranslate2 is installed it takes part in float32 and in int8, and flexgen
with 4-bit weights too. Printed: the medians of prefill (the prompt and the first token), decode (the other tokens) and total,
and the totals of flexgen over those of its peers. With --max-ratio the exit status is 1 where that over transformers' is larger.

Tokens: a vocabulary of one piece a byte turns any text into known ids, so that `flexgen generate` and transformers can complete the
same prompts. fp16 rounding of the cache may flip a near tie; a sequence is compared up to the first token that differs, and
the lead that the reference's token had there is shown, which must be small.

Needs torch and transformers (made with 2.9.1 and 4.57.1), and takes ctranslate2 (4.8.5) where it is there.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from transformers import LogitsProcessor, LogitsProcessorList, OPTConfig, OPTForCausalLM

try:
    import ctranslate2
except ImportError:
    ctranslate2 = None

EOS = 2
TIE = 5e-3  # a lead of this share of the largest |logit| may be lost to fp16 rounding


def byte_symbols():
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, extra = {}, 256
    for b in range(256):
        symbols[b] = chr(b if b in plain else extra)
        extra += b not in plain
    return symbols


def make_checkpoint(path, config):
    """A random OPT; linear weights scaled up from the usual init, under which every greedy completion repeats one token."""
    torch.manual_seed(1)
    model = OPTForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("proj.weight", "fc1.weight", "fc2.weight")):
                p.mul_(2.0)
    model.half().save_pretrained(path, safe_serialization=True)
    ids = random.Random(2).sample(range(4, config.vocab_size), 256)
    vocab = {"<s>": 0, "<pad>": 1, "</s>": EOS, "<unk>": 3, **{s: ids[b] for b, s in byte_symbols().items()}}
    first, second = byte_symbols()[0xff], byte_symbols()[0xfe]  # which no UTF-8 has: a merge for those who want one
    vocab[first + second] = next(i for i in range(4, config.vocab_size) if i not in ids)
    vocab.update({f"<{i}>": i for i in set(range(config.vocab_size)) - set(vocab.values())})  # peers want all of it
    with open(os.path.join(path, "vocab.json"), "w", encoding="utf-8") as f:
        json.dump(vocab, f)
    with open(os.path.join(path, "merges.txt"), "w", encoding="utf-8") as f:
        f.write(f"#version: 0.2\n{first} {second}\n")


class Clock(LogitsProcessor):
    """Called with the logits of every step: the first call is the end of the prefill."""

    def __call__(self, input_ids, scores):
        self.first = self.first or time.perf_counter()
        return scores


def transformers_run(model, ids, gen_len):
    """(prefill, decode, total) seconds, the tokens, and each one's lead over the second best."""
    clock = Clock()
    clock.first = None
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=gen_len, do_sample=False, use_cache=True,
                             logits_processor=LogitsProcessorList([clock]))
    end = time.perf_counter()
    assert out.shape[1] == ids.shape[1] + gen_len
    return (clock.first - begin, end - clock.first, end - begin), out


def open_ctranslate2(path, kind, threads):
    """The same model, converted once; kind is "float32" or "int8"."""
    to = os.path.join(path, f"ctranslate2-{kind}")
    if not os.path.exists(to):
        ctranslate2.converters.TransformersConverter(path).convert(to, quantization=kind)
    return ctranslate2.Generator(to, compute_type=kind, inter_threads=1, intra_threads=threads)


def ctranslate2_run(generator, tokens, gen_len):
    """(prefill, decode, total) seconds; the prefill's are those of a run that makes one token."""
    def seconds(n):
        begin = time.perf_counter()
        results = generator.generate_batch(tokens, max_length=n, min_length=n, beam_size=1, include_prompt_in_result=False)
        assert all(len(r.sequences_ids[0]) == n for r in results)
        return time.perf_counter() - begin
    prefill, total = seconds(1), seconds(gen_len)
    return prefill, total - prefill, total


def flexgen_bench(args, path, *more):
    command = [args.flexgen, "bench", "--model", path, "--prompt-len", str(args.prompt_len), "--gen-len", str(args.gen_len),
               "--gpu-batch-size", str(args.batch), "--num-gpu-batches", "1", "--threads", str(args.threads),
               "--percent", "100", "0", "100", "0", "100", "0", "--json", "-", *more]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(command)}: exit {run.returncode}\n{run.stderr}")
    result = json.loads(run.stdout)
    return result["prefill_s"], result["decode_s"], result["total_s"]


def flexgen_tokens(args, path, texts):
    prompts = os.path.join(path, "prompts.jsonl")
    with open(prompts, "w") as f:
        f.writelines(json.dumps({"prompt": t}) + "\n" for t in texts)
    command = [args.flexgen, "generate", "--model", path, "--prompts", prompts, "--max-tokens", str(args.gen_len),
               "--threads", str(args.threads)]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(command)}: exit {run.returncode}\n{run.stderr}")
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert sorted(r["id"] for r in rows) == list(range(len(texts)))
    return [r["tokens"] for r in sorted(rows, key=lambda r: r["id"])]


def compare_tokens(model, ids, ours, out):
    """Prints how many sequences agree to the end (or to </s>); returns the number of differences that no rounding explains."""
    with torch.inference_mode():
        logits = model(out).logits[:, ids.shape[1] - 1:-1]
    same = wrong = 0
    for r, tokens in enumerate(ours):
        theirs = out[r, ids.shape[1]:].tolist()
        if EOS in theirs:
            theirs = theirs[:theirs.index(EOS)]
        if tokens == theirs:
            same += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(tokens, theirs)) if a != b), min(len(tokens), len(theirs)))
        step = logits[r, at]
        lead = (step.max() - step[tokens[at] if at < len(tokens) else EOS]).item() / step.abs().max().item()
        wrong += lead > TIE
        print(f"  prompt {r}: first difference at token {at}, where the reference leads by {lead:.1e} of the largest logit"
              f"{'' if lead > TIE else ' (a tie in fp16)'}")
    distinct = len({t for tokens in ours for t in tokens})
    print(f"tokens: {same} of {len(ours)} completions are identical ({distinct} different tokens in them), {wrong} wrong")
    return wrong


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--flexgen", default="./flexgen")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--prompt-len", type=int, default=128)
    p.add_argument("--gen-len", type=int, default=32)
    p.add_argument("--max-ratio", type=float)
    p.add_argument("--keep", metavar="DIR", help="where the checkpoint is made, or found")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        path = args.keep or temporary
        if not os.path.exists(os.path.join(path, "model.safetensors")):
            make_checkpoint(path, OPTConfig())  # the defaults are opt-125m
        model = OPTForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None  # nothing stops early
        vocab = json.load(open(os.path.join(path, "vocab.json"), encoding="utf-8"))
        symbols, rng = byte_symbols(), random.Random(3)
        texts = ["".join(chr(rng.randrange(32, 127)) for _ in range(args.prompt_len - 1)) for _ in range(args.batch)]
        ids = torch.tensor([[EOS] + [vocab[symbols[ord(c)]] for c in t] for t in texts])

        _, out = transformers_run(model, ids, args.gen_len)  # warms up, and is the reference
        wrong = compare_tokens(model, ids, flexgen_tokens(args, path, texts), out)
        systems = {"transformers": lambda: transformers_run(model, ids, args.gen_len)[0], "flexgen": lambda: flexgen_bench(args, path)}
        if ctranslate2:
            by_id = {i: t for t, i in vocab.items()}
            words = [[by_id[i] for i in row] for row in ids.tolist()]
            for kind in ("float32", "int8"):
                peer = open_ctranslate2(path, kind, args.threads)
                ctranslate2_run(peer, words, args.gen_len)  # warms up
                systems[f"CTranslate2 {kind}"] = lambda peer=peer: ctranslate2_run(peer, words, args.gen_len)
            systems["flexgen 4-bit"] = lambda: flexgen_bench(args, path, "--compress-weight")
        runs = {name: [] for name in systems}
        for run in range(args.runs):
            for name, take in systems.items():
                runs[name].append(take())
            print(f"run {run + 1}: " + ", ".join(f"{name} {t[-1][2]:.2f} s" for name, t in runs.items()), file=sys.stderr)
    print(f"{args.batch} prompts of {args.prompt_len} tokens, {args.gen_len} new, {args.threads} threads; medians of {args.runs}")
    print(f"{'':20}{'prefill s':>12}{'decode s':>12}{'total s':>12}{'new tokens/s':>14}")
    took = {name: [statistics.median(column) for column in zip(*t)] for name, t in runs.items()}
    for name, t in took.items():
        print(f"{name:20}{t[0]:12.3f}{t[1]:12.3f}{t[2]:12.3f}{args.batch * args.gen_len / t[2]:14.1f}")
    for name, peer in (("flexgen", "transformers"), ("flexgen", "CTranslate2 float32"), ("flexgen 4-bit", "CTranslate2 int8")):
        if peer in took:
            ratios = [took[name][i] / took[peer][i] for i in range(3)]
            print(f"{f'{name} / {peer}':44}" + "".join(f"{r:8.2f}" for r in ratios))
    ratio = took["flexgen"][2] / took["transformers"][2]
    if wrong or (args.max_ratio and not ratio <= args.max_ratio):
        sys.exit(1)


if __name__ == "__main__":
    main()
