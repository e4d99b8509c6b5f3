// Dead letters can be shown, replayed and purged. Changes have to be confirmed.

import { open } from "./dialog.js";
import { el, find, rows } from "./dom.js";
import { shorter } from "./format.js";
import { ask } from "./session.js";

const SHOWN = 50;
const EVERY = 10_000; // Milliseconds after which the list is reread even if its length has not changed.

export class Letters {
  constructor() {
    this.count = null;
    this.read = 0;
    this.replays = false;
  }

  // Read the list if it may have changed.
  async see(count, anyway = false) {
    if (!anyway && count === this.count && performance.now() - this.read < EVERY) return;
    this.count = count;
    this.read = performance.now();
    let found;
    try { found = await ask(`internal/dlq?limit=${SHOWN}`); } catch { return; }
    this.count = found.count;
    find("letters-count").textContent = found.count > found.letters.length ? `${found.count}, of which the newest ${found.letters.length}` : String(found.count);
    rows(find("letters").tBodies[0], found.letters, (letter) => this.row(letter), (letter) => JSON.stringify([letter.tenant, letter.id]), "None.");
  }

  row(letter) {
    const button = (name, act, more = {}) => el("button", { type: "button", "aria-label": `${name} ${letter.id} of ${letter.tenant}`, on: { click: act }, ...more }, name);
    const why = this.replays ? {} : { disabled: true, title: "This process accepts no requests: replay at the admin port of a gateway." };
    const acts = el("div", { class: "acts" },
      button("Show", () => this.show(letter)),
      button("Replay", () => this.askTwice(letter, "Replay", "It runs once more, immediately. If it succeeds, the dead letter is removed.", () => this.replay(letter)), why),
      button("Purge", () => this.askTwice(letter, "Purge", "It is deleted permanently, along with its input.", () => this.purge(letter), true), { class: "danger" }));
    return {
      cells: [new Date(letter.died_at).toLocaleString([], { hour12: false }), [letter.id, "name"], letter.tenant, letter.model, [shorter(letter.error, 160), "error-text"], acts],
      mark: JSON.stringify([letter, this.replays]),
    };
  }

  address(letter, act = "") {
    return `internal/dlq/${encodeURIComponent(letter.id)}${act}?tenant=${encodeURIComponent(letter.tenant)}`;
  }

  async show(letter) {
    let whole;
    try { whole = await ask(this.address(letter)); } catch (error) { return this.tell(error.message); }
    const text = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));
    open(`Dead letter ${letter.id}`, [
      el("p", {}, `Tenant ${letter.tenant}, tier ${letter.tier}, model ${letter.model}; ${letter.attempts} ${letter.attempts === 1 ? "run" : "runs"}, the last on ${letter.worker}.`),
      el("p", {}, "Error"), el("pre", { tabindex: "0" }, letter.error), el("p", {}, "Input"), el("pre", { tabindex: "0" }, text(whole.input)),
      el("p", {}, "Parameters"), el("pre", { tabindex: "0" }, text(whole.parameters)),
    ]);
  }

  // The dialog doesn't wait for it, because a replay may take as long as a request.
  askTwice(letter, name, what, act, danger = false) {
    const content = [el("p", {}, `Tenant ${letter.tenant}, model ${letter.model}: ${shorter(letter.error, 300)}`), el("p", {}, what)];
    open(`${name} ${letter.id}?`, content, { name, danger, act: () => { act(); } });
  }

  async replay(letter) {
    this.tell(`Replaying ${letter.id} …`);
    try {
      const done = await ask(this.address(letter, "/replay"), "POST");
      this.tell(`${letter.id} was replayed as ${done.request_id} in ${done.latency_ms.toFixed(0)} ms.`);
    } catch (error) {
      this.tell(`${letter.id} failed again: ${error.message}`);
    }
    await this.see(null, true);
  }

  async purge(letter) {
    try {
      await ask(this.address(letter), "DELETE");
      this.tell(`${letter.id} was purged.`);
    } catch (error) {
      this.tell(error.message);
    }
    await this.see(null, true);
  }

  tell(text) { find("letters-note").textContent = text; }
}
