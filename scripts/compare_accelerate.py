#!/usr/bin/env python3
"""Throughput of Hugging Face Accelerate on an OPT that does not fit the GPU, to put beside flexgen's at the same limit.

    python3 scripts/compare_accelerate.py --model opt-6.7b --gpu-mem-gb 16 --prompt-len 512 --gen-len 32 --seconds 120

Random fp16 weights of the model's shape (nothing is downloaded) are dispatched by Accelerate: whole decoder layers to the GPU as far
as they may, the others to the CPU, from where each is copied to the GPU whenever it is its turn. The KV cache is always on
the GPU. How much of the limit the weights should take is therefore a choice; three are tried (85%, 50%, none of it), each
with the batch size doubled until the GPU is full. A try that would last beyond --seconds is given up. The best try counts:
tokens generated a second, the prefill included.

With --disk DIR the weights are bfloat16 in a file of DIR, from where each layer is read whenever it is its turn (on a CPU with --device
cpu; float32 would be twice as much to read). Behind every token the file leaves the page cache, as it would where memory is short;
the process's peak is printed. For flexgen beside it: bench --gpu-mem and --cpu-mem with half of that each, which reads around
the page cache.

The limit is PyTorch's own for what it allocates; the CUDA context (about 0.5 GB) comes on top, to the peer's advantage. GB are 2^30
bytes. --device cpu without --disk runs the same code without a GPU, where nothing is ever full, to try the script.

Needs torch, transformers and accelerate (made with 2.9.1, 4.57.1 and 1.15.0).
"""
import argparse
import gc
import json
import os
import resource
import sys
import time

import torch
from accelerate import cpu_offload, dispatch_model, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from transformers import LogitsProcessor, LogitsProcessorList, OPTConfig, OPTForCausalLM

SHAPES = {  # layers, hidden size, heads; post-norm opt-350m is left out
    "opt-125m": (12, 768, 12), "opt-1.3b": (24, 2048, 32), "opt-2.7b": (32, 2560, 32), "opt-6.7b": (32, 4096, 32),
    "opt-13b": (40, 5120, 40), "opt-30b": (48, 7168, 56), "opt-66b": (64, 9216, 72), "opt-175b": (96, 12288, 96)}
GB = 2**30
SHARES = (0.85, 0.5, 0.0)  # of the limit, for weights


class Forget(LogitsProcessor):
    """Behind every token the files leave the page cache."""

    def __init__(self, folder):
        self.files = [os.path.join(path, f) for path, _, files in os.walk(folder) for f in files] if folder else []

    def __call__(self, input_ids, scores):
        for name in self.files:
            fd = os.open(name, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        return scores


def empty_model(name, dtype):
    l, h1, nh = SHAPES[name]
    config = OPTConfig(num_hidden_layers=l, hidden_size=h1, num_attention_heads=nh, ffn_dim=4 * h1, word_embed_proj_dim=h1)
    with init_empty_weights():
        return OPTForCausalLM(config).to(dtype).eval()


def model_on_disk(name, folder, device):
    """Its layers are in files of the folder, the rest in memory."""
    path = os.path.join(folder, "checkpoint")
    if not os.path.exists(path):
        child = os.fork()  # so that what it takes to make the weights is not counted
        if not child:
            make_model(name, device, torch.bfloat16).save_pretrained(path, max_shard_size="200MB")
            os._exit(0)
        os.waitpid(child, 0)
    model = empty_model(name, torch.bfloat16)
    layers = {f"model.decoder.layers.{j}": "disk" for j in range(SHAPES[name][0])}
    rest = {f"model.decoder.{part}": device for part in ("embed_tokens", "embed_positions", "final_layer_norm")}
    model.tie_weights()
    load_checkpoint_and_dispatch(model, path, device_map={**rest, **layers, "lm_head": device}, dtype=torch.bfloat16,
                                 offload_folder=os.path.join(folder, "offload"))
    model.generation_config.eos_token_id = None
    return model


def make_model(name, device, dtype=torch.float16):
    """Random weights on the CPU, made on `device` tensor by tensor, since a CPU takes minutes over billions of them."""
    model = empty_model(name, dtype)
    model.to_empty(device="cpu")
    model.tie_weights()  # by to_empty the head lost its table
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                p.fill_(float(key.endswith("weight")))
            else:
                p.copy_(torch.randn(p.shape, dtype=p.dtype, device=device) * 0.02)
    model.generation_config.eos_token_id = None  # nothing stops early
    return model


def dispatch(model, device, weight_bytes):
    """Returns the model with its hooks, and the bytes of weights that stay on the GPU."""
    if device == "cpu" or not weight_bytes:
        return cpu_offload(model, execution_device=torch.device(device)), 0
    device_map = infer_auto_device_map(model, max_memory={0: int(weight_bytes), "cpu": "9999GB"}, dtype=torch.float16,
                                       no_split_module_classes=["OPTDecoderLayer"])
    model = dispatch_model(model, device_map, main_device=0)
    return model, sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type == "cuda")


