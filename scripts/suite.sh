#!/bin/bash
# suite.sh LOG COMMAND...: runs one suite, which may have environment variables before its program. The log gets all that
# it prints and ends with a line for summary.sh: suite NAME, exit status, seconds, CPU seconds.
log=$1
shift
name=${log#build/} name=${name%.log}
mkdir -p "${log%/*}"
TIMEFORMAT='%R %U %S'
{ time env "$@" >"$log" 2>&1 </dev/null; } 2>"$log.time"
status=$?
read -r seconds user system < <(tail -n 1 "$log.time") # above it bash says how a program died
rm "$log.time"
echo "suite $name $status $seconds $(echo "$user $system" | awk '{ print $1 + $2 }')" >>"$log"
printf '  %-24s %s in %.0f s\n' "$name" "$([ $status = 0 ] && echo passed || echo "FAILED ($status)")" "$seconds"
