#!/usr/bin/env bash
# other_computers.sh: the program on computers that are not here.
#
#   scripts/other_computers.sh [--install] [aarch64] [musl] [macos] [gcc11] [processors]      all parts, unless some are named
#
#   aarch64     ARM's 64 bits under Linux: built with Debian's cross compiler, run in qemu's user mode
#   musl        x86-64 Linux with musl for its C library: built with zig cc, run
#   macos       mini.c, the engine and its suites for Macs with ARM's and Intel's processors: zig cc compiles and links; nothing is run
#   gcc11       the program by gcc 11, which Ubuntu 22.04 has, and flexgen.cu with g++ 11
#   processors  make test for x86-64 with AVX2, and for x86-64 without vectors beyond SSE2
#
# A part whose tools are missing is skipped, with a line that says what it needs. --install gets them: Debian's packages (as root), zig
# from PyPI, and the sources of cJSON and CUnit, which are compiled for each of these computers. Exit status: 1 if anything failed.
set -u
cd "$(dirname "$0")/.." || exit 1
AT=build/others # all that is made here
export ZIG_GLOBAL_CACHE_DIR=$PWD/$AT/zig-cache PYTHONPATH=$PWD/$AT/python${PYTHONPATH:+:$PYTHONPATH}
mkdir -p $AT/python
install='' failed=0
[ "${1:-}" = --install ] && install=1 && shift

# step WORDS COMMAND...: runs a command, and prints one line, and the end of what it said if it fails; its status is the command's
step() {
    local began=$SECONDS
    if "${@:2}" >$AT/said 2>&1 </dev/null; then
        printf '  %-58s %4d s  ok\n' "$1" $((SECONDS - began))
    else
        printf '  %-58s %4d s  FAILED\n' "$1" $((SECONDS - began))
        grep -v -e '^[^ ]*cc ' -e ziglang $AT/said | tail -n 30
        failed=1
        return 1
    fi
}

# needs COMMAND PACKAGE...: false if there is no such command, also after an installation
needs() {
    command -v "$1" >/dev/null && return
    [ "$install" ] && [ "$(id -u)" = 0 ] && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${@:2}" >$AT/said 2>&1
    command -v "$1" >/dev/null && return
    echo "  skipped: needs $1; apt-get install ${*:2}"
    return 1
}
needs_zig() {
    python3 -m ziglang version >/dev/null 2>&1 && return
    [ "$install" ] && python3 -m pip install -q --target $AT/python ziglang >$AT/said 2>&1
    python3 -m ziglang version >/dev/null 2>&1 && return
    echo "  skipped: needs zig; pip install ziglang"
    return 1
}

# Both libraries as sources of Debian, from a list of sources of our own.
needs_sources() {
    local apt="apt-get -o Dir::Etc::SourceList=$PWD/$AT/sources.list -o Dir::Etc::SourceParts=- -o Dir::State::Lists=$PWD/$AT/lists"
    if [ ! -d $AT/CUnit ] && [ "$install" ]; then
        mkdir -p $AT/lists
        echo "deb-src http://deb.debian.org/debian stable main" >$AT/sources.list
        ($apt update -qq && cd $AT && $apt source -qq --download-only cjson cunit &&
            tar xzf cjson_*.orig.tar.gz --one-top-level=cjson --strip-components=1 &&
            tar xzf cunit_*.orig.tar.gz --one-top-level=. --strip-components=1) >$AT/said 2>&1
    fi
    [ -d $AT/CUnit ] && return
    echo "  skipped: needs the sources of cJSON and CUnit; --install gets them"
    return 1
}

