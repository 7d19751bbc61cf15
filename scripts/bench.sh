#!/bin/sh
# bench.sh BUILD: what this machine can do, then what flexgen does beside it, all from one run of about three minutes.
#
#   machine   multiply-adds of floats, and of integers of 16 bits, and a plain read of memory on all threads, memcpy on one, direct
#             transfers of the disk
#   kernels   BUILD/bench_host: linear beside OpenBLAS (if there), attention beside the plain read
#   runs      flexgen bench on opt-125m: prefill, decoding and one prompt's decoding (opt-1.3b too), each beside its bound, the disk
#             tier beside a direct read, packed weights beside fp16, overlap on beside off and beside the busiest channel (no
#             schedule can be faster than that)
#
# The bound of products is the slower of two: their multiply-adds (of integers if weights are packed), and a plain read of the weights if
# these are 100 MB or more, which no cache holds from one run to the next.
#
# The disk is the one under $TMPDIR, or /var/tmp, where the offload file is. A machine that does other work at
# the same time moves results and bounds alike, but not equally: run it on an idle one. `make bench` calls this.
set -e
build=${1:-build}
dir=${TMPDIR:-/var/tmp}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' INT TERM

"$build/bench_machine" "$dir" >"$tmp/machine"
"$build/bench_host" >"$tmp/host"
fma=$(awk '$1 == "multiply_add" { print $2 }' "$tmp/machine")
integer=$(awk '$1 == "integer_multiply_add" { print $2 }' "$tmp/machine")
read=$(sed -n 's/.*plain read *\([0-9.]*\).*/\1/p' "$tmp/host" | head -1)
# share(FLOP, bytes, seconds, more, packed) says which of the two bounds is the slower one, and how much of the seconds it is; the time
# to read `more` bytes, if given, is added to it.
bound='function share(flop, bytes, s, more, packed) {
    a = flop / (packed ? '"$integer"' : '"$fma"') / 1e9; m = bytes / '"$read"' / 1e9
    return sprintf("%s %.0f%%", a > m ? (packed ? "integer " : "") "multiply-adds" : "plain read",
                   100 * ((a > m ? a : m) + more / '"$read"' / 1e9) / s)
}'

echo "machine ($(awk '$1 == "threads" { print $2 }' "$tmp/machine") threads, $(uname -m), disk at $dir)"
awk -v read="$read" '
    { v[$1] = $2 }
    END {
        printf "  multiply-adds, all threads   %8.1f GFLOP/s\n", v["multiply_add"]
        printf "  the same of 16-bit integers  %8.1f GOP/s\n", v["integer_multiply_add"]
        printf "  plain read, all threads      %8.1f GB/s\n", read
        printf "  memcpy, one thread           %8.1f GB/s\n", v["memcpy"]
        if (v["direct_read"] == 0) print "  direct transfers             this disk takes none"
        else printf "  direct read of 16 MB         %8.2f GB/s (4 at a time %.2f), write %.2f\n", v["direct_read"], v["direct_read_4"], v["direct_write"]
    }' "$tmp/machine"

echo "kernels"
awk "$bound"'
    /^linear/ { first = $2 == "packed" ? 3 : 2
                for (f = first; f <= NF; f++) if ($f ~ /^GFLOP\/s/) { rate = $(f - 1); break }
                numbers = $(first + 2) * $(first + 4)
                bytes = numbers * ($2 == "packed" ? 36 / 64 : 2)
                printf "  %s   %s\n", $0, share(2 * $first * numbers, bytes >= 1e8 ? bytes : 0, 2 * $first * numbers / rate / 1e9, 0, $2 == "packed")
                next }
    /^attend|^prefill|^append|threads/ { print "  " $0 }' "$tmp/host" # the others have no bound

