// How many workers each model should have, and the decisions of the last half hour with their reasons.

import { el, find, plain, rows } from "./dom.js";
import { clock, share } from "./format.js";

const KEPT = 1_800; // Seconds for which decisions are shown.
const MOST = 60;
// Indexes of a decision's fields in the stream.
const [AT, MODEL, BEFORE, DESIRED, DIRECTION, REASON] = [0, 1, 2, 3, 4, 5];

export class Scaling {
  constructor() { this.decisions = []; }

  clear() { this.decisions = []; this.mark = null; }

  add(decisions, now, wall) {
    this.decisions = [...this.decisions, ...decisions].filter((one) => one[AT] > now - KEPT).slice(-MOST);
    const mark = JSON.stringify(this.decisions);
    if (mark === this.mark) return;
    this.mark = mark;
    find("decisions").replaceChildren(...(this.decisions.length
      ? [...this.decisions].reverse().map((one) => el("li", {}, el("time", {}, clock(wall(one[AT]))), el("span", { class: `dot ${one[DIRECTION] === "again" ? "warn" : "good"}`, "aria-hidden": "true" }), " ", sentence(one)))
      : [el("li", { class: "none" }, "No decision in the last 30 minutes.")]));
  }

  show(models) {
    rows(find("scaling").tBodies[0], Object.entries(models ?? {}).sort(([one], [other]) => (one < other ? -1 : 1)), ([model, one]) => plain(
      [model, "name"], [one.desired, "n"], [one.current, one.current < one.desired ? "n bad" : "n"], [one.coming, "n"], [one.late, one.late ? "n bad" : "n"],
      [one.utilisation === null ? "–" : share(one.utilisation), "n"], `${one.min_workers} to ${one.max_workers || "any"}`, `${one.driver}, ${one.policy}`,
      [one.trouble || one.reason, one.trouble ? "bad" : ""],
    ), ([model]) => model, "No controller has set a number of workers.");
  }
}

const sentence = (one) => (one[DIRECTION] === "again"
  ? `${one[MODEL]}: ${one[DESIRED]} asked for again, ${one[REASON]}`
  : `${one[MODEL]}: ${one[BEFORE]} → ${one[DESIRED]}, ${one[REASON]}`);
