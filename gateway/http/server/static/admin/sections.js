// ---- sections, one of which is shown, and the panel above them --------------------------------

const sections = new Map();

// A section. `load()` returns the nodes that it shows; `tools` stand beside its title.
function addSection(name, title, load, ...tools) {
  const link = element("a", { href: `#${name}` }, title), list = element("div", { class: "list" });
  const again = plainButton("Refresh", () => look(name));
  const view = element("section", { id: `${name}-section`, class: "card", "aria-labelledby": `${name}-title`, hidden: "" },
    element("div", { class: "head" }, element("h2", { id: `${name}-title` }, title), ...tools, again),
    element("p", { class: "error", role: "alert", hidden: "" }), list);
  byId("sections").append(link);
  byId("desk").append(view);
  sections.set(name, { link, view, list, load, turn: 0 });
}

const shownSection = () => (sections.has(location.hash.slice(1)) ? location.hash.slice(1) : "keys");

function showSection() {
  if (isShut) return;
  byId("desk").hidden = false;
  const shown = shownSection();
  for (const [name, { link, view }] of sections) {
    view.hidden = name !== shown;
    if (name === shown) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  sections.get(shown).link.scrollIntoView({ block: "nearest", inline: "nearest" });
  look(shown);
}

// Asks for a section's data and shows them, unless they were asked for once more meanwhile.
async function look(name) {
  const section = sections.get(name), turn = ++section.turn;
  let nodes;
  try {
    nodes = await section.load();
    if (turn === section.turn) section.view.querySelector(".error").hidden = true;
  } catch (error) {
    if (turn !== section.turn || isShut) return;
    if (error.status !== 404) {  // 404: this gateway has no such thing, such as a database
      fail(section.view, error.message);
      return;
    }
    nodes = [hint(error.message)];
  }
  if (turn !== section.turn || isShut) return;
  const held = section.list.contains(document.activeElement) ? document.activeElement : null;
  renew(section.list, ...nodes);
  if (held && !section.list.contains(document.activeElement)) (openerOf(held) ?? section.list.querySelector(".scroll"))?.focus();
}

// Does something to a section's things; says what went wrong, or shows how they are now.
async function act(name, path, method, body) {
  try {
    await call(path, method, body);
    await look(name);
  } catch (error) {
    fail(sections.get(name).view, error.message);
  }
}

const hint = (text) => element("p", { class: "hint" }, text);
const day = (seconds) => (isNumber(seconds) ? new Date(seconds * 1000).toISOString().slice(0, 10) : "–");
const moment = (seconds) => (isNumber(seconds) ? new Date(seconds * 1000).toLocaleString() : "–");
const dollars = (usd) => (isNumber(usd) ? `$${Math.abs(usd) < 0.01 ? Number(usd.toPrecision(2)) : usd.toFixed(2)}` : "–");
const rowsOr = (rows, heads, label, none) => (rows.length ? table(heads, rows, label) : hint(none));

// A button that opens the panel; `id` finds it again after its table was drawn anew.
const opener = (id, text, open) => plainButton(text, async () => {
  try { await open(); } catch (error) { fail(sections.get(shownSection()).view, error.message); }
}, { class: "link", "data-opens": id });

// The button that stands where another of the same thing stood.
const openerOf = ({ dataset }) => document.querySelector(`[data-opens="${CSS.escape(dataset.opens || "none")}"]`);

let panelFrom = document.body;

function openPanel(title, ...nodes) {
  if (isShut) return;
  const panel = byId("panel");
  if (!panel.open) panelFrom = document.activeElement;
  panel.replaceChildren(element("div", { class: "head" }, element("h2", { id: "panel-title" }, title),
    plainButton("Close", () => panel.close())), ...nodes);
  if (!panel.open) panel.showModal();
  panel.scrollTop = 0;
  panel.querySelector("form input, form select, input")?.focus();
}

byId("panel").addEventListener("close", () => {
  byId("panel").replaceChildren();  // it may have shown a secret
  if (!isShut) openerOf(panelFrom)?.focus();
});
addEventListener("hashchange", showSection);
Object.assign(page, {
  path: "/admin/keys?limit=1",
  opened: showSection,
  closed() {
    byId("panel").close();
    for (const section of sections.values()) {
      section.turn += 1;
      section.list.replaceChildren();
    }
    setState("a key is required", "");
  },
  show() { if (isShut) byId("desk").hidden = true; },
});
