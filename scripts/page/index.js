/* The animation of docs/index.html: three runs, played. */
const data = JSON.parse(document.getElementById("traces").textContent);
const TIERS = Object.entries(data.tiers);
let playing = false, last = 0;
CALLS = Object.entries(data.calls);

// -------------------------------------------------- the traces, from differences to times

for (const r of data.runs) {
  for (const lane of r.lanes) {
    const flat = lane.bars;
    let t = 0;
    lane.bars = [];
    for (let n = 0; n < flat.length; n += 4) {
      const begin = t + flat[n + 1];
      t = begin + flat[n + 2];
      lane.bars.push({call: flat[n], begin, end: t, layer: flat[n + 3]});
    }
  }
  const flat = r.squares;
  let t = 0;
  r.squares = [];
  for (let n = 0; n < flat.length; n += 6) {
    const [gap, length, batch, token, layer, sweep] = flat.slice(n, n + 6);
    t += gap;
    r.squares.push({begin: t, end: t + length, batch, token, layer, sweep});
  }
}
const most = key => Math.max(...data.runs[0].squares.map(s => s[key])) + 1;
ROWS = most("batch"), TOKENS = most("token"), LAYERS = most("layer");
const END = Math.max(...data.runs.map(r => r.end));
const PAGES = Math.max(...data.runs.flatMap(r => r.held.map(h => h[1] + h[2] + h[3])));
const SEQUENCES = Math.max(...data.runs.flatMap(r => r.held.map(h => h[4])));

function drawMemory() {
  const left = 30, top = 8, height = 80, [c, wide] = sheet("memory", top + height + 20), bottom = top + height;
  const x = t => left + t / END * (wide - left - 8), y = n => bottom - n / PAGES * height;
  for (let n = 0; n <= PAGES; n += PAGES / 4) {
    c.fillStyle = ink.line;
    c.fillRect(left, y(n), wide - left - 8, 1);
    write(c, String(n), left - 5, y(n), "right");
  }
  for (let t = 0; t <= END; t += 5e5) write(c, (t / 1e6).toFixed(1) + " s", x(t), bottom + 11, t ? "center" : "left");
  run.held.slice(0, -1).forEach((h, n) => {
    const next = run.held[n + 1][0];
    let below = 0;
    TIERS.forEach(([, color], tier) => {
      const pages = h[1 + tier], until = Math.min(next, Math.max(now, h[0]));
      c.fillStyle = color;
      c.fillRect(x(h[0]), y(below + pages), x(until) - x(h[0]), pages / PAGES * height);
      c.globalAlpha = 0.3;
      c.fillRect(x(until), y(below + pages), x(next) - x(until), pages / PAGES * height);
      c.globalAlpha = 1;
      below += pages;
    });
  });
  c.beginPath();
  run.held.forEach((h, n) => {
    const level = bottom - h[4] / SEQUENCES * height * 0.97;
    if (n) c.lineTo(x(h[0]), bottom - run.held[n - 1][4] / SEQUENCES * height * 0.97);
    c.lineTo(x(h[0]), level);
  });
  c.strokeStyle = ink.ink;
  c.lineWidth = 1.2;
  c.stroke();
  c.fillStyle = ink.now;
  c.fillRect(x(now) - 1, top - 6, 2, height + 6);
}

function tell() {
  const done = after(run.squares, now), s = run.squares[Math.max(0, done - 1)];
  const held = run.held.filter(h => h[0] <= now).pop() || run.held[0];
  const what = now >= run.end ? "the end" : `sweep ${s.sweep}: batch ${s.batch}, token ${s.token}, ` +
    (s.layer === LAYERS - 1 ? "the head, which chooses the next token" : `layer ${s.layer}`);
  at("status").textContent = `${run.name}, ${(now / 1e3).toFixed(2)} of ${(run.end / 1e3).toFixed(0)} ms, ${what}; ` +
    `${held[1] + held[2] + held[3]} pages, ${held[4]} sequences in flight`;
}

function draw() {
  asked = false;
  drawSquares();
  drawLanes();
  drawMemory();
  at("time").value = now;
  at("time").setAttribute("aria-valuetext", (now / 1e3).toFixed(1) + " milliseconds");
  tell();
}

// -------------------------------------------------- controls

function go(t) {
  now = Math.min(run.end, Math.max(0, t));
  redraw();
}

function choose(n) {
  run = data.runs[n];
  at("time").max = run.end;
  document.querySelectorAll("[data-schedule]").forEach((b, m) => b.setAttribute("aria-pressed", String(m === n)));
  go(now);
}

function frame(t) {
  if (!playing) return;
  go(now + (t - last) * at("speed").value);
  last = t;
  if (now >= run.end) play(false); else requestAnimationFrame(frame);
}

function play(on) {
  if (on === playing) return;
  playing = on;
  if (on && now >= run.end) go(0);
  at("play").textContent = on ? "Pause" : "Play";
  at("play").setAttribute("aria-label", on ? "Pause" : "Play");
  at("status").setAttribute("aria-live", on ? "off" : "polite");
  last = performance.now();
  if (on) requestAnimationFrame(frame);
}

/* To the beginning of the next square, or of the one before. */
function step(by) {
  play(false);
  const n = after(run.squares, now) - 1 + by;
  go(n < 0 ? 0 : n < run.squares.length ? run.squares[n].begin : run.end);
}

/* Keys serve the animation only while it is seen, so that they scroll the page elsewhere. */
function key(e) {
  const box = at("player").getBoundingClientRect();
  if (box.bottom < 0 || box.top > innerHeight || e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.target.closest("select, pre, .wide")) return;
  if (e.key === " " && e.target.tagName !== "BUTTON" && e.target.tagName !== "A") play(!playing);
  else if (e.key === "ArrowRight") step(1);
  else if (e.key === "ArrowLeft") step(-1);
  else if ("123".includes(e.key)) choose(e.key - 1);
  else return;
  e.preventDefault();
}

const seen = new Set(data.runs.flatMap(r => r.lanes.flatMap(l => l.bars.map(b => b.call))));
legend("calls", CALLS.filter((_, n) => seen.has(n)));
legend("tiers", TIERS);
legend("tiers", [[`sequences in flight, up to ${SEQUENCES}`, "var(--ink)"]]);
document.querySelectorAll("[data-schedule]").forEach((b, n) => b.addEventListener("click", () => choose(n)));
at("play").addEventListener("click", () => play(!playing));
at("back").addEventListener("click", () => step(-1));
at("forth").addEventListener("click", () => step(1));
at("time").addEventListener("input", e => go(Number(e.target.value)));
window.addEventListener("keydown", key);
window.addEventListener("resize", redraw);
choose(1);
colors();

/* index.html?ms=100 opens there, else in the midst of a square near the middle, where there is most to see. */
const askedFor = new URLSearchParams(location.search).get("ms"), middle = run.squares[Math.floor(0.45 * run.squares.length)];
go(askedFor === null ? (middle.begin + middle.end) / 2 : Number(askedFor) * 1000);
