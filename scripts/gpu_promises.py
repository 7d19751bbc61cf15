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
GROUP, GROUP_BYTES, HALF, SECTOR = 64, 36, 32, 32
H100 = 132 * 1.755e9 * 4  # instructions of warps a second
WORDS_BYTES = 32 * GROUP_BYTES  # of a portion
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


def instructions(kernels, n):
    """Those of a turn of a product's loop, with the branch back."""
    return len(largest_loop(kernels[f"packed_linear_kernel<{n}>"])) + 1


def print_instructions(archs, code):
    print("\n## Products with packed weights: instructions of a warp for a portion\n")
    print("Of the loop, for 1152 bytes of w and 32 columns of x. 112 of them unpack: for each four numbers a permutation, two masks, two steps")
    print("from there to the codes, and two multiply-adds, so that a number is rounded as in quant.c.", end=" ")
    if "90" in archs:
        rate = H100 * WORDS_BYTES / instructions(code["90"], 1) / 1e12
        print(f"With 8 rows an H100 (132 multiprocessors,\n1.755 GHz, four instructions a clock) can issue those of {rate:.1f} TB/s, where its memory has 3.35, so that they may bind.")
    print("Before a thread's columns of x were neighbours, these were 213 on sm_90, and two words of codes lay in one bank for each load of a warp")
    print("(1.24 of the least time of the loop's loads from shared memory); now none do.\n")
    rows = [[8 * n, *(instructions(code[arch], n) for arch in archs)] for n in (1, 2, 4, 8)]
    print_table(["rows", *(f"sm_{arch}" for arch in archs)], rows)


def sectors(addresses):
    return len({address // SECTOR for address in addresses})


def count_sectors(hd):
    """Sectors of a token's K, of its V, and those in which a head of 4 bits lies, on average over 32 heads; as score_fours, weigh_fours
    and load_shares of flexgen.cu read them."""
    heads, tile, lanes = 32, 16, [(quad, in_quad) for quad in range(8) for in_quad in range(4)]
    groups, halves = -(-hd // GROUP), -(-hd // HALF)
    size = sum(4 + min(GROUP, hd - g * GROUP) // 2 for g in range(groups))
    k = v = least = 0
    for head in range(0, heads * size, size):
        row = [head + t * heads * size for t in range(tile)]
        for i in range(0, tile, 8):
            k += sectors(row[q + i] + c * GROUP_BYTES for q, c in lanes if c < groups)
            k += sum(sectors(row[q + i] + b // 2 * GROUP_BYTES + 4 + b % 2 * 16 + c * 4 for q, c in lanes) for b in range(halves))
        for i in range(4):
            v += sum(sectors(row[2 * c + i % 2 + i // 2 * 8] + 4 + q * 4 + j * GROUP_BYTES for q, c in lanes if j * GROUP + q // 4 * HALF < hd)
                     for j in range(groups))
        for first in range(0, tile * groups, len(lanes)):
            v += sectors(row[n // groups] + n % groups * GROUP_BYTES for n in range(first, min(first + len(lanes), tile * groups)))
        least += sum(sectors(range(at, at + size)) for at in row)
    return (size, *(count / heads / tile for count in (k, v, least)))


def print_sectors():
    print("\n## Attention to 4-bit heads: sectors\n")
    print("Arithmetic, not a measurement. Sectors of 32 bytes that the loads ask for, for a token, beside those in which its head lies. A word of")
    print("4 bytes is the widest load, since groups have 36 bytes. What is asked for again is answered by the first cache: at most 240 bytes a")
    print("token, 2 of its clocks on an H100, where the memory takes 5 for the head's own. Left as it is. So are bank conflicts that cost")
    print("little: two-way in unpack (20 clocks of a block's 700), two- and four-way where a warp's 128 tokens end in eight elements a thread.\n")
    rows = [[hd, size, f"{k:.1f}", f"{v:.1f}", f"{least:.1f}"] for hd in (64, 80, 128) for size, k, v, least in [count_sectors(hd)]]
    print_table(["head", "bytes", "K", "V", "least"], rows)


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
        print_instructions(archs, code)
        if "75" in archs:
            print_turing(facts, code["75"])
    else:
        print("\nStores and loads in flight are not counted: cuobjdump is not installed.")
    print_sectors()
    print("".join(f"gpu_promises.py: {line}\n" for line in broken), end="", file=sys.stderr)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
