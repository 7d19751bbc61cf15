#!/usr/bin/env python3
"""schedules.py [PART...]: the three schedules, overlap and the sim against the clock, as tables. Standard library only.

  diagonal    diagonal beside zig-zag in the same memory, weights over a slowed link
  trend       the same on the sim, for finer and finer batches
  prefill     the same with long prompts and short outputs, where pacing adds no batch
  lengths     prompts and outputs of all lengths: diagonal, zig-zag, zig-zag padded to the longest
  overlap     overlap on and off, copies as long as computing; the whole beside the slowest lane
  sim         the host device with slowed links beside the sim that is told the same numbers

All by default, in about half an hour on two cores. Run it on an idle machine, in the repository, after `make` and
`make build/bench_host`. --flexgen FILE names another program."""
import argparse, json, os, re, statistics, subprocess, sys, tempfile

FLEXGEN = "./flexgen"
TMP = tempfile.TemporaryDirectory()
GPU_ONLY = "100 0 100 0 100 0"
STREAMED = "--percent 0 100 0 100 100 0 --cpu-cache-compute"  # weights over the link; the CPU attends to its pages


def bench(flags, device="host"):
    """One run of flexgen bench; its JSON."""
    out = os.path.join(TMP.name, "run.json")
    command = [FLEXGEN, "bench", "--device", device, "--offload-dir", os.environ.get("TMPDIR", "/var/tmp"), "--json", out]
    r = subprocess.run(command + flags.split(), capture_output=True, text=True)
    if r.returncode:
        sys.exit(f"{' '.join(command)} {flags}: {r.stderr.splitlines()[-1] if r.stderr else r.returncode}")
    with open(out) as f:
        return json.load(f)


