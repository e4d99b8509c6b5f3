// The other panels: stats, tables and events.

import { FILL, LEFT, MODEL, REASON, SECONDS, SIZE, TIERS, WORKER, cameBack, failed } from "./board.js";
import { el, find, plain, rows, status, swatch } from "./dom.js";
import { age, clock, milliseconds, rate, share } from "./format.js";

const STALE = 10; // Seconds after which a capacity is outdated.
const EVENTS = 60;

const body = (id) => find(id).tBodies[0];

export function legend(tiers) {
  find("legend").replaceChildren(...tiers.map((tier, index) => el("li", {}, swatch(index), tier)));
}

export function figures(recent, snapshot, promise) {
  const sum = (found) => found && Object.values(found).reduce((total, one) => total + one, 0);
  const [, p95] = recent.latency;
  const healthy = snapshot.workers.filter((worker) => worker.status === "healthy").length;
  const there = snapshot.workers.filter((worker) => worker.status !== "offline").length;
  const waiting = snapshot.queues.reduce((total, queue) => total + queue.depth, 0);
  const oldest = Math.max(0, ...snapshot.queues.map((queue) => queue.oldest_seconds));
  const shown = [
    ["requests/s", rate(sum(recent.ended)), false],
    [`P95 of ${promise} ms promised`, milliseconds(p95), p95 !== null && p95 * 1000 > promise],
    [waiting ? `waiting, oldest ${milliseconds(oldest)}` : "waiting", waiting, false],
    ["refused/s", rate(sum(recent.refused)), false],
    ["workers healthy", `${healthy} of ${there}`, healthy < there || !there],
    ["dead letters", snapshot.dead_letters, false],
  ];
  const mark = JSON.stringify(shown);
  if (figures.mark === mark) return;
  figures.mark = mark;
  find("figures").replaceChildren(...shown.map(([name, value, over]) => el("li", { class: over ? "over" : null }, el("b", {}, value), el("span", {}, name))));
}

export function tables(recent, snapshot, tiers, promise) {
  rows(body("latency"), recent.tiers, (one) => plain(
    el("span", {}, swatch(tiers.indexOf(one.tier)), one.tier), [rate(one.answered), "n"],
    ...one.latency.map((value, index) => [milliseconds(value), index === 1 && value !== null && value * 1000 > promise ? "n bad" : "n"]),
  ), (one) => one.tier);
  const models = [...new Set([...snapshot.capacities.map((one) => one.model), ...Object.keys(recent.ended ?? {})])].filter(Boolean).sort();
  rows(body("capacity"), models, (model) => {
    const one = snapshot.capacities.find((found) => found.model === model && found.age_seconds - snapshot.age_seconds < STALE);
    const most = one?.items_per_second ? `${rate(one.items_per_second)}${one.estimated ? " (estimated)" : ""}` : "unknown";
    const slots = one ? `${one.healthy} healthy${one.degraded ? `, ${one.degraded} degraded` : ""}${one.rollout ? `, ${one.rollout}` : ""}` : "–";
    const costs = call(snapshot.workers.find((worker) => worker.model === model && worker.status === "healthy" && worker.cost)?.cost);
    return plain([model, "name"], [rate(recent.ended && (recent.ended[model] ?? 0)), "n"], [one?.items_per_second ? rate(one.usable_per_second) : "–", "n"], [most, "n"], slots + costs);
  }, (model) => model, "No model is known.");
  const bulk = (snapshot.bulk ?? []).map((one) => ({ model: one.model, tier: "bulk", depth: one.waiting, oldest_seconds: 0 }));
  rows(body("queue"), together([...snapshot.queues, ...bulk]), (one) => plain(
    el("span", {}, one.tier === "bulk" ? "" : swatch(Math.max(tiers.indexOf(one.tier), 0)), one.tier), [one.model, "name"],
    [one.depth, "n"], [one.depth && one.oldest_seconds ? milliseconds(one.oldest_seconds) : "–", "n"],
  ), (one) => JSON.stringify([one.model, one.tier]));
  const reasons = [["refused", recent.refused ?? {}], ["failed", recent.failed], ["retried", recent.retries]]
    .flatMap(([what, found]) => Object.entries(found).map(([reason, value]) => ({ what, reason, value })));
  const refusals = new Set(Object.keys(recent.refused ?? {}));
  rows(body("refusals"), reasons.filter((one) => one.what !== "failed" || !refusals.has(one.reason)), (one) => plain(one.what, [one.reason, "name"], [rate(one.value), "n"]),
    (one) => JSON.stringify([one.what, one.reason]), recent.refused ? "None in the last 10 seconds." : "Unknown.");
  find("workers").classList.toggle("gpus", snapshot.workers.some((one) => one.gpu_figures));
  rows(body("workers"), [...snapshot.workers].sort((one, other) => (one.worker_id < other.worker_id ? -1 : 1)), (one) => plain(
    [one.worker_id, "name"], one.version ? `${one.model} (${one.version})` : one.model,
    el("span", { title: one.reason || null }, status(one.status), one.reason ? ` ${one.reason}` : "",
      one.failed >= 0.02 ? el("span", { class: "bad" }, ` ${share(one.failed)} of its inputs fail`) : ""), [share(one.utilisation), "n"], [one.restarts, "n"], [gpu(one.gpu_figures), "gpu"],
  ), (one) => one.worker_id, "There are no workers.");
  rows(body("processes"), [...snapshot.members].sort((one, other) => (one.role + one.id < other.role + other.id ? -1 : 1)), (one) => plain(
    [one.id, "name"], one.leads ? `${one.role}, leads` : one.role, one.host, one.version, [one.pending, "n"], [rate(recent.processes && (recent.processes[one.id] ?? 0)), "n"], [age(one.age_seconds), "n"],
  ), (one) => one.id);
  find("gone").hidden = !snapshot.departed.length;
  rows(body("gone"), snapshot.departed, (one) => plain(
    [one.id, "name"], el("span", { class: one.ending === "stopped" || one.ending === "drained" ? "" : "bad" }, one.ending), one.role, one.host, one.reason, [age(one.age_seconds), "n"],
  ), (one) => one.id);
}

