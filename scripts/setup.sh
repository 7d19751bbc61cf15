#!/bin/sh
# setup.sh CC HEADER:PACKAGE...: installs the packages of Debian whose headers the compiler does not find. As root it installs them;
# otherwise, and on other systems, it prints the one command that does, and fails. Several makes may ask at once: dpkg allows one
# installation at a time, so the others wait for the first, and look again.
cc=$1
shift

# missing HEADER:PACKAGE...: prints the packages whose headers the compiler does not find
missing() {
    for need in "$@"; do
        echo "#include <${need%%:*}>" | $cc -fsyntax-only -x c -include stdio.h - 2>/dev/null || printf ' %s' "${need##*:}"
    done
}

# try TOOL COMMAND CJSON CUNIT: where there is such a tool, prints the command for the missing packages, by their names there
try() {
    command -v "$1" >/dev/null || return
    echo "missing libraries; install them with: $2$(echo "$packages" | sed "s/libcjson-dev/$3/; s/libcunit1-dev/$4/")" >&2
    exit 1
}

packages=$(missing "$@")
[ -z "$packages" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    try apt-get "sudo apt-get install -y" libcjson-dev libcunit1-dev # Debian, Ubuntu
    try brew "brew install" cjson cunit                              # macOS
    try dnf "sudo dnf install" cjson-devel CUnit-devel               # Fedora
    try pacman "sudo pacman -S" cjson cunit                          # Arch
    try zypper "sudo zypper install" cJSON-devel cunit-devel         # openSUSE
    try apk "sudo apk add" cjson-dev cunit-dev                       # Alpine
    echo "missing libraries; install cJSON and CUnit, with their headers" >&2
    exit 1
fi
# The lock is on the program itself, which is only read: a name in /tmp could be a link that somebody else has left there.
exec 9<"$(command -v apt-get)"
flock 9
packages=$(missing "$@")
[ -z "$packages" ] && exit 0
echo "installing$packages" >&2
export DEBIAN_FRONTEND=noninteractive
install="apt-get -o DPkg::Lock::Timeout=300 install -y -qq"
$install $packages >/dev/null 2>&1 || { apt-get update -qq >/dev/null && $install $packages >/dev/null; }
