#!/bin/bash
# gpu_check.sh PART ARCHIVE [SECONDS [STEP...]]: on a machine with a GPU, a CUDA toolkit and a compiler, one of two parts:
#
#   correctness   mini.cu, the suites on the GPU, perplexity and tokens beside the CPU's, wrong memory accesses, races
#   performance   the machine's bounds, what flexgen does beside them and beside its peers, a trace, counters of the kernels
#
# Neither packages nor a network are needed. What the machine lacks comes from the folder .deps, if gpu_deps.sh has filled it on
# another one, and cuBLAS from Python's packages if the toolkit has none. A part takes SECONDS (540) at most and begins with what
# matters most. Each step says what it will do and how long it may take: its own time, which no other can use up, and what earlier
# ones have left over. A step that fails or hangs stops no other that can do without it; one that is ended is waited for, since until
# it is gone the GPU is not free. Everything is in ARCHIVE, a .tar.gz that is written anew after every step, before the next begins:
#
#   NN-STEP.log     what a step printed; of one that failed the last lines are printed too
#   summary.json    how each step went
#   NAME.json .txt  of the runs of flexgen bench; offload, gpu, limited.trace: what each lane did when, in a second run
#   figures.json    values, bounds, ratios: the table that comes last
#
# The exit status is 1 if a step failed or was not run. A step for which this machine has no tool or package is skipped, which its
# line says, and so is what does not fit it. Where nothing can be built or run, one line says what to do, and the status is 2. BUILD=build;
# GPU_MEM_GB and CPU_MEM_GB: the memory for the runs that offload (16 and 96, or most of what is free); TMPDIR: where the disk tier is;
# FLEXLLMGEN=checkout of the original program, to be run beside this one (its tokenizer must be downloaded already); GRACE=4: seconds
# that an ended step has to go, which are of its own time.
# shellcheck disable=SC2086,SC2046,SC2034,SC2155 # lists of words are meant to be split

# Each step, its seconds, the programs that it needs, and what it does. The seconds of a part are 530 together, of 540; where SECONDS
# are others, or STEPs are chosen, they are shared in the same proportions. 0: in what the others leave.
correctness="
card 10 : what this machine is
mini 30 : builds mini.cu; tokens of the shipped model beside those of mini.c; compute-sanitizer looks for wrong accesses
build 100 : builds the program and the suites for this GPU
cuda 45 gpu/test_cuda : every kernel beside its plain form
tokens 35 flexgen : completions of the shipped model on host and GPU, greedy and sampled, and on the GPU without graphs
eval 20 flexgen : perplexity of the shipped model on host and GPU
lanes 20 gpu/test_lanes : queues, marks and traces of the GPU
schedule 50 gpu/test_schedule : placements, schedules and batchings against each other, every 23rd
memcheck 40 flexgen : compute-sanitizer looks for wrong accesses of a run that uses every tier
memcheck_packed 30 flexgen : the same, packed and sparse
memcheck_kernels 40 gpu/test_cuda : the same of the kernels' suite, every 101st case
racecheck 35 flexgen : compute-sanitizer looks for races in shared memory
synccheck 25 flexgen : compute-sanitizer looks for barriers that not all threads reach
blaslog 15 flexgen : how cuBLAS splits and joins sums, by its own log
stages 15 gpu/test_stages : a pipeline's stages on the GPU
transformers 20 flexgen : greedy tokens beside those of Hugging Face on the CPU
schedule_all 0 gpu/test_schedule : all placements, schedules and batchings, for as long as there is time"
performance="
card 10 : what this machine is
build 75 : builds the program and the benchmarks for this GPU
bounds_gpu 25 bench_gpu : copies and products of this GPU at their best
gpu 45 flexgen : opt-6.7b all on the GPU, and once more for a trace
opt30b 65 flexgen : opt-30b all on the GPU, in 16 bits, with 4-bit weights, and 4-bit cache, batches of 8 and 64
kernels 40 bench_gpu : flexgen's kernels by themselves
limited 40 flexgen : opt-6.7b in a part of the GPU, the CPU attending; and once more for a trace
offload 75 flexgen : opt-30b in a part of the GPU, weights and cache on the CPU; and once more for a trace
graphs 10 flexgen : opt-125m all on the GPU, one prompt, with graphs and without
waits 15 bench_gpu : launches, marks, waits, small copies beside large ones, pinning
ncu 35 flexgen : counters of the kernels
twice 20 flexgen : the same run twice, whose tokens must be the same
bounds_host 10 bench_host : how fast the CPU reads its memory
bounds_machine 10 bench_machine : the disk and the memory of this machine
packed 20 flexgen : as limited, with 4-bit weights and cache
profile 15 flexgen : this machine as numbers
searched 15 flexgen : the policy that is found with them, predicted and measured
accelerate 5 flexgen : Hugging Face Accelerate in the same part of the GPU
flexllmgen 0 : the original program"

