/* The page of the policy search: what is asked becomes command lines of the program, which worker.js runs; its JSON is drawn. */

const {machines, models} = JSON.parse(at("data").textContent);
const SLIDERS = [ // label, unit, its size, the file's keys that move together
  ["GPU memory", "GB", 1e9, ["gmem"]], ["CPU memory", "GB", 1e9, ["cmem"]], ["disk", "GB", 1e9, ["nmem"]],
  ["CPU-GPU link", "GB/s", 1e9, ["ctog_bdw", "gtoc_bdw"]], ["disk speed", "GB/s", 1e9, ["dtoc_bdw", "ctod_bdw"]],
  ["GPU memory speed", "GB/s", 1e9, ["gpu_bdw"]], ["CPU memory speed", "GB/s", 1e9, ["cpu_bdw"]],
  ["GPU computing", "TFLOP/s", 1e12, ["mm_flops", "bmm_flops"]], ["CPU computing", "TFLOP/s", 1e12, ["cpu_flops"]],
];
const CURVES = {mm_flops: "mm_rows", bmm_flops: "bmm_tokens_g", cpu_flops: "cpu_tokens"}; // measured at several sizes instead
const FIELDS = ["model", "machine", "s", "n", "pack", "sparse", "schedule", "latency", "frontier", "hand",
  "wg", "wc", "cg", "cc", "hg", "hc", "gbs", "batches", "attends"];
const USUAL = {model: "opt-30b", machine: "t4", s: "512", n: "32"};
const SHADES = ["#3f74b0", "#6ea6e6", "#9db8d6", "#e8a15c", "#7fa650", "#b07fb8", "#c9b458", "#8c8c8c"];
const PLOT = ["#3f74b0", "#b8741f"]; // of the two lines of Figure 1; seen on white and on black
const element = (name, text = "", of = {}) => Object.assign(document.createElement(name), {textContent: text}, of);
const digits = (x, n = 3) => x === 0 ? "0" : Number(x.toPrecision(n)).toLocaleString("en", {maximumSignificantDigits: n});
const bytes = x => x >= 1e8 || !x ? digits(x / 1e9) + " GB" : digits(x / 1e6) + " MB";
const percent = x => digits(100 * x) + "%";

// -------------------------------------------------- the program

let module; // the program, compiled

/* A thread that answers command lines one after the other: {status, said, files}. */
function thread() {
  const worker = new Worker(URL.createObjectURL(new Blob([at("worker").textContent], {type: "text/javascript"})));
  const waiting = new Map();
  let count = 0;
  worker.onmessage = e => { waiting.get(e.data.id)(e.data); waiting.delete(e.data.id); };
  worker.postMessage({module});
  return {
    ask(args, read) {
      const id = ++count, file = at("machine").value + ".json";
      worker.postMessage({id, args, read, files: {[file]: JSON.stringify(machines[at("machine").value])}});
      return new Promise(done => waiting.set(id, done));
    },
    stop() { worker.terminate(); },
  };
}

