# gpu_figures.awk: what flexgen did on a GPU beside the machine's bounds, from the files that gpu_check.sh leaves in a directory:
# bounds-* ("name value" a line, in 1e9 a second), and of the runs gpu, offload and limited of flexgen bench the JSON (one "key":
# value a line) and the text (a lane a line). What is not there is left out. Prints a table and writes figures.json.
#
#     awk -v card="..." -v memory="16 GiB" -f gpu_figures.awk FILES
#
# Bytes and FLOPs are counted from the model's shape, not taken from the program: what it moves or computes needlessly counts
# against it.
function file(    name) { name = FILENAME; sub(/\.[a-z]+$/, "", name); return name }
FILENAME ~ /^bounds-/ { if (!($1 in bound)) named[++names] = $1; bound[$1] = $2; next }
FILENAME == "accelerate.json" { if (match($0, /"throughput": [0-9.]+/)) accelerate = substr($0, RSTART + 14, RLENGTH - 14); next }
FILENAME == "flexllmgen.txt" { if (match($0, /total throughput: *[0-9.]+/)) { split(substr($0, RSTART, RLENGTH), w, /: */); flexllmgen = w[2] } next }
FILENAME ~ /\.json$/ { key = $1; gsub(/[":]/, "", key); value = $2; gsub(/[",]/, "", value); if (!((file(), key) in run)) run[file(), key] = value; next } # of a key that comes again the run's own is first
match($0, / busy +[0-9.]+ s/) { # "  load weights     ctog  busy    1.234 s  moved    56.78 MB    9.10 GB/s"
    split(substr($0, RSTART), w, / +/)
    if (w[3] + 0 > busy[file()]) busy[file()] = w[3] + 0
    if (/^  load weights/) loading[file()] = w[8] + 0
}
function shape(name) { # of run `name`: its model and its task
    m = run[name, "model"]; s = run[name, "s"]; n = run[name, "n"]; seqs = run[name, "gbs"] * run[name, "num_gpu_batches"]
    l = m ~ /1.3b/ ? 24 : m ~ /6.7b/ ? 32 : m ~ /13b/ ? 40 : m ~ /30b/ ? 48 : 0
    h1 = m ~ /1.3b/ ? 2048 : m ~ /6.7b/ ? 4096 : m ~ /13b/ ? 5120 : 7168
    weights = 2 * l * (12 * h1 * h1 + 13 * h1) # bytes; h2 = 4 h1, and biases and layernorms
    if (run[name, "compress_weight"] == "true") weights -= 2 * l * 12 * h1 * h1 * (1 - 4.5 / 16) # 4 bits, and two halves for 64
    token = 2 * l * 12 * h1 * h1               # FLOP of one token in all layers, attention left out
    kv = 4 * l * h1 * (run[name, "compress_cache"] == "true" ? 4.5 / 16 : 1) # bytes of one token
    prefill = seqs * (s * token + 2 * l * s * s * h1)
    return l && run[name, "total_s"] > 0
}
function most(a, b) { return a > b ? a : b }
function over(a, b) { return b > 0 ? a / b : 0 }
function figure(name, unit, value, of, limit) {
    if (!(value > 0)) return
    printf "%-44s %10.2f %-9s", name, value, unit
    if (limit > 0) printf " %-34s %10.2f %6.0f%%", of, limit, 100 * value / limit
    print ""
    if (name ~ /^ /) name = what ":" substr(name, 2) # a line under the run's own
    json = json sprintf("%s\n  {\"name\": \"%s\", \"unit\": \"%s\", \"value\": %.6g", json ? "," : "", name, unit, value)
    json = json (limit > 0 ? sprintf(", \"of\": \"%s\", \"bound\": %.6g, \"ratio\": %.4f}", of, limit, value / limit) : "}")
}
END {
    printf "\n%s\n%-44s %10s %-9s %-34s %10s %7s\n", card, "", "value", "", "bound", "", "ratio"
    count = split("h2d d2h both d2d plain_read direct_read", copies, " ")
    for (i = 1; i <= count; i++) if (copies[i] in bound) figure(copies[i], "GB/s", bound[copies[i]])
    gemm = most(bound["gemm_large"], bound["gemm_prefill"])
    figure("largest fp16 product", "TFLOP/s", gemm / 1e3)
    for (i = 1; i <= names; i++) {
        what = named[i]
        if (what ~ /^attend_prefill/) figure(what, "TFLOP/s", bound[what] / 1e3, "largest fp16 product", gemm / 1e3)
        else if (what ~ /^(packed|blas|attend4?|layernorm)_|^unpack$/) figure(what, "GB/s", bound[what], "copy within the GPU", bound["d2d"])
        else if (what ~ /^pieces_/) figure(what, "GB/s", bound[what], "pinned copy to the GPU", bound["h2d"])
        else if (what ~ /^(pick|launch|sync|copy)_|^launch$/) figure(what, "us", bound[what])
        else if (what == "register") figure("pinning of memory", "ms/GB", bound[what])
    }
    count = split("gpu all-fp16-8 all-w4-8 all-w4c4-8 all-fp16-64 all-w4-64 all-w4c4-64", runs, " ")
    for (i = 1; i <= count; i++) if (shape(runs[i])) {
        split(runs[i], way, "-")
        what = m ", all on the GPU, " seqs " x " s " + " n (way[2] ? ", " way[2] : "")
        # a step reads all weights, the table of the head, and the KV of s + 1, s + 2, ... tokens
        bytes = (n - 1) * (weights + 2 * 50272 * h1) + kv * seqs * ((n - 1) * s + n * (n - 1) / 2)
        figure(what, "token/s", run[runs[i], "throughput"])
        figure("  decode", "GB/s", over(bytes / 1e9, run[runs[i], "decode_s"]), "copy within the GPU", bound["d2d"])
        figure("  prefill", "TFLOP/s", over(prefill / 1e12, run[runs[i], "prefill_s"]), "largest fp16 product", gemm / 1e3)
    }
    if (shape("offload")) {
        what = m ", " memory ", " run["offload", "gbs"] " x " run["offload", "num_gpu_batches"] ", " s " + " n
        off = 1 - run["offload", "cg"]
        load = over(weights * run["offload", "wc"], bound["h2d"] * 1e9)
        # each stage lasts as long as its slowest lane: the prefill loads weights, computes, stores KV;
        least = most(most(load, over(prefill, gemm * 1e9)), over(seqs * s * kv * off, bound["d2h"] * 1e9))
        for (t = s + 1; t < s + n; t++) # a decode step loads weights, computes, and the CPU reads the KV of t tokens
            least += most(most(load, over(seqs * token, gemm * 1e9)), over(seqs * t * kv * off, bound["plain_read"] * 1e9))
        figure(what, "token/s", run["offload", "throughput"])
        figure("  loading weights", "GB/s", loading["offload"], "pinned copy to the GPU", bound["h2d"])
        figure("  time", "s", run["offload", "total_s"], "slowest lanes at their bounds", bound["h2d"] && bound["d2h"] && bound["plain_read"] && gemm ? least : 0)
        figure("  time", "s", run["offload", "total_s"], "busiest lane", busy["offload"])
    }
    if (shape("limited")) {
        what = m ", " memory ", " s " + " n
        figure(what, "token/s", run["limited", "throughput"], "Accelerate", accelerate)
        if (flexllmgen) figure(what, "token/s", run["limited", "throughput"], "the original program (no limit)", flexllmgen)
    }
    printf "{\"card\": \"%s\", \"figures\": [%s\n]}\n", card, json >"figures.json"
}