part=$1
{ [ $# -ge 2 ] && [[ $part == correctness || $part == performance ]]; } || { sed -n '2,/^# shell/{/^# shell/!s/^# \{0,1\}//p;}' "$0"; exit 2; }
mkdir -p "$(dirname "$2")" && archive=$(cd "$(dirname "$2")" && pwd)/$(basename "$2") || exit 2
seconds=${3:-540} chosen=" ${*:4} "
cd "$(dirname "$0")/.." || exit 2
: "${BUILD:=build}" "${CUDA_HOME:=/usr/local/cuda}"
PATH=$PATH:$CUDA_HOME/bin:$CUDA_HOME/compute-sanitizer:/usr/local/nvidia/bin:/usr/lib/wsl/lib
scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/gpu-check-XXXXXX") || exit 2
: "${GRACE:=4}"
grace=$(awk "BEGIN { print int(1000 * $GRACE) }")
DIR=$scratch/$part
mkdir "$DIR"
trap 'rm -rf "$scratch"' EXIT
SKIP=77 # a step's exit status: a tool is missing, the log's last line says which
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
    ln -sf "${blas/Lt/}" "$BUILD/cuda/libcublas.so" # for mini.cu
    ln -sf "${blas/Lt/}" "$BUILD/cuda/$(basename "${blas/Lt/}")"
    export CPATH=${CPATH:+$CPATH:}${header%/*} CUDA_ARGS="CUDA_INCLUDE=${header%/*} CUDA_LIB=$(cd "$BUILD/cuda" && pwd)"
}
gather_cuda

# ---- what this machine is: one line if it will not do ----------------------------------------------------------

cannot() { echo "gpu_check.sh: $*"; exit 2; }
# ask FIELD: what nvidia-smi says of the GPU that is used
ask() { nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits -i "${CUDA_VISIBLE_DEVICES:-0}" 2>/dev/null | head -n 1; }
# at_most GB MIB: GB, or less where so many MiB are less
at_most() { awk -v gb="$1" -v mib="$2" 'BEGIN { have = int(mib / 1024); print (mib == "" || have > gb ? gb : have < 1 ? 1 : have) }'; }

nvcc=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1.\2/p')
driver=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\)\.\([0-9]*\).*/\1.\2/p')
[ -n "$nvcc" ] || cannot "there is no nvcc: install the CUDA toolkit${driver:+, up to version ${driver%.*}.x} (Python's packages have no compiler), or name its folder by CUDA_HOME"
[ -z "$driver" ] || [ "${nvcc%.*}" -le "${driver%.*}" ] ||
    cannot "the driver knows CUDA $driver, and the toolkit is $nvcc: install a newer driver, or name a toolkit of ${driver%.*}.x by CUDA_HOME"
[ -n "$CUDA_ARGS" ] || cannot "cuBLAS or CUDA's runtime is missing ($(cat "$DIR/cuda")): apt-get install libcublas-dev-${nvcc/./-} cuda-cudart-dev-${nvcc/./-}"
if [ -z "$driver" ]; then
    ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1' ||
        cannot "there is no driver of NVIDIA's, neither nvidia-smi nor libcuda.so.1: install it; in a container, start that with --gpus all"
    echo "no nvidia-smi here: what the card is, the program will say"
fi
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ "$gpus" -lt 2 ] || [ -n "$CUDA_VISIBLE_DEVICES" ] || echo "$gpus GPUs: the first is used; CUDA_VISIBLE_DEVICES=1 takes the second"
free_mib=$(ask memory.free)
# The system has 2 GiB; under WSL only half of the memory can be pinned.
host_mib=$(awk '/^MemAvailable/ { print int($2 / 1024) - 2048 }' /proc/meminfo)
uname -r | grep -qi microsoft && host_mib=$((host_mib / 2)) && echo "WSL: half of the memory is used, since no more can be pinned"
: "${GPU_MEM_GB:=$(at_most 16 "${free_mib:+$((free_mib * 9 / 10))}")}" "${CPU_MEM_GB:=$(at_most 96 "$host_mib")}"
export DIR BUILD CPU_MEM_GB GPU_MEM_GB PATH scratch part SKIP

# ---- steps: each runs in a shell of its own -------------------------------------------------------------------

step_card() {
    cat "$DIR/cuda"
    nproc && grep -m 1 'model name' /proc/cpuinfo && free -g && df -h "$scratch"
    ${CC:-cc} --version | head -n 1
    nvcc --version | tail -n 2
    echo "for the runs that offload: $GPU_MEM_GB GB of the GPU, $CPU_MEM_GB GB of the CPU"
    nvidia-smi || return 0 # in a container perhaps
    nvidia-smi -q >"$DIR/nvidia-smi" # clocks, what holds them back, the link
    nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader -i "${CUDA_VISIBLE_DEVICES:-0}" | tee "$DIR/card"
}

# capability: that of the GPU that is here, as 86; if it is not known, of the oldest, whose code others can run.
capability() {
    local gpu
    gpu=$(awk -F', *' 'NR == 1 && $2 ~ /^[0-9]+\.[0-9]+$/ { sub(/\./, "", $2); print $2 }' "$DIR/card" 2>/dev/null)
    echo "${gpu:-75}"
}

# The shortest way to see this GPU work: mini.cu's tokens under three placements. It needs no other program of this one.
step_mini() {
    local flags bad=0 cuda ask="models/opt-tiny --prompts models/prompts.txt --json --gpu-batch-size 2 --num-gpu-batches 2 --gpu-mem 1e9 --cpu-mem 1e9"
    cuda=$(cd "$BUILD/cuda" && pwd) || return
    ${CC:-cc} -O3 mini.c -lm -lpthread -o "$scratch/mini-cpu" || return
    nvcc -O3 -DGPU -arch=sm_"$(capability)" mini.c mini.cu -L"$cuda" -Xlinker -rpath="$cuda" -lcublas -o "$scratch/mini-gpu" || return
    while read -r flags; do
        for half in cpu gpu; do
            "$scratch/mini-$half" $ask --max-tokens 24 --percent $flags >"$DIR/mini-$half" </dev/null || return
        done
        echo "$flags:"
        shared "$DIR/mini-cpu" "$DIR/mini-gpu" || bad=1
    done <<'LIST'
100 0 100 0 100 0
0 50 0 50 0 100
20 40 30 40 0 100 --cpu-cache-compute --compress-weight --compress-cache
LIST
    command -v compute-sanitizer >/dev/null || return $bad
    sanitize memcheck "$scratch/mini-gpu" $ask --max-tokens 3 --percent 20 40 30 40 20 40
    case $? in 0 | "$SKIP") return $bad ;; *) return 1 ;; esac
}

