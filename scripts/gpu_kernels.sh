#!/bin/bash
# gpu_kernels.sh [ARCH...]: registers, shared memory and spilled bytes of every kernel of flexgen.cu, as ptxas reports them for sm_75,
# 80, 90 and 120, and the share of an SM's threads that may be there at once (occupancy). No GPU is needed.
#
#     scripts/gpu_kernels.sh >results/kernels.md
cd "$(dirname "$0")/.." || exit 2
[ $# -gt 0 ] || set -- 75 80 90 120
nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
report=$(mktemp)
trap 'rm -f "$report" "$report.o"' EXIT
for arch; do codes="$codes -gencode arch=compute_$arch,code=sm_$arch"; done
# shellcheck disable=SC2086
"$nvcc" -std=c++17 -O3 -I. $codes -Xptxas -v -c flexgen.cu -o "$report.o" 2>"$report" || { cat "$report" >&2; exit 1; }
version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
c++filt <"$report" | awk -v archs="$*" -v version="$version" '
    # a block'\''s threads: what the launcher gives it; rows: as many as a row needs, at most
    function threads(name) { return name ~ /^(pick|score)_/ ? 1024 : name ~ /^unpack_kernel/ ? 64 : name ~ /^(attend|weigh|select)_/ ? 128 : 256 }
    # blocks on an SM: the least that threads, registers (for each warp, in steps of 256) and shared memory allow
    function occupancy(arch, t, r, s,    most, shared, warps, blocks, b) {
        most = arch == 75 ? 1024 : arch == 80 || arch == 90 ? 2048 : 1536
        shared = 1024 * (arch == 75 ? 64 : arch == 80 ? 164 : arch == 90 ? 228 : 100)
        warps = t / 32
        blocks = most / t
        b = int(65536 / (int((32 * r + 255) / 256) * 256) / warps)
        if (b < blocks) blocks = b
        if (arch != 75) s += 1024 # of each block, for the system
        b = int(shared / (s > 0 ? s : 1))
        if (b < blocks) blocks = b
        b = arch == 75 ? 16 : arch == 120 ? 24 : 32
        if (b < blocks) blocks = b
        return 100 * blocks * t / most
    }
    /Compiling entry function/ { arch = $NF; gsub(/[^0-9]/, "", arch) }
    /Function properties for/ {
        name = $0
        sub(/.*Function properties for (void )?/, "", name)
        gsub(/\(int\)|\(bool\)|\(Pages\)/, "", name); gsub(/true/, "1", name); gsub(/false/, "0", name)
        sub(/\(.*/, "", name)
    }
    /spill stores/ { spilled[arch, name] = $(NF - 7) + $(NF - 3); all += spilled[arch, name] }
    / Used [0-9]+ registers/ {
        match($0, /Used [0-9]+/); r = substr($0, RSTART + 5, RLENGTH - 5)
        s = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH) + 0 : 0
        if (!(name in seen)) { seen[name] = 1; names[++n] = name }
        shared[name] = s
        cell[arch, name] = sprintf("%d, %d%%", r, occupancy(arch, threads(name), r, s))
    }
    END {
        count = split(archs, a, " ")
        print "# Kernels: registers, occupancy, shared memory, spills\n"
        print "Made by `scripts/gpu_kernels.sh`, from what ptxas of CUDA " version " reports. For each GPU: registers of a thread, and the"
        print "largest share of the threads of an SM that can be there at once with the block that the launcher asks for (the largest, where"
        print "it depends on a row). The flags behind `attend_kernel` and `weigh_kernel` are the lanes that share a token, how pages hold"
        print "numbers (0: as halfs, 1: in 4 bits, in groups and heads of whole eights, 2: packed otherwise), and whether only scores are wanted;"
        print "behind `attend_prefill_kernel` the tiles of 16 that a head has; behind `packed_linear_kernel` the eights of rows of a block, and"
        print "whether columns come in multiples of 8.\n"
        line = "| kernel | block | shared (bytes) |"; rule = "|---|---|---|"
        for (i = 1; i <= count; i++) { line = line " sm_" a[i] " |"; rule = rule "---|" }
        print line " spilled (bytes) |\n" rule "---|"
        for (k = n; k >= 1; k--) {
            line = "| `" names[k] "` | " threads(names[k]) " | " shared[names[k]] " |"
            bytes = 0
            for (i = 1; i <= count; i++) { line = line " " cell[a[i], names[k]] " |"; bytes += spilled[a[i], names[k]] }
            print line " " bytes " |"
            all -= bytes
        }
        print "\nFunctions that kernels call spill " all + 0 " bytes."
    }'
