#!/usr/bin/env bash
# limit_test.sh [short | SIZES [QUOTAS [COMMANDS]]]: every command in control groups of ten sizes of memory (MB) and four quotas of CPU (percent
# of a processor, or max), on its first start, when it measures the machine, and on its second. short takes some minutes. COMMANDS: a pattern, see below.
#
# Each case ends well or is refused in one line; to be killed, to hang or to say more than that is a failure. What a group reads
# counts as its memory, so files are dropped from the page cache first. The inputs of the last commands are large, and each ends in what is
# refused, so that none of them is ever a job: in a large group they are read to their end. Where no group can be made (it takes root, mostly), this is
# said, and nothing fails. The program is $FLEXGEN_BIN, or ./flexgen; the device is the host.
set -u
cd "$(dirname "$0")/.." || exit 1
flexgen=$(realpath "${FLEXGEN_BIN:-./flexgen}") sizes=${1:-8 16 32 64 128 256 512 1024 2048 4096} quotas=${2:-max 100 50 25}
[[ $sizes == short ]] && sizes="16 40 256" quotas=50
most=${sizes##* }
name=flexgen-limit-$$ limit=600
dir=$(mktemp -d -p "${TMPDIR:-/var/tmp}") && trap 'rmdir "$memory/$name" "$cpu/$name" 2>/dev/null; rm -rf "$dir"' EXIT
unset HOME

# The directory, of our group or above it, where a group can be made that has such a file; the kind of mount, the controller.
place_for() { # FILE TYPE CONTROLLER
    local mount group place
    mount=$(awk -v type="$2" -v c="$3" '{ split($0, part, " - "); split(part[2], of, " ") }
        of[1] == type && (c == "" || "," of[3] "," ~ "," c ",") { print $5; exit }' /proc/self/mountinfo)
    group=$(awk -F: -v c="$3" '(c == "" && $2 == "") || (c != "" && "," $2 "," ~ "," c ",") { print $3; exit }' /proc/self/cgroup)
    [[ $mount ]] || return 1
    for place in "$mount${group%/}" "$mount$(dirname "$group")" "$mount"; do
        mkdir "$place/$name" 2>/dev/null || continue
        [[ -w $place/$name/$1 ]] && { rmdir "$place/$name"; echo "$place"; return; }
        rmdir "$place/$name"
    done
    return 1
}

memory=$(place_for memory.limit_in_bytes cgroup memory || place_for memory.max cgroup2 "") ||
    { echo "skipped: no control group for memory can be made here"; exit 0; }
cpu=$(place_for cpu.cfs_quota_us cgroup cpu || place_for cpu.max cgroup2 "") ||
    { echo "skipped: no control group for CPU can be made here"; exit 0; }

make_group() { # MB QUOTA
    local group=$memory/$name bytes=$(($1 << 20)) share=$cpu/$name
    mkdir -p "$group" "$share" || exit 1
    if [[ -e $group/memory.max ]]; then
        echo $bytes >"$group/memory.max"
        [[ -e $group/memory.swap.max ]] && echo 0 >"$group/memory.swap.max"
    else
        echo $bytes >"$group/memory.limit_in_bytes"
        [[ -e $group/memory.memsw.limit_in_bytes ]] && echo $bytes >"$group/memory.memsw.limit_in_bytes"
    fi
    [[ $2 == max ]] && return
    [[ -e $share/cpu.max ]] && echo "$(($2 * 1000)) 100000" >"$share/cpu.max" || echo $(($2 * 1000)) >"$share/cpu.cfs_quota_us"
}

# What it says is in $dir/out and $dir/err.
run() { # MB QUOTA WORDS...
    make_group "$1" "$2"
    for file in "$dir/flexgen" "$dir"/model/*; do dd if="$file" iflag=nocache count=0 2>/dev/null; done
    # shellcheck disable=SC2016
    timeout -k 10 $limit sh -c 'echo $$ >"$0/cgroup.procs" && echo $$ >"$1/cgroup.procs" && shift && exec "$@"' \
        "$memory/$name" "$cpu/$name" "$dir/flexgen" "${@:3}" >"$dir/out" 2>"$dir/err"
    local status=$?
    rmdir "$memory/$name"
    [[ -d $cpu/$name ]] && rmdir "$cpu/$name"
    return $status
}

# One word for what came of it; the threads are no more than the quota has processors, which is said where one runs.
judge() { # STATUS QUOTA
    local lines threads quota=$2
    [[ $quota == max ]] && quota=$(($(nproc) * 100))
    lines=$(grep -c ^flexgen: "$dir/err")
    threads=$(cat "$dir/out" "$dir/err" | sed -n 's/.* \([0-9]*\) threads, .*/\1/p' | tail -1)
    if (($1 == 0)) && cmp -s "$dir/out" "$dir/expected" || { (($1 == 0)) && [[ ! -e $dir/expected ]]; }; then
        if ((${threads:-1} > 1 && ${threads:-1} * 100 > quota)); then
            echo "$threads-threads"
        elif ((quota < $(nproc) * 100)) && [[ ${words[0]} != policy ]] && ! grep -q '^computing on ' "$dir/err"; then
            echo silent
        else
            echo ok
        fi
    elif (($1 == 1 || $1 == 2)) && ((lines == 1)); then
        echo refused
    elif (($1 == 137)); then
        echo KILLED
    else
        echo "FAILED($1)"
    fi
}

cp "$flexgen" "$dir/flexgen"
cp -r models/opt-tiny "$dir/model"
head -c 3000 models/opt-tiny/stories.txt >"$dir/stories"
prompt=(generate --model "$dir/model" --device host --prompt "Once upon a time" --max-tokens 8)
policy=(--percent 100 0 100 0 100 0 --gpu-batch-size 1 --num-gpu-batches 1)
short=(--prompt-len 16 --gen-len 4 --device host)
commands=("generate" "generate --percent" "generate --gpu-mem 2G" "generate /dev/shm" "bench opt-125m" "bench opt-125m --gpu-mem 2G" "policy opt-350m" "profile opt-1.3b" "eval" "quantize"
    "input prompts" "input short" "input wide" "input long" "input config" "input text" "input words")
make_input() { # KIND: writes $dir/KIND
    local story=" and then they all went home to eat some bread with the big dog, who was happy"
    case $1 in
    prompts) yes "Once upon a time$story" | head -c 100M && printf '\n\xff\n' ;;
    short) yes a | head -n 2000000 && printf '\xff\n' ;;
    wide) printf '{"prompt": "Hi", "x": [0' && yes ,0 | tr -d '\n' | head -c $((most < 128 ? 5 : 15))M && printf ']}\n4\n' ;;
    long) printf '{"prompt": "Hi", "x": [0' && yes ,0 | tr -d '\n' | head -c 40M && printf ']}\n' ;;
    config) printf '{"model_type": "opt", "x": [0' && yes ,0 | tr -d '\n' | head -c 80M && printf ']}\n' ;;
    text) yes "Once upon a time$story" | head -c 40M && printf '\xff\n' ;;
    words) yes "{\"text\": \"Once upon a time$story\"}" | head -n 500000 && echo 4 ;;
    esac >"$dir/$1"
}
words() { # COMMAND: sets words
    local more=()
    [[ $1 == *--gpu-mem* ]] && more=(--gpu-mem 2G)
    [[ $1 == *--percent* ]] && more=("${policy[@]}")
    [[ $1 == *shm* ]] && more=(--offload-dir /dev/shm) # where files are memory
    case $1 in
    generate*) words=("${prompt[@]}" "${more[@]}") ;;
    bench*) words=(bench --model opt-125m "${short[@]}" --num-prompts 4 "${more[@]}") ;;
    policy*) words=(policy --model opt-350m "${short[@]}") ;;
    profile*) words=(profile --model opt-1.3b --device host --output "$dir/hardware.json") ;;
    eval) words=(eval --model "$dir/model" --device host --perplexity "$dir/stories") ;;
    quantize) words=(quantize --model "$dir/model" --output "$dir/copy") ;;
    input*)
        local kind=${1#input }
        [[ -e $dir/$kind ]] || make_input "$kind"
        case $kind in
        config)
            [[ -e $dir/other ]] || cp -r "$dir/model" "$dir/other" && cp "$dir/config" "$dir/other/config.json"
            words=(generate --model "$dir/other" --device host --prompt a)
            ;;
        text) words=(eval --model "$dir/model" --device host --perplexity "$dir/text") ;;
        words) words=(eval --model "$dir/model" --device host --last-word "$dir/words") ;;
        *) words=(generate --model "$dir/model" --device host --strict --prompts "$dir/$kind") ;;
        esac
        ;;
    esac
}
"$flexgen" "${prompt[@]}" "${policy[@]}" 2>/dev/null >"$dir/completion" || exit 1

