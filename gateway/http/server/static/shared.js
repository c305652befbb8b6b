"use strict";
// Code of all pages: making elements, the header, the key and the form that asks for it, colours.
const byId = (id) => document.getElementById(id);
const KEPT = "outrider-key";
const ENTER = "Enter a key to continue.";
const KEY_TROUBLE = {  // by error code: the gateway's messages address programs
  missing_api_key: ENTER,
  invalid_api_key: "Unknown key. Check that it is complete.",
};
let key = keptKey();  // empty: none
let isShut = false;  // the form is shown until a key is entered
// What each page does: `path` is requested to try a key; `opened(response)` and `closed()` follow when
// a key was accepted and when it was removed; `show()` shows or hides the page's own parts.
const page = { path: "", opened() {}, closed() {}, show() {} };

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

// The tab's own storage, where the browser has one.
function keptKey() {
  try { return sessionStorage.getItem(KEPT) ?? ""; } catch { return ""; }
}

function keepKey(text) {
  try {
    if (text) sessionStorage.setItem(KEPT, text); else sessionStorage.removeItem(KEPT);
  } catch { /* then it lasts until the page is left */ }
}

function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  else if (session.csrf_token) headers["x-outrider-csrf"] = session.csrf_token;
  return fetch(path, { ...options, headers });
}

async function errorOf(response) {
  try { return (await response.json()).error ?? {}; } catch { return {}; /* not one of the gateway's */ }
}

function messageOf(response, error) {
  return error.message || `The gateway did not answer the request: status ${response.status}.`;
}

async function reasonOf(response) {
  const error = await errorOf(response);
  return KEY_TROUBLE[error.code] ?? messageOf(response, error);
}

function fail(card, message) {
  const error = card.querySelector(".error");
  error.textContent = message;
  error.hidden = false;
}

// Shows the form or the page, and the public part of the key.
function showAccess() {
  byId("access").hidden = !isShut;
  const isSession = !key && session.is_signed_in;
  byId("holder").hidden = !key && !isSession;
  byId("holder-name").textContent = isSession ? session.name : /^or-[0-9a-z]{8}/.exec(key)?.[0] ?? "without a name";
  byId("holder-kind").textContent = isSession ? "signed in as" : "key";
  byId("forget").textContent = isSession ? "Sign out" : "Forget";
  byId("in-the-clear").hidden = isSecureContext;
  page.show();
}

// Shows the form: no key is set, or the gateway refused it.
function shut(why) {
  isShut = true;
  key = "";
  keepKey("");
  byId("remember").checked = false;
  byId("access-why").textContent = why;
  page.closed();
  showAccess();
  byId("key").focus();
}

function refuseKey(message) {
  fail(byId("access"), message);
  byId("key").setAttribute("aria-invalid", "true");
  byId("key").select();
}

async function enter(text) {
  byId("access").querySelector(".error").hidden = true;
  byId("key").removeAttribute("aria-invalid");
  if (!/^[!-~]+$/.test(text)) {
    refuseKey("This is not a key: a key has letters, digits and signs such as -, and no spaces.");
    return;
  }
  key = text;
  let response;
  try {
    response = await ask(page.path);
  } catch {
    key = "";
    refuseKey("The gateway does not respond.");
    return;
  }
  if ([401, 403, 429].includes(response.status)) {
    key = "";
    refuseKey(await reasonOf(response));
    return;
  }
  isShut = false;
  if (byId("remember").checked) keepKey(key);
  byId("key").value = "";
  showAccess();
  page.opened(response);
}

function setState(text, kind) {
  byId("state").textContent = text;
  byId("state").className = kind;
}

// A tier's colour: the local models have theirs, upstream tiers one of four by their name.
function tierLine(name) {
  if (name === "small" || name === "large") return `var(--${name}-line)`;
  const sum = [...name].reduce((total, letter) => (total * 31 + letter.codePointAt(0)) % 9973, 7);
  return `var(--other${sum % 4 + 1}-line)`;
}

function startAccess() {
  const here = location.pathname === "/" ? "/playground" : location.pathname;
  for (const link of document.querySelectorAll("#top nav a")) {
    if (link.pathname === here) link.setAttribute("aria-current", "page");
  }
  byId("access").addEventListener("submit", (event) => {
    event.preventDefault();
    enter(byId("key").value.trim().replace(/^bearer\s+/i, ""));
  });
  byId("forget").addEventListener("click", async () => {
    if (!key && session.is_signed_in) {
      await signOut();
      shut("You have signed out.");
    } else shut("The key was removed. Enter it again, or another one.");
  });
  // A page that came with 401 asks for a key at once; older browsers learn it from the first request.
  const arrival = performance.getEntriesByType("navigation")[0];
  if (!key && arrival?.responseStatus === 401) shut(ENTER); else showAccess();
  arrive();
}

// Opens the page to whoever has signed in: a link from another site brings no cookie, and so a 401.
async function arrive() {
  await readSession();
  if (key || !session.is_signed_in) return;
  const wasShut = isShut;
  isShut = false;
  showAccess();
  if (wasShut) page.opened(await ask(page.path));
}
