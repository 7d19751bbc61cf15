#!/usr/bin/env python3
"""What the kernels of flexgen.cu promise about their machine code.

    scripts/gpu_kernels.sh check       compiles them and runs this, as  gpu_promises.py DIR ARCH...

DIR has a cubin for each GPU, DIR/75, and DIR/facts: a line a GPU and kernel with the blocks that an SM holds, registers, bytes of
shared memory and of local memory. Prints tables of what is promised for results/kernels.md. What is broken goes to standard error,
a line each, and the exit status is 1. Instructions are cuobjdump's (its path is the environment's cuobjdump; without it they are not
counted).
"""
import collections
import os
import re
import subprocess
import sys

# Stores of a kernel: how many of 16 bytes, at least; and of 4 bytes, at most; how many of 4 bytes the compiler made of those of 16 where
# they were plain assignments, on sm_75 to sm_90. attend_kernel writes a partial result with 10 of 4 bytes. The loops of some are unrolled.
STORES = [
    ("embed_kernel", 1, 0, 0),
    ("layernorm_kernel", 2, 0, 0),
    ("unpack_kernel", 8, 0, 32),
    ("attend_prefill_kernel<[1248]>", 1, 0, 4),
    ("attend_prefill_kernel<[3567]>", 1, 0, 0),
    ("attend_kernel<.*, 0>", 1, 10, 4),
    ("append_kernel", 2, 0, 0),
    ("weigh_kernel<.*>", 1, 0, 4),
]
# Kernels whose loads must be on their way on sm_75 while tensor cores work, with the blocks that an SM must hold there, and before
# copies went through registers: blocks and bytes of shared memory. Then, no product stood between any load and the store of what it had
# loaded.
TURING = [
    *((f"packed_linear_kernel<{n}>", 2, 1, shared) for n, shared in ((1, 42000), (2, 47120), (4, 57360))),
    ("packed_linear_kernel<8>", 1, 0, 77840),
    *((f"attend_prefill_kernel<{n}>", 2, blocks, None) for n, blocks in zip(range(1, 9), (5, 4, 4, 3, 2, 2, 3, 2))),
]
PRODUCTS = 4  # at least, between a load and the store of what it has loaded
broken = []


def promise(kept, arch, name, what):
    if not kept:
        broken.append(f"sm_{arch}: {name}: {what}")


def plain(name):
    """A kernel's name as results/kernels.md has it."""
    name = re.sub(r"\((int|bool|Pages)\)|^void ", "", name).replace("true", "1").replace("false", "0")
    return name.split("(")[0]


def disassemble(path):
    """{kernel: its instructions, as (address, predicated or not: text)}"""
    listing = subprocess.run([os.environ["cuobjdump"], "-sass", path], check=True, capture_output=True, text=True).stdout
    listing = subprocess.run(["c++filt"], input=listing, check=True, capture_output=True, text=True).stdout
    kernels, code = {}, []
    for line in listing.splitlines():
        if "Function : " in line:
            code = kernels[plain(line.split("Function : ")[1].strip())] = []
        found = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line)
        if found:
            code.append((int(found[1], 16), found[2]))
    return kernels


def stores(code):
    """How many stores there are of 16 and of 4 bytes."""
    kinds = collections.Counter()
    for _, text in code:
        if text.startswith("STG.E"):
            kinds[next((size for size in ("128", "64", "U16", "U8") if f".{size}" in text.split()[0]), "32")] += 1
    return kinds["128"], kinds["32"]


def largest_loop(code):
    """The instructions of the loop that has most products."""
    place = {address: n for n, (address, _) in enumerate(code)}
    loops = [[]]
    for n, (_, text) in enumerate(code):
        found = re.match(r"BRA.* 0x([0-9a-f]+)", text)
        begin = place.get(int(found[1], 16), n) if found else n
        if begin < n:
            loops.append([line for _, line in code[begin:n]])
    return max(loops, key=lambda loop: (sum(line.startswith("HMMA") for line in loop), -len(loop)))


def products_in_flight(code):
    """For each load of 16 bytes in the loop, the products between it and the store of what it has loaded, which the next turn may have."""
    loop = largest_loop(code)
    counts = []
    for n, text in enumerate(loop):
        found = re.match(r"LDG\.E\.128\S* (R\d+),", text)
        if not found:
            continue
        products = 0
        for later in loop[n + 1:] + loop[:n]:
            products += later.startswith("HMMA")
            if re.match(rf"STS\.128 .*, {found[1]}\b", later):
                break
        counts.append(products)
    return counts


def print_table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")


def print_stores(archs, code):
    print("\n## Stores of 16 bytes\n")
    print("In the machine code of each kernel, as `STG.E.128`, and in brackets those of 4 bytes. Of plain assignments (`*p = bits`) the compiler")
    print("made four of 4 bytes each on sm_75 to sm_90, which touch a sector of 32 bytes four times; `before` counts these.\n")
    rows = []
    for pattern, wide, words, before in STORES:
        for name in sorted(filter(re.compile(pattern).fullmatch, code[archs[0]])):
            counts = [stores(code[arch][name]) for arch in archs]
            for arch, (is_wide, is_words) in zip(archs, counts):
                promise(is_wide >= wide, arch, name, f"{is_wide} stores of 16 bytes, and {wide} are promised")
                promise(is_words <= words, arch, name, f"{is_words} stores of 4 bytes, and {words} are allowed")
            rows.append([f"`{name}`", before, *(f"{a} ({b})" for a, b in counts)])
    print_table(["kernel", "before", *(f"sm_{arch}" for arch in archs)], rows)


def print_turing(facts, kernels):
    print("\n## Loads in flight on sm_75, which has no asynchronous copies\n")
    print("Of the loop that has the products: loads of 16 bytes, and how many products (`HMMA`) stand between a load and the store of its bytes")
    print("into shared memory, at least; before, every load was stored at once, so that it was 0. Blocks and bytes of shared memory: of an SM")
    print("with 64 KB, which two blocks share.\n")
    rows = []
    for name, least, before, shared_before in TURING:
        blocks, _, shared, _ = facts["75", name]
        counts = products_in_flight(kernels[name])
        promise(blocks >= least, 75, name, f"{blocks} blocks on an SM, and {least} are promised")
        promise(counts and min(counts) >= PRODUCTS, 75, name, f"products while loads are in flight: {counts}")
        rows.append([f"`{name}`", len(counts), min(counts, default=0), f"{shared_before or shared} to {shared}", f"{before} to {blocks}"])
    print_table(["kernel", "loads", "products", "shared (bytes), before and now", "blocks, before and now"], rows)


def main():
    folder, archs = sys.argv[1], sys.argv[2:]
    facts = {}
    for line in open(os.path.join(folder, "facts"), encoding="utf-8"):
        arch, name, *numbers = line.rstrip("\n").split("\t")
        facts[arch, name] = tuple(map(int, numbers))
    for (arch, name), (_, _, _, local) in facts.items():
        promise(local == 0, arch, name, f"{local} bytes of local memory: registers are spilled")
    if os.environ.get("cuobjdump"):
        code = {arch: disassemble(os.path.join(folder, arch)) for arch in archs}
        print_stores(archs, code)
        if "75" in archs:
            print_turing(facts, code["75"])
    else:
        print("\nStores and loads in flight are not counted: cuobjdump is not installed.")
    print("".join(f"gpu_promises.py: {line}\n" for line in broken), end="", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
