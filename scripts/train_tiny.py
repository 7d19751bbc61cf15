#!/usr/bin/env python3
"""Train the small OPT model of models/opt-tiny from plain text, on a CPU.

    python3 scripts/train_tiny.py stories.txt --aux more.txt --aux old_books.txt \
        --val held_out.txt --work build/opt-tiny-run --out models/opt-tiny

The script does everything from text to a directory that both this project and
Hugging Face `transformers` can load:

  1. trains a byte-level BPE (GPT-2 split pattern) and writes it in OPT's file
     format: vocab.json and merges.txt, ids 0..3 = <s> <pad> </s> <unk>;
  2. trains an OPT decoder: pre-layernorm, learned positions with offset 2, ReLU
     feed-forward of 4*hidden, biases everywhere, tied embeddings, final layernorm;
  3. exports config.json, model.safetensors (fp16) and the tokenizer's files.

Texts inside a training file are separated by lines `<|endoftext|>`. The model
sees `</s> text </s> text ...`, so a prompt at inference is `</s>` + text, which
is what OPT's own tokenizer makes.

Training can be stopped (SIGTERM, SIGINT) and run again with the same command: it
goes on from --work/state.pt, which is written atomically every few minutes. The
learning rate is constant after a short warm-up and falls linearly to zero in the
last --decay-steps steps. To end earlier or later than --steps planned, write into
the file --work/decay the number of steps that the training shall go on: the rate
then falls to zero over these steps, from what it is.

    python3 scripts/train_tiny.py --eval models/opt-tiny --val held_out.txt

prints the bits per byte of an exported model on held-out text, in float32.

Needs: torch >= 2.4, numpy, tokenizers, safetensors.
"""
import argparse
import json
import math
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F

BOS = EOS = 2          # OPT starts and ends a text with </s>
PAD = 1
POS_OFFSET = 2         # OPT's position i is row i + 2 of embed_positions
IGNORE = -100
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
SEP = "<|endoftext|>"


# ----------------------------------------------------------------- files

def write_atomic(path, data):
    tmp = f"{path}.tmp{os.getpid()}"
    with open(tmp, "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode("utf-8"))
        f.flush()
        os.fsync(f.fileno())
    os.replace(tmp, path)


def write_json(path, obj):
    write_atomic(path, json.dumps(obj, indent=2, ensure_ascii=False) + "\n")


def read_texts(path):
    """The texts of a training file, without the blank space around them."""
    with open(path, encoding="utf-8") as f:
        texts = f.read().split(SEP)
    return [t.strip() for t in texts if t.strip()]


def read_stories(path):
    """The texts of a held-out file. Files without separators hold stories one
    after another; there a new story starts at a line that begins with 'Once '."""
    with open(path, encoding="utf-8") as f:
        raw = f.read()
    if SEP in raw:
        return [t.strip() for t in raw.split(SEP) if t.strip()]
    return [t.strip() for t in re.split(r"\n(?=Once )", raw) if t.strip()]


# ------------------------------------------------------------- tokenizer

def train_tokenizer(texts, size, out):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    data = json.loads(tok.to_str())["model"]
    vocab = sorted(data["vocab"].items(), key=lambda kv: kv[1])
    assert [t for t, _ in vocab[:4]] == SPECIALS and len(vocab) == size
    assert [i for _, i in vocab] == list(range(size))
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["merges"]]
    assert len(merges) == size - 4 - 256
    os.makedirs(out, exist_ok=True)
    write_atomic(f"{out}/vocab.json", json.dumps(dict(vocab), ensure_ascii=False))
    write_atomic(f"{out}/merges.txt", "#version: 0.2\n" + "\n".join(merges) + "\n")


