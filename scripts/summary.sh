#!/bin/sh
# summary.sh LOG...: what the suites printed, one after the other, then one summary of all in the form of CUnit's, which are left
# out, the names of what failed and of what did not run because its suite ended early, and a last line for programs. Fails if a test
# did, or if a suite did not end well.
cat "$@" | awk '
    /^  Listed: / { listed++; next }
    /^Run Summary:/ { in_summary = ran = 1 }
    in_summary && / suites / { for (f = 2; f <= 6; f++) suites[f] += $f }
    in_summary && / tests / { for (f = 2; f <= 6; f++) tests[f] += $f; bad = $5 }
    in_summary && / asserts / { for (f = 2; f <= 6; f++) asserts[f] += $f; in_summary = 0; next }
    /^  Test: / { test = $0; sub(/ \.\.\..*/, "", test) }
    /FAILED$/ { names = names "\n  " test; reds++ }
    /^Elapsed time =/ && ran { next }
    $1 == "suite" && NF > 5 { early = $0; sub(/^suite /, "", early) }
    /^  not run: / { names = names "\n" $0; unrun++ }
    $1 == "suite" && NF == 5 {
        printf "%s took %.1f s, and %.1f s of the processors\n", $2, $4, $5
        wall += $4; processors += $5
        if (early) { # by suite.sh, in the middle of a test
            suites[2]++; suites[5]++
            tests[2] += listed; tests[3] += listed - unrun; tests[5] += ++reds; tests[4] += listed - unrun - reds; tests[6] += unrun
            failed = failed "\nFAILED: " early names
        } else if ($3) {
            if (!bad) { tests[2]++; tests[5]++; suites[5]++ } # not by a test that says so
            failed = failed "\nFAILED: " $2 (bad ? "" : ", at its end") ", exit status " $3 names
        }
        ran = bad = listed = reds = unrun = 0
        names = early = ""
        next
    }
    !in_summary { print }
    END {
        print "\nRun Summary:    Type  Total    Ran Passed Failed Inactive"
        printf "              suites %6d %6d    n/a %6d %8d\n", suites[2], suites[3], suites[5], suites[6]
        printf "               tests %6d %6d %6d %6d %8d\n", tests[2], tests[3], tests[4], tests[5], tests[6]
        printf "             asserts %6d %6d %6d %6d      n/a\n", asserts[2], asserts[3], asserts[4], asserts[5]
        print failed
        printf "took %.1f s one suite after the other, and %.1f s of the processors\n", wall, processors
        printf "%d passed, %d failed, %d skipped\n", tests[4], tests[5], tests[6]
        exit failed != ""
    }'