/* Answers come from one thread; what takes longer, Figure 1 and the sweep, from another, which the next question ends. */
let quick, slow;
async function load() {
  const packed = Uint8Array.from(atob(JSON.parse(at("data").textContent).wasm), c => c.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  module = await WebAssembly.compile(await new Response(plain).arrayBuffer());
  quick = thread();
  return true;
}

/* Of browsers that are too old. */
function cannot(error) {
  at("refused").hidden = false;
  at("refused").textContent = `This browser cannot run the program: ${error.message}`;
  return false;
}

// -------------------------------------------------- the question

/* The names under which the machine's file has a key: itself, or one for each phase. */
const names_of = key => [key, key + "_p", key + "_g"].filter(name => machines[at("machine").value][name] > 0);

function make_sliders() {
  for (const [label, unit, size, keys] of SLIDERS) {
    const input = element("input", "", {type: "range", min: -20, max: 20, step: 1, value: 0, id: keys[0]});
    const box = element("div", "", {className: "slider"});
    input.setAttribute("list", "middle");
    box.append(element("label", label, {htmlFor: keys[0]}), element("output", "", {id: keys[0] + "-is"}), input);
    at("sliders").append(box);
  }
  const list = element("datalist", "", {id: "middle"});
  list.append(element("option", "", {value: 0}));
  at("sliders").append(list);
}

const moved_to = (key, name) => Number((machines[at("machine").value][name] * 2 ** (at(key).value / 4)).toPrecision(6));

function tell_sliders() {
  for (const [, unit, size, keys] of SLIDERS) {
    const machine = machines[at("machine").value], slider = at(keys[0]), name = names_of(keys[0])[0];
    const curve = keys.some(key => machine[CURVES[key]]);
    slider.disabled = curve || !name;
    if (slider.disabled) slider.value = 0;
    const is = name ? digits(moved_to(keys[0], name) / size) + " " + unit : "no bound";
    at(keys[0] + "-is").textContent = curve ? "measured at several sizes" : is + (slider.value === "0" ? "" :
      ` (file: ${digits(machine[name] / size)})`);
    slider.setAttribute("aria-valuetext", at(keys[0] + "-is").textContent);
  }
}

/* The machine's flags, and those of model and task. */
function question() {
  const args = ["--model", at("model").value, "--prompt-len", at("s").value, "--gen-len", at("n").value,
    "--hardware", at("machine").value + ".json"];
  for (const [, , , keys] of SLIDERS)
    for (const key of at(keys[0]).value === "0" ? [] : keys)
      for (const name of names_of(key)) args.push("--with", `${name}=${moved_to(keys[0], name)}`);
  if (at("pack").checked) args.push("--allow-compression");
  if (at("sparse").checked) args.push("--attn-sparsity", "0.1");
  if (at("latency").value > 0) args.push("--max-latency", at("latency").value);
  return args;
}

const schedule = () => at("schedule").value ? ["--schedule", at("schedule").value] : [];

/* The flags of a policy that was found, without those of the question. */
function flags_of(p) {
  const flags = ["--percent", ...[p.wg, p.wc, p.cg, p.cc, p.hg, p.hc].map(x => String(Number((100 * x).toPrecision(12)))),
    "--gpu-batch-size", String(p.gbs), "--num-gpu-batches", String(p.num_gpu_batches), "--schedule", p.schedule];
  if (p.cpu_cache_compute) flags.push("--cpu-cache-compute");
  if (p.compress_weight) flags.push("--compress-weight");
  if (p.compress_cache) flags.push("--compress-cache");
  return flags;
}

function by_hand() {
  const flags = ["--percent", ...["wg", "wc", "cg", "cc", "hg", "hc"].map(id => at(id).value || "0"),
    "--gpu-batch-size", at("gbs").value || "1", "--num-gpu-batches", at("batches").value || "1"];
  return at("attends").checked ? [...flags, "--cpu-cache-compute"] : flags;
}

// -------------------------------------------------- the address

function to_address() {
  const to = new URLSearchParams();
  for (const id of [...FIELDS, ...SLIDERS.map(s => s[3][0])]) {
    const value = at(id).type === "checkbox" ? (at(id).checked ? "1" : "") : at(id).type === "range" && at(id).value === "0" ? "" : at(id).value;
    const hidden = !at("hand").checked && FIELDS.indexOf(id) > FIELDS.indexOf("hand");
    if (value && value !== USUAL[id] && !hidden) to.set(id, value);
  }
  history.replaceState(null, "", "#" + to);
}

function from_address() {
  const from = new URLSearchParams(location.hash.slice(1));
  for (const id of [...FIELDS, ...SLIDERS.map(s => s[3][0])]) {
    const value = from.get(id) ?? USUAL[id] ?? "";
    if (at(id).type === "checkbox") at(id).checked = value === "1";
    else at(id).value = at(id).type === "range" ? value || 0 : value;
  }
  for (const id of ["model", "machine"]) if (!at(id).value) at(id).value = USUAL[id];
}

// -------------------------------------------------- the answer

const JSON_FILE = ["--json", "answer.json"];
let newest = 0, best, answered = false;

async function solve(flags) {
  const answer = await quick.ask(["policy", ...question(), ...flags, "--explain", ...JSON_FILE], ["answer.json"]);
  return answer.status ? {refusal: answer.said.join(" ") || "the program stopped"} : JSON.parse(answer.files["answer.json"]);
}

/* The whole answer to what is asked now; an older question that is still open is told nothing any more. */
async function answer() {
  const mine = ++newest;
  at("byhand").hidden = !at("hand").checked;
  tell_sliders();
  to_address();
  at("answer").setAttribute("aria-busy", "true");
  if (!await loaded || mine !== newest) return;
  if (slow) slow.stop();
  slow = null;
  const found = await solve(schedule());
  if (mine !== newest) return;
  best = found.refusal ? null : found;
  if (at("hand").checked && !at("gbs").value) take(), to_address();
  const shown = at("hand").checked ? await solve([...by_hand(), ...schedule()]) : found;
  if (mine !== newest) return;
  at("answer").setAttribute("aria-busy", "false");
  at("refused").hidden = !shown.refusal;
  at("refused").textContent = shown.refusal ? shown.refusal + (answered ? ". Below is the answer from before." : "") : "";
  at("found").classList.toggle("stale", Boolean(shown.refusal));
  at("found").hidden = Boolean(shown.refusal) && !answered;
  if (shown.refusal) return;
  answered = true;
  show(shown, found);
  slow = thread();
  await show_frontier(shown, mine);
  await show_sweep(shown, mine);
}

function where(name, gpu, cpu, disk) {
  const parts = [[gpu, "GPU"], [cpu, "CPU"], [disk, "disk"]].filter(([share]) => share > 0);
  return `${name}: ${parts.map(([share, tier]) => `${percent(share)} ${tier}`).join(", ")}`;
}

function show(p, found) {
  const name = {zigzag: "zig-zag", row: "row by row", diagonal: "diagonal"}[p.schedule];
  const packed = [p.compress_weight && "weights", p.compress_cache && "the KV cache"].filter(Boolean).join(" and ");
  at("words").textContent = `${p.num_gpu_batches} GPU batch${p.num_gpu_batches > 1 ? "es" : ""} of ${p.gbs}, ${name}; ` +
    `the ${p.cpu_cache_compute ? "CPU" : "GPU"} attends to the cache off the GPU${packed ? "; " + packed + " in 4 bits" : ""}. ` +
    [where("Weights", p.wg, p.wc, p.wd), where("KV cache", p.cg, p.cc, p.cd), where("activations", p.hg, p.hc, p.hd)].join("; ") + ".";
  const figures = [["token/s", p.throughput], ["s for a block", p.latency], ["s a layer, prefill (T_pre)", p.T_pre],
    ["s a layer, generation (T_gen)", p.T_gen]];
  if (p !== found && best) figures.push(["of the best's token/s", 100 * p.throughput / best.throughput, "%"]);
  at("figures").replaceChildren(...figures.map(([what, x, unit = ""]) => {
    const box = element("div", what);
    box.prepend(element("b", digits(x, 4) + unit));
    return box;
  }));
  const asked = ["./flexgen", "policy", ...question(), ...(p === found ? [] : by_hand()), ...schedule()].join(" ");
  at("command").textContent = asked.replace("--hardware ", "--hardware hardware/");
  show_tiers(p);
  show_lanes(p);
  show_more(p);
}

function bar(label, parts, whole, binds) {
  const row = element("div", "", {className: "bar"}), track = element("div");
  for (const [text, size, color] of parts) {
    const part = track.appendChild(element("i", "", {title: text}));
    part.style.width = 100 * Math.min(1, size / whole) + "%";
    part.style.background = color;
  }
  row.append(element("span", label, {className: binds ? "binds" : ""}), track);
  return row;
}

function legend_of(parts) {
  const box = element("div", "", {className: "legend"});
  for (const [text, , color] of parts) {
    const entry = box.appendChild(element("span"));
    entry.appendChild(element("i")).style.background = color;
    entry.append(text);
  }
  return box;
}

/* A bar a tier: its largest regions by name, the others together, and what is left of its capacity. */
function show_tiers(p) {
  const capacity = {GPU: "GPU memory", CPU: "CPU memory", disk: "disk space"};
  at("tiers").replaceChildren(...Object.entries(p.regions).flatMap(([tier, regions]) => {
    const has = p.lp.rows.find(row => row.row === capacity[tier]).right * 1e9;
    const sorted = Object.entries(regions).sort((a, b) => b[1] - a[1]), small = sorted.slice(SHADES.length - 1);
    const parts = sorted.slice(0, SHADES.length - 1);
    if (small.length) parts.push(["others", small.reduce((sum, r) => sum + r[1], 0)]);
    const named = parts.map(([name, size], n) => [`${name} ${bytes(size)}`, size, SHADES[n]]);
    const used = parts.reduce((sum, r) => sum + r[1], 0);
    return [bar(`${tier}: ${bytes(used)} of ${bytes(has)}`, named, has, p.bound[tier]), legend_of(named)];
  }));
}

/* Of each lane its seconds in a layer, in both phases; the longest of a phase binds. */
function show_lanes(p) {
  const lanes = {ctog: "CPU to GPU", gtoc: "GPU to CPU", dtoc: "disk to CPU", ctod: "CPU to disk", gpu: "GPU", cpu: "CPU"};
  at("lanebars").replaceChildren(...["p", "g"].flatMap(phase => {
    const rows = Object.entries(lanes).map(([lane, name]) => [name, p.lp.rows.find(r => r.row === `${lane}^${phase}`)]).filter(r => r[1]);
    const longest = Math.max(...rows.map(r => r[1].left)), binding = phase === "p" ? p.bound.T_pre : p.bound.T_gen;
    return rows.map(([name, row]) => {
      const binds = binding.split(/ with | /).includes(row.row);
      return bar(`${name}^${phase} ${digits(row.left)} s${binds ? ", binds" : ""}`,
        [[row.row, row.left, phase === "p" ? SHADES[0] : SHADES[3]]], longest, binds);
    });
  }));
}

function show_more(p) {
  const words = {"GPU memory": "1 GB more on the GPU", "CPU memory": "1 GB more on the CPU", "disk space": "1 GB more on disk",
    ctog: "1 GB/s more from CPU to GPU", gtoc: "1 GB/s more from GPU to CPU", dtoc: "1 GB/s more from disk to CPU", ctod: "1 GB/s more from CPU to disk"};
  const gains = Object.entries(p.more).map(([what, then]) => [words[what], then.throughput / p.lp.throughput]).filter(([, gain]) => gain > 5e-5);
  gains.sort((a, b) => b[1] - a[1]);
  const lines = gains.map(([what, gain]) => `${what}: +${percent(gain)} token/s`);
  at("more").replaceChildren(...(lines.length ? lines : ["No memory and no link would: the processors hold it back."]).map(text => element("li", text)));
}

// -------------------------------------------------- Figure 1

async function show_frontier(p, mine) {
  at("figure1").hidden = !at("frontier").checked;
  if (!at("frontier").checked) return;
  const lines = [];
  const others = ["--schedule", "row", "--percent", "-", "-", "100", "0", "100", "0"]; // section 6: DeepSpeed, Accelerate
  for (const [name, flags] of [["FlexGen", schedule()], ["row by row, with the cache on the GPU, as others do", others]]) {
    const got = await slow.ask(["policy", ...question(), ...flags, "--frontier", ...JSON_FILE], ["answer.json"]);
    if (mine !== newest) return;
    if (!got.status) lines.push([name, JSON.parse(got.files["answer.json"]).frontier]);
  }
  const all = lines.flatMap(line => line[1]).concat(p), W = 640, H = 300, left = 60, bottom = 40;
  const range = key => [Math.log10(Math.min(...all.map(f => f[key]))), Math.log10(Math.max(...all.map(f => f[key])))];
  const [x0, x1] = range("latency"), [y0, y1] = range("throughput");
  const x = f => left + (Math.log10(f.latency) - x0) / (x1 - x0 || 1) * (W - left - 20);
  const y = f => H - bottom - (Math.log10(f.throughput) - y0) / (y1 - y0 || 1) * (H - bottom - 30);
  const mark = (f, color, r) => `<circle cx="${x(f)}" cy="${y(f)}" r="${r}" fill="${color}"><title>${digits(f.throughput)} token/s, ${digits(f.latency)} s</title></circle>`;
  const curves = lines.map(([name, list], n) => {
    const color = PLOT[n];
    return `<polyline fill="none" stroke="${color}" stroke-width="2" points="${list.map(f => x(f) + "," + y(f)).join(" ")}"/>` +
      list.map(f => mark(f, color, 3)).join("");
  });
  const ends = [10 ** x0, 10 ** x1].map((v, n) => `<text x="${n ? W - 20 : left}" y="${H - 18}" text-anchor="${n ? "end" : "start"}">${digits(v)} s</text>`)
    .concat([10 ** y0, 10 ** y1].map((v, n) => `<text x="${left - 6}" y="${n ? 34 : H - bottom}" text-anchor="end">${digits(v)}</text>`));
  at("plot").innerHTML = `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="Throughput in token/s over the latency of a block, both logarithmic" font-size="12" fill="currentColor">` +
    `<path d="M${left} 24V${H - bottom}H${W - 20}" fill="none" stroke="currentColor"/>${curves.join("")}${mark(p, "var(--now)", 6)}${ends.join("")}` +
    `<text x="${left}" y="14" text-anchor="middle">token/s</text>` +
    `<text x="${W / 2}" y="${H - 4}" text-anchor="middle">latency of a block</text></svg>`;
  at("curves").replaceChildren(legend_of([...lines.map(([name], n) => [name, 0, PLOT[n]]), ["what is shown above", 0, "var(--now)"]]));
}

// -------------------------------------------------- one sweep on the sim

/* The second sweep of a trace, which decodes, as draw.js takes it: times in microseconds from its first square on. */
function sweep_of(trace) {
  const lanes = new Map(), squares = new Map(), names = new Map();
  for (const e of trace.traceEvents) {
    if (e.name === "thread_name") lanes.set(e.tid, {name: e.args.name, bars: []});
    if (e.ph !== "X" || e.args.i !== 1) continue;
    if (!names.has(e.name)) names.set(e.name, names.size);
    const {j, k} = e.args, begin = e.ts, end = e.ts + e.dur, bars = lanes.get(e.tid).bars, last = bars[bars.length - 1];
    if (last && last.layer === j && begin - last.end < 100) last.end = end;
    else bars.push({call: names.get(e.name), begin, end, layer: j});
    if (e.cat !== "gpu") continue;
    const key = j * 1e6 + k, s = squares.get(key);
    squares.set(key, s ? {...s, begin: Math.min(s.begin, begin), end: Math.max(s.end, end)} : {begin, end, batch: k, token: 0, layer: j, sweep: 1});
  }
  const list = [...squares.values()].sort((a, b) => a.begin - b.begin), first = list[0].begin;
  for (const lane of lanes.values()) lane.bars = lane.bars.filter(bar => bar.end > first); // the weights of layer 0 came before
  for (const thing of [...list, ...[...lanes.values()].flatMap(l => l.bars)]) thing.begin = Math.max(0, thing.begin - first), thing.end -= first;
  return {lanes: [...lanes.values()].filter(l => l.bars.length), squares: list, names: [...names.keys()], end: Math.max(...list.map(s => s.end))};
}

async function show_sweep(p, mine) {
  const middle = Math.min(2046, Number(at("s").value) + Math.floor(at("n").value / 2)), flags = flags_of(p);
  const task = question(), of = task.indexOf("--prompt-len");
  task.splice(of, 4, "--prompt-len", String(middle), "--gen-len", "2");
  const limits = task.filter((arg, n) => !["--max-latency", "--allow-compression"].includes(arg) && task[n - 1] !== "--max-latency");
  const got = await slow.ask(["bench", "--device", "sim", ...limits, ...flags, "--json", "bench.json", "--trace", "trace.json"], ["trace.json"]);
  if (mine !== newest || got.status) return;
  const share = run ? now / run.end : 1 / 2; // it opens in the middle, where there is most to see
  run = sweep_of(JSON.parse(got.files["trace.json"]));
  columnName = () => "one new token of each sequence";
  TOKENS = 1, ROWS = Math.max(...run.squares.map(s => s.batch)) + 1, LAYERS = Math.max(...run.squares.map(s => s.layer)) + 1;
  const shades = Object.entries(JSON.parse(at("data").textContent).calls);
  CALLS = run.names.map(name => shades.find(([call]) => call === name) || [name, SHADES[7]]);
  perPixel = run.end / LAYERS * 4 / at("lanes").clientWidth;
  at("calls").replaceChildren();
  legend("calls", CALLS);
  at("time").max = run.end;
  go(share * run.end);
}

function draw() {
  asked = false;
  if (!run) return;
  drawSquares();
  drawLanes();
  at("time").value = now;
  at("time").setAttribute("aria-valuetext", digits(now / 1e6) + " seconds");
}

function go(t) {
  now = t;
  redraw();
}

/* A sweep takes ten seconds to watch, however long it takes. */
let playing = false;
function play(on) {
  playing = on;
  at("play").textContent = on ? "Pause" : "Play";
  let last = performance.now();
  const frame = t => {
    if (!playing) return;
    go(Math.min(run.end, now + (t - last) / 1e4 * run.end));
    last = t;
    if (now >= run.end) play(false); else requestAnimationFrame(frame);
  };
  if (on && run) { if (now >= run.end) now = 0; requestAnimationFrame(frame); }
}

// -------------------------------------------------- the beginning

at("model").append(...models.map(name => element("option", name.replace("opt-", "OPT-").replace(/b$/, "B").replace(/m$/, "M"), {value: name})));
at("machine").append(...Object.keys(machines).map(name => element("option", machines[name].name, {value: name})));
make_sliders();
from_address();
let soon;
at("asked").addEventListener("input", () => { tell_sliders(); clearTimeout(soon); soon = setTimeout(answer, 60); });
at("asked").addEventListener("submit", e => e.preventDefault());
at("machine").addEventListener("change", () => { for (const s of SLIDERS) at(s[3][0]).value = 0; });
at("take").addEventListener("click", () => { take(); answer(); });
at("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(at("command").textContent);
  at("copy").textContent = "copied";
  setTimeout(() => { at("copy").textContent = "copy"; }, 2000);
});
at("play").addEventListener("click", () => play(!playing));
at("time").addEventListener("input", e => go(Number(e.target.value)));
addEventListener("hashchange", () => { from_address(); answer(); });
addEventListener("resize", redraw);

/* The best policy becomes the one by hand. */
function take() {
  if (!best) return;
  for (const id of ["wg", "wc", "cg", "cc", "hg", "hc"]) at(id).value = Number((100 * best[id]).toPrecision(6));
  at("gbs").value = best.gbs, at("batches").value = best.num_gpu_batches, at("attends").checked = best.cpu_cache_compute;
}

colors();
const loaded = load().catch(cannot);
answer();
