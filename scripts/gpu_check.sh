#!/bin/bash
# gpu_check.sh PART ARCHIVE [SECONDS [STEP...]]: on a machine with a GPU, a CUDA toolkit and a compiler, one of two parts:
#
#   correctness   the suites on the GPU, perplexity and tokens beside the CPU's, wrong memory accesses, races
#   performance   the machine's bounds, what flexgen does beside them and beside its peers, a trace, counters of the kernels
#
# Neither packages nor a network are needed. What the machine lacks comes from the folder .deps, if gpu_deps.sh has filled it on
# another one, and cuBLAS from Python's packages if the toolkit has none. A part takes SECONDS (540) at most and begins with what
# matters most. Each step has a time of its own, and what earlier steps have left over; a step that fails or hangs stops no other
# that can do without it. Everything is in ARCHIVE, a .tar.gz that is written anew after every step:
#
#   NN-STEP.log     what a step printed; of one that failed the last lines are printed too
#   summary.json    how each step went
#   NAME.json .txt  of the runs of flexgen bench; offload, gpu, limited.trace: what each lane did when, in a second run
#   figures.json    values, bounds, ratios: the table that comes last
#
# The exit status is 1 if a step failed or was not run. A step for which this machine has no tool or package is skipped, which its
# line says. BUILD=build; CPU_MEM_GB=96 and GPU_MEM_GB=16: the memory for the runs that offload; TMPDIR: where the disk tier is;
# FLEXLLMGEN=checkout of the original program, to be run beside this one (its tokenizer must be downloaded already).
# shellcheck disable=SC2086,SC2046,SC2034,SC2155 # lists of words are meant to be split

# Each step, its seconds, and the programs that it needs. The seconds of a part are 540 together; 0: in what the others leave.
correctness="
card 10
build 110
cuda 50 gpu/test_cuda
eval 25 flexgen
lanes 20 gpu/test_lanes
schedule 60 gpu/test_schedule
memcheck 45 flexgen
memcheck_packed 35 flexgen
memcheck_kernels 50 gpu/test_cuda
racecheck 45 flexgen
stages 20 gpu/test_stages
transformers 70 flexgen
schedule_all 0 gpu/test_schedule"
performance="
card 10
build 75
bounds_gpu 35 bench_gpu
gpu 45 flexgen
limited 40 flexgen
offload 95 flexgen
ncu 45 flexgen
bounds_host 15 bench_host
bounds_machine 15 bench_machine
accelerate 65 flexgen
packed 40 flexgen
profile 30 flexgen
searched 30 flexgen
flexllmgen 0"

