#!/bin/bash
# fault_test.sh [N]: the suite `faults` with all its cases, which takes about half an hour: for each command and each way to fail
# every call in turn, or of more than N (600) calls so many at equal distances.
cd "$(dirname "$0")/.." && make build/flexgen_host build/faults.so build/test_faults >/dev/null && FAULT_CASES=${1:-600} build/test_faults