# run NAME FLAGS...: one run of $model with random weights, as NAME.json
model=opt-125m
run() {
    name=$1
    shift
    "$build/flexgen" bench --model $model --offload-dir "$dir" --json "$tmp/$name.json" "$@" >"$tmp/log" 2>&1 || { cat "$tmp/log" >&2; exit 1; }
}
# get NAME KEY: a number of the run; CHANNEL.moved_bytes and CHANNEL.busy_s for a channel's
get() {
    awk -v want="$2" '
        { key = $1; gsub(/[":]/, "", key); value = $2; sub(/,$/, "", value) }
        value == "{" { object = key "."; next }
        /^\t\t\t/ { key = object key }
        key == want { print value; exit }' "$tmp/$1.json"
}
median() { printf '%s\n' "$@" | sort -g | sed -n "$((($# + 1) / 2))p"; }

echo "runs (opt-125m, random weights)"
memory="--num-gpu-batches 1 --prompt-len 128 --gen-len 32 --percent 100 0 100 0 100 0"
run memory --gpu-batch-size 16 $memory
awk -v pre="$(get memory prefill_s)" -v dec="$(get memory decode_s)" "$bound"'BEGIN {
    layer = 2 * (4 * 768 * 768 + 2 * 768 * 3072) * 12; head = 2 * 50272 * 768 # FLOP a token, attention left out; and bytes
    p = 16 * (128 * layer + head); d = 16 * 31 * (layer + head)
    cache = 16 * 31 * (128 + 16) * 4 * 768 * 12 # bytes that attention reads while products wait, and the other way round
    printf "  all in memory, 16 x 128 + 32: prefill %6.1f GFLOP/s   %s\n", p / pre / 1e9, share(p, 0, pre)
    printf "                                decode  %6.1f GFLOP/s   %s\n", d / dec / 1e9, share(d, 31 * (layer + head), dec)
    printf "                                with a plain read of the cache: %s\n", share(d, 31 * (layer + head), dec, cache)
}'

# One prompt alone reads every weight of the layers and of the head for each token.
# one MODEL LAYERS HIDDEN
one() {
    model=$1
    run one --gpu-batch-size 1 $memory
    awk -v name="$model" -v s="$(get one decode_s)" -v read="$read" -v l="$2" -v h="$3" 'BEGIN {
        gbs = 31 * 2 * (12 * l * h * h + 50272 * h) / s / 1e9
        printf "  one prompt, %-9s 128 + 32: decode %7.1f token/s, weights %.1f GB/s, plain read %.1f (%.0f%%)\n", name, 31 / s, gbs, read, 100 * gbs / read
    }'
}
one opt-1.3b 24 2048
one opt-125m 12 768

run disk --gpu-batch-size 4 --num-gpu-batches 1 --prompt-len 32 --gen-len 24 --percent 0 0 100 0 100 0
awk -v moved="$(get disk dtoc.moved_bytes)" -v busy="$(get disk dtoc.busy_s)" -v wall="$(get disk total_s)" \
    -v one="$(awk '$1 == "direct_read" { print $2 }' "$tmp/machine")" 'BEGIN {
    rate = moved / busy / 1e9
    printf "  weights on disk, 4 x 32 + 24: dtoc %.2f GB/s, direct read ", rate
    if (one > 0) printf "%.2f (%.0f%%)", one, 100 * rate / one; else printf "not possible here"
    printf "; wall %.2f s, reading %.2f s (%.0f%% of it)\n", wall, busy, 100 * busy / wall
}'

# Weights over a slow link, so that they are what is waited for: as F16, then packed.
link="--gpu-batch-size 4 --num-gpu-batches 2 --prompt-len 32 --gen-len 24 --percent 0 100 100 0 100 0 --link ctog=0.5G"
halfs= packed=
for r in 1 2 3; do
    run halfs$r $link
    run packed$r $link --compress-weight
    halfs="$halfs $(get halfs$r decode_throughput)" packed="$packed $(get packed$r decode_throughput)"
done
awk -v halfs="$(median $halfs)" -v packed="$(median $packed)" -v before="$(get halfs1 ctog.moved_bytes)" -v after="$(get packed1 ctog.moved_bytes)" 'BEGIN {
    printf "  weights over 0.5 GB/s, decode: fp16 %.1f token/s, packed %.1f (%.2fx, bytes allow %.2fx)\n", halfs, packed, packed / halfs, before / after
}'

# Weights on disk, cache on the CPU tier, two batches: reading and computing take about as long as each other. Short prompts, because
# the prefill has another busiest channel than the rest.
mixed="--gpu-batch-size 32 --num-gpu-batches 2 --prompt-len 4 --gen-len 24 --percent 0 0 0 100 100 0"
on= off=
for r in 1 2 3; do
    run on$r $mixed
    run off $mixed --no-overlap
    on="$on $(get on$r total_s)" off="$off $(get off total_s)"
done
middle=$(median $on)
for r in 1 2 3; do [ "$(get on$r total_s)" = "$middle" ] && pick=on$r; done
for c in ctog gtoc dtoc ctod gpu cpu; do echo "$c $(get $pick $c.busy_s)"; done | sort -k2 -g | tail -1 >"$tmp/busiest"
awk -v on="$middle" -v off="$(median $off)" '{
    printf "  disk and CPU tiers, 2 x 32 x 4 + 24: overlap %.2f s, no overlap %.2f s (%.2fx), busiest channel %s %.2f s (%.0f%% of the wall)\n",
           on, off, off / on, $1, $2, 100 * $2 / on }' "$tmp/busiest"