# For the GPU that is here.
step_build() {
    local programs="flexgen flexgen_cuda.so"
    [ $part = correctness ] && programs="$programs gpu/test_cuda gpu/test_lanes gpu/test_schedule gpu/test_stages"
    [ $part = performance ] && programs="$programs bench_gpu bench_host bench_machine"
    programs=$(printf "$BUILD/%s " $programs)
    rm -f $programs # what does not build is not run in an older state
    make -k -j"$(nproc)" BUILD="$BUILD" GPU="$(capability)" SETUP= WERROR= MPICC= $CUDA_ARGS $programs
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

# shared A B: of every two completions, the share of the longer one that they begin alike with; then of all. Fails below 0.5: sums in
# another order may turn near ties, but not most of a text.
shared() {
    paste -d '\n' "$1" "$2" | awk -v least=.5 'function text(line) { sub(/.*"completion": "/, "", line); sub(/", "[a-z_]*".*/, "", line); return line }
        NR % 2 { a = text($0); next }
        { b = text($0); most = length(a) > length(b) ? length(a) : length(b)
          for (n = 0; n < most && substr(a, n + 1, 1) == substr(b, n + 1, 1);) n++
          same += n; all += most; printf "  prompt %d: %d of %d characters\n", NR / 2 - 1, n, most }
        END { print "  alike: " same " of " all + 0; exit !(all && same >= least * all) }'
}
# The shipped model's completions, one sequence diffed with the other; on the GPU once more without graphs, which must be the same to the byte.
step_tokens() {
    local way run sampled rc=0 flags="--model models/opt-tiny --prompts models/prompts.txt --max-tokens 60 --percent 100 0 100 0 100 0
        --gpu-batch-size 5 --num-gpu-batches 1 --gpu-mem 2G --cpu-mem 2G --offload-dir $scratch"
    for way in greedy sampled; do
        [ $way = greedy ] && sampled= || sampled="--temperature 0.7 --top-p 0.9 --seed 3"
        for run in host cuda "cuda --no-graph"; do
            "$BUILD/flexgen" generate --device $run $flags $sampled --output "$DIR/tokens-$way-${run/ -/}" || return
        done
        echo "$way, host and cuda:"
        shared "$DIR/tokens-$way-host" "$DIR/tokens-$way-cuda" || rc=1
        cmp "$DIR/tokens-$way-cuda" "$DIR/tokens-$way-cuda-no-graph" || rc=1
    done
    return $rc
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

# not the library's own kernels, as above
step_synccheck() { sanitize synccheck --kernel-name-exclude "regex=gemm|gemv|cutlass|nvjet|xmma|cublas" $mixed; }

# What cuBLAS says of its choices: nowhere may sums of parts be joined in place or in the result's own type.
step_blaslog() {
    CUBLASLT_LOG_LEVEL=5 CUBLASLT_LOG_FILE=$scratch/blaslog "$BUILD/flexgen" bench --device cuda --model opt-1.3b --prompt-len 100 --gen-len 2 \
        --percent 100 0 100 0 100 0 --gpu-batch-size 8 --num-gpu-batches 1 --gpu-mem 8G --cpu-mem 4G --offload-dir "$scratch" || return
    [ -s "$scratch/blaslog" ] || { echo "this cuBLAS writes no log"; return $SKIP; }
    head -c 200000 "$scratch/blaslog" >"$DIR/blaslog"
    grep -oiE '[a-z_]*(split|reduction)[a-z_]*[=:] ?[A-Za-z0-9_]+' "$scratch/blaslog" | sort | uniq -c
    ! grep -iE 'reduction[a-z_]*[=:] ?[a-z_]*(inplace|in_place|output_type)' "$scratch/blaslog" | head -n 3 | grep .
}

step_bounds_gpu() { "$BUILD/bench_gpu" copies products | tee "$DIR/bounds-gpu"; }
step_kernels() { "$BUILD/bench_gpu" kernels | tee "$DIR/bounds-kernels"; }
step_waits() { "$BUILD/bench_gpu" waits | tee "$DIR/bounds-waits"; }
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
    return $SKIP
}

# Everything on the GPU. Weights are made first: 13 GB, or 2.6 for a smaller card.
step_gpu() {
    first_that_fits gpu --trace "$DIR/gpu.trace" --prompt-len 512 --gen-len 32 --percent 100 0 100 0 100 0 --num-gpu-batches 1 <<'LIST'
--model opt-6.7b --gpu-batch-size 64
--model opt-6.7b --gpu-batch-size 32
--model opt-6.7b --gpu-batch-size 4
--model opt-1.3b --gpu-batch-size 32
--model opt-1.3b --gpu-batch-size 4
LIST
}

# What launches cost the smallest model.
step_graphs() {
    local small="--model opt-125m --prompt-len 32 --gen-len 256 --percent 100 0 100 0 100 0 --gpu-batch-size 1 --num-gpu-batches 1"
    run_bench graphs $small && run_bench no-graphs $small --no-graph && grep -H '"decode_throughput"' "$DIR"/{graphs,no-graphs}.json
}

# All that fit; weights are made anew each time, 60 GB in 16 bits. The most telling first.
step_opt30b() {
    local bits flags gbs rc=$SKIP
    for gbs in 8 64; do
        for bits in w4 w4c4 fp16; do
            case $bits in w4) flags=--compress-weight ;; w4c4) flags="--compress-weight --compress-cache" ;; *) flags= ;; esac
            run_bench all-$bits-$gbs --model opt-30b --prompt-len 512 --gen-len 16 --percent 100 0 100 0 100 0 --gpu-batch-size $gbs --num-gpu-batches 1 $flags
            case $? in 0) rc=0 ;; 2) echo "does not fit this GPU" ;; *) return 1 ;; esac
        done
    done
    return $rc
}