// The run time of a call, if the workers have reported it: by the number of inputs, by weight, or with padding to the longest.
function call(line) {
  const by = { number: "input", weight: "unit of weight", padded: "input and unit of the longest's weight" };
  return line ? `; a call takes ${Number((line.alpha * 1000).toPrecision(3))} ms and ${Number((line.beta * 1e6).toPrecision(3))} µs for each ${by[line.shape]}` : "";
}

// Stats of a worker's GPU, as far as its driver reports them.
function gpu(one) {
  if (!one) return "–";
  const told = [
    one.memory_total_bytes && `${share(one.memory_used_bytes / one.memory_total_bytes)} of ${Math.round(one.memory_total_bytes / 2 ** 30)} GiB`,
    one.utilisation !== null && `computes ${share(one.utilisation)}`, one.power_watts !== null && `${Math.round(one.power_watts)} W`, one.temperature_celsius !== null && `${one.temperature_celsius} °C`,
    one.ecc_errors && `${one.ecc_errors} ECC errors`, Object.keys(one.xids).length && `Xid ${Object.keys(one.xids).join(", ")}`,
  ];
  return told.filter(Boolean).join(", ") || "–";
}

// Queues by model and tier. All versions of a model are combined.
function together(queues) {
  const found = new Map();
  for (const one of queues) {
    const key = JSON.stringify([one.model, one.tier]), before = found.get(key);
    if (before) found.set(key, { ...before, depth: before.depth + one.depth, oldest_seconds: Math.max(before.oldest_seconds, one.oldest_seconds) });
    else found.set(key, one);
  }
  return [...found.values()];
}

export function batches(board, tiers, wall) {
  const table = find("batches");
  if (!table.open) return;
  rows(table.querySelector("tbody"), board.latest(30), (one) => plain(
    clock(wall(one[LEFT])), [one[WORKER], "name"], one[MODEL], one[SIZE], share(one[FILL]),
    one[TIERS].map((count, tier) => (count ? `${count} ${tiers[tier] ?? "bulk"}` : "")).filter(Boolean).join(", "),
    one[REASON], one[SECONDS] ? milliseconds(one[SECONDS]) : "–", [cameBack(one), failed(one) ? "bad" : ""],
  ), (one) => `${one[WORKER]} ${one[LEFT]}`);
}

// Failures and recoveries, newest first.
export class Events {
  constructor() { this.known = new Map(); }

  clear() { this.known.clear(); }

  // `lost` is when the broker lost its data, if that was within these minutes.
  add(departures, changes, wall, lost) {
    for (const one of departures) {
      if (failed(one)) this.known.set(`b ${one[WORKER]} ${one[LEFT]}`, [one[LEFT] + one[SECONDS], `${one[WORKER]}: a batch of ${one[SIZE]} came back ${cameBack(one)}`, "bad"]);
    }
    for (const [at, worker, , name, restarts, cause] of changes) {
      const text = restarts ? `${worker} is ${name}, after ${restarts} ${restarts === 1 ? "restart" : "restarts"}` : `${worker} is ${name}`;
      this.known.set(`c ${worker} ${at} ${name}`, [at, cause ? `${text}: ${cause}` : text, name === "healthy" ? "good" : "warn"]);
    }
    const newest = [...this.known].sort(([, one], [, other]) => other[0] - one[0]).slice(0, EVENTS);
    this.known = new Map(newest);
    const mark = lost + newest.map(([key]) => key).join("\n");
    if (mark === this.mark) return;
    this.mark = mark;
    find("events").replaceChildren(...(newest.length
      ? newest.map(([, [at, text, kind]]) => el("li", {}, el("time", {}, clock(wall(at))), el("span", { class: `dot ${kind}`, "aria-hidden": "true" }), " ", text))
      : [el("li", { class: "none" }, lost ? `None since ${lost}, when the broker lost its data.` : "None in the last 3 minutes.")]));
  }
}
