#!/bin/sh
# exercise.sh N DIR: makes a starter tree for exercise N of docs/EXERCISES.md in the new directory DIR
exec python3 -B "${0%.sh}.py" start "$@"