# libraries DIR AR CC...: compiles both into DIR/lib, with their headers in DIR/include
libraries() {
    local dir=$1 ar=$2 source
    shift 2
    mkdir -p "$dir/lib" "$dir/include/cjson" "$dir/include/CUnit"
    cp $AT/cjson/cJSON.h "$dir/include/cjson"
    cp $AT/CUnit/Headers/*.h "$dir/include/CUnit"
    for source in $AT/cjson/cJSON.c $AT/CUnit/Sources/{Basic,Framework}/*.c; do
        "$@" -w -O2 -I"$dir/include" -I"$dir/include/CUnit" -c "$source" -o "$dir/lib/$(basename "$source" .c).o" || return
    done
    $ar rcs "$dir/lib/libcjson.a" "$dir/lib/cJSON.o"
    $ar rcs "$dir/lib/libcunit.a" "$dir"/lib/{Basic,CUError,MyMem,TestDB,TestRun,Util}.o
}

# make_for DIR AR CC CFLAGS GOALS...: make for another computer, without CUDA and MPI
make_for() {
    CFLAGS="$4 -I$PWD/$1/include" make AR="$2" CC="$3" CXX= NVCC= MPICC= CUDA_INCLUDE= SETUP= BUILD="$1/build" \
        LIBS="-L$PWD/$1/lib -lcjson -lm -lpthread" "${@:5}"
}

# engine DIR AR CC CFLAGS: builds it, and runs the suites about what the processor and the C library do
engine() {
    local suite
    step "compiles with -Werror, and links" make_for "$@" "$1/build/flexgen" "$1/build/mini" || return
    for suite in host quant opt_model lp policy schedule; do
        step "suite $suite" make_for "$@" SUITE=$suite FLAGS="${EVERY:+--every $EVERY}" RUNNER="${RUNNER:-}" test
    done
    return 0
}

# tokens COMMAND: the lists of tokens that it prints as JSON
tokens() { $1 2>/dev/null | grep -o '"tokens": *\[[^]]*\]'; }
# same_tokens COMMAND OTHER: both print the same tokens, and some
same_tokens() {
    local here there
    here=$(tokens "$1") there=$(tokens "$2")
    [ "$here" ] && diff <(echo "$here") <(echo "$there")
}

# commands DIR: flexgen's and mini's own commands on that computer; their tokens are those of the programs here
commands() {
    local there="${RUNNER:-} $1/build/flexgen" tiny="--model models/opt-tiny" packed="--model $1/packed"
    local prompts="--prompts models/prompts.txt --max-tokens 12" away="--percent 0 0 0 0 0 0"
    rm -rf "$1/packed"
    step "generate" same_tokens "./flexgen generate $tiny $prompts" "$there generate $tiny $prompts"
    step "generate, all on the disk" same_tokens "./flexgen generate $tiny $prompts" "$there generate $tiny $prompts $away"
    step "quantize" $there quantize $tiny --output "$1/packed"
    # of both at once a text may differ: the last bit of a sum makes another code of the cache
    step "generate with packed weights" same_tokens "./flexgen generate $tiny $prompts --compress-weight" "$there generate $packed $prompts"
    step "generate with a packed cache" same_tokens "./flexgen generate $tiny $prompts --compress-cache" \
        "$there generate $tiny $prompts --compress-cache"
    head -n 8 models/opt-tiny/stories.txt >"$1/text"
    step "eval" $there eval $tiny --perplexity "$1/text" --window 64
    step "bench" $there bench $tiny --prompt-len 32 --gen-len 8 --num-prompts 4 --percent 100 0 100 0 100 0
    step "policy" $there policy --model opt-30b --hardware hardware/t4.json
    step "mini" same_tokens "./flexgen generate $tiny $prompts" "${RUNNER:-} $1/build/mini models/opt-tiny $prompts --json"
}

# cuda_host DIR: compiles flexgen.cu for a GPU beside an ARM processor. It is not linked: that takes the toolkit's libraries for ARM.
cuda_host() {
    local nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc include
    [ -x "$nvcc" ] || { echo "  skipped: flexgen.cu needs nvcc"; return; }
    include=$(dirname "$nvcc")/../targets/$(uname -m)-linux/include
    step "flexgen.cu compiles with -Werror" make NVCC="$nvcc -ccbin aarch64-linux-gnu-g++ -I$include" GPU=90 NVWERROR=1 BUILD="$1/build" \
        "$1/build/flexgen.cu.o"
}

aarch64() {
    needs aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross && needs qemu-aarch64 qemu-user && needs_sources || return
    local dir=$AT/aarch64 RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" EVERY=${EVERY:-50}
    libraries $dir ar aarch64-linux-gnu-gcc || return
    engine $dir ar aarch64-linux-gnu-gcc -O3 && commands $dir
    step "all suites compile" make_for $dir ar aarch64-linux-gnu-gcc -O3 NATIVE= RUNNER=true test
    needs aarch64-linux-gnu-g++ g++-aarch64-linux-gnu && cuda_host $dir
}

musl() {
    needs_zig && needs_sources || return
    local dir=$AT/musl cc="python3 -m ziglang cc -target x86_64-linux-musl -fno-sanitize=undefined"
    libraries $dir ar $cc || return
    engine $dir "python3 -m ziglang ar" "$cc" "-O3 -march=native" && commands $dir
}

# compiles and links for a Mac, with warnings as errors
for_mac() {
    local dir=$AT/$1 cc="python3 -m ziglang cc -target $1"
    libraries $dir "python3 -m ziglang ar" $cc || return
    step "$1: mini.c, and the engine" make_for $dir "python3 -m ziglang ar" "$cc" "-O3 $2" "$dir/build/flexgen" "$dir/build/mini"
    step "$1: the suites" make_for $dir "python3 -m ziglang ar" "$cc" "-O3 $2" RUNNER=true test
}
macos() {
    needs_zig && needs_sources || return
    for_mac aarch64-macos ""
    for_mac x86_64-macos -march=haswell
}

gcc11() {
    needs gcc-11 gcc-11 || return
    engine $AT/gcc11 ar gcc-11 "-O3 -march=native"
    needs g++-11 g++-11 || return
    [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] || { echo "  skipped: flexgen.cu needs nvcc"; return; }
    step "flexgen.cu compiles" env NVCC_APPEND_FLAGS="-ccbin g++-11" make BUILD=$AT/gcc11/build GPU=75 $AT/gcc11/build/flexgen.cu.o
}

processors() {
    local processor
    for processor in haswell x86-64; do
        step "make test CFLAGS='-O3 -march=$processor'" env CFLAGS="-O3 -march=$processor" make BUILD=$AT/$processor test
    done
}

[ $# -gt 0 ] || set -- aarch64 musl macos gcc11 processors
make -s >$AT/said 2>&1 || { cat $AT/said; exit 1; }
for part; do
    echo "$part"
    case $part in
    aarch64 | musl | macos | gcc11 | processors) $part ;;
    *) echo "  there is no such part: aarch64, musl, macos, gcc11, processors"; failed=1 ;;
    esac
done
exit $failed
