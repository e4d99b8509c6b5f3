// Drains, which stop the workers of a host, the workers of a process or a single worker from claiming batches.

import { call, choice, field, open } from "./dialog.js";
import { el, find } from "./dom.js";
import { ask } from "./session.js";

export class Drains {
  constructor() {
    this.snapshot = null;
    find("drain").addEventListener("click", () => this.askDrain());
    find("undrain").addEventListener("click", () => this.askUndrain());
  }

  see(snapshot) {
    this.snapshot = snapshot;
    find("drain").disabled = !snapshot.workers.some((one) => one.status !== "offline");
  }

  // Names that can be drained: hosts, then processes, then workers.
  names() {
    const { workers, members } = this.snapshot, there = workers.filter((one) => one.status !== "offline").map((one) => one.worker_id).sort();
    const homes = members.filter((one) => members.length === 1 || there.some((worker) => worker.startsWith(`${one.id}/`)));
    const hosts = [...new Set(homes.map((one) => one.host))].sort();
    return [...hosts.map((one) => [one, `all of host ${one}`]), ...homes.map((one) => [one.id, `all of process ${one.id}`]), ...there.map((one) => [one, one])];
  }

  askDrain() {
    let force = false;
    const which = choice(this.names());
    const ease = () => { force = false; call("Drain", false); };
    which.addEventListener("change", ease);
    open("Drain workers?", [
      field("Workers", which), el("p", {}, "They finish their current batch, and claim no more until they are undrained or their process is restarted."),
    ], {
      name: "Drain",
      act: async () => {
        try {
          await this.order("start", { name: which.value, force }, `${which.value} is drained.`);
        } catch (error) {
          if (error.status === 400) { force = true; call("Drain anyway", true); }
          throw error;
        }
      },
    });
  }

  async askUndrain() {
    let drains;
    try { ({ drains } = await ask("internal/drains")); } catch (error) { return this.tell(error.message); }
    if (!drains.length) return this.tell("Nothing is drained.");
    const which = choice(drains.map((one) => [one.name, one.name === one.process ? `all of process ${one.name}` : one.name]));
    open("Undrain workers?", [field("Workers", which), el("p", {}, "They claim batches again.")], {
      name: "Undrain",
      act: () => this.order("end", { name: which.value }, `${which.value} is no longer drained.`),
    });
  }

  async order(act, query, done) {
    await ask(`internal/drains/${act}?${new URLSearchParams(query)}`, "POST");
    this.tell(done);
  }

  tell(text) { find("workers-note").textContent = text; }
}