# The tokens of two runs, by their digest.
step_twice() {
    local run
    for run in 1 2; do
        run_bench twice-$run --model opt-1.3b --prompt-len 200 --gen-len 16 --percent 50 50 50 50 50 50 --gpu-batch-size 8 --num-gpu-batches 2 --gpu-mem "${GPU_MEM_GB}G" || return
    done
    grep -h '"digest"' "$DIR"/twice-[12].json | tee "$scratch/digests"
    [ "$(sort -u "$scratch/digests" | wc -l)" = 1 ] && [ "$(wc -l <"$scratch/digests")" = 2 ]
}

# With GPU_MEM_GB of the GPU; fewer batches, in the end a smaller model, until it fits.
step_offload() {
    first_that_fits offload --gpu-mem "${GPU_MEM_GB}G" --prompt-len 512 --gen-len 8 --cpu-cache-compute --trace "$DIR/offload.trace" <<'LIST'
--model opt-30b --gpu-batch-size 28 --num-gpu-batches 2 --percent 10 90 0 100 0 100
--model opt-30b --gpu-batch-size 14 --num-gpu-batches 2 --percent 10 90 0 100 0 100
--model opt-13b --gpu-batch-size 48 --num-gpu-batches 3 --percent 20 80 0 100 0 100
--model opt-13b --gpu-batch-size 24 --num-gpu-batches 2 --percent 20 80 0 100 0 100
--model opt-6.7b --gpu-batch-size 8 --num-gpu-batches 2 --percent 10 90 0 100 0 100
--model opt-1.3b --gpu-batch-size 8 --num-gpu-batches 2 --percent 10 90 0 100 0 100
LIST
}

