"use strict";
/* Draws the canvases: output rate, KV cache, steps. experts.js has another. */

/* Canvases take their colours from the legends, where CSS has resolved them for the theme. */
const colour = (kind) =>
  getComputedStyle(document.querySelector(`.legend .s-${kind}`)).backgroundColor;
const softInk = () => getComputedStyle($("health")).color;

function prepare(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (!width) return null;
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    Object.assign(canvas, { width: across, height: down });
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return { pen, width, height };
}

/* ---------------------------------------------------------------- KV cache */

const MARKS = { ".": "free", c: "cached", u: "used", s: "shared" };
for (const kind of ["used", "shared", "cached", "free"]) {
  const swatch = h("i", { className: `swatch s-${kind}` });
  $("cache-legend").append(h("li", {}, swatch, kind, h("span", { id: `n-${kind}` })));
  if (kind !== "free") $("cache-bar").append(h("i", { className: `s-${kind}` }));
}

const FADE_MS = 900; // a block that a request has just taken
const MIN_CELLS = 128;
const cache = { cells: "", perCell: 0, taken: new Map(), size: 1, across: 1 };

/* Notes which cells were taken since the last poll. */
function noteBlocks(state) {
  const now = performance.now();
  const { blocks, blocks_per_cell: perCell } = state;
  const isFree = (mark) => mark === undefined || mark === "." || mark === "c";
  if (cache.perCell !== perCell || blocks.length < cache.cells.length) cache.taken.clear();
  else if (cache.perCell)
    for (let i = 0; i < blocks.length; i++)
      if (!isFree(blocks[i]) && blocks[i] !== "-" && isFree(cache.cells[i]))
        cache.taken.set(i, now);
  Object.assign(cache, { cells: blocks, perCell });
}

/* Returns the number of cells of the map: those of the blocks that were ever taken, and room for as
   many again at most. So the map grows with what is in use, by factors of two. */
function numCells() {
  const all = Math.ceil(engine.state.num_blocks / cache.perCell);
  let room = MIN_CELLS;
  while (room < cache.cells.length) room *= 2;
  return Math.min(all, room);
}

function tellCache(cells) {
  const { num_blocks: all, block_counts: counts } = engine.state;
  for (const kind of Object.values(MARKS)) put($(`n-${kind}`), whole(counts[kind]));
  ["used", "shared", "cached"].forEach((kind, i) => {
    $("cache-bar").children[i].style.width = `${(100 * counts[kind]) / Math.max(1, all - 1)}%`;
  });
  const shown = Math.min(all, cells * cache.perCell);
  const each = cache.perCell > 1 ? `, ${cache.perCell} in each square` : "";
  const part = shown < all ? `first ${whole(shown)} of ` : "";
  put($("cache-told"), `${part}${several(all, "block")}${each}`);
  const states = Object.values(MARKS).map((kind) => `${counts[kind]} ${kind}`);
  $("cache").setAttribute("aria-label", `KV cache: ${states.join(", ")}`);
}

/* Tells whether something still moves. */
function drawCache() {
  const canvas = $("cache");
  const width = canvas.clientWidth;
  if (!width) return false;
  const num = numCells();
  const size = Math.max(4, Math.min(28, Math.floor(Math.sqrt((width * 150) / num))));
  const across = Math.floor(width / size);
  const gap = size > 8 ? 2 : 1;
  const { pen } = prepare(canvas, Math.ceil(num / across) * size);
  const square = (i) => {
    const [x, y] = [(i % across) * size, Math.floor(i / across) * size];
    pen.fillRect(x, y, size - gap, size - gap);
  };
  Object.assign(cache, { size, across });
  for (const [mark, kind] of Object.entries(MARKS)) {
    pen.fillStyle = colour(kind);
    for (let i = 0; i < num; i++) if ((cache.cells[i] ?? ".") === mark) square(i);
  }
  pen.fillStyle = getComputedStyle(document.body).color;
  const now = performance.now();
  for (const [i, time] of cache.taken) {
    const age = (now - time) / FADE_MS;
    const isHeld = cache.cells[i] === "u" || cache.cells[i] === "s";
    if (age >= 1 || still.matches || !isHeld) {
      cache.taken.delete(i);
      continue;
    }
    pen.globalAlpha = 0.6 * (1 - age);
    square(i);
  }
  pen.globalAlpha = 1;
  tellCache(num);
  return cache.taken.size > 0;
}

/* ---------------------------------------------------------------- steps */

const STEP_HEIGHT = 118;
const LANE = 12;
const AXIS = 46;
let bars = null;

function ceilNicely(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 3, 4, 5, 6, 8, 10].find((n) => n * power >= x) * power;
}

