// The departure board has a lane for each GPU. A bar is a batch, from its departure to its arrival.

import { el, find, status } from "./dom.js";
import { begin, colour, still } from "./drawing.js";
import { share, shorter } from "./format.js";

const DELAY = 0.9; // Seconds by which the board is delayed, so that bars move in from the right without jumping.
const KEPT = 180; // Seconds for which batches are kept.
const FRAME = 40; // Minimum milliseconds between redraws.
// Indexes of a batch's fields in the stream.
export const [WORKER, MODEL, VERSION, LEFT, SIZE, FILL, REASON, TIERS, SECONDS, OUTCOME] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
const RUNNING = "", ARRIVED = "ok";

export class Board {
  constructor() {
    this.batches = new Map();
    this.marks = [];
    this.lanes = new Map();
    this.span = Number(find("span").value);
    this.paused = null;
    this.drawn = 0;
    find("span").addEventListener("change", (event) => { this.span = Number(event.target.value); this.draw(true); });
    find("pause").addEventListener("click", (event) => {
      this.paused = this.paused === null ? this.now() : null;
      event.target.setAttribute("aria-pressed", String(this.paused !== null));
      event.target.textContent = this.paused === null ? "Pause" : "Resume";
    });
    const step = () => { this.draw(false); requestAnimationFrame(step); };
    requestAnimationFrame(step);
    this.offset = null;
  }

  clear() {
    this.batches.clear();
    this.marks = [];
    this.offset = null;
  }

  // Set the clock to a time of the broker. It never goes back just because an event was late.
  hear(now) {
    const offset = now - performance.now() / 1000;
    if (this.offset === null || Math.abs(offset - this.offset) > 5) this.offset = offset;
    else this.offset = Math.max(offset, this.offset - 0.02);
  }

  now() { return this.offset === null ? 0 : performance.now() / 1000 + this.offset; }

  add(departures, changes) {
    for (const one of departures) {
      const lane = this.batches.get(one[WORKER]) ?? new Map();
      lane.set(one[LEFT], one);
      this.batches.set(one[WORKER], lane);
    }
    this.marks.push(...changes);
    const oldest = this.now() - KEPT;
    for (const lane of this.batches.values()) for (const left of lane.keys()) { if (left >= oldest) break; lane.delete(left); }
    while (this.marks.length && this.marks[0][0] < oldest) this.marks.shift();
  }

  // There is a lane for each worker. Models that share a GPU also share a lane.
  see(workers) {
    const wanted = new Map();
    for (const worker of workers) {
      const name = worker.gpu || worker.worker_id;
      wanted.set(name, [...(wanted.get(name) ?? []), worker]);
    }
    const body = find("lanes");
    for (const [name, lane] of this.lanes) if (!wanted.has(name)) { lane.element.remove(); this.lanes.delete(name); }
    for (const name of [...wanted.keys()].sort()) {
      const found = wanted.get(name);
      let lane = this.lanes.get(name);
      if (!lane) {
        const canvas = el("canvas", { role: "img" });
        const title = el("b", { title: name }, name), line = el("span");
        lane = { canvas, line, element: el("div", { class: "lane", "data-lane": name }, el("div", { class: "name" }, title, line), canvas) };
        this.lanes.set(name, lane);
        body.append(lane.element);
      }
      lane.workers = found.map((worker) => worker.worker_id);
      const warm = found.find((worker) => worker.status !== "cold") ?? found[0];
      const busy = Math.min(1, found.reduce((sum, worker) => sum + worker.utilisation, 0));
      const models = found.map((worker) => worker.model).join(", ");
      const mark = `${warm.status} ${share(busy)} ${models}`;
      if (lane.mark !== mark) {
        lane.mark = mark;
        lane.line.replaceChildren(status(warm.status), ` · ${share(busy)} busy · ${shorter(models, 40)}`);
        lane.canvas.setAttribute("aria-label", `${name}: ${warm.status}, ${share(busy)} busy, runs ${models}; the table below lists its batches`);
      }
    }
    if (!workers.length && !body.children.length) body.append(el("p", { class: "none" }, "There are no workers."));
    else body.querySelector(":scope > .none")?.remove();
  }

