#!/bin/bash
# suite.sh LOG COMMAND...: runs one suite, which may have environment variables before its program, and has its exit status, or with
# GOING_ON set in the environment 0. The log gets all that it prints. One that has not ended after SUITE_SECONDS (600) is ended, with
# all that it has started. When a suite ends before its last test, the log says in which, and which did not run. Its last line is for
# summary.sh: suite NAME, exit status, seconds, CPU seconds.
log=$1 limit=${SUITE_SECONDS:-600}
shift
name=${log#build/} name=${name%.log}
mkdir -p "${log%/*}"
TIMEFORMAT='%R %U %S'
set -m # the suite is a process group of its own
{ time timeout --foreground -k 10 "$limit" env "$@" >"$log" 2>&1 </dev/null; } 2>"$log.time" &
trap 'kill -- -$!' INT TERM HUP
wait $!
status=$?
kill -KILL -- -$! 2>/dev/null # what it left running
awk -v name="$name" -v status=$status -v limit="$limit" -v time="$(tail -n 1 "$log.time")" '
    /^  Listed: / { listed[++n] = substr($0, 11); place[listed[n]] = n }
    /^  Test: / {
        test = substr($0, 9)
        sub(/ \.\.\..*/, "", test)
        if (test in place) begun = place[test]
    }
    /^Run Summary:/ { whole = 1 }
    END { # above its last line bash says how a program died
        print ""
        split(time, t)
        if (status && !whole) {
            end = t[1] >= limit ? "ended after " limit " s" : "died, exit status " status
            printf "suite %s: %s, %s\n", name, end, begun ? "in test \"" listed[begun] "\"" : "before its first test"
            while (begun < n) printf "  not run: %s\n", listed[++begun]
        }
        printf "suite %s %d %.1f %.1f\n", name, status, t[1], t[2] + t[3]
    }' "$log" >"$log.time"
cat "$log.time" >>"$log"
rm "$log.time"
tail -n 1 "$log" | awk '{ printf "  %-24s %s in %.0f s\n", $2, $3 ? "FAILED (" $3 ")" : "passed", $4 }'
[ -n "$GOING_ON" ] || exit $status