def first_batch(model, args, resident):
    """A power of two with which the KV cache takes up to half of what the weights leave; smaller ones are only slower."""
    config = model.config
    kv = 4 * config.num_hidden_layers * config.hidden_size * (args.prompt_len + args.gen_len)
    room, batch = args.gpu_mem_gb * GB - resident, 1
    while 2 * batch * kv <= room / 2:
        batch *= 2
    return batch


def generate(model, args, batch, deadline):
    """Seconds for one batch; None when the deadline came first. Raises OutOfMemoryError."""
    ids = torch.randint(4, model.config.vocab_size, (batch, args.prompt_len), device=args.device)
    if args.device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=args.gen_len, max_new_tokens=args.gen_len,
                             do_sample=False, use_cache=True, max_time=max(deadline - time.monotonic(), 0.1),
                             logits_processor=LogitsProcessorList([Forget(args.disk)]))
    tokens = out[:, args.prompt_len:].cpu()  # waits
    took = time.perf_counter() - begin
    return took if tokens.shape[1] == args.gen_len else None


def collect():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def one_try(model, args, batch, deadline):
    """Seconds, or "full" or "late"."""
    try:
        took = generate(model, args, batch, deadline)
    except torch.cuda.OutOfMemoryError:
        took = "full"
    collect()  # not before the exception, which holds the tensors, is gone
    return took or "late"


def try_batches(model, args, share, resident, deadline, tries):
    batch, tried = args.batch or min(first_batch(model, args, resident), args.max_batch), set()
    while 1 <= batch <= args.max_batch and batch not in tried and time.monotonic() < deadline:
        took = one_try(model, args, batch, deadline)
        rate = batch * args.gen_len / took if isinstance(took, float) else None
        tried.add(batch)
        tries.append({"weights_share": share, "weights_gpu_gb": round(resident / GB, 2), "batch": batch, "throughput": rate,
                      "seconds": round(took, 3) if rate else None, "note": "" if rate else took})
        print(f"weights {resident / GB:5.1f} GB on the GPU, batch {batch:4d}: "
              f"{f'{took:7.2f} s, {rate:8.2f} token/s' if rate else took}", file=sys.stderr, flush=True)
        if took == "late" or args.batch:
            return
        batch = batch * 2 if rate else batch // 2


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", choices=SHAPES, default="opt-6.7b")
    p.add_argument("--gpu-mem-gb", type=float, default=16)
    p.add_argument("--prompt-len", type=int, default=512)
    p.add_argument("--gen-len", type=int, default=32)
    p.add_argument("--seconds", type=float, default=120, help="for everything, the weights' making included")
    p.add_argument("--max-batch", type=int, default=1024)
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--disk", metavar="DIR", help="the layers are read from files in it")
    p.add_argument("--batch", type=int, help="no other is tried")
    p.add_argument("--json", default="-")
    args = p.parse_args()
    begin = time.monotonic()
    torch.manual_seed(0)
    if args.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(args.gpu_mem_gb * GB / total, 1.0))
    tries = []
    shares = SHARES if args.device == "cuda" and not args.disk else (0.0,)
    for i, share in enumerate(shares):
        left = begin + args.seconds - time.monotonic()
        deadline = time.monotonic() + left / (len(shares) - i)  # what one placement leaves over, the next ones have
        if left <= 0:
            break
        if args.disk:
            model, resident = model_on_disk(args.model, args.disk, args.device), 0
        else:
            model, resident = dispatch(make_model(args.model, args.device), args.device, share * args.gpu_mem_gb * GB)
        try_batches(model, args, share, resident, deadline, tries)
        del model
        collect()
    best = max((t for t in tries if t["throughput"]), key=lambda t: t["throughput"], default=None)
    result = {"throughput": best["throughput"] if best else None, "batch": best["batch"] if best else None,
              "seconds": best["seconds"] if best else None, "weights_gpu_gb": best["weights_gpu_gb"] if best else None,
              "model": args.model, "gpu_mem_gb": args.gpu_mem_gb, "prompt_len": args.prompt_len, "gen_len": args.gen_len,
              "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB, "tries": tries}
    text = json.dumps(result, indent=1) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
    else:
        with open(args.json, "w", encoding="utf-8") as f:
            f.write(text)
    if not best:
        sys.exit("compare_accelerate.py: no try ended in time; give more --seconds")


if __name__ == "__main__":
    main()
