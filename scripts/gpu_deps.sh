#!/bin/sh
# gpu_deps.sh: on a machine that has packages, fills the folder .deps, which git ignores, with what gpu_check.sh may miss on one
# that has none. Take the folder along; gpu_check.sh uses of it what is missing there. Some 2 MB:
#
#   include, lib             headers and shared objects of cJSON and CUnit
#   cuda/include, cuda/lib   cuBLAS's headers and CUDA's runtime to link with, where there is a toolkit here
#
# cuBLAS itself, over 500 MB, does not come along: gpu_check.sh looks for it in the toolkit there, and in Python's packages.
set -e
cd "$(dirname "$0")/.."
dir=.deps
cc=${CC:-cc}
cuda=${CUDA_HOME:-/usr/local/cuda}
missing=
rm -rf "$dir"
mkdir -p "$dir/include" "$dir/lib" "$dir/cuda/include" "$dir/cuda/lib"

# header NAME: where the compiler finds it
header() { echo "#include <stdio.h>
#include <$1>" | $cc -M -x c - 2>/dev/null | tr -d '\\\n' | tr ' ' '\n' | grep -m 1 "/$1\$"; }
# library NAME: the file behind lib NAME.so, under the name that programs ask for
library() {
    file=$($cc -print-file-name="lib$1.so")
    [ -e "$file" ] || return
    name=$(readlink -f "$file")
    soname=$(objdump -p "$name" | awk '$1 == "SONAME" { print $2 }')
    cp "$name" "$dir/lib/$soname"
    cp "$name" "$dir/lib/lib$1.so" # not a link, which does not always travel
}

for name in cjson/cJSON.h CUnit/CUnit.h; do
    file=$(header "$name") && cp -r "$(dirname "$file")" "$dir/include/" || missing="$missing $name"
done
for name in cjson cunit; do library "$name" || missing="$missing lib$name.so"; done
for file in "$cuda/include/cublasLt.h" "$cuda/include/cublas_api.h"; do
    [ ! -e "$file" ] || cp "$file" "$dir/cuda/include/"
done
for file in "$cuda"/lib64/libcudart_static.a "$cuda"/lib/*-linux-gnu/libcudart_static.a; do
    [ ! -e "$file" ] || { cp "$file" "$dir/cuda/lib/" && break; }
done
echo "$dir: $(du -sk "$dir" | cut -f1) KiB"
[ -z "$missing" ] || { echo "gpu_deps.sh: not found here:$missing" >&2; exit 1; }
