#!/bin/sh
# exercise.sh N DIR: makes a starter tree for exercise N of docs/EXERCISES.md in the new directory DIR; `week W DIR` for those of a week of
# docs/TEACHING.md, and `all DIR` for all; `--variant V` anywhere: with the contracts of variant V
exec python3 -B "${0%.sh}.py" start "$@"
