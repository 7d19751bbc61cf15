#!/bin/bash
# gpu_check.sh DIR [STEP...]: on a machine with a GPU, builds for it, runs the suites on it, looks for wrong memory accesses
# and races, measures the machine's bounds and puts what flexgen does beside them. All steps, or those named.
#
#   DIR/NN-STEP.log      what a step printed
#   DIR/summary.json     how each step went; written anew after every step
#   DIR/NAME.json .txt   of the runs of flexgen bench
#   DIR/figures.json     values, bounds, ratios: the table that comes last (also from earlier runs' files in DIR)
#
# Every step has a time limit, and all of them have SECONDS_IN_ALL (540): what no longer fits is not run, and said so. A failed
# step stops no other that can do without it. The exit status is 1 if any step failed or was not run; a step for which this
# machine lacks an optional tool (compute-sanitizer, Python's accelerate) is skipped and does not count.
#
#   BUILD=build   SECONDS_IN_ALL=540   CPU_MEM_GB=what is available, less 8%   TMPDIR=where the disk tier's file is
#   FLEXLLMGEN=checkout of the original program, to be run beside this one (its tokenizer must be downloaded already)
# shellcheck disable=SC2086,SC2046 # lists of words are meant to be split
[ $# -ge 1 ] || { sed -n '2,/^# shell/{/^# shell/!s/^# \{0,1\}//p;}' "$0"; exit 2; }
mkdir -p "$1" && DIR=$(cd "$1" && pwd) || exit 2
shift
chosen=" $* "
cd "$(dirname "$0")/.." && figures=$PWD/scripts/gpu_figures.awk || exit 2
: "${BUILD:=build}" "${SECONDS_IN_ALL:=540}"
: "${CPU_MEM_GB:=$(awk '/^MemAvailable/ { print int($2 / 1048576 * 0.92) }' /proc/meminfo)}"
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin:${CUDA_HOME:-/usr/local/cuda}/compute-sanitizer
scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/gpu-check-XXXXXX") || exit 2
child=
trap 'rm -rf "$scratch"' EXIT
trap '[ -z "$child" ] || kill "$child"; exit 1' INT TERM
export DIR BUILD CPU_MEM_GB PATH scratch
SKIP=77 # a step's exit status: an optional tool is missing, the log's last line says which

# ---- steps: each runs in a shell of its own -------------------------------------------------------------------

step_card() {
    rm -f "$DIR/card" "$DIR/compute_capability"
    nvidia-smi
    nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader -i "${CUDA_VISIBLE_DEVICES:-0}" >"$DIR/card" || return
    awk -F', *' 'NR == 1 { sub(/\./, "", $2); print $2 }' "$DIR/card" | grep -xE '[0-9]+' >"$DIR/compute_capability" || return
    echo "$(nproc) threads, $CPU_MEM_GB GiB for the CPU tier"
}

step_build() {
    local programs="$BUILD/flexgen $BUILD/flexgen_cuda.so $BUILD/gpu/test_cuda $BUILD/gpu/test_schedule $BUILD/gpu/test_lanes $BUILD/bench_gpu $BUILD/bench_machine $BUILD/bench_host"
    rm -f $programs # what does not build is not run in an older state
    make -k -j"$(nproc)" BUILD="$BUILD" GPU="$(cat "$DIR/compute_capability")" $programs
}

step_tests() { make BUILD="$BUILD" GPU="$(cat "$DIR/compute_capability")" gpu-tests; }

step_bounds_gpu() { "$BUILD/bench_gpu" | tee "$DIR/bounds-gpu"; }
step_bounds_machine() { "$BUILD/bench_machine" "$scratch" | tee "$DIR/bounds-machine"; }
step_bounds_host() { # plain read, all threads
    "$BUILD/bench_host" | tee "$scratch/host" || return
    sed -n 's/.*plain read *\([0-9.]*\).*/plain_read \1/p' "$scratch/host" | head -n 1 | grep . >"$DIR/bounds-host"
}

# run_bench NAME FLAGS...: flexgen bench on the GPU, as NAME.json and NAME.txt; 2: does not fit
run_bench() {
    local name=$1
    shift
    rm -f "$DIR/$name.json"
    set -- bench --device cuda --offload-dir "$scratch" --cpu-mem "${CPU_MEM_GB}G" --json "$DIR/$name.json" "$@"
    echo "+ flexgen $*"
    "$BUILD/flexgen" "$@" >"$DIR/$name.txt" </dev/null || return
    cat "$DIR/$name.txt"
}

# Everything on the GPU. Weights are made first: 13 GB.
step_opt_6_7b() {
    for gbs in 64 32 16 4; do
        run_bench gpu --model opt-6.7b --prompt-len 512 --gen-len 32 --percent 100 0 100 0 100 0 --gpu-batch-size $gbs --num-gpu-batches 1
        rc=$?
        [ $rc = 2 ] || return $rc
    done
    return 2
}

# The machine as numbers, the policy that is found with them in 16 GiB of the GPU, and what it promised beside what it took.
step_profile() { "$BUILD/flexgen" profile --device cuda --model opt-6.7b --offload-dir "$scratch" --output "$DIR/hardware.json"; }
step_searched() { run_bench searched --model opt-6.7b --gpu-mem 16G --hardware "$DIR/hardware.json" --prompt-len 512 --gen-len 32 --num-prompts 256; }

# 30B with 16 GiB of the GPU; fewer weights there, fewer batches, in the end a smaller model, until it fits.
step_opt_30b() {
    while read -r model gbs batches wg; do
        run_bench offload --model "$model" --gpu-mem 16G --prompt-len 512 --gen-len 8 --percent "$wg" $((100 - wg)) 0 100 0 100 \
            --cpu-cache-compute --gpu-batch-size "$gbs" --num-gpu-batches "$batches"
        rc=$?
        [ $rc = 2 ] || return $rc
        echo "$model, $gbs x $batches with $wg% of the weights on the GPU, does not fit this machine"
    done <<'LIST'
opt-30b 48 3 20
opt-30b 48 3 10
opt-30b 48 2 10
opt-30b 24 3 15
opt-30b 48 1 10
opt-13b 48 3 20
opt-13b 48 1 20
LIST
    return 2
}

# sanitize TOOL OPTIONS... PROGRAM FLAGS...
sanitize() {
    command -v compute-sanitizer || { echo "no compute-sanitizer here"; return $SKIP; }
    compute-sanitizer --tool "$1" --error-exitcode 9 "${@:2}" >"$scratch/$1" 2>&1
    rc=$?
    cat "$scratch/$1"
    [ $rc = 0 ] && grep -q "SUMMARY: 0 " "$scratch/$1" # a tool that could not look has found nothing either
}
# every tier holds some of everything, pages end within a prompt, the CPU attends for its part
mixed="$BUILD/flexgen bench --device cuda --model opt-125m --prompt-len 24 --gen-len 3 --gpu-batch-size 3 --num-gpu-batches 2
    --percent 40 40 40 40 40 40 --cpu-cache-compute --offload-dir $scratch"
step_memcheck() { sanitize memcheck $mixed; }
fewer="--compress-weight --compress-cache --attn-sparsity 0.3"
step_memcheck_packed() { sanitize memcheck $mixed $fewer; }
step_memcheck_kernels() { sanitize memcheck "$BUILD/gpu/test_cuda"; }
# not the library's own kernels: their barriers are not all understood, and each takes long
step_racecheck() { sanitize racecheck --kernel-name-exclude "regex=gemm|gemv|cutlass|nvjet|xmma|cublas" $mixed; }

# Peers, each with what this program does at the same limit.
peer="--prompt-len 512 --gen-len 32 --percent 50 50 0 100 0 100 --cpu-cache-compute --gpu-batch-size 64 --num-gpu-batches 2"
step_opt_6_7b_16g() { run_bench limited --model opt-6.7b --gpu-mem 16G $peer; }
step_opt_6_7b_packed() { run_bench packed --model opt-6.7b --gpu-mem 16G $peer --compress-weight --compress-cache; }
step_accelerate() {
    python3 -c 'import accelerate, torch, transformers' || { echo "no torch, transformers and accelerate here"; return $SKIP; }
    python3 scripts/compare_accelerate.py --model opt-6.7b --gpu-mem-gb 16 --prompt-len 512 --gen-len 32 --seconds 60 --json "$DIR/accelerate.json"
}
step_flexllmgen() { # it knows no limit for the GPU
    [ -n "$FLEXLLMGEN" ] || { echo "FLEXLLMGEN names no checkout"; return $SKIP; }
    PYTHONPATH=$FLEXLLMGEN python3 -m flexllmgen.flex_opt --model facebook/opt-6.7b --path _DUMMY_ $peer --cut-gen-len 5 \
        --offload-dir "$scratch/flexllmgen" --log-file "$DIR/flexllmgen.txt"
}

# ---- running them ---------------------------------------------------------------------------------------------

now() { date +%s.%N; }
begun=$(now) failed=0 number=0 rows=

write_summary() {
    printf '{"seconds": %.1f, "failed": %d, "steps": [%s\n]}\n' "$(awk "BEGIN { print $(now) - $begun }")" "$failed" "${rows%,}" >"$DIR/summary.json"
}

# step NAME SECONDS [NEEDS...]: runs step_NAME if the files that it needs are there
step() {
    local name=$1 budget=$2 log start rc=null ok=false note missing='' left seconds=0
    shift 2
    number=$((number + 1))
    [ "$chosen" = "  " ] || [[ $chosen == *" $name "* ]] || return
    log=$DIR/$(printf '%02d-%s.log' $number "$name")
    left=$(awk "BEGIN { print int($SECONDS_IN_ALL - ($(now) - $begun)) }")
    for need; do [ -s "$need" ] || missing="$missing ${need##*/}"; done
    if [ -n "$missing" ]; then
        echo "no$missing" >"$log"
        note="not run: no$missing"
    elif [ "$left" -lt 5 ]; then
        echo "all $SECONDS_IN_ALL s are over" >"$log"
        note="not run: all $SECONDS_IN_ALL s are over"
    else
        [ "$budget" -le "$left" ] || budget=$left
        start=$(now)
        timeout -k 5 "$budget" bash -o pipefail -c "step_$name" >"$log" 2>&1 </dev/null &
        child=$!
        wait $child # unlike a command in the foreground, a signal to this script ends it
        rc=$? child=
        seconds=$(awk "BEGIN { printf \"%.1f\", $(now) - $start }")
        case $rc in
        0) ok=true note='' ;;
        "$SKIP") ok=null note="skipped: $(tail -n 1 "$log")" ;;
        124 | 137) note="stopped after $budget s" ;;
        *) note="exit status $rc: $(tail -n 1 "$log")" ;;
        esac
    fi
    [ $ok != false ] || failed=$((failed + 1))
    note=$(printf %s "$note" | tr -c '[:print:]' ' ' | sed 's/["\\]/\\&/g')
    rows="$rows"$(printf '\n  {"name": "%s", "seconds": %s, "exit_status": %s, "ok": %s, "note": "%s"},' "$name" "$seconds" "$rc" $ok "$note")
    printf '%-17s %7.1f s  %s\n' "$name" "$seconds" "$([ $ok = true ] && echo ok || echo "$note")"
    write_summary
}

