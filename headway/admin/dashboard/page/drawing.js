// Drawing on canvases: sizes, theme colours and line charts.

const quiet = matchMedia("(prefers-reduced-motion: reduce)");
export const still = () => quiet.matches;

let colours = null;
export const recolour = () => { colours = null; };

// Theme colours by CSS variable name.
export function colour(name) {
  colours ??= new Map();
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

// Return the cleared context of a canvas in the resolution of the screen, or null while it has no size.
export function begin(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const STEPS = [1, 2, 2.5, 5, 10];
// Return a round number at or above a value, for the top of an axis.
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * STEPS.find((step) => step * power >= value);
}

// Draw a chart over time. `areas` are stacked, and `lines` are drawn on top. Each has `of(row)` and `colour`, and lines may
// be `dashed`. `level` is a labelled horizontal line.
export function chart(canvas, { rows, from, to, areas = [], lines = [], level = null, show, least = 0 }) {
  const begun = begin(canvas);
  if (!begun) return;
  const { context, width, height } = begun;
  const bottom = height - 18, top = 6, left = 52;
  let most = Math.max(least, level?.value ?? 0);
  for (const row of rows) {
    let sum = 0;
    for (const area of areas) sum += area.of(row) ?? 0;
    most = Math.max(most, sum, ...lines.map((line) => line.of(row) ?? 0));
  }
  most = ceiling(most * 1.05);
  const x = (at) => left + ((at - from) / (to - from)) * (width - left - 4);
  const y = (value) => bottom - (value / most) * (bottom - top);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  for (const part of [0, 0.5, 1]) {
    context.strokeStyle = colour("rule");
    context.beginPath();
    context.moveTo(left, Math.round(y(most * part)) + 0.5);
    context.lineTo(width, Math.round(y(most * part)) + 0.5);
    context.stroke();
    context.fillStyle = colour("quiet");
    context.textAlign = "right";
    context.fillText(show(most * part), left - 7, y(most * part));
  }
  context.textBaseline = "alphabetic";
  const minutes = (to - from) / 60, shown = (value) => (Number.isInteger(value) ? value : value.toFixed(1));
  for (const [part, text, align] of [[0, `${shown(minutes)} min ago`, "left"], [0.5, `${shown(minutes / 2)} min`, "center"], [1, "now", "right"]]) {
    context.textAlign = align;
    context.fillText(text, left + part * (width - left - 4), height - 4);
  }
  const base = new Map();
  for (const area of areas) {
    context.fillStyle = area.colour;
    for (const run of runs(rows, area.of)) {
      context.beginPath();
      run.forEach((row, index) => {
        const high = (base.get(row) ?? 0) + (area.of(row) ?? 0);
        if (index) context.lineTo(x(row[0]), y(high)); else context.moveTo(x(row[0]), y(high));
      });
      for (const row of [...run].reverse()) context.lineTo(x(row[0]), y(base.get(row) ?? 0));
      context.closePath();
      context.fill();
    }
    for (const row of rows) base.set(row, (base.get(row) ?? 0) + (area.of(row) ?? 0));
  }
  for (const line of lines) {
    context.strokeStyle = line.colour;
    context.lineWidth = line.width ?? 1.6;
    context.lineJoin = "round";
    context.setLineDash(line.dashed ? [4, 4] : []);
    for (const run of runs(rows, line.of)) {
      context.beginPath();
      run.forEach((row, index) => (index ? context.lineTo(x(row[0]), y(line.of(row))) : context.moveTo(x(row[0]), y(line.of(row)))));
      if (run.length === 1) context.lineTo(x(run[0][0]) + 2, y(line.of(run[0])));
      context.stroke();
    }
  }
  context.setLineDash([]);
  if (level) {
    context.strokeStyle = colour("bad");
    context.lineWidth = 1.2;
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(left, Math.round(y(level.value)) + 0.5);
    context.lineTo(width, Math.round(y(level.value)) + 0.5);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = colour("bad");
    context.textAlign = "right";
    context.fillText(level.name, width - 4, y(level.value) - 5);
  }
}

// Split rows into runs, which end at a gap in time or a missing value.
function* runs(rows, of) {
  let run = [];
  for (const row of rows) {
    const value = of(row);
    if (value === null || value === undefined || (run.length && row[0] - run.at(-1)[0] > 10)) {
      if (run.length) yield run;
      run = [];
    }
    if (value !== null && value !== undefined) run.push(row);
  }
  if (run.length) yield run;
}
