// Three charts of the last half hour: latency against the promise, arrivals against capacity, and waiting requests.

import { el, find } from "./dom.js";
import { chart, colour } from "./drawing.js";
import { milliseconds, rate } from "./format.js";

const SPANS = [120, 300, 600, 1800]; // Seconds that a chart can show. The smallest span that fits all rows is used.
const UNFINISHED = 4; // Seconds after which all processes have reported their part of a row.
// Indexes of a row's fields in the stream.
const [ANSWERED, REFUSED, FAILED, P50, P95, P99, WAITING, CAPACITY, USABLE] = [2, 3, 4, 5, 6, 7, 8, 10, 11];

export class Charts {
  constructor() {
    this.rows = [];
    this.canvases = Object.fromEntries(["latency", "arrivals", "queue"].map((name) => {
      const canvas = el("canvas", { role: "img" });
      const keys = el("ul", { class: "keys", "aria-hidden": "true" });
      find(`${name}-chart`).append(canvas, keys);
      return [name, { canvas, keys }];
    }));
  }

  start(rows, tiers, promise) {
    this.rows = rows;
    this.tiers = tiers;
    this.promise = promise / 1000;
    this.keys("latency", [["P50", "p50"], ["P95", "ink"], ["P99", "p99"]]);
    this.keys("arrivals", [["answered", "p50"], ["refused", "warn"], ["failed", "bad"], ["capacity", "ink"], ["usable part of it", "quiet"]]);
    this.keys("queue", tiers.map((tier, index) => [tier, `tier-${index % 8}`]));
  }

  keys(name, found) {
    this.canvases[name].keys.replaceChildren(...found.map(([text, variable]) => {
      const mark = el("span", { class: "swatch" });
      mark.style.background = `var(--${variable})`;
      return el("li", {}, mark, text);
    }));
  }

  add(rows) {
    for (const row of rows) {
      const last = this.rows.findLastIndex((one) => one[0] <= row[0]);
      if (last >= 0 && this.rows[last][0] === row[0]) this.rows[last] = row;
      else this.rows.splice(last + 1, 0, row);
    }
  }

  draw(now) {
    while (this.rows.length && this.rows[0][0] < now - SPANS.at(-1) - 4) this.rows.shift();
    const reach = this.rows.length ? now - this.rows[0][0] : 0;
    const to = now, from = now - (SPANS.find((span) => span >= reach) ?? SPANS.at(-1));
    const whole = this.rows.filter((row) => row[0] + UNFINISHED <= now);
    const common = { rows: whole, from, to };
    const { latency, arrivals, queue } = this.canvases;
    chart(latency.canvas, {
      ...common, show: milliseconds, level: { value: this.promise, name: `promise ${milliseconds(this.promise)}` },
      lines: [
        { of: (row) => row[P99], colour: colour("p99"), dashed: true },
        { of: (row) => row[P50], colour: colour("p50") },
        { of: (row) => row[P95], colour: colour("ink"), width: 2 },
      ],
    });
    chart(arrivals.canvas, {
      ...common, show: rate, least: 1,
      areas: [
        { of: (row) => row[ANSWERED], colour: colour("p50") },
        { of: (row) => row[REFUSED], colour: colour("warn") },
        { of: (row) => Math.max(row[FAILED] - row[REFUSED], 0), colour: colour("bad") },
      ],
      lines: [
        { of: (row) => row[USABLE] || null, colour: colour("quiet"), dashed: true },
        { of: (row) => row[CAPACITY] || null, colour: colour("ink") },
      ],
    });
    chart(queue.canvas, {
      ...common, show: (value) => (value >= 10 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1)), least: 4,
      areas: [...this.tiers.keys()].reverse().map((tier) => ({ of: (row) => row[WAITING]?.[tier] ?? null, colour: colour(`tier-${tier % 8}`) })),
    });
  }

  label(recent, snapshot) {
    const [p50, p95, p99] = recent.latency;
    this.canvases.latency.canvas.setAttribute("aria-label", `Latency of the last 30 minutes; now P50 ${milliseconds(p50)}, P95 ${milliseconds(p95)}, P99 ${milliseconds(p99)}, promised ${milliseconds(this.promise)}`);
    const arrivals = Object.values(recent.ended ?? {}).reduce((sum, one) => sum + one, 0);
    const capacity = snapshot.capacities.reduce((sum, one) => sum + one.items_per_second, 0);
    this.canvases.arrivals.canvas.setAttribute("aria-label", `Requests per second of the last 30 minutes; now ${rate(arrivals)} of a capacity of ${rate(capacity)}`);
    const waiting = snapshot.queues.reduce((sum, one) => sum + one.depth, 0);
    this.canvases.queue.canvas.setAttribute("aria-label", `Waiting requests of the last 30 minutes; now ${waiting}`);
  }
}