# Beside the peers, at the same limit.
peer="--prompt-len 512 --gen-len 32 --percent 50 50 0 100 0 100 --cpu-cache-compute --gpu-batch-size 64 --num-gpu-batches 2"
fitting() { "$@" || { rc=$?; [ $rc = 2 ] && echo "does not fit this machine" && rc=$SKIP; return $rc; }; }
step_limited() { fitting run_bench limited --model opt-6.7b --gpu-mem "${GPU_MEM_GB}G" $peer --trace "$DIR/limited.trace"; }
step_packed() { fitting run_bench packed --model opt-6.7b --gpu-mem "${GPU_MEM_GB}G" $peer --compress-weight --compress-cache; }
step_accelerate() {
    [ $LIMIT -ge 40 ] || { echo "too little time is left"; return $SKIP; }
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
    local ncu="ncu --clock-control none --section SpeedOfLight --section Occupancy --section WarpStateStats --section MemoryWorkloadAnalysis"
    $ncu -k 'regex:attend_kernel|pick' -c 6 $run &&
        $ncu -k 'regex:attend_kernel|pack_kernel' -c 6 $run --compress-cache &&
        $ncu -k 'regex:attend_prefill|unpack|packed_linear|layernorm' -c 16 $run --compress-weight
}

# The machine as numbers, the policy that is found with them in GPU_MEM_GB of the GPU, and what it promised beside what it took.
step_profile() { "$BUILD/flexgen" profile --device cuda --model opt-6.7b --cpu-mem "${CPU_MEM_GB}G" --offload-dir "$scratch" --output "$DIR/hardware.json"; }
step_searched() { run_bench searched --model opt-6.7b --gpu-mem "${GPU_MEM_GB}G" --hardware "$DIR/hardware.json" --prompt-len 512 --gen-len 32 --num-prompts 256; }

