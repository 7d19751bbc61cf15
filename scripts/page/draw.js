/* What docs/index.html and docs/explore.html draw a run with: squares and lanes around `now`. The page that includes this has
 * run {lanes: [{name, bars: [{call, begin, end, layer}]}], squares: [{begin, end, batch, token, layer, sweep}]} (times in
 * microseconds), now, ROWS, TOKENS, LAYERS, CALLS [[name, color]], perPixel (microseconds of the lanes), and the canvases. */
"use strict";
const at = id => document.getElementById(id);
const PAST = 0.6; // the share of the lanes' time that lies before now
let run, now = 0, ink = {}, asked = false, perPixel = 30, ROWS = 1, TOKENS = 1, LAYERS = 1, CALLS = [];
let columnName = token => token ? "token " + token : "token 0, prefill";

/* The first place in a list in order of time that begins after t. */
function after(list, t) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].begin > t) high = middle; else low = middle + 1;
  }
  return low;
}

// -------------------------------------------------- drawing

/* An empty canvas of so many CSS pixels in height: [context, width]. */
function sheet(id, height) {
  const canvas = at(id), ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + "px";
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  c.font = "11px system-ui, Helvetica, Arial, sans-serif";
  c.textBaseline = "middle";
  return [c, width];
}

function write(c, text, x, y, align = "left", color = ink.soft) {
  c.fillStyle = color;
  c.textAlign = align;
  c.fillText(text, x, y);
}

function drawSquares() {
  const left = 22, top = 18, gap = 3, wide = at("squares").clientWidth;
  const cell = (wide - left - gap * (TOKENS - 1)) / (TOKENS * LAYERS), tall = Math.min(12, Math.max(8, cell));
  const [c] = sheet("squares", top + ROWS * tall + 2), seam = cell > 5 ? 1 : 0.5;
  const x = s => left + s.token * (LAYERS * cell + gap) + s.layer * cell;
  for (let token = 0; token < TOKENS; token++) {
    const middle = x({token, layer: LAYERS / 2});
    write(c, LAYERS * cell > 60 ? columnName(token) : String(token), middle, 8, "center");
  }
  for (let row = 0; row < ROWS; row += tall < 11 ? 3 : 1) write(c, String(row), left - 5, top + (row + 0.5) * tall, "right");
  const newest = after(run.squares, now) - 1, sweep = newest < 0 ? -1 : run.squares[newest].sweep;
  run.squares.forEach((s, n) => {
    c.fillStyle = n > newest ? ink.empty : now < s.end ? ink.now : s.sweep === sweep ? ink.sweep : ink.done;
    c.fillRect(x(s), top + s.batch * tall, cell - seam, tall - 1);
  });
}

function drawLanes() {
  const left = 96, tall = 17, [c, wide] = sheet("lanes", run.lanes.length * tall + 18);
  const begin = now - (wide - left) * perPixel * PAST, pixel = 1 / perPixel, bottom = run.lanes.length * tall;
  run.lanes.forEach((lane, n) => {
    const y = n * tall;
    write(c, lane.name, left - 8, y + tall / 2, "right");
    c.fillStyle = ink.empty;
    c.fillRect(left, y + tall - 2, wide - left, 1);
    for (let b = Math.max(0, after(lane.bars, begin) - 1); b < lane.bars.length; b++) {
      const bar = lane.bars[b], x = left + Math.max(0, (bar.begin - begin) * pixel);
      const right = Math.min(wide, left + (bar.end - begin) * pixel);
      if (x >= wide) break;
      if (right <= left) continue;
      c.globalAlpha = bar.begin > now ? 0.35 : 1;
      c.fillStyle = CALLS[bar.call][1];
      c.fillRect(x, y + 3, Math.max(right - x - 0.5, 0.7), tall - 5);
      c.globalAlpha = 1;
      const text = bar.layer === LAYERS - 1 ? "h" : String(bar.layer);
      if (right - x > 8 * text.length + 2) write(c, text, (x + right) / 2, y + tall / 2 + 1, "center", bar.begin > now ? ink.ink : inkOn(CALLS[bar.call][1]));
    }
  });
  const x = left + (wide - left) * PAST;
  c.fillStyle = ink.now;
  c.fillRect(x - 1, 0, 2, bottom);
  write(c, "now", x, bottom + 9, "center", ink.now);
}

/* Black or white, whichever has more contrast with a colour #rrggbb: 4.58:1 at least. */
function inkOn(color) {
  const light = [1, 3, 5].map(n => parseInt(color.slice(n, n + 2), 16) / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0.05);
  return light / 0.05 > 1.05 / light ? "#000" : "#fff";
}

/* Many causes, one drawing a frame. */
function redraw() {
  if (!asked) requestAnimationFrame(draw);
  asked = true;
}

function colors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "line", "empty", "done", "sweep", "now"]) ink[name] = style.getPropertyValue("--" + name).trim();
  draw();
}
for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", colors);

function legend(id, entries) {
  for (const [name, color] of entries) {
    const entry = at(id).appendChild(document.createElement("span"));
    entry.appendChild(document.createElement("i")).style.background = color;
    entry.append(name);
  }
}