export SKIP mixed fewer peer
export -f $(compgen -A function step_) run_bench sanitize
write_summary
gpu=$DIR/compute_capability # the step card has found one
step card 20
step build 120 "$gpu"
step tests 100 "$gpu" "$BUILD/gpu/test_cuda"
step bounds_gpu 45 "$gpu" "$BUILD/bench_gpu"
step bounds_host 45 "$BUILD/bench_host"
step bounds_machine 45 "$BUILD/bench_machine"
step opt_6_7b 60 "$gpu" "$BUILD/flexgen"
step profile 60 "$gpu" "$BUILD/flexgen"
step searched 90 "$gpu" "$DIR/hardware.json"
step memcheck 60 "$gpu" "$BUILD/flexgen"
step opt_30b 150 "$gpu" "$BUILD/flexgen"
step racecheck 60 "$gpu" "$BUILD/flexgen"
step opt_6_7b_16g 60 "$gpu" "$BUILD/flexgen"
step opt_6_7b_packed 60 "$gpu" "$BUILD/flexgen"
step memcheck_packed 60 "$gpu" "$BUILD/flexgen"
step accelerate 100 "$gpu"
step flexllmgen 100 "$gpu"
step memcheck_kernels 100 "$gpu" "$BUILD/gpu/test_cuda"

[ -n "$rows" ] || { echo "no such step:$chosen"; exit 2; }
shopt -s nullglob # what is not there is not read; /dev/null, since no file at all would be standard input
(cd "$DIR" && awk -v card="$(head -n 1 card 2>/dev/null)" -f "$figures" /dev/null bounds-* {accelerate,gpu,offload,limited}*.json {flexllmgen,gpu,offload,limited}*.txt)
[ "$failed" = 0 ] || { echo "$failed steps failed or were not run; $DIR/summary.json"; exit 1; }
