// The dashboard. Everything on the page comes from a single stream of events.

import { Board } from "./board.js";
import { Charts } from "./charts.js";
import { find } from "./dom.js";
import { Drains } from "./drains.js";
import { recolour } from "./drawing.js";
import { age, clock } from "./format.js";
import { Letters } from "./letters.js";
import { Events, batches, figures, legend, tables } from "./panels.js";
import { Rollouts } from "./rollouts.js";
import { Scaling } from "./scaling.js";
import { session, showSignIn, signOut } from "./session.js";

const SILENT = 4_000; // Milliseconds without an event after which the page says so.
const AGAIN = 2_000; // Milliseconds before retrying a stream that was refused.

const board = new Board(), charts = new Charts(), events = new Events(), letters = new Letters(), scaling = new Scaling(), drains = new Drains(), rollouts = new Rollouts();
const RECENT = 180; // Seconds for which batches and changes are kept.
const HISTORY = 1_800; // Seconds for which a loss of the history is reported.
const NOTHING = { tiers: [], latency: [null, null, null], processes: null, refused: null, failed: {}, retries: {}, ended: null };
let stream = null, about = null, heard = 0;

const wall = (instant) => new Date(Date.now() - (board.now() - instant) * 1000);

function say(kind, text) {
  const line = find("state-text");
  if (line.textContent !== text) line.textContent = text;
  find("state").querySelector(".dot").className = `dot ${kind}`;
}

// Show a line between the heading and the board, or none if the text is empty. Screen readers don't announce it, because it
// changes all the time.
function note(id, text) {
  const line = find(id);
  line.hidden = !text;
  if (line.textContent !== text) line.textContent = text || "";
}

function start(told) {
  about = told;
  board.clear();
  events.clear();
  scaling.clear();
  find("who").textContent = `${told.role} ${told.id} · version ${told.version}`;
  document.title = `Headway · ${told.id}`;
  legend(told.tiers);
  letters.replays = told.replays;
  charts.start(told.rows, told.tiers, told.promise_ms);
  find("dashboard").hidden = false;
  take(told);
}

function take(told) {
  heard = performance.now();
  if (told.now) board.hear(told.now);
  if (told.away) say("bad", `The broker is unreachable: ${told.away}`);
  else say("good", "Live");
  const lost = told.lost_at && board.now() - told.lost_at < HISTORY ? clock(wall(told.lost_at)) : "";
  note("lost-note", lost && `The broker lost its data at ${lost}: earlier data may be missing here.`);
  board.add(told.departures, told.changes);
  events.add(told.departures, told.changes, wall, board.now() - told.lost_at < RECENT ? lost : "");
  scaling.add(told.scalings, board.now(), wall);
  charts.add(told.rows);
  if (told.away && told.snapshot === null) note("age-note", "Nothing is known about the fleet until the broker is back.");
  if (told.snapshot) {
    const recent = told.recent ?? NOTHING;
    note("age-note", told.snapshot.away && `The fleet is shown as it was ${age(told.snapshot.age_seconds)} ago.`);
    board.see(told.snapshot.workers.filter((worker) => worker.status !== "offline"));
    figures(recent, told.snapshot, about.promise_ms);
    tables(recent, told.snapshot, about.tiers, about.promise_ms);
    scaling.show(told.snapshot.scaling);
    charts.label(recent, told.snapshot);
    charts.draw(board.now());
    batches(board, about.tiers, wall);
    drains.see(told.snapshot);
    if (!told.away) {
      letters.see(told.snapshot.dead_letters);
      rollouts.see(told.snapshot);
    }
  }
}

function listen() {
  stream?.close();
  stream = new EventSource("internal/events");
  stream.addEventListener("start", (event) => start(JSON.parse(event.data)));
  stream.addEventListener("tick", (event) => about && take(JSON.parse(event.data)));
  stream.addEventListener("dropped", (event) => say("warn", `Reconnecting: ${JSON.parse(event.data).reason}.`));
  stream.onerror = () => {
    if (stream.readyState === EventSource.CLOSED) { stream = null; setTimeout(enter, AGAIN); }
    say("bad", "No connection; trying again …");
  };
}

async function enter() {
  let found;
  try { found = await session(); } catch (error) {
    say("bad", error.message);
    setTimeout(enter, AGAIN);
    return;
  }
  if (!found.signed_in) {
    say("warn", "Not signed in");
    showSignIn(enter);
    return;
  }
  find("sign-out").hidden = !found.needed;
  listen();
}

find("sign-out").addEventListener("click", async () => {
  stream?.close();
  stream = null;
  try { await signOut(); } finally { about = null; enter(); }
});

find("batches").addEventListener("toggle", () => about && batches(board, about.tiers, wall));
setInterval(() => {
  if (stream && heard && performance.now() - heard > SILENT && stream.readyState === EventSource.OPEN) say("warn", "No data for a few seconds …");
}, 1_000);

// The theme is the system's, unless another one was chosen in this browser.
const THEMES = ["system", "light", "dark"], dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "system";
try { theme = localStorage.getItem("headway-theme") ?? "system"; } catch { /* Storage may be forbidden. */ }

function paint() {
  document.documentElement.dataset.theme = theme === "dark" || (theme !== "light" && dark.matches) ? "dark" : "light";
  find("theme").textContent = `Theme: ${theme}`;
  recolour();
  if (about) { charts.draw(board.now()); board.draw(true); }
}

find("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.setItem("headway-theme", theme); } catch { /* It then only lasts as long as this page. */ }
  paint();
});
dark.addEventListener("change", paint);
window.addEventListener("resize", () => about && charts.draw(board.now()));
paint();
enter();