  draw(anyway) {
    const at = performance.now();
    if (!anyway && (this.offset === null || document.hidden || at - this.drawn < (still() ? 1000 : FRAME))) return;
    if (!anyway && this.paused !== null) return;
    this.drawn = at;
    const to = (this.paused ?? this.now()) - DELAY, from = to - this.span;
    for (const lane of this.lanes.values()) this.drawLane(lane, from, to);
    const axis = `${this.span}`;
    if (this.axis !== axis) {
      this.axis = axis;
      const text = (seconds) => (seconds >= 60 ? `${seconds / 60} min` : `${seconds} s`);
      find("axis").replaceChildren(el("span", {}, `${text(this.span)} ago`), el("span", {}, text(this.span / 2)), el("span", {}, "now"));
    }
  }

  drawLane(lane, from, to) {
    const begun = begin(lane.canvas);
    if (!begun) return;
    const { context, width, height } = begun;
    const x = (instant) => ((instant - from) / (to - from)) * width;
    const top = 5, deep = height - 9;
    for (const worker of lane.workers) {
      const batches = [...(this.batches.get(worker)?.values() ?? [])];
      for (const [index, batch] of batches.entries()) {
        const next = batches[index + 1]?.[LEFT] ?? Infinity; // A slot runs one batch at a time, so this one has ended, but its end was never reported.
        const end = Math.min(batch[OUTCOME] === RUNNING ? next : batch[LEFT] + batch[SECONDS], to);
        if (end < from || batch[LEFT] > to || (batch[OUTCOME] === RUNNING && to - batch[LEFT] > KEPT)) continue;
        bar(context, batch, x(batch[LEFT]), Math.max(x(end), x(batch[LEFT]) + 2), top, deep);
      }
    }
    for (const [instant, worker, , name] of this.marks) {
      if (!lane.workers.includes(worker) || instant < from || instant > to) continue;
      context.fillStyle = context.strokeStyle = name === "healthy" ? colour("good") : colour("bad");
      const [tip, foot] = name === "healthy" ? [height - 8, height] : [8, 0];
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(x(instant), 0);
      context.lineTo(x(instant), height);
      context.stroke();
      context.beginPath();
      context.moveTo(x(instant), tip);
      context.lineTo(x(instant) - 5, foot);
      context.lineTo(x(instant) + 5, foot);
      context.fill();
    }
  }

  // The last batches, newest first.
  latest(count) {
    const all = [...this.batches.values()].flatMap((lane) => [...lane.values()].slice(-count));
    return all.sort((one, other) => other[LEFT] - one[LEFT]).slice(0, count);
  }
}

export const cameBack = (batch) => (batch[OUTCOME] === RUNNING ? "on its way" : batch[OUTCOME] === ARRIVED ? "arrived" : batch[OUTCOME]);
export const failed = (batch) => batch[OUTCOME] !== RUNNING && batch[OUTCOME] !== ARRIVED;

// Draw a batch: an outline as high as a full batch, filled as far as the batch is full, in the colours of its tiers.
function bar(context, batch, x0, x1, top, deep) {
  const wide = Math.max(x1 - x0 - 1, 1.5), high = Math.max(deep * Math.min(batch[FILL], 1), 2);
  let low = top + deep;
  context.globalAlpha = batch[OUTCOME] === RUNNING ? 0.65 : 1;
  batch[TIERS].forEach((count, tier) => {
    if (!count) return;
    const part = (high * count) / batch[SIZE];
    context.fillStyle = colour(`tier-${tier % 8}`);
    context.fillRect(x0, low - part, wide, part);
    low -= part;
  });
  context.globalAlpha = 1;
  const again = batch[REASON] === "retry";
  context.strokeStyle = failed(batch) ? colour("bad") : again ? colour("warn") : colour("line");
  context.lineWidth = failed(batch) || again ? 2 : 1;
  context.setLineDash(again ? [3, 3] : []);
  context.strokeRect(x0 + 0.5, top + 0.5, Math.max(wide - 1, 1), deep - 1);
  context.setLineDash([]);
  if (failed(batch)) {
    context.beginPath();
    context.moveTo(x1 - 6, top + 2); context.lineTo(x1, top + 8);
    context.moveTo(x1, top + 2); context.lineTo(x1 - 6, top + 8);
    context.stroke();
  }
}