failures=0 cases=0
for quota in $quotas; do
    printf '%-28s' "CPU $quota, memory in MB:"
    # shellcheck disable=SC2086
    printf ' %9s' $sizes
    echo
    for command in "${commands[@]}"; do
        [[ $command =~ ${3:-} ]] || continue
        words "$command"
        rm -f "$dir/expected"
        [[ $command == generate* ]] && cp "$dir/completion" "$dir/expected"
        row=("" "")
        for size in $sizes; do
            rm -rf "$dir/cache" # the first start
            for start in 0 1; do
                rm -rf "$dir/copy"
                XDG_CACHE_HOME=$dir/cache run "$size" "$quota" "${words[@]}" 2>/dev/null
                verdict=$(judge $? "$quota")
                row[start]+=$(printf ' %9s' "$verdict")
                cases=$((cases + 1))
                [[ $verdict == ok || $verdict == refused ]] && continue
                failures=$((failures + 1))
                printf '\n%s in %s MB, CPU %s, start %s: %s\n' "$command" "$size" "$quota" $((start + 1)) "$verdict"
                tail -3 "$dir/err"
            done
        done
        printf '%-28s%s\n%-28s%s\n' "$command" "${row[0]}" "  second start" "${row[1]}"
    done
done
echo "$cases cases, $failures failures"
((failures == 0))