# ---- running them ---------------------------------------------------------------------------------------------

now() { date +%s%3N; } # in milliseconds, as all times here
begun=$(now) failed=0 number=0 rows='' child=''
left() { echo $((seconds * 1000 - ($(now) - begun))); }
in_seconds() { printf '%d.%d' $(($1 / 1000)) $(($1 % 1000 / 100)); }

# Everything so far. A moment at which there is no archive, or half of one, does not come. Traces stay out of one that would be too
# large to be carried away.
keep() {
    printf '{"part": "%s", "seconds": %s, "failed": %d, "steps": [%s\n]}\n' $part "$(in_seconds $(($(now) - begun)))" "$failed" "${rows%,}" >"$DIR/summary.json"
    (shopt -s nullglob # what is not there is not read; /dev/null, since no file at all would be standard input
     f=$PWD/scripts/gpu_figures.awk && cd "$DIR" && awk -v card="$(head -n 1 card 2>/dev/null)" -v memory="$GPU_MEM_GB GiB" -f "$f" /dev/null \
         bounds-* {accelerate,all,gpu,offload,limited}*.json {flexllmgen,gpu,offload,limited}*.txt) >"$DIR/figures"
    tar -czf "$archive.new" -C "$scratch" $part
    [ "$(wc -c <"$archive.new")" -le 15000000 ] || tar -czf "$archive.new" --exclude='*.trace' -C "$scratch" $part
    mv "$archive.new" "$archive"
}

# gone GROUP MS: waits until no process of the group is alive; what has ended and is nobody's counts as gone. Fails after MS.
gone() {
    local end=$(($(now) + $2))
    until cat /proc/[0-9]*/stat 2>/dev/null | awk -v group="$1" '{ sub(/.*\) /, ""); if ($3 == group && $1 !~ /[ZX]/) n++ } END { exit n > 0 }'; do
        [ "$(now)" -lt $end ] || return
        sleep .05
    done
}

stop() {
    [ -z "$child" ] || { kill -KILL -- "-$child"; gone "$child" $grace; } 2>/dev/null
    failed=$((failed + 1))
    keep
    exit 1
}
trap stop INT TERM

