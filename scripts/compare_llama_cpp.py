#!/usr/bin/env python3
"""Time flexgen beside llama.cpp, on models of the same size, with the same number of threads.

    python3 scripts/compare_llama_cpp.py [--flexgen ./flexgen] [--threads N] [--runs 5] [--keep DIR]

llama.cpp has no OPT. It runs a random GPT-2 with as many numbers as OPT-125M, of the same shapes; only the function of its MLP differs (GELU
instead of ReLU). The GPT-2 is written as two GGUF files to a temporary directory (--keep DIR keeps them and uses them again): in F16, and
with all matrices in Q4_0, the token table included, which is the head, too. flexgen runs `bench --model opt-125m` as it is, and with
--compress-weight --compress-head. Packed numbers take 4.5 bits on both sides. The KV cache is F16 on both.

Both generate greedily for random prompts: 16 of 128 tokens and 32 more, and one of 32 tokens and 64 more. Nothing ends early, because the
files have no vocabulary and so no token that ends a text. Logits are computed for the last token of a prompt only. The runs alternate; both
have their models loaded, and llama.cpp has run once before. It works with its own defaults, but for the largest batch (--ubatch). Printed:
the medians of prefill (the prompts and the first token), decode (the other tokens) and total, and flexgen's times over llama.cpp's.

Needs gguf, numpy and llama-cpp-python (made with 0.19.0, 2.4.6 and 0.3.36). The latter must be compiled for this processor:
CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import gguf
import llama_cpp
import numpy as np

LAYERS, H1, H2, HEADS, VOCAB, POSITIONS = 12, 768, 3072, 12, 50272, 2050  # OPT-125M's
NUMBERS = 125_239_296  # of OPT-125M, embeddings included
TYPES = {"F16": gguf.GGMLQuantizationType.F16, "Q4_0": gguf.GGMLQuantizationType.Q4_0}
FLAGS = {"F16": [], "Q4_0": ["--compress-weight", "--compress-head"]}  # flexgen's, for the same width
CASES = [(16, 128, 32), (1, 32, 64)]  # prompts, tokens of each, new tokens


# ---------------------------------------------------------------------------------------------------------------
# llama.cpp's side
# ---------------------------------------------------------------------------------------------------------------

def gpt2_tensors():
    """(name, shape) of every tensor, as llama.cpp names them. The head is the token table, so it has no tensor of its own."""
    def linear(name, rows, columns):
        return [(f"{name}.weight", (rows, columns)), (f"{name}.bias", (rows,))]

    def norm(name):
        return [(f"{name}.weight", (H1,)), (f"{name}.bias", (H1,))]
    tensors = [("token_embd.weight", (VOCAB, H1)), ("position_embd.weight", (POSITIONS, H1))] + norm("output_norm")
    for j in range(LAYERS):
        tensors += norm(f"blk.{j}.attn_norm") + linear(f"blk.{j}.attn_qkv", 3 * H1, H1) + linear(f"blk.{j}.attn_output", H1, H1)
        tensors += norm(f"blk.{j}.ffn_norm") + linear(f"blk.{j}.ffn_up", H2, H1) + linear(f"blk.{j}.ffn_down", H1, H2)
    return tensors


def make_gguf(path, kind):
    """A random GPT-2 whose matrices have this type; the rest is float32, as llama.cpp's own converter leaves it."""
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(H1)
    writer.add_feed_forward_length(H2)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(VOCAB)
    rng, numbers = np.random.default_rng(1), 0
    for name, shape in gpt2_tensors():
        values = rng.standard_normal(shape, dtype=np.float32) * 0.02
        if name.endswith("norm.weight"):
            values += 1
        numbers += values.size
        if len(shape) == 1 or name.startswith("position"):
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, TYPES[kind]), raw_dtype=TYPES[kind])
    assert numbers == NUMBERS
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@llama_cpp.llama_log_callback
def silence(level, text, user_data):
    pass


