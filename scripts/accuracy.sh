#!/bin/sh
# accuracy.sh BUILD [TEXT]: what compression and sparse attention cost (the paper's Table 6), as a table in Markdown: the
# perplexity of a text, by default the stories beside the shipped model, that it was not trained on, and how many tokens
# change: of the next tokens that the model chooses in fp16 behind a third, a half and two thirds of each line, those that
# are not its choice any more. MODEL names another.
#
# With a packed or sparse cache every token comes from a decoding step that reads it, so that the cost shows; a minute or
# two. `make accuracy` calls this.
set -e
build=${1:-build}
model=${MODEL:-models/opt-tiny}
text=${2:-$model/stories.txt}
json=$(mktemp)
said=$(mktemp)
parts=$(mktemp)
chosen=$(mktemp)
trap 'rm -f "$json" "$said" "$parts" "$chosen"' EXIT
trap 'exit 1' INT TERM

value() { sed -n "s/^[^a-z]*\"$1\":[^0-9]*\([0-9.e+-]*\).*/\1/p" "$json"; }

# run COMMAND FLAGS...
run() {
    command=$1
    shift
    "$build/flexgen" "$command" --model "$model" --percent 100 0 100 0 100 0 --gpu-batch-size 32 --num-gpu-batches 1 "$@" \
        2>"$said" || { cat "$said" >&2; exit 1; }
}

# row NAME FLAGS...
row() {
    name=$1
    shift
    run eval --perplexity "$text" --json "$json" "$@" >/dev/null
    changed=$(run eval --score "$chosen" "$@" | grep -c '"greedy": false') || [ "$changed" = 0 ]
    printf '| %-26s | %10.3f | %13.4f | %14s |\n' "$name" "$(value perplexity)" "$(value bits_per_byte)" \
        "$changed of $(wc -l <"$chosen")"
}

awk 'NF > 6 { for (part = 2; part < 5; part++) { # sixths of its words
    end = int(NF * part / 6)
    for (i = 1; i < end; i++) printf "%s ", $i
    print $end } }' "$text" >"$parts"
run generate --prompts "$parts" --max-tokens 1 >"$chosen"
printf '| %-26s | %10s | %13s | %14s |\n|---|---|---|---|\n' "$(basename "$model"), $(basename "$text")" perplexity \
    'bits per byte' 'changed tokens'
row fp16
row '4-bit weights' --compress-weight
row '4-bit weights and head' --compress-weight --compress-head
row '4-bit cache' --compress-cache
row '4-bit' --compress-weight --compress-cache
row '4-bit-S, 10% of V' --compress-weight --compress-cache --attn-sparsity 0.1
row '3-bit' --compress-weight --compress-cache --bits 3
for f in 0.05 0.1 0.2 0.5 1; do
    row "fp16, sparsity $f" --attn-sparsity $f
done