def median_of(runs, key="total_s"):
    return sorted(runs, key=lambda r: r[key])[len(runs) // 2]


def cpu_bytes(run):
    return int(run["tiers"]["CPU"]["planned_bytes"])


def row(*cells):
    print("| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)


def head(title, *columns):
    print(f"\n{title}\n")
    row(*columns)
    row(*["---"] * len(columns))


# ---------------------------------------------------------------------------------------------------------------
# The machine, for the sim
# ---------------------------------------------------------------------------------------------------------------

def write_hardware(h, links):
    for link in ("ctog", "gtoc", "dtoc", "ctod"):
        h[link + "_bdw"] = links.get(link, 8e9 if link in ("ctog", "gtoc") else 1e9)
    path = os.path.join(TMP.name, "host.json")
    with open(path, "w") as f:
        json.dump(h, f)
    return path


rates = {}


def host_hardware(links, model="opt-125m", s=64, gbs=8):
    """A hardware file for this machine: links as they are slowed; attention as build/bench_host measures it; products at
    the rates that make the sim agree with one run of the host device that has everything in memory, at this batch size."""
    if "attend" not in rates:
        text = subprocess.run(["build/bench_host"], capture_output=True, text=True, check=True).stdout
        find = lambda pattern: statistics.median(float(x) for x in re.findall(pattern, text))
        rates["attend"], rates["tiles"] = find(r"attend .*?([\d.]+) GB/s   plain") * 1e9, find(r"prefill attention .*?([\d.]+) GFLOP/s") * 1e9
    h = {"name": "this machine", "gmem": 1e12, "cmem": 1e12, "nmem": 1e12, "shared_cores": True, "op_s": 1e-5, "mm_flops_p": 1e11,
         "mm_flops_g": 1e11, "bmm_flops_p": rates["tiles"], "bmm_flops_g": rates["attend"], "cpu_flops": rates["attend"]}
    key = model, s, gbs
    if key not in rates:
        flags = f"--model {model} --prompt-len {s} --gen-len 24 --gpu-batch-size {gbs} --num-gpu-batches 3 --percent {GPU_ONLY} "
        host = [bench(flags) for _ in range(3)]
        for _ in range(6):
            sim = bench(flags + "--hardware " + write_hardware(h, links), "sim")
            h["mm_flops_p"] *= sim["prefill_s"] / median_of(host, "prefill_s")["prefill_s"]
            h["mm_flops_g"] *= sim["decode_s"] / median_of(host, "decode_s")["decode_s"]
        rates[key] = h["mm_flops_p"], h["mm_flops_g"]
    h["mm_flops_p"], h["mm_flops_g"] = rates[key]
    return write_hardware(h, links)


def link_flag(links):
    return "--link " + ",".join(f"{k}={v:.0f}" for k, v in links.items())


# ---------------------------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------------------------

def compare_diagonal(model, s, n, gbs, Z, blocks, links):
    """Zig-zag with Z batches sets the limits; diagonal fills the same ones."""
    common = f"--model {model} --prompt-len {s} --gen-len {n} --gpu-batch-size {gbs} {STREAMED} "
    hardware = f"--hardware {host_hardware(links, model, s, gbs)} "
    limit = cpu_bytes(bench(common + hardware + f"--num-gpu-batches {Z}", "sim"))
    runs = {}
    for schedule in ("zigzag", "diagonal"):
        flags = common + f"--num-prompts {Z * gbs * blocks} --cpu-mem {limit} --gpu-mem 4G --schedule {schedule} "
        runs[schedule] = bench(flags + link_flag(links)), bench(flags + hardware, "sim")
    head(f"{model}, {s} + {n} tokens, GPU batches of {gbs}, {blocks} blocks of {Z} batches, {link_flag(links)}, CPU tier of "
         f"{limit / 2**20:.1f} MiB", "asked for", "is", "batches", "sweeps", "host s", "token/s", "sim s")
    for schedule, (host, sim) in runs.items():
        row(schedule, host["schedule"], host["num_gpu_batches"], int(host["sweeps"]), host["total_s"], host["throughput"], sim["total_s"])
    (z, zs), (d, ds) = runs["zigzag"], runs["diagonal"]
    print(f"\ndiagonal / zig-zag: {z['total_s'] / d['total_s']:.2f} on the host, {zs['total_s'] / ds['total_s']:.2f} on the sim")


def diagonal():
    compare_diagonal("models/opt-tiny", 32, 256, 4, 8, 16, {"ctog": 0.2e9})
    compare_diagonal("models/opt-tiny", 32, 256, 2, 16, 16, {"ctog": 0.2e9})


def trend():
    slow = "--hardware hardware/t4.json --with ctog_bdw=1e9"  # weights bound every one of these
    head("The trend, on the sim (t4.json with a ctog of 1 GB/s, opt-6.7b, 32 + 256): the memory of Z zig-zag batches of 64 / Z sequences",
         "Z", "blocks", "K", "diagonal / zig-zag", "(2s + 2n) / (2s + n)")
    for Z in (2, 4, 8, 16, 32):
        for blocks in (16, 64):
            common = f"--model opt-6.7b {slow} --prompt-len 32 --gen-len 256 --gpu-batch-size {64 // Z} {STREAMED} --gpu-mem 64G "
            limit = cpu_bytes(bench(common + f"--cpu-mem 4000G --num-gpu-batches {Z}", "sim"))
            z, d = (bench(common + f"--cpu-mem {limit} --num-prompts {64 * blocks} --schedule {x}", "sim") for x in ("zigzag", "diagonal"))
            row(Z, blocks, d["num_gpu_batches"], z["total_s"] / d["total_s"], 1.8)


def prefill():
    compare_diagonal("opt-125m", 512, 32, 1, 8, 4, {"ctog": 1e9})


def lengths():
    links = {"ctog": 0.7e9}
    hardware = f"--hardware {host_hardware(links, 'opt-125m', 256, 2)} "
    base = f"--model opt-125m --gpu-batch-size 2 {STREAMED} "
    limit = cpu_bytes(bench(base + f"--prompt-len 512 --gen-len 128 --num-gpu-batches 8 {hardware}", "sim"))
    head(f"opt-125m, prompts of 16 to 512 tokens, 8 to 128 wanted, CPU tier of {limit / 2**20:.0f} MiB, {link_flag(links)}", "device", "prompts",
         "run", "batches", "sweeps", "s", "wanted token/s", "beside the first")
    for device, count in (("sim", 1024), ("sim", 128), ("host", 128)):
        common = base + f"--cpu-mem {limit} --gpu-mem 4G --num-prompts {count} " + (hardware if device == "sim" else link_flag(links))
        mixed = common + " --prompt-len 16-512 --gen-len 8-128 "
        runs = [("zig-zag, padded to the longest", bench(common + " --prompt-len 512 --gen-len 128", device)),
                ("zig-zag", bench(mixed, device)), ("diagonal", bench(mixed + "--schedule diagonal", device))]
        tokens = runs[1][1]["throughput"] * runs[1][1]["total_s"]  # that somebody asked for
        for name, r in runs:
            row(device, count, name, r["num_gpu_batches"], int(r["sweeps"]), r["total_s"], tokens / r["total_s"],
                runs[0][1]["total_s"] / r["total_s"])


def slowest(run):
    name, lane = max(run["lanes"].items(), key=lambda x: x[1]["busy_s"])
    return name, lane["busy_s"]


def overlap():
    """Short prompts and a small head, so that every sweep has the same work; the link so slow that copies take as long."""
    common = "--model opt-350m --prompt-len 4 --gen-len 24 --gpu-batch-size 16 --num-gpu-batches 8 --percent 0 100 100 0 100 0 "
    as_long = lambda run: {"ctog": run["channels"]["ctog"]["moved_bytes"] / run["channels"]["gpu"]["busy_s"]}
    hardware = lambda links: f"--hardware {host_hardware(links, 'opt-350m', 4, 16)} "
    links = as_long(bench(common + "--no-overlap --link ctog=1G"))
    on, off = (median_of([bench(common + link_flag(links) + x) for _ in range(3)]) for x in ("", " --no-overlap"))
    longer = common.replace("--gen-len 24", "--gen-len 96")  # the first layer and the prefill, which nothing hides, weigh less
    simulated = as_long(bench(longer + hardware(links) + "--no-overlap", "sim"))
    son, soff = (bench(longer + hardware(simulated) + x, "sim") for x in ("", "--no-overlap"))
    head(f"opt-350m, 8 x 16 x 4 + 24, copies as long as computing ({link_flag(links)}), medians of 3", "device", "overlap s",
         "no overlap s", "ratio", "slowest lane", "its s", "whole / slowest lane")
    for name, a, b in (("host", on, off), ("sim, 96 tokens", son, soff)):
        lane, busy = slowest(a)
        row(name, a["total_s"], b["total_s"], b["total_s"] / a["total_s"], lane, busy, a["total_s"] / busy)
    slow = {"ctog": links["ctog"] / 1.5}
    r = median_of([bench(common + link_flag(slow)) for _ in range(3)])
    lane, busy = slowest(r)
    print(f"\nthe same with {link_flag(slow)}: {r['total_s']:.2f} s, slowest lane {lane} {busy:.2f} s, whole / slowest lane {r['total_s'] / busy:.3f}")


POLICIES = [  # GPU batch size, prompt length, the rest
    ("weights over the link", 8, 32, "--gen-len 24 --num-gpu-batches 2 --percent 0 100 100 0 100 0"),
    ("cache over the link", 4, 192, "--gen-len 24 --num-gpu-batches 4 --percent 100 0 0 100 100 0"),
    ("half of the weights, CPU attention, activations down", 8, 128, "--gen-len 24 --num-gpu-batches 3 --percent 50 50 0 100 0 100 --cpu-cache-compute"),
    ("weights on disk", 8, 32, "--gen-len 12 --num-gpu-batches 2 --percent 0 0 100 0 100 0"),
    ("nearly all on the GPU", 16, 128, "--gen-len 24 --num-gpu-batches 2 --percent 90 10 80 20 100 0"),
    ("everything a third, GPU attention", 6, 64, "--gen-len 16 --num-gpu-batches 4 --percent 33 33 33 33 33 33"),
    ("row", 8, 64, "--gen-len 12 --num-gpu-batches 3 --num-prompts 24 --schedule row --percent 20 80 50 50 100 0 --cpu-cache-compute"),
    ("diagonal", 4, 32, "--gen-len 32 --num-gpu-batches 4 --num-prompts 48 --schedule diagonal --percent 0 100 0 100 100 0 --cpu-cache-compute"),
]


def sim():
    links = {"ctog": 1e9, "gtoc": 1e9, "dtoc": 0.5e9, "ctod": 0.25e9}
    head(f"opt-125m, the host device with {link_flag(links)} (medians of 3) and the sim with the same numbers", "policy", "host s", "sim s",
         "sim / host", "busiest channel")
    for name, gbs, s, flags in POLICIES:
        flags = f"--model opt-125m --prompt-len {s} --gpu-batch-size {gbs} {flags} "
        hardware = host_hardware(links, "opt-125m", s, gbs)
        host = median_of([bench(flags + link_flag(links)) for _ in range(3)])
        simulated = bench(flags + f"--hardware {hardware}", "sim")
        busiest = max(host["channels"].items(), key=lambda x: x[1]["busy_s"])[0]
        row(name, host["total_s"], simulated["total_s"], simulated["total_s"] / host["total_s"], busiest)


PARTS = {f.__name__: f for f in (diagonal, trend, prefill, lengths, overlap, sim)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--flexgen", default=FLEXGEN)
    args = parser.parse_args()
    FLEXGEN = args.flexgen
    for part in args.part or PARTS:
        PARTS[part]()
