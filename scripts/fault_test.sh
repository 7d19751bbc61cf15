#!/bin/bash
# fault_test.sh [N]: the suite `faults` with all its cases, which takes an hour or more: for each command and each way to fail every
# call in turn, or of more than N (600) calls so many at equal distances. Allocations inside the C library, a hundred a command,
# are a class of their own (inner), so that none of them is left out. FAULT_JOB="long lines" and FAULT_CLASS=inner choose.
cd "$(dirname "$0")/.." && make build/flexgen_host build/faults.so build/test_faults >/dev/null &&
    FLEXGEN_BIN=build/flexgen_host FAULTS_LIBRARY=build/faults.so FAULT_CASES=${1:-600} build/test_faults