def load_tokenizer(path):
    from tokenizers import Tokenizer, models, pre_tokenizers, decoders
    tok = Tokenizer(models.BPE.from_file(f"{path}/vocab.json", f"{path}/merges.txt"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    return tok


def encode_all(tok, texts):
    return [np.array(e.ids, dtype=np.int32) for e in tok.encode_batch(texts)]


# ------------------------------------------------------------------ data

class Source:
    """Endless windows from one set of texts, each window starting with </s>.

    Every pass takes the texts in a new order. Windows are filled with whole texts
    (best fit from a small pool), so most texts start near the window's start as
    they do at inference; a text longer than a window is cut into pieces. What no
    text fits is filled with padding that the loss ignores."""

    POOL = 256

    def __init__(self, texts, seed, cut_at=None):
        self.texts, self.rng, self.cut_at = texts, random.Random(seed), cut_at
        self.queue, self.passes, self.tokens = [], 0, 0

    def refill(self):
        order = list(range(len(self.texts)))
        self.rng.shuffle(order)
        docs = []
        for i in order:
            t = self.texts[i]
            if self.cut_at is None:
                docs.append(t)
            else:       # books: pieces of random length, other ones in each pass
                p = 0
                while p < len(t):
                    n = self.rng.randint(self.cut_at // 4, self.cut_at - 2)
                    docs.append(t[p:p + n])
                    p += n
        if self.cut_at is not None:
            self.rng.shuffle(docs)
        self.queue = docs + self.queue       # taken from the end
        self.passes += 1

    def window(self, size):
        """size + 1 tokens: </s> text </s> text </s> ... and padding."""
        row, room = [np.array([BOS], np.int32)], size
        while room > 8:
            if len(self.queue) < self.POOL:
                self.refill()
            q, best = self.queue, -1
            if len(row) == 1:
                best = len(q) - 1            # first text of a window: any
            else:
                for j in range(len(q) - self.POOL, len(q)):
                    n = len(q[j]) + 1
                    if n <= room and (best < 0 or n > len(q[best]) + 1):
                        best = j
                left = room if best < 0 else room - len(q[best]) - 1
                if left > max(32, room // 2):
                    best = len(q) - 1        # nothing fits well: cut a text
                elif best < 0:
                    break
            t = q.pop(best)
            if len(t) + 1 > room:
                rest = t[room:]
                if len(rest) > 16:
                    q.insert(max(0, len(q) - 2000), rest)
                row.append(t[:room])
                self.tokens += room
                room = 0
            else:
                row += [t, np.array([EOS], np.int32)]
                self.tokens += len(t) + 1
                room -= len(t) + 1
        row.append(np.full(room, PAD, np.int32))
        return np.concatenate(row)


class Mixture:
    """Batches of the main texts with a share of the auxiliary ones."""

    def __init__(self, main, aux, seed):
        self.main, self.aux = main, aux
        self.rng = random.Random(seed + 17)
        self.weights = [sum(map(len, a.texts)) for a in aux]

    def batch(self, rows, size, share):
        out = []
        for _ in range(rows):
            src = self.main
            if self.aux and self.rng.random() < share:
                src = self.rng.choices(self.aux, self.weights)[0]
            out.append(src.window(size))
        w = torch.from_numpy(np.stack(out)).long()
        x, y = w[:, :-1].contiguous(), w[:, 1:].contiguous()
        return x, y.masked_fill(y == PAD, IGNORE)


# ----------------------------------------------------------------- model

class Masks:
    """Dropout from one pool of random bits at random offsets: drawing fresh bits
    for every activation would take a good part of the time on a CPU."""

    def __init__(self, p, dtype, size=1 << 24):
        self.p, self.dtype, self.size = p, dtype, size
        if p > 0:
            self.pool = ((torch.rand(size) >= p).float() / (1 - p)).to(dtype)

    def refresh(self, n=1 << 20):
        if self.p > 0:
            o = random.randrange(self.size - n)
            self.pool[o:o + n] = ((torch.rand(n) >= self.p).float() / (1 - self.p)).to(self.dtype)

    def draw(self, *shape):
        n = math.prod(shape)
        o = random.randrange((self.size - n) // 64) * 64       # aligned
        return self.pool[o:o + n].view(*shape)


def attention(q, k, v, chunk=256, masks={}):
    """Causal attention; q, k, v are [batch, heads, tokens, head_dim]. Plain matrix
    products, by blocks of queries that skip the keys right of them: on CPUs in
    bfloat16 about twice as fast as scaled_dot_product_attention."""
    t, out = q.shape[2], []
    q = q * q.shape[-1] ** -0.5
    for i in range(0, t, chunk):
        j = min(i + chunk, t)
        mask = masks.get((i, j, q.dtype))
        if mask is None:
            mask = torch.full((j - i, j), -math.inf, dtype=q.dtype).triu(i + 1)
            masks[i, j, q.dtype] = mask
        s = q[:, :, i:j] @ k[:, :, :j].transpose(-1, -2) + mask
        out.append(torch.softmax(s, -1) @ v[:, :, :j])
    return out[0] if len(out) == 1 else torch.cat(out, 2)


class Block(torch.nn.Module):
    def __init__(self, d, heads, layers):
        super().__init__()
        P = torch.nn.Parameter
        self.heads = heads
        self.ln1 = torch.nn.LayerNorm(d)
        self.qkv_w = P(torch.randn(3 * d, d) * 0.5 * d ** -0.5)
        self.qkv_b = P(torch.zeros(3 * d))
        self.out_w = P(torch.randn(d, d) * 0.5 * d ** -0.5 / math.sqrt(2 * layers))
        self.out_b = P(torch.zeros(d))
        self.ln2 = torch.nn.LayerNorm(d)
        self.fc1_w = P(torch.randn(4 * d, d) * 0.5 * d ** -0.5)
        self.fc1_b = P(torch.zeros(4 * d))
        self.fc2_w = P(torch.randn(d, 4 * d) * 0.25 * d ** -0.5 / math.sqrt(2 * layers))
        self.fc2_b = P(torch.zeros(d))

    def forward(self, x, m1, m2, dt):
        b, t, d = x.shape
        h = self.ln1(x).to(dt)
        qkv = F.linear(h, self.qkv_w.to(dt), self.qkv_b.to(dt))
        q, k, v = qkv.view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = attention(q, k, v)
        a = a.transpose(1, 2).reshape(b, t, d)
        a = F.linear(a, self.out_w.to(dt), self.out_b.to(dt))
        x = x + (a if m1 is None else a * m1)
        h = self.ln2(x).to(dt)
        h = F.relu(F.linear(h, self.fc1_w.to(dt), self.fc1_b.to(dt)))
        h = F.linear(h, self.fc2_w.to(dt), self.fc2_b.to(dt))
        return x + (h if m2 is None else h * m2)


class OPT(torch.nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        d, n = cfg["hidden"], cfg["layers"]
        self.tok = torch.nn.Parameter(torch.randn(cfg["vocab"], d) * 0.02)
        self.pos = torch.nn.Parameter(torch.randn(cfg["positions"] + POS_OFFSET, d) * 0.02)
        self.blocks = torch.nn.ModuleList(Block(d, cfg["heads"], n) for _ in range(n))
        self.ln = torch.nn.LayerNorm(d)

    def logits(self, x, masks=None, dt=torch.float32):
        t = x.shape[1]
        h = F.embedding(x, self.tok) + self.pos[POS_OFFSET:POS_OFFSET + t]
        if masks is not None:
            h = h * masks[0]
        for i, blk in enumerate(self.blocks):
            m1, m2 = (None, None) if masks is None else masks[1 + 2 * i:3 + 2 * i]
            h = blk(h, m1, m2, dt)
        return F.linear(self.ln(h).to(dt), self.tok.to(dt))

    def forward(self, x, y, masks=None, dt=torch.float32):
        lg = self.logits(x, masks, dt)
        return F.cross_entropy(lg.view(-1, lg.shape[-1]).float(), y.view(-1),
                               ignore_index=IGNORE)


# ------------------------------------------------------------- optimizer

def orthogonalize(g, steps=5):
    """Newton-Schulz iteration of the Muon optimizer, on a batch of matrices."""
    a, b, c = 3.4445, -4.7750, 2.0315
    flip = g.shape[-2] > g.shape[-1]
    x = (g.mT if flip else g).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return (x.mT if flip else x).float()


class Muon:
    """Muon for the matrices inside the blocks (q, k and v each on its own)."""

    def __init__(self, params, lr, momentum=0.95, wd=0.1):
        self.params, self.lr, self.momentum, self.wd = params, lr, momentum, wd
        self.buf = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, i, scale):
        """The step of parameter i alone, so that several threads can share the work."""
        lr, p, m = self.lr * scale, self.params[i], self.buf[i]
        m.lerp_(p.grad, 1 - self.momentum)
        u = p.grad.lerp(m, self.momentum)
        rows, cols = p.shape
        split = 3 if rows == 3 * cols else 1
        u = orthogonalize(u.view(split, rows // split, cols))
        p.mul_(1 - lr * self.wd)
        p.add_(u.reshape(rows, cols), alpha=-lr * max(1, rows / split / cols) ** 0.5)


# ---------------------------------------------------------------- export

HF_CONFIG = {
    "_remove_final_layer_norm": False, "activation_dropout": 0.0,
    "activation_function": "relu", "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0, "bos_token_id": BOS, "do_layer_norm_before": True,
    "dropout": 0.1, "enable_bias": True, "eos_token_id": EOS, "init_std": 0.02,
    "layer_norm_elementwise_affine": True, "layerdrop": 0.0, "model_type": "opt",
    "pad_token_id": PAD, "tie_word_embeddings": True, "torch_dtype": "float16",
    "use_cache": True,
}


def export(model, out, work):
    from safetensors.torch import save
    cfg = model.cfg
    d = cfg["hidden"]
    os.makedirs(out, exist_ok=True)
    w = {"model.decoder.embed_tokens.weight": model.tok,
         "model.decoder.embed_positions.weight": model.pos,
         "model.decoder.final_layer_norm.weight": model.ln.weight,
         "model.decoder.final_layer_norm.bias": model.ln.bias}
    for i, b in enumerate(model.blocks):
        p = f"model.decoder.layers.{i}."
        for j, n in enumerate("qkv"):
            w[f"{p}self_attn.{n}_proj.weight"] = b.qkv_w[j * d:(j + 1) * d]
            w[f"{p}self_attn.{n}_proj.bias"] = b.qkv_b[j * d:(j + 1) * d]
        w[f"{p}self_attn.out_proj.weight"], w[f"{p}self_attn.out_proj.bias"] = b.out_w, b.out_b
        w[f"{p}self_attn_layer_norm.weight"], w[f"{p}self_attn_layer_norm.bias"] = b.ln1.weight, b.ln1.bias
        w[f"{p}fc1.weight"], w[f"{p}fc1.bias"] = b.fc1_w, b.fc1_b
        w[f"{p}fc2.weight"], w[f"{p}fc2.bias"] = b.fc2_w, b.fc2_b
        w[f"{p}final_layer_norm.weight"], w[f"{p}final_layer_norm.bias"] = b.ln2.weight, b.ln2.bias
    w = {k: v.detach().half().contiguous().clone() for k, v in w.items()}
    assert all(torch.isfinite(v).all() for v in w.values())
    for f in ("vocab.json", "merges.txt"):
        with open(f"{work}/{f}", "rb") as s:
            write_atomic(f"{out}/{f}", s.read())
    write_json(f"{out}/config.json", dict(sorted({
        **HF_CONFIG, "vocab_size": cfg["vocab"], "hidden_size": d,
        "word_embed_proj_dim": d, "ffn_dim": 4 * d, "num_hidden_layers": cfg["layers"],
        "num_attention_heads": cfg["heads"],
        "max_position_embeddings": cfg["positions"]}.items())))
    write_json(f"{out}/generation_config.json", {
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    write_json(f"{out}/special_tokens_map.json", names)
    write_json(f"{out}/tokenizer_config.json", {
        "add_bos_token": True, "add_prefix_space": False, **names, "errors": "replace",
        "clean_up_tokenization_spaces": False, "model_max_length": cfg["positions"],
        "tokenizer_class": "GPT2Tokenizer"})
    write_atomic(f"{out}/model.safetensors", save(w, metadata={"format": "pt"}))


def load_exported(path):
    from safetensors.torch import load_file
    with open(f"{path}/config.json") as f:
        c = json.load(f)
    w = {k: v.float() for k, v in load_file(f"{path}/model.safetensors").items()}
    model = OPT({"vocab": c["vocab_size"], "hidden": c["hidden_size"],
                 "layers": c["num_hidden_layers"], "heads": c["num_attention_heads"],
                 "positions": c["max_position_embeddings"]})
    g = lambda n: w["model.decoder." + n]
    sd = {"tok": g("embed_tokens.weight"), "pos": g("embed_positions.weight"),
          "ln.weight": g("final_layer_norm.weight"), "ln.bias": g("final_layer_norm.bias")}
    for i in range(c["num_hidden_layers"]):
        l, s = f"layers.{i}.", f"blocks.{i}."
        for kind, k in (("weight", "w"), ("bias", "b")):
            sd[s + f"qkv_{k}"] = torch.cat([g(f"{l}self_attn.{n}_proj.{kind}") for n in "qkv"])
            sd[s + f"out_{k}"] = g(f"{l}self_attn.out_proj.{kind}")
            sd[s + f"fc1_{k}"], sd[s + f"fc2_{k}"] = g(f"{l}fc1.{kind}"), g(f"{l}fc2.{kind}")
            sd[s + f"ln1.{kind}"] = g(f"{l}self_attn_layer_norm.{kind}")
            sd[s + f"ln2.{kind}"] = g(f"{l}final_layer_norm.{kind}")
    model.load_state_dict(sd)
    return model


# ------------------------------------------------------------ evaluation

def bits_per_byte(model, tok, stories, pool, dt=torch.float32, max_rows=16):
    """Each story is </s> text </s>; all tokens but the first are predicted. One
    longer than the position table is scored in windows that each start with </s>
    and repeat half a window as context."""
    size = model.cfg["positions"]
    rows, nbytes = [], 0
    for s, ids in zip(stories, encode_all(tok, stories)):
        nbytes += len(s.encode("utf-8"))
        t = [int(i) for i in ids] + [EOS]
        p, first = 0, 0                  # window starts at p, scores from `first` on
        while first < len(t):
            part = t[p:p + size]
            y = [IGNORE] * (first - p) + part[first - p:]
            rows.append(([BOS] + part[:-1], y))
            first = p + len(part)
            p = first - size // 2
    rows.sort(key=lambda r: len(r[0]))

    @torch.no_grad()
    def score(i):
        group = rows[i:i + max_rows]
        n = max(len(x) for x, _ in group)
        x = torch.tensor([x + [PAD] * (n - len(x)) for x, _ in group])
        y = torch.tensor([y + [IGNORE] * (n - len(y)) for _, y in group])
        lg = model.logits(x, None, dt).float()
        return (F.cross_entropy(lg.view(-1, lg.shape[-1]), y.view(-1),
                                ignore_index=IGNORE, reduction="sum").item(),
                int((y != IGNORE).sum()))

    nll, count = map(sum, zip(*pool.map(score, range(0, len(rows), max_rows))))
    return nll / math.log(2) / nbytes, nll / count, count, nbytes


# -------------------------------------------------------------- training

def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    ap.add_argument("text", nargs="*", help="main training text(s)")
    ap.add_argument("--aux", action="append", default=[], help="further text, a smaller share")
    ap.add_argument("--val", help="held-out text")
    ap.add_argument("--out", default="models/opt-tiny", help="where the model is exported")
    ap.add_argument("--work", default="build/opt-tiny-run", help="checkpoints and logs")
    ap.add_argument("--eval", metavar="DIR", help="only print bits per byte of an exported model")
    ap.add_argument("--vocab", type=int, default=4096)
    ap.add_argument("--hidden", type=int, default=256)
    ap.add_argument("--layers", type=int, default=6)
    ap.add_argument("--heads", type=int, default=4)
    ap.add_argument("--positions", type=int, default=512)
    ap.add_argument("--steps", type=int, default=5500, help="planned steps, decay included")
    ap.add_argument("--decay-steps", type=int, default=1300)
    ap.add_argument("--warmup", type=int, default=60)
    ap.add_argument("--batch-tokens", type=int, default=8192)
    ap.add_argument("--part-tokens", type=int, default=1024,
                    help="tokens of the batch that a thread works on at a time")
    ap.add_argument("--long-every", type=int, default=4,
                    help="every n-th step uses full-length windows, the others half-length ones")
    ap.add_argument("--muon-lr", type=float, default=0.02)
    ap.add_argument("--adam-lr", type=float, default=3e-3)
    ap.add_argument("--weight-decay", type=float, default=0.1)
    ap.add_argument("--dropout", type=float, default=0.15)
    ap.add_argument("--aux-share", type=float, nargs=3, default=[0.4, 0.25, 0.08],
                    metavar=("START", "END", "DECAY"),
                    help="share of auxiliary text at the start, before and in the decay")
    ap.add_argument("--eval-every", type=int, default=100)
    ap.add_argument("--eval-stories", type=int, default=120, help="stories in a quick evaluation")
    ap.add_argument("--export-every", type=int, default=300)
    ap.add_argument("--save-seconds", type=float, default=300)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--fp32", action="store_true", help="no bfloat16 (for CPUs without it)")
    ap.add_argument("--max-seconds", type=float, default=0, help="stop after this long (for timing)")
    a = ap.parse_args()

    # One worker thread per core, each with its own part of the batch: fewer waits
    # than splitting every single operation over the cores.
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(a.threads, initializer=torch.set_num_threads, initargs=(1,))
    if a.eval:
        model, tok = load_exported(a.eval), load_tokenizer(a.eval)
        stories = read_stories(a.val)
        bpb, nats, n, nb = bits_per_byte(model, tok, stories, pool)
        print(f"{bpb:.4f} bits per byte ({nats:.4f} nats per token, {n} tokens, "
              f"{nb} bytes, {len(stories)} stories)")
        return
    if not a.text:
        ap.error("no training text given")

    os.makedirs(a.work, exist_ok=True)
    random.seed(a.seed)
    torch.manual_seed(a.seed)
    dt = torch.float32 if a.fp32 else torch.bfloat16
    main_texts = [t for p in a.text for t in read_texts(p)]
    aux_texts = [read_texts(p) for p in a.aux]
    if not os.path.exists(f"{a.work}/merges.txt"):
        # the main text four times: the vocabulary should fit it best
        train_tokenizer(main_texts * 4 + [t for x in aux_texts for t in x], a.vocab, a.work)
    tok = load_tokenizer(a.work)
    main_src = Source(encode_all(tok, main_texts), a.seed)
    aux_src = [Source(encode_all(tok, x), a.seed + 1 + i, cut_at=a.positions)
               for i, x in enumerate(aux_texts)]
    mix = Mixture(main_src, aux_src, a.seed)
    stories = read_stories(a.val) if a.val else []
    quick = random.Random(0).sample(stories, min(a.eval_stories, len(stories)))

    model = OPT({"vocab": a.vocab, "hidden": a.hidden, "layers": a.layers,
                 "heads": a.heads, "positions": a.positions})
    matrices = [p for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2]
    tables = [model.tok, model.pos]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    muon = Muon(matrices, a.muon_lr, wd=a.weight_decay)
    adam = torch.optim.AdamW([{"params": tables, "weight_decay": 0.01},
                              {"params": vectors, "weight_decay": 0.0}],
                             lr=a.adam_lr, betas=(0.9, 0.98), eps=1e-10)
    masks = Masks(a.dropout, dt)
    step, seen = 0, 0
    decay_from, decay_len, decay_top = a.steps - a.decay_steps, a.decay_steps, 1.0
    state_path, decay_path = f"{a.work}/state.pt", f"{a.work}/decay"

    if os.path.exists(state_path):
        s = torch.load(state_path, map_location="cpu", weights_only=False)
        model.load_state_dict(s["model"])
        muon.buf = s["muon"]
        adam.load_state_dict(s["adam"])
        step, seen = s["step"], s["seen"]
        if s["decaying"]:
            decay_from, decay_len, decay_top = s["decay"]
        for src, (q, r, p, n) in zip([main_src] + aux_src, s["data"]):
            src.queue, src.passes, src.tokens = q, p, n
            src.rng.setstate(r)
        mix.rng.setstate(s["mix"])
        random.seed(a.seed + step)

    def save():
        tmp = state_path + ".tmp"
        torch.save({"model": model.state_dict(), "muon": muon.buf, "adam": adam.state_dict(),
                    "step": step, "seen": seen, "decay": (decay_from, decay_len, decay_top),
                    "decaying": step >= decay_from,
                    "data": [(x.queue, x.rng.getstate(), x.passes, x.tokens)
                             for x in [main_src] + aux_src],
                    "mix": mix.rng.getstate()}, tmp)
        os.replace(tmp, state_path)

    def log(line):
        print(line, flush=True)
        with open(f"{a.work}/status.txt", "a") as f:
            f.write(line + "\n")

    stop = []
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stop.append(1))

    nparams = sum(p.numel() for p in model.parameters())
    log(f"# {nparams} parameters, {sum(map(len, main_src.texts))} tokens of main text, "
        f"{[sum(map(len, s.texts)) for s in aux_src]} of auxiliary text, from step {step}")
    params = list(model.parameters())

    def work(job):
        loss = model(*job, dt)
        return loss.item(), torch.autograd.grad(loss, params)

    t0 = last_save = t_log = time.time()
    loss_sum, loss_n, tok_log = 0.0, 0, 0

    while step < decay_from + decay_len and not stop:
        if os.path.exists(decay_path):
            with open(decay_path) as f:
                n = int(f.read())
            os.remove(decay_path)
            if step >= decay_from:       # already falling: go on from here
                decay_top *= 1 - (step - decay_from) / decay_len
            decay_from, decay_len = step, n
            log(f"# decay from x{decay_top:.2f} at step {step}, {n} steps")
        # learning rate and mixture of this step
        scale = min(1.0, (step + 1) / a.warmup)
        if step >= decay_from:
            scale *= decay_top * (1 - (step - decay_from) / decay_len)
            share = a.aux_share[2]
        else:
            f = step / max(1, decay_from)
            share = a.aux_share[0] * (1 - f) + a.aux_share[1] * f
        size = a.positions if step % a.long_every == 0 else a.positions // 2
        rows = a.batch_tokens // size
        x, y = mix.batch(rows, size, share)
        masks.refresh()
        part = max(1, a.part_tokens // size)
        jobs = [(x[i:i + part], y[i:i + part],
                 [masks.draw(part, size, a.hidden) for _ in range(1 + 2 * a.layers)]
                 if a.dropout > 0 else None) for i in range(0, rows, part)]
        results = list(pool.map(work, jobs))
        loss = sum(l for l, _ in results) / len(results)
        for p, *g in zip(params, *(g for _, g in results)):
            p.grad = sum(g[1:], g[0]).div_(len(g))
        torch.nn.utils.clip_grad_norm_(tables + vectors, 1.0)
        for g in adam.param_groups:
            g["lr"] = a.adam_lr * scale
        adam.step()
        list(pool.map(lambda i: muon.step(i, scale), range(len(matrices))))
        step += 1
        n = int((y != IGNORE).sum())
        seen, tok_log = seen + n, tok_log + n
        loss_sum, loss_n = loss_sum + loss, loss_n + 1

        if step % 20 == 0:
            print(f"step {step} loss {loss_sum / loss_n:.4f} "
                  f"{tok_log / (time.time() - t_log):.0f} tok/s", flush=True)
        done = step >= decay_from + decay_len
        if stories and (step % a.eval_every == 0 or done):
            speed = tok_log / (time.time() - t_log)
            bpb, nats, _, _ = bits_per_byte(model, tok, stories if done else quick, pool, dt)
            log(f"step {step} val {bpb:.4f} bpb ({nats:.4f} nats/token) train {loss_sum / loss_n:.4f} "
                f"seen {seen / 1e6:.2f}M tokens, {main_src.tokens / sum(map(len, main_src.texts)):.2f} "
                f"passes, aux {share:.2f}, lr x{scale:.2f}, {speed:.0f} tok/s, "
                f"{time.time() - t0:.0f} s")
            loss_sum, loss_n, tok_log, t_log = 0.0, 0, 0, time.time()
        if time.time() - last_save > a.save_seconds or done or stop:
            save()
            last_save = time.time()
        if step % a.export_every == 0 or done:
            export(model, a.out, a.work)
        if a.max_seconds and time.time() - t0 > a.max_seconds:
            break
    print(f"stopped at step {step}")


if __name__ == "__main__":
    main()
