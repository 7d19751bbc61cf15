#!/usr/bin/env python3
"""Write tests/golden/: two small random OPT checkpoints and what Hugging Face computes with them, in float32.

    python3 scripts/make_golden.py [tests/golden]

opt-pre is built like every published OPT but opt-350m: layernorm before, tied embeddings, a final layernorm; it is
saved in three shards with an index. opt-post is built like opt-350m: layernorm after, a narrow token table with
project_in and project_out, no final layernorm; it is one file. Both are saved in fp16, and the float32 model that makes
the golden data has the same, rounded weights. All parameters are random, biases and layernorms too, because zeros
and ones hide mistakes. FFN and vocabulary are no round numbers on purpose.

golden.bin, all little-endian and without padding:

    int32   sequences, vocab, greedy
    then for each sequence:
    int32   n, rows
    int32   ids[n]               the prompt; ids[0] is 2, </s>
    int32   tokens[greedy]       greedy continuation; never 2
    float32 logits[rows][vocab]  of the last `rows` positions of the prompt (n: all of them, 1: the last)

Prompts are drawn again until, at every step of the greedy continuation, the best token leads the second best by at
least MARGIN of the largest |logit|: more than fp16 KV costs, so that any correct engine must find the same tokens.

    python3 scripts/make_golden.py --perplexity models/opt-tiny models/opt-tiny/stories.txt

prints the perplexities that tests/test_eval.c compares with: the text with </s> in front, cut into disjoint windows, each
given to the model by itself, the mean over all tokens but the first of each window.

Needs torch and transformers (made with 2.9.1 and 4.57.1; the perplexities with 2.15.0 and 5.23.0).
"""
import math
import os
import shutil
import struct
import sys

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import OPTConfig, OPTForCausalLM

GREEDY = 32
MARGIN = 6e-3
PROMPTS = [(1, 1), (5, 5), (33, 33), (70, 1)]  # length, rows of logits
COMMON = dict(vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, ffn_dim=192,
              max_position_embeddings=128, dropout=0.0, attention_dropout=0.0, bos_token_id=2, eos_token_id=2, pad_token_id=1)
WINDOWS = [(512, 4), (128, 32)]  # tokens of a window, how many of them
MODELS = {
    "opt-pre": (dict(), "150KB"),
    "opt-post": (dict(word_embed_proj_dim=32, do_layer_norm_before=False), "10MB"),
}


def random_model(config, seed):
    """A model whose every parameter is random and exact in fp16."""
    torch.manual_seed(seed)
    model = OPTForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "layer_norm.weight" in name:
                p.normal_(1.0, 0.2)
            elif p.dim() == 1:
                p.normal_(0.0, 0.1)
            else:
                p.normal_(0.0, 0.15)
            p.copy_(p.half().float())
    return model


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def greedy(model, prompt, eos):
    """The continuation without a cache, or None where a step is too close to call or ends the text."""
    ids = list(prompt)
    for _ in range(GREEDY):
        last = logits_of(model, ids)[-1]
        best, second = last.topk(2).values.tolist()
        if best - second < MARGIN * last.abs().max().item() or last.argmax().item() == eos:
            return None
        ids.append(last.argmax().item())
    return ids[len(prompt):]


def sequences(model, vocab, eos, generator):
    """[(prompt, tokens, logits)], or None where the shortest prompt, of which there is only one, is too close to call."""
    result = []
    for length, rows in PROMPTS:
        tokens = None
        while tokens is None:
            prompt = [eos] + torch.randint(3, vocab, (length - 1,), generator=generator).tolist()
            tokens = greedy(model, prompt, eos)
            if tokens is None and length == 1:
                return None
        result.append((prompt, tokens, logits_of(model, prompt)[-rows:]))
    return result


def write_golden(path, seqs, vocab):
    with open(path, "wb") as f:
        f.write(struct.pack("<3i", len(seqs), vocab, GREEDY))
        for prompt, tokens, logits in seqs:
            f.write(struct.pack(f"<{2 + len(prompt) + GREEDY}i", len(prompt), len(logits), *prompt, *tokens))
            f.write(struct.pack(f"<{logits.numel()}f", *logits.flatten().tolist()))


@torch.no_grad()
def print_perplexities(directory, path):
    tokenizer = ByteLevelBPETokenizer(os.path.join(directory, "vocab.json"), os.path.join(directory, "merges.txt"))
    model = OPTForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with open(path, encoding="utf-8", newline="") as f:
        ids = [model.config.eos_token_id] + tokenizer.encode(f.read()).ids
    for window, count in WINDOWS:
        rows = torch.tensor(ids[: window * count]).view(count, window)
        logp = torch.log_softmax(model(input_ids=rows, use_cache=False).logits.double(), -1)[:, :-1]
        print(window, count, math.exp(-logp.gather(2, rows[:, 1:, None]).mean().item()))


def main():
    if sys.argv[1:2] == ["--perplexity"]:
        return print_perplexities(*sys.argv[2:])
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "..", "tests", "golden")
    for name, (options, shard) in MODELS.items():
        config = OPTConfig(**COMMON, **options)
        seed, seqs = 0, None
        while seqs is None:
            seed += 1
            model = random_model(config, seed)
            seqs = sequences(model, config.vocab_size, config.eos_token_id, torch.Generator().manual_seed(seed))
        where = os.path.join(out, name)
        shutil.rmtree(where, ignore_errors=True)
        os.makedirs(where)
        write_golden(os.path.join(where, "golden.bin"), seqs, config.vocab_size)
        model.half().save_pretrained(where, safe_serialization=True, max_shard_size=shard)
        os.remove(os.path.join(where, "generation_config.json"))
        size = sum(os.path.getsize(os.path.join(where, f)) for f in os.listdir(where))
        print(f"{name}: seed {seed}, {size} bytes, largest |logit| {max(l.abs().max().item() for _, _, l in seqs):.2f}")


if __name__ == "__main__":
    main()
