#!/bin/bash
# gpu_kernels.sh [check] [ARCH...]: what can be counted of the kernels of flexgen.cu where no GPU is: registers, shared memory, spilled
# bytes and occupancy, as ptxas reports them; instructions, by cuobjdump -sass, where that is installed (from PyPI: nvidia-cuda-cuobjdump
# and nvidia-cuda-nvdisasm); blocks, waves and bytes on their way of products with packed weights; and how much of a decode step is the
# memory's, with rates that are stated. It fails where a kernel breaks a promise (scripts/gpu_promises.py).
#
#     scripts/gpu_kernels.sh >results/kernels.md
#     scripts/gpu_kernels.sh check        only says which promises are broken
cd "$(dirname "$0")/.." || exit 2
bin=${CUDA_HOME:-/usr/local/cuda}/bin
if [ "$1" = check ]; then
    shift
    exec >/dev/null
    [ -x "$bin/nvcc" ] || { echo "skipped: nvcc is not installed" >&2; exit 0; }
fi
[ $# -gt 0 ] || set -- 75 80 86 89 90 120
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
report=$work/report
compile() {
    "$bin/nvcc" -std=c++17 -O3 -I. -gencode "arch=compute_$1,code=sm_$1" -Xptxas -v -cubin flexgen.cu -o "$work/$1" 2>"$report.$1" ||
        { cat "$report.$1" >&2; return 1; }
}
for arch; do compile "$arch" & while [ "$(jobs -r | wc -l)" -ge "$(nproc)" ]; do wait -n; done; done
wait
for arch; do [ -s "$work/$arch" ] || exit 1; cat "$report.$arch"; done >"$report"
version=$("$bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
value() { sed -n "s/.*\b$1 = \([0-9]*\)[,; ].*/\1/p" flexgen.cu | head -n 1; } # of a constant
constants="-v SIDES=$(value SIDES) -v SLICES=$(value SLICES) -v PORTION=$(value PORTION) -v TILES_AT_ONCE=$(value TILES_AT_ONCE)"
constants="$constants -v SHARERS=$(value SHARERS) -v BLOCKS=$(value BLOCKS) -v PORTIONS=$(value PORTIONS)"
# shellcheck disable=SC2086
c++filt <"$report" | awk $constants -v SLOTS_75="$(value SLOTS_75)" -v SLOTS_80="$(value SLOTS_80)" -v archs="$*" -v version="$version" -v facts="$work/facts" '
    # a block'\''s threads: what the launcher gives it; rows: as many as a row needs, at most
    function threads(name) { return name ~ /^(pick|score|layernorm)_/ ? 1024 : name ~ /^unpack_kernel/ ? 64 : name ~ /^(attend|weigh|select)_/ ? 128 : 256 }
    # what a block of products with packed weights asks for: a ring, in whose place sums come
    function slots(arch) { return arch == 75 ? SLOTS_75 : SLOTS_80 }
    function slot(tiles) { return SIDES * SLICES * PORTION * 36 + SLICES * tiles * 8 * PORTION * 2 }
    function room(arch, tiles,    ring, sums) {
        ring = slots(arch) * slot(tiles)
        sums = SIDES * TILES_AT_ONCE * 8 * 68 * 4
        return ring > sums ? ring : sums
    }
    # bytes of w and x on their way in one of its blocks
    function ahead(arch, tiles) { return (slots(arch) - 1) * slot(tiles) }
    # blocks on an SM: the least that threads, registers (for each warp, in steps of 256) and shared memory allow
    function most_threads(arch) { return arch == 75 ? 1024 : arch == 80 || arch == 90 ? 2048 : 1536 }
    function at_once(arch, t, r, s,    most, shared, warps, blocks, b) {
        most = most_threads(arch)
        shared = 1024 * (arch == 75 ? 64 : arch == 80 ? 164 : arch == 90 ? 228 : 100)
        warps = t / 32
        blocks = most / t
        b = int(65536 / (int((32 * r + 255) / 256) * 256) / warps)
        if (b < blocks) blocks = b
        if (arch != 75) s += 1024 # of each block, for the system
        b = int(shared / (s > 0 ? s : 1))
        if (b < blocks) blocks = b
        b = arch == 75 ? 16 : arch == 120 ? 24 : 32
        return b < blocks ? b : blocks
    }
    /Compiling entry function/ { arch = $NF; gsub(/[^0-9]/, "", arch) }
    /Function properties for/ {
        name = $0
        sub(/.*Function properties for (void )?/, "", name)
        gsub(/\(int\)|\(bool\)|\(Pages\)/, "", name); gsub(/true/, "1", name); gsub(/false/, "0", name)
        sub(/\(.*/, "", name)
    }
    /spill stores/ { local[arch, name] = $1; all += $1 } # the stack frame, in which spilled registers are
    / Used [0-9]+ registers/ {
        match($0, /Used [0-9]+/); r = substr($0, RSTART + 5, RLENGTH - 5)
        s = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH) + 0 : 0
        if (name ~ /^packed/) { tiles = substr(name, index(name, "<") + 1) + 0; s += room(arch, tiles) }
        if (!(name in seen)) { seen[name] = 1; names[++n] = name }
        if (s > shared[name]) shared[name] = s
        blocks = at_once(arch, threads(name), r, s)
        cell[arch, name] = blocks ? sprintf("%d, %d%%", r, 100 * blocks * threads(name) / most_threads(arch)) : r ", -"
        if (name ~ /^packed/) flying[arch, tiles] = blocks * ahead(arch, tiles) / 1024
        printf "%s\t%s\t%d\t%d\t%d\t%d\n", arch, name, blocks, r, s, local[arch, name] >facts
    }
    END {
        count = split(archs, a, " ")
        print "# Kernels: registers, occupancy, shared memory, spills, instructions, waves\n"
        print "Made by `scripts/gpu_kernels.sh`, from what ptxas of CUDA " version " reports. For each GPU: registers of a thread, and the"
        print "largest share of the threads of an SM that can be there at once with the block that the launcher asks for (the largest, where"
        print "it depends on a row). The flags behind `attend_kernel` and `weigh_kernel` are the threads that share a token, how pages hold"
        print "numbers (0: as halfs, 1: in 4 bits, as codes), and whether only scores are wanted;"
        print "behind `attend_prefill_kernel` the tiles of 16 that a head has; behind `packed_linear_kernel` the eights of rows of a block."
        print "A dash: blocks of that kernel need more shared memory than there is, and others run."
        print "Local: memory of a thread, for registers that are spilled or arrays that have no place in registers. No GPU has seen any of"
        print "these figures.\n"
        line = "| kernel | block | shared (bytes) |"; rule = "|---|---|---|"
        for (i = 1; i <= count; i++) { line = line " sm_" a[i] " |"; rule = rule "---|" }
        print line " local (bytes) |\n" rule "---|"
        for (k = n; k >= 1; k--) {
            line = "| `" names[k] "` | " threads(names[k]) " | " shared[names[k]] + 0 " |"
            bytes = 0
            for (i = 1; i <= count; i++) { line = line " " cell[a[i], names[k]] " |"; bytes += local[a[i], names[k]] }
            print line " " bytes " |"
            all -= bytes
        }
        print "\nFunctions that kernels call have " all + 0 " bytes of local memory."
        print "\n## Products with packed weights: bytes on their way on an SM\n"
        print "All but one of the slots of a ring buffer, w and x, in KB of 1024 bytes, of the blocks that an SM holds. On sm_75, which has no asynchronous"
        print "copies, they are on their way to registers.\n"
        line = "| rows |"; rule = "|---|"
        for (i = 1; i <= count; i++) { line = line " sm_" a[i] " |"; rule = rule "---|" }
        print line "\n" rule
        for (t = 1; t <= 8; t *= 2) {
            line = "| " 8 * t " |"
            for (i = 1; i <= count; i++) line = line sprintf(" %.0f |", flying[a[i], t])
            print line
        }
    }'

# Loops without loops in them, as "instructions products F16-stores", in order.
loops() {
    "$cuobjdump" -sass "$work/$1" -fun "$2" | awk '
        match($0, /^[ \t]+\/\*[0-9a-f]+\*\/ /) {
            at[++n] = $1; gsub(/[^0-9a-f]/, "", at[n]); line[at[n]] = n; text[n] = $0; sub(/;.*/, "", text[n])
        }
        END {
            for (i = 1; i <= n; i++) if (match(text[i], /BRA.* 0x[0-9a-f]+/)) {
                to = text[i]; sub(/.*BRA.* 0x/, "", to); sub(/[^0-9a-f].*/, "", to)
                while (length(to) < 4) to = "0" to
                if (!(to in line) || line[to] > i || line[to] <= last) continue
                products = halfs = 0
                for (k = line[to]; k <= i; k++) { products += text[k] ~ /HMMA/; halfs += text[k] ~ /STS.U16/ }
                print i - line[to] + 1, products, halfs
                last = i
            }
        }'
}
printf '\n## Attention to 4-bit heads: instructions of a warp for 8 tokens\n\n'
cuobjdump=$(command -v "$bin/cuobjdump" cuobjdump | head -n 1)
if [ -n "$cuobjdump" ]; then
    printf 'Of the loops of `attend_kernel<16, 1, 0>` (heads of 128), which take 16 tokens at a time. V: with the weights'"'"' loop.\n\n'
    printf '| | K | V |\n|---|---|---|\n'
    for arch; do
        loops "$arch" _Z13attend_kernelILi16EL5Pages1ELb0EEv2OpPf | awk -v arch="$arch" '
            $3 && !$2 { shares = $1 / $3 } # 2 stores of the 32 threads are 16 tokens of two groups
            $2 { loop[++n] = $1 / 2 }
            END { printf "| sm_%s | %.0f | %.0f |\n", arch, loop[1], loop[2] + shares }'
    done
else
    echo "Not counted: cuobjdump is not installed."
fi
cuobjdump=$cuobjdump python3 -B scripts/gpu_promises.py "$work" "$@" || broken=1
# shellcheck disable=SC2086
awk $constants '
    function up(a, b) { return int((a + b - 1) / b) }
    function sharers(across, k, places,    z, best) {
        best = 1
        for (z = 2; z <= SHARERS && across * z <= BLOCKS && z * SLICES * PORTIONS * PORTION <= k; z++)
            if (z * up(across * best, places) > best * up(across * z, places)) best = z
        return best
    }
    function filled(blocks, places) { return blocks / (up(blocks, places) * places) }
    function product(model, h, what, n, k,    across, z) {
        across = up(n, SIDES * 64); z = sharers(across, k, 264)
        printf "| %s | %s | %d x %d | %d | %d | %d | %.2f, %.0f%% | %.2f, %.0f%% |\n", model, what, n, k, across, z, across * z,
            across * z / 264, 100 * filled(across * z, 264), across * z / 132, 100 * filled(across * z, 132)
        if (model == "30B") {
            part = 2 * n * k / 1e6 # MFLOP a row
            least8 += n * k * .5625 / 4.3e6; least64 += max(n * k * .5625 / 4.3e6, 64 * part / 790e0)
            own8 += n * k * .5625 / 4.3e6 + z * 8 * 1024 / 100e3
            own64 += max(max(n * k * .5625 / 4.3e6, n * k * (.5625 + 128 / (SIDES * 64)) / 5.5e6), 64 * part / 600) / filled(across * z, 132) + z * 64 * 1024 / 100e3
        }
    }
    function max(a, b) { return a > b ? a : b }
    function model(name, h) {
        product(name, h, "QKV", 3 * h, h); product(name, h, "out", h, h)
        product(name, h, "FC1", 4 * h, h); product(name, h, "FC2", h, 4 * h)
    }
    function step(B, least, own,    cache, bound, time) {
        cache = B * 512 * 2 * 7168 * 2 / 4.3e6
        bound = least + cache; time = own + cache / .8 + 8 * 2.5
        printf "| %d | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f%% |\n", B, least, cache, bound, own, time, 100 * bound / time
    }
    function launches(name, l, h, B,    n, took, graphs, memory) {
        n = 8 * l + 6 + 2
        took = 2.5 * n + 4
        graphs = 0.5 * n + 4 + 32 * 0.5
        memory = 2 * (l * 12 * h * h + 50272 * h + B * l * 2 * 512 * h) / 936e3
        printf "| %s | %d | %d | %.0f | %.0f | %.0f%% | %d | %.0f | %.0f%% |\n", name, B, n, took, memory, 100 * took / (took + memory),
               int((n - 2 + 31) / 32), graphs, 100 * graphs / (graphs + memory)
    }
    BEGIN {
        print "\n## Products with packed weights: waves\n"
        print "On a GPU with 132 multiprocessors: 264 places for blocks of up to 32 rows, 132 for those of 64. Sharers: blocks that share outputs"
        print "and deal their columns. Waves: blocks over places, and how much of whole waves is filled.\n"
        print "| OPT | product | n x k | blocks across | sharers | blocks | waves of 264 | waves of 132 |\n|---|---|---|---|---|---|---|---|"
        model("6.7B", 4096); model("13B", 5120); model("30B", 7168); model("175B", 12288)
        print "\n## Expected: decoding OPT-30B with weights in 4 bits, all of it on an H200\n"
        print "Arithmetic, not a measurement; us a layer. Bound: weights at 4.3 TB/s or products at 790 TFLOP/s, whichever takes longer, and 512"
        print "tokens of F16 K and V of each sequence at 4.3 TB/s. Expected, with rates that are judgements: products at the slowest of the memory,"
        print "the second cache'\''s 5.5 TB/s of w and x, and 600 TFLOP/s of mma.sync (at 64 rows over the filled share of waves), the last block'\''s"
        print "sums at 0.1 TB/s, attention at 80% of the memory, 2.5 us for the begin and end of each of eight kernels.\n"
        print "| B | products, bound | K and V, bound | bound | products, expected | expected | share |\n|---|---|---|---|---|---|---|"
        step(8, least8, own8); step(64, least64, own64)
        print "\n## Launches: their share of a decoding step, all of it on an RTX 3090\n"
        print "Arithmetic, not a measurement. Counted by the suite `lanes` on the emulation: of one batch, eight kernels a layer and six others, two"
        print "copies, and no events between layers. Assumed: 2.5 us from one launch or copy to the next, 4 us until a GPU that is idle begins; the"
        print "model and 512 tokens of F16 K and V of each sequence are read at 936 GB/s. Share: launches over launches and memory, as if"
        print "nothing of them overlapped, though the host posts ahead of the GPU. Graphs: of at most 32 kernels, when the sweep is like an"
        print "earlier one (device/graph.c). Assumed of them: 0.5 us between two kernels, as NVIDIA has published of a V100 (2.9 us of work took"
        print "3.4 us), and 0.5 us for which the host posts an operation, of which 32 are posted before the GPU begins.\n"
        print "| OPT | B | launches and copies | us | memory, us | share | graphs | us | share |\n|---|---|---|---|---|---|---|---|---|"
        for (B = 1; B <= 32; B = B == 1 ? 8 : 4 * B) launches("125M", 12, 768, B)
        for (B = 1; B <= 32; B = B == 1 ? 8 : 4 * B) launches("1.3B", 24, 2048, B)
    }'
[ -z "$broken" ]
