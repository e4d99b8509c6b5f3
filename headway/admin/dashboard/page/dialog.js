// The dialog that asks for confirmation of changes.

import { el, find } from "./dom.js";

const dialog = find("dialog"), yes = find("dialog-yes"), no = find("dialog-no"), trouble = find("dialog-error");
let act = null, busy = null;
no.addEventListener("click", () => dialog.close());

yes.addEventListener("click", async () => {
  const begun = act;
  if (!begun || busy === begun) return; // The button stays enabled, because disabling it would lose the focus.
  busy = begun;
  trouble.textContent = "";
  try {
    await begun();
    if (act === begun) dialog.close();
  } catch (error) {
    if (act === begun) trouble.textContent = error.message;
  }
  if (busy === begun) busy = null;
});

// Show the dialog. `order` is { name, danger, act }; without one, the dialog only shows something. It closes once `act` has
// succeeded. If `act` throws, the dialog shows the error, and keeps what was filled in.
export function open(title, content, order = null) {
  find("dialog-title").textContent = title;
  find("dialog-body").replaceChildren(...content);
  trouble.textContent = "";
  no.textContent = order ? "Cancel" : "Close";
  yes.hidden = !order;
  call(order?.name ?? "", order?.danger ?? false);
  if (!dialog.open) dialog.showModal();
  act = order?.act;
  (find("dialog-body").querySelector("select, input") ?? no).focus();
}

// Rename the order.
export function call(name, danger) {
  yes.textContent = name;
  yes.classList.toggle("danger", danger);
}

// A label with an input below it.
export const field = (label, input) => el("label", { class: "field" }, label, input);

export const choice = (options, more = {}) => el("select", more, ...options.map(([value, text]) => el("option", { value }, text)));