function drawSteps() {
  const area = prepare($("steps"), STEP_HEIGHT);
  if (!area) return;
  const { pen, width, height } = area;
  const pitch = width < 500 ? 4 : 6;
  const shown = engine.steps.slice(-Math.floor((width - AXIS + 2) / pitch));
  const totals = shown.map(([, , schedule, execute, process]) => schedule + execute + process);
  const high = totals.sort((a, b) => a - b)[Math.floor(totals.length * 0.97)] || 0;
  const top = ceilNicely(Math.max(1e-4, high * 1.08));
  const base = height - LANE - 6;
  bars = { pitch, shown };
  pen.textAlign = "right";
  pen.fillStyle = softInk();
  pen.strokeStyle = colour("free");
  for (const part of [1, 0.5, 0]) {
    const y = Math.round(base - (base - 8) * part) + 0.5;
    pen.beginPath();
    pen.moveTo(0, y);
    pen.lineTo(width - AXIS, y);
    pen.stroke();
    if (part && shown.length) pen.fillText(seconds(top * part), width, y + 4);
  }
  const parts = [
    [3, colour("execute")],
    [2, colour("schedule")],
    [4, colour("process")],
  ];
  const [prompt, output] = [colour("prompt"), colour("output")];
  const most = Math.max(1, ...shown.map((step) => step[5] + step[6]));
  shown.forEach((step, i) => {
    let y = base;
    for (const [part, paint] of parts) {
      const tall = Math.min(y, (step[part] / top) * (base - 8));
      pen.fillStyle = paint;
      pen.fillRect(i * pitch, y - tall, pitch - 1, tall);
      y -= tall;
    }
    const all = step[5] + step[6];
    const tall = all ? Math.max(2, (LANE * all) / most) : 0;
    const prefill = all ? (tall * step[5]) / all : 0;
    pen.fillStyle = prompt;
    pen.fillRect(i * pitch, base + 4, pitch - 1, prefill);
    pen.fillStyle = output;
    pen.fillRect(i * pitch, base + 4 + prefill, pitch - 1, tall - prefill);
  });
  tellSteps(shown);
}

function tellSteps(shown) {
  const sum = (part) => shown.reduce((total, step) => total + step[part], 0);
  const mean = (part) => (shown.length ? seconds(sum(part) / shown.length) : "");
  const [schedule, execute, process] = [mean(2), mean(3), mean(4)];
  put($("mean-schedule"), schedule);
  put($("mean-execute"), execute);
  put($("mean-process"), process);
  put($("steps-title"), shown.length ? `Last ${several(shown.length, "step")}` : "Steps");
  const means = `on average schedule ${schedule}, execute ${execute}, process ${process}`;
  const words = `Time of the last ${several(shown.length, "step")}, ${means}`;
  $("steps").setAttribute("aria-label", shown.length ? words : "No steps yet");
}

/* ---------------------------------------------------------------- output rate */

function drawSpark() {
  const area = prepare($("spark"), 62);
  const { samples } = engine;
  if (!area || samples.length < 2) return;
  const { pen, width, height } = area;
  const end = samples.at(-1).time;
  const span = Math.max(15, Math.min(60, end - samples[0].time));
  const rates = samples.map((_, i) => rate(i, "output"));
  const most = Math.max(...rates);
  const x = (i) => width - ((end - samples[i].time) / span) * width;
  const y = (value) => height - 1 - (value / (Math.max(10, most) * 1.05)) * (height - 20);
  pen.fillStyle = colour("free");
  pen.fillRect(0, height - 1, width, 1);
  pen.beginPath();
  rates.forEach((value, i) => (i ? pen.lineTo(x(i), y(value)) : pen.moveTo(x(i), y(value))));
  pen.strokeStyle = pen.fillStyle = colour("output");
  pen.lineWidth = 1.6;
  pen.lineJoin = "round";
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(x(0), height);
  pen.closePath();
  pen.globalAlpha = 0.14;
  pen.fill();
  pen.globalAlpha = 1;
  pen.fillStyle = softInk();
  pen.fillText(`last ${whole(span)} s, at most ${whole(most)} per second`, 0, 10);
}

let drawing = false;
/* Draws at most once per frame, and again as long as blocks fade. */
function redraw() {
  if (drawing || !engine.state) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    drawSpark();
    drawSteps();
    drawExperts();
    if (drawCache()) redraw();
  });
}
new ResizeObserver(() => redraw()).observe($("engine"));

/* ---------------------------------------------------------------- words at the pointer */

function tip(canvas, box, words) {
  canvas.onpointermove = ({ offsetX, offsetY }) => {
    const text = words(offsetX, offsetY);
    box.hidden = !text;
    if (!text) return;
    put(box, text);
    const left = Math.min(offsetX + 12, canvas.clientWidth - box.offsetWidth);
    box.style.left = `${Math.max(0, left)}px`;
    box.style.top = `${offsetY - box.offsetHeight - 8}px`;
  };
  canvas.onpointerleave = () => (box.hidden = true);
}
tip($("cache"), $("cache-tip"), (x, y) => {
  const { size, across, cells, perCell } = cache;
  if (!perCell || x >= across * size) return "";
  const i = Math.floor(y / size) * across + Math.floor(x / size);
  if (i >= numCells()) return "";
  const first = i * perCell;
  const last = Math.min(engine.state.num_blocks, first + perCell) - 1;
  const name =
    first === last ? `block ${whole(first)}` : `blocks ${whole(first)} to ${whole(last)}`;
  const mark = cells[i] ?? ".";
  return `${name}: ${mark === "-" ? "the null block" : MARKS[mark]}`;
});
tip($("steps"), $("steps-tip"), (x) => {
  const step = bars?.shown[Math.floor(x / bars.pitch)];
  if (!step) return "";
  const [number, , schedule, execute, process, prompt, output, requests, preemptions] = step;
  const parts = [
    several(requests, "request"),
    `${whole(prompt)} prompt and ${whole(output)} output tokens`,
  ];
  if (preemptions) parts.push(several(preemptions, "preemption"));
  const spent = [
    `schedule ${seconds(schedule)}`,
    `execute ${seconds(execute)}`,
    `process ${seconds(process)}`,
  ];
  return `step ${whole(number)}: ${parts.join(", ")}\n${spent.join(", ")}`;
});
