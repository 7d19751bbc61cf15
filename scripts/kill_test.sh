#!/usr/bin/env bash
# kill_test.sh [ROUNDS [SEED]]: a job that is killed at random moments, and goes on under other policies, writes the same file.
#
# Each round draws prompts, sampling and stop texts, runs the job undisturbed, then runs it again and again, each time under another
# policy, killed (KILL, TERM or INT) after a random part of the time that it takes, until it ends. Then the two files are compared
# byte by byte, and to go on once more does nothing. The program is $FLEXGEN_BIN, or ./flexgen; the device is the host.
set -u
rounds=${1:-200} model=models/opt-tiny flexgen=${FLEXGEN_BIN:-./flexgen}
RANDOM=${2:-1}
dir=$(mktemp -d) && trap 'rm -rf "$dir"' EXIT

one_of() { shift $((RANDOM % $#)); echo "$1"; }

draw_prompts() {
    local i starts=("Once upon a time" "Tom and Sue went" "The big dog" "" "One day, a girl named Lily" "\\u00e9t\\u00e9 \\ud83d\\ude00")
    for ((i = 0; i < 6 + RANDOM % 10; i++)); do
        echo "{\"prompt\": \"${starts[RANDOM % ${#starts[@]}]}\", \"max_tokens\": $((1 + RANDOM % 48))}"
        ((RANDOM % 8)) || echo "not a prompt"
    done
}

draw_policy() {
    local percent
    percent=$(one_of "100 0 100 0 100 0" "0 100 0 100 0 100" "0 0 0 0 0 0" "30 40 20 50 10 60" "50 50 0 0 0 100")
    echo "--percent $percent --gpu-batch-size $((1 + RANDOM % 5)) --num-gpu-batches $((1 + RANDOM % 3))" \
        "--schedule $(one_of zigzag row diagonal) --page-tokens $(one_of 4 16) $(one_of "" --cpu-cache-compute)" \
        "--threads $(one_of 1 2) $(one_of "" "" --no-overlap)"
}

kills=0
for ((round = 1; round <= rounds; round++)); do
    draw_prompts >"$dir/prompts.jsonl"
    job=(generate --model $model --prompts "$dir/prompts.jsonl" --device host --gpu-mem 256M --cpu-mem 256M --disk-mem 256M)
    ((RANDOM % 2)) && job+=(--temperature 0.9 --top-p 0.9 --seed $RANDOM)
    ((RANDOM % 2)) && job+=(--stop " the" --stop ".")
    rm -f "$dir"/whole* "$dir"/killed*
    began=${EPOCHREALTIME/./}
    # shellcheck disable=SC2046 # a policy is many words
    "$flexgen" "${job[@]}" $(draw_policy) --output "$dir/whole" 2>"$dir/err" || (($? == 1)) || { cat "$dir/err"; exit 1; }
    took=$((${EPOCHREALTIME/./} - began))
    for ((run = 1; ; run++)); do
        limit=1000
        ((run <= 6)) && limit=$(((1 + RANDOM % 110) * took / 100))
        ((run <= 6)) && limit=$((limit / 1000000)).$(printf %06d $((limit % 1000000)))
        policy=$(draw_policy)
        # shellcheck disable=SC2086
        timeout --foreground -s "$(one_of KILL KILL TERM INT)" $limit "$flexgen" "${job[@]}" $policy --output "$dir/killed" --resume 2>"$dir/err"
        status=$?
        ((status <= 1)) && break
        ((status == 124 || status == 130 || status == 137 || status == 143)) || { echo "status $status: $policy"; cat "$dir/err"; exit 1; }
        kills=$((kills + 1))
    done
    cmp "$dir/whole" "$dir/killed" || { echo "round $round: ${job[*]}, last under $policy"; exit 1; }
    "$flexgen" "${job[@]}" --output "$dir/killed" --resume 2>"$dir/err"
    grep -q "nothing is left to do" "$dir/err" || { echo "round $round: a job that has ended goes on"; cat "$dir/err"; exit 1; }
    [[ $(wc -l <"$dir/killed.journal") == 1 ]] || { echo "round $round: of a journal more than its head has stayed"; exit 1; }
done
echo "$rounds jobs, $kills kills: every file is that of a run without a break"
