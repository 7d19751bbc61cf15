#!/usr/bin/env bash
# lines.sh [write | BUILD]: every file of the program keeps to its budget of lines, scripts/lines.txt, and no line is longer than 124
# columns; with a folder of objects also that no two files need each other, over the symbols of all objects. The tests, mini.c and
# docs/ have no budget. To raise one, change lines.txt and say in the commit why; `write` makes all budgets what the files have.
set -u
cd "$(dirname "$0")/.." || exit 1
export LC_ALL=C.UTF-8
budgets=scripts/lines.txt status=0
# the program's files: in a clean checkout without git, all that are there
files() { ls *.[ch] *.cu */*.[ch] | grep -v -e '^tests/' -e '^docs/' -e '^build/' -e '^mini\.c$'; }

if [ "${1:-}" = write ]; then
    files | xargs wc -l | awk '{ printf "%6d %s\n", $1, $2 }' >"$budgets"
    exit
fi
files | xargs wc -l | awk -v budgets="$budgets" '
    BEGIN { while ((getline line <budgets) > 0) { split(line, f, " "); most[f[2]] = f[1] } }
    $2 == "total" { printf "%d lines of %d\n", $1, most["total"]; if ($1 > most["total"]) bad = 1; next }
    !($2 in most) { print $2 ": has no budget in " budgets; bad = 1; next }
    $1 > most[$2] { print $2 ": " $1 " lines, and its budget is " most[$2]; bad = 1 }
    END { exit bad }' || status=1
files | xargs awk '
    FNR == 1 { table = 0 }
    /clang-format o/ { table = /off/ } # which may be wider
    length > 124 && !table { print FILENAME ":" FNR ": " length " columns, more than 124"; bad = 1 }
    END { exit bad }' || status=1

# A file needs another if it uses what that one defines. tsort finds no order where two need each other, directly or by others.
if [ -n "${1:-}" ]; then
    find "$1" -maxdepth 2 -name '*.o' | grep -E "^$1/((cost|device|io)/)?[a-z_]*\.o$" | xargs nm -A |
        awk '{ split($1, at, ":"); name = $NF; kind = $(NF - 1) }
             kind ~ /[TDRB]/ { home[name] = at[1] }
             kind == "U" { uses[at[1] " " name] }
             END { for (use in uses) { split(use, u, " "); if (u[2] in home) print u[1], home[u[2]] } }' |
        tsort >/dev/null || { echo "these files need each other"; status=1; }
fi
exit $status
