// Elements are created from text only: nothing from the service is ever interpreted as markup.

export const find = (id) => document.getElementById(id);

// Create an element with attributes and children, which are elements or text.
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children) made.append(typeof child === "object" && child !== null ? child : String(child ?? ""));
  return made;
}

const written = new WeakMap();

// Update the rows of a table body. Cells are strings, elements, or [text, class]. Unchanged rows aren't touched, so that
// they keep the focus. `key` returns a row's key for its data.
export function rows(body, data, cellsOf, key = (_, index) => index, none = "Nothing.") {
  const span = body.closest("table").querySelectorAll("thead th").length;
  if (!data.length) {
    if (written.get(body) !== "none") body.replaceChildren(el("tr", {}, el("td", { class: "none", colspan: span }, none)));
    written.set(body, "none");
    return;
  }
  if (written.get(body) === "none") body.replaceChildren();
  written.set(body, "some");
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  let at = body.firstElementChild;
  data.forEach((one, index) => {
    const name = String(key(one, index));
    const { cells, mark } = cellsOf(one);
    let row = old.get(name);
    if (row && row.dataset.mark === mark) {
      old.delete(name);
    } else {
      const fresh = el("tr", { "data-key": name, "data-mark": mark }, ...cells.map(cell));
      if (row) { if (at === row) at = row.nextElementSibling; old.delete(name); row.remove(); }
      row = fresh;
    }
    if (row === at) at = at.nextElementSibling;
    else body.insertBefore(row, at);
  });
  for (const row of old.values()) row.remove();
}

function cell(value) {
  if (Array.isArray(value)) return el("td", { class: value[1] }, value[0]);
  return el("td", {}, value);
}

// Cells with plain text, which is also the row's mark.
export const plain = (...cells) => ({ cells, mark: JSON.stringify(cells.map((one) => (one instanceof Node ? one.textContent : one))) });

export const swatch = (tier) => {
  const made = el("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = `var(--tier-${tier % 8})`;
  return made;
};

const KINDS = { healthy: "good", starting: "warn", degraded: "warn", cold: "", drained: "", failed: "bad", offline: "bad" };
export const status = (name) => el("span", { class: "tag" }, el("span", { class: `dot ${KINDS[name] ?? ""}`, "aria-hidden": "true" }), name);
