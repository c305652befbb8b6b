// ---- forms, whose fields have the names that the gateway's errors use ------------------------

class Refusal extends Error {
  constructor(message, status = 0, param = "") {
    super(message);
    Object.assign(this, { status, param });
  }
}

// Returns the gateway's answer. Throws a Refusal with its words, and the field at fault.
async function call(path, method = "GET", body = undefined) {
  const options = body === undefined ? { method }
    : { method, headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  let response;
  try {
    response = await ask(path, options);
  } catch {
    setState("no connection", "broken");
    throw new Refusal("The gateway does not respond.");
  }
  setState("connected", "ready");
  if (response.ok) return response.json();
  const error = await errorOf(response);
  if (response.status === 401) shut(key ? KEY_TROUBLE[error.code] ?? messageOf(response, error) : "Enter an administrator's key.");
  throw new Refusal(messageOf(response, error), response.status, error.param ?? "");
}

// What a field's control holds, as the API wants it; null for nothing.
const READ = {
  text: (control) => control.value.trim() || null,
  choice: (control) => control.value || null,
  number: (control) => (control.value === "" ? null : Number(control.value)),
  check: (control) => control.checked,
  names: (control) => (control.value.trim() ? control.value.split(",").map((name) => name.trim()).filter(Boolean) : null),
  moment: (control) => (control.value ? Math.floor(new Date(control.value).getTime() / 1000) : null),
};
const WRITE = {
  choice: (control, value) => { control.value = value ?? ""; },
  check: (control, value) => { control.checked = Boolean(value); },
  names: (control, value) => { control.value = (value ?? []).join(", "); },
  moment: (control, value) => { control.value = value === null || value === undefined ? "" : localMoment(value); },
};
const INPUTS = { check: { type: "checkbox" }, number: { type: "number", min: "0", step: "any" }, moment: { type: "datetime-local" } };
let numFields = 0;

function localMoment(seconds) {
  const at = new Date(seconds * 1000);
  return new Date(at.getTime() - at.getTimezoneOffset() * 60000).toISOString().slice(0, 16);
}

// A field: {path, label, kind, value, hint, options}. `path` is its place in the request's body.
function makeField({ path, label, kind = "text", value = null, hint = "", options = [] }) {
  const id = `field-${++numFields}`;
  const control = kind === "choice"
    ? element("select", { id }, ...options.map(([each, text]) => element("option", { value: each }, text)))
    : element("input", { id, autocomplete: "off", ...(INPUTS[kind] ?? { type: "text", spellcheck: "false" }) });
  const fault = element("span", { class: "error", id: `${id}-fault`, hidden: "" });
  const note = element("span", { class: "hint", id: `${id}-hint` }, hint);
  control.setAttribute("aria-describedby", `${id}-fault ${id}-hint`);
  (WRITE[kind] ?? ((target, text) => { target.value = text ?? ""; }))(control, value);
  const read = () => {
    if (control.validity.badInput) throw new Refusal(`${label}: this is not complete.`, 0, path.join("."));
    return READ[kind](control);
  };
  const view = element("div", { class: kind === "check" ? "control check" : "control" },
    element("label", { for: id }, label), control, note, fault);
  return { path, control, fault, read, view, before: JSON.stringify(read()) };
}

// Puts a value at its place in a body.
function place(body, path, value) {
  path.slice(0, -1).reduce((inner, name) => (inner[name] ??= {}), body)[path.at(-1)] = value;
}

// A form. `send(body)` gets the fields that were changed; what it throws is shown at the field at fault.
function makeForm(button, specs, send) {
  const fields = specs.map(makeField);
  const done = element("span", { class: "hint", role: "status" });
  const made = element("form", { novalidate: "" }, element("div", { class: "fields" }, ...fields.map((one) => one.view)),
    element("p", { class: "error", role: "alert", hidden: "" }), element("button", { class: "primary" }, button), done);
  made.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (made.ariaBusy === "true") return;
    made.ariaBusy = "true";
    done.textContent = "";
    clearFaults(made, fields);
    try {
      const body = {}, values = fields.map((one) => [one, one.read()]);
      for (const [one, value] of values) if (JSON.stringify(value) !== one.before) place(body, one.path, value);
      const told = await send(body);
      for (const [one, value] of values) one.before = JSON.stringify(value);
      done.textContent = told ?? "";
    } catch (error) {
      showFault(made, fields, error);
    }
    made.ariaBusy = "false";
  });
  return made;
}

function clearFaults(form, fields) {
  form.querySelector(":scope > .error").hidden = true;
  for (const one of fields) {
    one.fault.hidden = true;
    one.control.removeAttribute("aria-invalid");
  }
}

// The field that an error names, or one within or around what it names; else the whole form.
function showFault(form, fields, error) {
  const param = error.param ?? "", within = (one, other) => `${one}.`.startsWith(`${other}.`);
  const wrong = param && fields.find((one) => within(param, one.path.join(".")) || within(one.path.join("."), param));
  if (!wrong) {
    fail(form, error.message);
    return;
  }
  wrong.fault.textContent = error.message;
  wrong.fault.hidden = false;
  wrong.control.setAttribute("aria-invalid", "true");
  wrong.control.focus();
}

// A button for what is not taken back easily: it asks once more. `work` says what is done in its place.
function sureButton(text, label, work) {
  return plainButton(text, () => { if (confirm(`${label}?`)) work(); }, { "aria-label": label });
}

function plainButton(text, work, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", work);
  return made;
}