# run STEP MS LOG: its exit status, 124 if it was ended after MS. Whatever it leaves running is killed and waited for, GRACE seconds in
# all: half of them to end by itself. behind: what is said of one that is there even so, waiting in a driver.
run() {
    local rc=124 end=$(($(now) + $2))
    behind=''
    timeout 1000000 bash -o pipefail -c "step_$1" >"$3" 2>&1 </dev/null & # timeout makes it a process group of its own
    child=$!
    while kill -0 $child 2>/dev/null && [ "$(now)" -lt $end ]; do sleep .05; done
    if kill -0 $child 2>/dev/null; then
        kill -TERM -- -$child 2>/dev/null
        gone $child $((grace / 2))
    else
        wait $child
        rc=$?
    fi
    kill -KILL -- -$child 2>/dev/null
    gone $child $((grace / 2)) || behind='; it has not ended and may hold the GPU'
    child=''
    return $rc
}

# step NAME MS LATER WHAT [PROGRAM...]: runs step_NAME within what is left, less the milliseconds of the LATER steps, if it has its
# programs
step() {
    local name=$1 limit=$(($(left) - $3 - grace)) what=$4 log start rc=null ok=false note='' missing='' took=0 behind=''
    number=$((number + 1))
    log=$DIR/$(printf '%02d-%s.log' $number "$name")
    for program in "${@:5}"; do [ -e "$BUILD/$program" ] || missing="$missing $program"; done
    if [ -n "$missing" ]; then
        note="not run: no$missing"
    elif [ $limit -lt 500 ]; then
        note="not run: no time is left"
        [ "$2" != 0 ] || ok=null
    else
        start=$(now)
        printf '%-17s %s; at most %s s\n' "$name" "$what" "$(in_seconds $limit)"
        export LIMIT=$((limit / 1000))
        run "$name" $limit "$log"
        rc=$?
        took=$(($(now) - start))
        case $rc in
        0) ok=true ;;
        "$SKIP") ok=null note="skipped: $(tail -n 1 "$log")" ;;
        124)
            note="ended after $(in_seconds $limit) s"
            [ "$2" != 0 ] || grep -q FAILED "$log" || ok=null
            ;;
        *) note="exit status $rc" ;;
        esac
        note=$note$behind
    fi
    printf '%-17s %7s s  %s\n' "$name" "$(in_seconds $took)" "$([ $ok = true ] && echo "ok$note" || echo "$note")"
    if [ $ok = false ]; then
        failed=$((failed + 1))
        [ $rc = null ] || tail -n 20 "$log" | cut -c 1-160 | sed 's/^/    /'
    fi
    note=$(printf %s "$note" | tr -c '[:print:]' ' ' | sed 's/["\\]/\\&/g')
    rows="$rows"$(printf '\n  {"name": "%s", "limit_s": %s, "seconds": %s, "exit_status": %s, "ok": %s, "note": "%s"},' "$name" "$(in_seconds $((limit > 0 ? limit : 0)))" "$(in_seconds $took)" "$rc" $ok "$note")
    keep
}

export CUDA_ARGS mixed peer
export -f $(compgen -A function step_) run_bench first_that_fits fitting sanitize shared capability
steps=$(printf '%s\n' "${!part}" | awk -v chosen="$chosen" 'NF && (chosen ~ /^ *$/ || index(chosen, " " $1 " "))')
[ -n "$steps" ] || { echo "gpu_check.sh: no such step:$chosen"; exit 2; }
all=$(echo "$steps" | awk '{ s += $2 } END { print s + !s }') later=$((seconds * 1000 * 53 / 54))
while read -r -u 3 name budget programs; do
    budget=$((budget * seconds * 1000 * 53 / 54 / all)) later=$((later - budget))
    step "$name" $budget $later "${programs#*: }" ${programs%%:*}
done 3<<<"$steps"
[ $part = correctness ] || cat "$DIR/figures"
echo "$failed steps failed or were not run; everything is in $archive"
[ "$failed" = 0 ]