part=$1
{ [ $# -ge 2 ] && [[ $part == correctness || $part == performance ]]; } || { sed -n '2,/^# shell/{/^# shell/!s/^# \{0,1\}//p;}' "$0"; exit 2; }
mkdir -p "$(dirname "$2")" && archive=$(cd "$(dirname "$2")" && pwd)/$(basename "$2") || exit 2
seconds=${3:-540} chosen=" ${*:4} "
cd "$(dirname "$0")/.." || exit 2
: "${BUILD:=build}" "${CPU_MEM_GB:=96}" "${GPU_MEM_GB:=16}" "${CUDA_HOME:=/usr/local/cuda}"
PATH=$PATH:$CUDA_HOME/bin:$CUDA_HOME/compute-sanitizer:/usr/local/nvidia/bin
scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/gpu-check-XXXXXX") || exit 2
DIR=$scratch/$part
mkdir "$DIR"
trap 'rm -rf "$scratch"' EXIT
SKIP=77 # a step's exit status: a tool is missing, the log's last line says which
export DIR BUILD CPU_MEM_GB GPU_MEM_GB PATH scratch part SKIP
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NVCC_APPEND_FLAGS=-allow-unsupported-compiler XDG_CACHE_HOME=$scratch

# ---- what the machine lacks -----------------------------------------------------------------------------------

# links HEADER LIBRARY: whether the compiler finds both
links() { printf '#include <stdio.h>\n#include <%s>\nint main(void) { return 0; }\n' "$1" | ${CC:-cc} -x c - -o "$scratch/a.out" "-l$2" 2>/dev/null; }
deps=$PWD/.deps
if ! { links cjson/cJSON.h cjson && links CUnit/CUnit.h cunit; } && [ -d "$deps" ]; then
    export CPATH=$deps/include${CPATH:+:$CPATH} LIBRARY_PATH=$deps/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
    export LD_LIBRARY_PATH=$deps/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

# first FILE...: that is there
first() { for file; do [ ! -e "$file" ] || { echo "$file"; return; }; done; }
# gather_cuda: cuBLAS and CUDA's runtime in one folder, from wherever they are, as make's arguments
gather_cuda() {
    local packages header blas runtime
    packages=$(python3 -c 'import nvidia; print(*(p + "/*" for p in nvidia.__path__))' 2>/dev/null)
    header=$(first "$CUDA_HOME"/include/cublasLt.h {/usr/local,/usr}/include/cublasLt.h $(printf '%s/include/cublasLt.h ' $packages) "$deps"/cuda/include/cublasLt.h)
    blas=$(first "$CUDA_HOME"/{lib64,targets/*/lib}/libcublasLt.so.[0-9]* /usr/lib/*-linux-gnu/libcublasLt.so.[0-9]* $(printf '%s/lib/libcublasLt.so.[0-9]* ' $packages))
    runtime=$(first "$CUDA_HOME"/{lib64,targets/*/lib}/libcudart_static.a /usr/lib/*-linux-gnu/libcudart_static.a "$deps"/cuda/lib/libcudart_static.a)
    echo "cuBLAS: ${header:-no cublasLt.h}, ${blas:-no libcublasLt.so}; CUDA's runtime: ${runtime:-no libcudart_static.a}" >"$DIR/cuda"
    { [ -n "$header" ] && [ -n "$blas" ] && [ -n "$runtime" ]; } || return
    mkdir -p "$BUILD/cuda"
    ln -sf "$runtime" "$BUILD/cuda/libcudart_static.a"
    ln -sf "$blas" "$BUILD/cuda/libcublasLt.so"
    ln -sf "$blas" "$BUILD/cuda/$(basename "$blas")"
    export CPATH=${CPATH:+$CPATH:}${header%/*} CUDA_ARGS="CUDA_INCLUDE=${header%/*} CUDA_LIB=$(cd "$BUILD/cuda" && pwd)"
}
gather_cuda

# ---- steps: each runs in a shell of its own -------------------------------------------------------------------

step_card() {
    cat "$DIR/cuda"
    nproc && grep -m 1 'model name' /proc/cpuinfo && free -g && df -h "$scratch"
    ${CC:-cc} --version | head -n 1
    nvcc --version | tail -n 2
    nvidia-smi
    nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader -i "${CUDA_VISIBLE_DEVICES:-0}" | tee "$DIR/card"
}

# For the GPU that is here; if it is not known, for the oldest, whose code others can run.
step_build() {
    local programs="flexgen flexgen_cuda.so" gpu
    [ $part = correctness ] && programs="$programs gpu/test_cuda gpu/test_lanes gpu/test_schedule gpu/test_stages"
    [ $part = performance ] && programs="$programs bench_gpu bench_host bench_machine"
    programs=$(printf "$BUILD/%s " $programs)
    gpu=$(awk -F', *' 'NR == 1 && $2 ~ /^[0-9]+\.[0-9]+$/ { sub(/\./, "", $2); print $2 }' "$DIR/card" 2>/dev/null)
    rm -f $programs # what does not build is not run in an older state
    make -k -j"$(nproc)" BUILD="$BUILD" GPU="${gpu:-75}" SETUP= WERROR= MPICC= $CUDA_ARGS $programs
}

step_cuda() { "$BUILD/gpu/test_cuda"; }
step_lanes() { "$BUILD/gpu/test_lanes"; }
step_stages() { "$BUILD/gpu/test_stages"; }
step_schedule() { "$BUILD/gpu/test_schedule" --every 23; }
step_schedule_all() { "$BUILD/gpu/test_schedule"; }

# The shipped model's perplexity on both devices: within 1%, since one has activations of 16 bits and the other of 32.
step_eval() {
    local flags="--model models/opt-tiny --perplexity models/opt-tiny/stories.txt --limit 20 --window 256 --gpu-batch-size 5 --num-gpu-batches 2
        --percent 50 50 50 50 50 50 --gpu-mem 4G --cpu-mem 4G --offload-dir $scratch"
    for device in host cuda; do
        "$BUILD/flexgen" eval --device $device $flags --json "$DIR/eval-$device.json" || return
    done
    awk '/"perplexity"/ { gsub(/[^0-9.]/, "", $2); value[n++] = $2 }
        END { print "perplexity: host " value[0] ", cuda " value[1]; exit !(n == 2 && value[1] / value[0] > .99 && value[1] / value[0] < 1.01) }' "$DIR"/eval-{host,cuda}.json
}

# Greedy tokens beside those of Hugging Face on the CPU; without a search, which would measure the machine first.
step_transformers() {
    python3 -c 'import torch, transformers' || { echo "no torch and transformers here"; return $SKIP; }
    cat >"$scratch/flexgen" <<EOS
#!/bin/sh
[ "\$1" != generate ] || set -- "\$@" --percent 100 0 100 0 100 0 --gpu-batch-size 16 --num-gpu-batches 1
exec "$BUILD/flexgen" "\$@" --device cuda
EOS
    chmod +x "$scratch/flexgen"
    python3 scripts/compare_transformers.py --flexgen "$scratch/flexgen" --runs 1
}

# sanitize TOOL OPTIONS... PROGRAM FLAGS...
sanitize() {
    command -v compute-sanitizer || { echo "no compute-sanitizer here"; return $SKIP; }
    compute-sanitizer --tool "$1" --error-exitcode 9 "${@:2}" >"$scratch/$1" 2>&1
    rc=$?
    cat "$scratch/$1"
    ! grep -q "Device not supported" "$scratch/$1" || { echo "compute-sanitizer does not support this machine"; return $SKIP; }
    [ $rc = 0 ] && grep -q "SUMMARY: 0 " "$scratch/$1" # a tool that could not look has found nothing either
}
# every tier holds some of everything, pages end within a prompt, the CPU attends for its part
mixed="$BUILD/flexgen bench --device cuda --model opt-125m --prompt-len 24 --gen-len 3 --gpu-batch-size 3 --num-gpu-batches 2
    --percent 40 40 40 40 40 40 --cpu-cache-compute --gpu-mem 4G --cpu-mem 4G --offload-dir $scratch"
step_memcheck() { sanitize memcheck $mixed; }
step_memcheck_packed() { sanitize memcheck $mixed --compress-weight --compress-cache --attn-sparsity 0.3; }
# the suite makes calls that CUDA refuses; those are no errors of the kernels
step_memcheck_kernels() { sanitize memcheck --report-api-errors no "$BUILD/gpu/test_cuda" --every 101; }
# not the library's own kernels: their barriers are not all understood, and each takes long
step_racecheck() { sanitize racecheck --kernel-name-exclude "regex=gemm|gemv|cutlass|nvjet|xmma|cublas" $mixed; }

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
    set -- bench --device cuda --offload-dir "$scratch" --cpu-mem "${CPU_MEM_GB}G" --json "$DIR/$name.json" "$@"
    echo "+ flexgen $*"
    "$BUILD/flexgen" "$@" >"$DIR/$name.txt" </dev/null || return
    cat "$DIR/$name.txt"
}
# first_that_fits NAME FLAGS... <LIST: run_bench with the flags of the first line of the list that fits
first_that_fits() {
    while read -r line; do
        run_bench "$@" $line
        rc=$?
        [ $rc = 2 ] || return $rc
        echo "does not fit this machine: $line"
    done
    return 2
}

# Everything on the GPU. Weights are made first: 13 GB.
step_gpu() { printf -- '--gpu-batch-size %s\n' 64 32 16 4 | first_that_fits gpu --model opt-6.7b --trace "$DIR/gpu.trace" --prompt-len 512 --gen-len 32 --percent 100 0 100 0 100 0 --num-gpu-batches 1; }

# With GPU_MEM_GB of the GPU; fewer batches, in the end a smaller model, until it fits.
step_offload() {
    first_that_fits offload --gpu-mem "${GPU_MEM_GB}G" --prompt-len 512 --gen-len 8 --cpu-cache-compute --trace "$DIR/offload.trace" <<'LIST'
--model opt-30b --gpu-batch-size 48 --num-gpu-batches 3 --percent 20 80 0 100 0 100
--model opt-30b --gpu-batch-size 48 --num-gpu-batches 2 --percent 10 90 0 100 0 100
--model opt-30b --gpu-batch-size 28 --num-gpu-batches 2 --percent 10 90 0 100 0 100
--model opt-30b --gpu-batch-size 14 --num-gpu-batches 2 --percent 10 90 0 100 0 100
--model opt-13b --gpu-batch-size 48 --num-gpu-batches 3 --percent 20 80 0 100 0 100
--model opt-13b --gpu-batch-size 24 --num-gpu-batches 2 --percent 20 80 0 100 0 100
LIST
}

# Beside the peers, at the same limit.
peer="--prompt-len 512 --gen-len 32 --percent 50 50 0 100 0 100 --cpu-cache-compute --gpu-batch-size 64 --num-gpu-batches 2"
step_limited() { run_bench limited --model opt-6.7b --gpu-mem "${GPU_MEM_GB}G" $peer --trace "$DIR/limited.trace"; }
step_packed() { run_bench packed --model opt-6.7b --gpu-mem "${GPU_MEM_GB}G" $peer --compress-weight --compress-cache; }
step_accelerate() {
    python3 -c 'import accelerate, torch, transformers' || { echo "no torch, transformers and accelerate here"; return $SKIP; }
    python3 scripts/compare_accelerate.py --model opt-6.7b --gpu-mem-gb "$GPU_MEM_GB" --prompt-len 512 --gen-len 32 --seconds $((LIMIT - 10)) --json "$DIR/accelerate.json"
}
step_flexllmgen() { # it knows no limit for the GPU
    [ -n "$FLEXLLMGEN" ] || { echo "FLEXLLMGEN names no checkout"; return $SKIP; }
    PYTHONPATH=$FLEXLLMGEN python3 -m flexllmgen.flex_opt --model facebook/opt-6.7b --path _DUMMY_ $peer --cut-gen-len 5 \
        --offload-dir "$scratch/flexllmgen" --log-file "$DIR/flexllmgen.txt"
}

# Counters of the kernels, those of prefill and then those of decode, on halfs and on packed numbers.
step_ncu() {
    command -v ncu || { echo "no ncu here"; return $SKIP; }
    local run="$BUILD/flexgen bench --device cuda --model opt-1.3b --prompt-len 512 --gen-len 2 --percent 100 0 100 0 100 0
        --gpu-batch-size 32 --num-gpu-batches 1 --gpu-mem ${GPU_MEM_GB}G --cpu-mem 4G --offload-dir $scratch"
    ncu --clock-control none -k 'regex:attend_prefill|unpack|packed_linear|layernorm' -c 20 $run --compress-weight &&
        ncu --clock-control none -k 'regex:attend_kernel|combine|pick' -c 8 $run &&
        ncu --clock-control none -k 'regex:attend_kernel|pack_kernel' -c 8 $run --compress-cache
}

# The machine as numbers, the policy that is found with them in GPU_MEM_GB of the GPU, and what it promised beside what it took.
step_profile() { "$BUILD/flexgen" profile --device cuda --model opt-6.7b --cpu-mem "${CPU_MEM_GB}G" --offload-dir "$scratch" --output "$DIR/hardware.json"; }
step_searched() { run_bench searched --model opt-6.7b --gpu-mem "${GPU_MEM_GB}G" --hardware "$DIR/hardware.json" --prompt-len 512 --gen-len 32 --num-prompts 256; }

# ---- running them ---------------------------------------------------------------------------------------------

now() { date +%s.%N; }
left() { awk "BEGIN { print int($seconds - ($(now) - $begun)) }"; }
begun=$(now) failed=0 number=0 rows='' child=''

# Everything so far. A moment at which there is no archive, or half of one, does not come.
keep() {
    printf '{"part": "%s", "seconds": %.1f, "failed": %d, "steps": [%s\n]}\n' $part "$(awk "BEGIN { print $(now) - $begun }")" "$failed" "${rows%,}" >"$DIR/summary.json"
    (shopt -s nullglob # what is not there is not read; /dev/null, since no file at all would be standard input
     f=$PWD/scripts/gpu_figures.awk && cd "$DIR" && awk -v card="$(head -n 1 card 2>/dev/null)" -v memory="$GPU_MEM_GB GiB" -f "$f" /dev/null \
         bounds-* {accelerate,gpu,offload,limited}*.json {flexllmgen,gpu,offload,limited}*.txt) >"$DIR/figures"
    tar -czf "$archive.new" -C "$scratch" $part && mv "$archive.new" "$archive"
}

stop() {
    [ -z "$child" ] || kill -KILL -- "-$child"
    failed=$((failed + 1))
    keep
    exit 1
}
trap stop INT TERM

# run STEP LIMIT LOG: its exit status. Whatever it leaves running is killed; one that waits in a driver is left behind even so.
run() {
    local rc=137 tenths
    timeout -k 5 "$2" bash -o pipefail -c "step_$1" >"$3" 2>&1 </dev/null &
    child=$!
    for ((tenths = 10 * ($2 + 10); tenths; tenths--)); do
        kill -0 $child 2>/dev/null || break
        sleep .1
    done
    [ $tenths = 0 ] || { wait $child; rc=$?; }
    kill -KILL -- -$child 2>/dev/null
    child=''
    return $rc
}

# step NAME SECONDS LATER [PROGRAM...]: runs step_NAME within what is left, less the seconds of the LATER steps, if it has its programs
step() {
    local name=$1 limit=$(($(left) - $3)) log start rc=null ok=false note missing='' took=0
    number=$((number + 1))
    log=$DIR/$(printf '%02d-%s.log' $number "$name")
    [ $limit -ge "$2" ] || limit=$2
    [ $limit -le "$(left)" ] || limit=$(left)
    for program in "${@:4}"; do [ -e "$BUILD/$program" ] || missing="$missing $program"; done
    if [ -n "$missing" ]; then
        note="not run: no$missing"
    elif [ $limit -lt 5 ]; then
        note="not run: no time is left"
        [ "$2" != 0 ] || ok=null
    else
        start=$(now)
        export LIMIT=$limit
        run "$name" $limit "$log"
        rc=$?
        took=$(awk "BEGIN { printf \"%.1f\", $(now) - $start }")
        case $rc in
        0) ok=true note='' ;;
        "$SKIP") ok=null note="skipped: $(tail -n 1 "$log")" ;;
        124 | 137)
            note="stopped after $limit s"
            [ "$2" != 0 ] || grep -q FAILED "$log" || ok=null
            ;;
        *) note="exit status $rc" ;;
        esac
    fi
    printf '%-17s %7.1f s  %s\n' "$name" "$took" "$([ $ok = true ] && echo ok || echo "$note")"
    if [ $ok = false ]; then
        failed=$((failed + 1))
        [ $rc = null ] || tail -n 20 "$log" | cut -c 1-160 | sed 's/^/    /'
    fi
    note=$(printf %s "$note" | tr -c '[:print:]' ' ' | sed 's/["\\]/\\&/g')
    rows="$rows"$(printf '\n  {"name": "%s", "seconds": %s, "exit_status": %s, "ok": %s, "note": "%s"},' "$name" "$took" "$rc" $ok "$note")
    keep
}

export CUDA_ARGS mixed peer
export -f $(compgen -A function step_) run_bench first_that_fits sanitize
steps=$(printf '%s\n' "${!part}" | awk -v chosen="$chosen" 'NF && (chosen ~ /^ *$/ || index(chosen, " " $1 " "))')
[ -n "$steps" ] || { echo "gpu_check.sh: no such step:$chosen"; exit 2; }
later=$(echo "$steps" | awk '{ s += $2 } END { print s }')
while read -r -u 3 name budget programs; do
    later=$((later - budget))
    step "$name" "$budget" $later $programs
done 3<<<"$steps"
[ $part = correctness ] || cat "$DIR/figures"
echo "$failed steps failed or were not run; everything is in $archive"
[ "$failed" = 0 ]
