#!/bin/sh
# setup.sh CC HEADER:PACKAGE...: installs the Debian packages whose headers the compiler does not find. As root it
# installs them; otherwise it prints the one command that does, and fails.
cc=$1
shift
missing=
for need in "$@"; do
    echo "#include <${need%%:*}>" | $cc -fsyntax-only -x c -include stdio.h - 2>/dev/null || missing="$missing ${need##*:}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing$missing" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq $missing >/dev/null 2>&1 || { apt-get update -qq >/dev/null && apt-get install -y -qq $missing >/dev/null; }
else
    echo "missing libraries; install them with: sudo apt-get install -y$missing" >&2
    exit 1
fi
