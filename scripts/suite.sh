#!/bin/bash
# suite.sh LOG COMMAND...: runs one suite, which may have environment variables before its program. The log gets all that
# it prints and ends with a line for summary.sh: suite NAME, exit status, seconds, CPU seconds. One that hangs is ended after an hour.
log=$1
shift
name=${log#build/} name=${name%.log}
mkdir -p "${log%/*}"
TIMEFORMAT='%R %U %S'
{ time timeout --foreground 3600 env "$@" >"$log" 2>&1 </dev/null; } 2>"$log.time"
status=$?
awk -v name="$name" -v status=$status -v time="$(tail -n 1 "$log.time")" 'BEGIN { # above its last line bash says how a program died
    split(time, t)
    printf "\nsuite %s %d %.1f %.1f\n", name, status, t[1], t[2] + t[3] }' >>"$log"
rm "$log.time"
tail -n 1 "$log" | awk '{ printf "  %-24s %s in %.0f s\n", $2, $3 ? "FAILED (" $3 ")" : "passed", $4 }'