class LlamaCpp:
    """One model with a context for `batch` prompts of s tokens and n new ones each."""

    def __init__(self, path, batch, s, n, args):
        self.batch, self.s, self.n = batch, s, n
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = batch * (s + n), batch
        params.n_batch, params.n_ubatch = batch * s, args.ubatch
        params.n_threads = params.n_threads_batch = args.threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F16
        self.context = self.model and llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit(f"compare_llama_cpp.py: llama.cpp cannot open {path}")
        assert llama_cpp.llama_model_n_params(self.model) >= NUMBERS
        self.prompts = self.tokens_of(s)
        ids = np.random.default_rng(2).integers(0, VOCAB, batch * s)
        for i, token in enumerate(ids):
            self.set(self.prompts, i, token, i % s, i // s, i % s == s - 1)
        self.step = self.tokens_of(1)

    def tokens_of(self, each):
        """Room for so many tokens of each prompt."""
        tokens = llama_cpp.llama_batch_init(self.batch * each, 0, 1)
        tokens.n_tokens = self.batch * each
        return tokens

    @staticmethod
    def set(tokens, i, token, position, sequence, wants_logits):
        tokens.token[i], tokens.pos[i], tokens.logits[i] = token, position, wants_logits
        tokens.n_seq_id[i], tokens.seq_id[i][0] = 1, sequence

    def best(self, tokens):
        """Computes these tokens, and returns the most probable next token of each prompt."""
        if llama_cpp.llama_decode(self.context, tokens):
            sys.exit("compare_llama_cpp.py: llama_decode failed")
        logits = llama_cpp.llama_get_logits(self.context)  # (batch, VOCAB): of the tokens that want them
        return np.ctypeslib.as_array(logits, (self.batch, VOCAB)).argmax(axis=1)

    def run(self):
        """(prefill, decode, total) seconds."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        begin = time.perf_counter()
        best = self.best(self.prompts)
        first = time.perf_counter()
        for i in range(1, self.n):
            for b in range(self.batch):
                self.set(self.step, b, best[b], self.s + i - 1, b, True)
            best = self.best(self.step)
        end = time.perf_counter()
        return first - begin, end - first, end - begin


# ---------------------------------------------------------------------------------------------------------------
# Both
# ---------------------------------------------------------------------------------------------------------------

def flexgen_run(args, batch, s, n, flags):
    """(prefill, decode, total) seconds."""
    command = [args.flexgen, "bench", "--model", "opt-125m", "--prompt-len", str(s), "--gen-len", str(n), "--gpu-batch-size", str(batch),
               "--num-gpu-batches", "1", "--threads", str(args.threads), "--percent", "100", "0", "100", "0", "100", "0", "--json", "-", *flags]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(command)}: exit {run.returncode}\n{run.stderr}")
    result = json.loads(run.stdout)
    return result["prefill_s"], result["decode_s"], result["total_s"]


def compare(args, path, kind, batch, s, n):
    """A row: the medians of both in turns."""
    peer = LlamaCpp(path, batch, s, n, args)
    peer.run()  # warms up
    theirs, ours = [], []
    for _ in range(args.runs):
        theirs.append(peer.run())
        ours.append(flexgen_run(args, batch, s, n, FLAGS[kind]))
    theirs, ours = ([statistics.median(column) for column in zip(*runs)] for runs in (theirs, ours))
    print(f"{kind:5}{f'{batch} x ({s} + {n})':16}" + "".join(f"{t:9.3f}" for t in theirs) + "   " + "".join(f"{t:9.3f}" for t in ours) +
          "   " + "".join(f"{o / t:7.2f}" for o, t in zip(ours, theirs)), flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--flexgen", default="./flexgen")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--ubatch", type=int, default=512, help="tokens that llama.cpp computes at once")
    p.add_argument("--keep", metavar="DIR", help="where the GGUF files are made, or found")
    args = p.parse_args()
    llama_cpp.llama_log_set(silence, None)
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as temporary:
        print(f"{args.threads} threads, medians of {args.runs}, seconds: prefill, decode and total of llama.cpp and of flexgen, and flexgen / llama.cpp")
        for kind in TYPES:
            path = os.path.join(args.keep or temporary, f"gpt2-{kind}.gguf")
            if not os.path.exists(path):
                make_gguf(path, kind)
            for case in CASES:
                compare(args, path, kind, *case)


if __name__ == "__main__":
    main()
