// Rollouts: the last one of each model with the results of both versions, and the orders that start and end rollouts.

import { choice, field, open } from "./dialog.js";
import { el, find, rows } from "./dom.js";
import { milliseconds } from "./format.js";
import { ask } from "./session.js";

const OFTEN = 2_000, SELDOM = 10_000; // Milliseconds between reads, while a rollout is running and otherwise.
const ENDS = { promote: "promoted", abort: "aborted" };

export class Rollouts {
  constructor() {
    this.read = -SELDOM;
    this.runs = false;
    this.versions = [];
    find("rollout-start").addEventListener("click", () => this.askStart());
  }

  // Read the rollouts if they may have changed.
  async see(snapshot) {
    this.note(snapshot.workers);
    const told = JSON.stringify(snapshot.capacities.map((one) => one.rollout));
    if (told === this.told && performance.now() - this.read < (this.runs ? OFTEN : SELDOM)) return;
    this.told = told;
    await this.list();
  }

  async list() {
    this.read = performance.now();
    let found;
    try { found = (await ask("internal/rollouts")).rollouts; } catch { return; }
    this.runs = found.some((one) => one.state === "running");
    rows(find("rollouts").tBodies[0], found, (one) => this.row(one), (one) => one.model, "There have been no rollouts.");
  }

  // Remember the versions that could be rolled out: those of models with at least two.
  note(workers) {
    const found = new Map();
    for (const one of workers) {
      if (one.version && one.status !== "offline" && one.status !== "failed") found.set(one.model, (found.get(one.model) ?? new Set()).add(one.version));
    }
    this.versions = [...found].filter(([, versions]) => versions.size > 1).sort()
      .flatMap(([model, versions]) => [...versions].sort((one, other) => other.localeCompare(one, [], { numeric: true })).map((version) => [model, version]));
    const start = find("rollout-start"), none = !this.versions.length;
    if (start.disabled !== none) start.disabled = none;
    start.title = none ? "No model has workers of two versions." : "";
  }

  row(one) {
    const button = (act, name, what, danger) => el("button", {
      type: "button", class: danger ? "danger" : null, disabled: one.state === ENDS[act], "aria-label": `${name} ${one.model}`,
      on: { click: () => open(`${name} version ${one.version} of ${one.model}?`, [el("p", {}, what)], { name, danger, act: () => this.order(act, { model: one.model }, `${one.model}: ${ENDS[act]}.`) }) },
    }, name);
    const acts = el("div", { class: "acts" },
      button("promote", "Promote", `Version ${one.version} gets all requests immediately, and version ${one.beside} gets none.`),
      button("abort", "Abort", `Version ${one.beside} gets all requests immediately, and version ${one.version} gets none.`, true));
    const step = one.state === "running" ? `step ${one.step + 1} of ${one.steps.length}, ${one.step_seconds.toFixed(0)} of ${one.every} s` : "";
    const texts = [one.model, one.state.replace("_", " "), `${one.percent} %`, step, counts(one.version, one.new), counts(one.beside, one.old), one.reason];
    const [model, state, ...rest] = texts;
    return { cells: [[model, "name"], [state, one.state === "rolled_back" ? "bad" : ""], ...rest.slice(0, -1), [one.reason, "error-text"], acts], mark: JSON.stringify(texts) };
  }

  askStart() {
    const which = choice(this.versions.map(([model, version], index) => [index, `${version} of ${model}`]));
    const beside = el("select"), number = (value) => el("input", { type: "number", min: 0, step: "any", value });
    const steps = el("input", { value: "1,10,50,100", spellcheck: "false" }), minutes = number(10), slower = number(25);
    const tests = [["failures", "It fails more"], ["p95", "It is slower"]].map(([test, text]) => [test, el("input", { type: "checkbox", checked: true }), text]);
    const others = () => beside.replaceChildren(...this.versions.filter(([model, version]) => model === chosen()[0] && version !== chosen()[1]).map(([, version]) => el("option", {}, version)));
    const offered = this.versions, chosen = () => offered[which.value];
    which.addEventListener("change", others);
    others();
    open("Start a rollout", [
      field("New version (workers must already serve it)", which), field("Version to compare it with", beside),
      field("Share of the requests in each step, in percent", steps), field("Minutes of a step", minutes),
      el("fieldset", {}, el("legend", {}, "Roll back if"), ...tests.map(([, box, text]) => el("label", {}, box, text))),
      field("How much slower its P95 may be, in percent", slower),
    ], {
      name: "Start",
      act: () => {
        const [model, version] = chosen(), rollback_on = tests.filter(([, box]) => box.checked).map(([test]) => test).join(",");
        return this.order("start", { model, version, beside: beside.value, steps: steps.value, every: minutes.value * 60, rollback_on, slower: slower.value / 100 }, `${model}: version ${version} gets its first share.`);
      },
    });
  }

  async order(act, query, done) {
    await ask(`internal/rollouts/${act}?${new URLSearchParams(query)}`, "POST");
    find("rollouts-note").textContent = done;
    await this.list();
  }
}

const counts = (version, one) => `${version}: ${one.answered} answered, ${one.failed} failed, P95 ${milliseconds(one.p95_seconds)}`;
