#!/bin/sh
# emulated.sh PLAIN ASAN TSAN: the kernels' suite, and on the cuda device the engine's and the lanes', on the CPU emulation
# (tests/cuda_cpu.h). The arguments are build folders with run_tests_emulated in them. Five ways, since no single one sees everything:
#
#   plain                    whether results are right
#   reversed order, strict   blocks and threads that rely on running before others; calls that CUDA refuses, leaks
#   random order, slow       copies that arrive later than what needs them
#   ASan and UBSan           reads and writes outside of what was allocated, shared memory included
#   ThreadSanitizer          missing barriers, missing waits between streams and with the host
#
# The slower a way, the fewer of the engine's combinations it takes (every so many-th, odd, or the lists' inner loops would never turn);
# the slowest runs beside the others. `make test` calls this.
set -e
status=0 tsan_status=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# way TITLE EVERY VARIABLE=VALUE... PROGRAM
way() {
    title=$1 every=$2
    shift 2
    echo
    echo "cuda device on the CPU emulation: $title"
    env "$@" --device cuda --every "$every" cuda schedule lanes
}

way "ThreadSanitizer" 383 TSAN_OPTIONS=halt_on_error=1 setarch -R "$3/run_tests_emulated" >"$log" 2>&1 &
way "plain" 11 "$1/run_tests_emulated" || status=1
way "reversed order, strict" 25 CUDA_CPU_ORDER=reverse CUDA_CPU_STRICT=1 "$1/run_tests_emulated" || status=1
way "random order, slow copies" 25 CUDA_CPU_ORDER=random CUDA_CPU_GBPS=0.05 "$1/run_tests_emulated" || status=1
way "ASan and UBSan" 49 "$2/run_tests_emulated" || status=1
wait $! || tsan_status=1
cat "$log"
[ $status = 0 ] && [ $tsan_status = 0 ]
