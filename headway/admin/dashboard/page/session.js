// Requests to the admin port, and the sign-in. The token is only sent in the body of one request, and stored nowhere.

import { find } from "./dom.js";

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

// Return the decoded answer to a request, or null if it is empty.
export async function ask(path, method = "GET", body = null) {
  const options = { method, credentials: "same-origin", headers: body === null ? {} : { "content-type": "application/json" } };
  const answer = await fetch(path, body === null ? options : { ...options, body: JSON.stringify(body) }).catch(() => {
    throw new Refused(0, "The process does not respond.");
  });
  const text = await answer.text();
  let found = null;
  try { found = text ? JSON.parse(text) : null; } catch { found = { message: text.slice(0, 200) }; }
  if (!answer.ok) throw new Refused(answer.status, found?.message ?? answer.statusText);
  return found;
}

const SESSION = "dashboard/session";

export const session = () => ask(SESSION);
export const signOut = () => ask(SESSION, "DELETE");

// Show the sign-in. `done` is called once it has succeeded.
export function showSignIn(done) {
  const form = find("sign-in-form"), field = find("token"), trouble = find("sign-in-error");
  find("dashboard").hidden = true;
  find("sign-out").hidden = true;
  find("sign-in").hidden = false;
  field.focus();
  form.onsubmit = async (event) => {
    event.preventDefault();
    const token = field.value;
    field.value = "";
    trouble.textContent = "";
    try {
      await ask(SESSION, "POST", { token });
    } catch (error) {
      trouble.textContent = error.message;
      field.focus();
      return;
    }
    find("sign-in").hidden = true;
    done();
  };
}
