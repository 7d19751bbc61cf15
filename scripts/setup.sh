#!/bin/sh
# setup.sh CC HEADER:PACKAGE...: installs the Debian packages whose headers the compiler does not find. As root it
# installs them; otherwise it prints the one command that does, and fails. Several makes may ask at once: dpkg allows
# one installation at a time, so the others wait for the first, and look again.
cc=$1
shift

# missing HEADER:PACKAGE...: prints the packages whose headers the compiler does not find
missing() {
    for need in "$@"; do
        echo "#include <${need%%:*}>" | $cc -fsyntax-only -x c -include stdio.h - 2>/dev/null || printf ' %s' "${need##*:}"
    done
}
[ -z "$(missing "$@")" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing libraries; install them with: sudo apt-get install -y$(missing "$@")" >&2
    exit 1
fi
exec 9>"${TMPDIR:-/tmp}/flexgen-setup.lock"
flock 9
packages=$(missing "$@")
[ -z "$packages" ] && exit 0
echo "installing$packages" >&2
export DEBIAN_FRONTEND=noninteractive
install="apt-get -o DPkg::Lock::Timeout=300 install -y -qq"
$install $packages >/dev/null 2>&1 || { apt-get update -qq >/dev/null && $install $packages >/dev/null; }
