// ---- keys and teams ------------------------------------------------------------------------

const PAGE = 50;
const MOST_SHOWN = 500;  // teams, adapters and the like come all at once
const LIMITS = [
  ["requests_per_minute", "requests a minute"], ["tokens_per_minute", "tokens a minute"],
  ["requests_per_day", "requests a day"], ["tokens_per_day", "tokens a day"],
  ["concurrent_requests", "requests at once"], ["usd_per_day", "USD a day"], ["usd_per_week", "USD a week"],
  ["usd_per_month", "USD a month"], ["usd_per_7_days", "USD in 7 days"], ["usd_per_30_days", "USD in 30 days"],
];
const REVEALS = [["", "as the alias says"], ["nothing", "nothing but the answer"], ["tiers", "tiers"], ["costs", "tiers and costs"]];
const starts = [];  // the key before each page of the list, of those before the present one
const find = element("input", { type: "search", id: "find", placeholder: "name or id", "aria-label": "Find keys by name or id", maxlength: "128" });
let after = "", teamNames = new Map();

function limitsText(limits) {
  const own = LIMITS.filter(([name]) => isNumber(limits[name])).map(([name, text]) =>
    name.startsWith("usd") ? `$${limits[name]} ${text.slice(4)}` : `${limits[name].toLocaleString("en")} ${text}`);
  const byTier = Object.entries(limits.models ?? {}).map(([tier, inner]) => `${tier}: ${limitsText(inner)}`);
  const byUser = limits.end_user ? [`each end user: ${limitsText(limits.end_user)}`] : [];
  return [...own, ...byTier, ...byUser].join(", ") || "none";
}

function scopesText(one) {
  const rights = [one.admin && "admin", one.metrics && "metrics", one.reveals && `reveals ${one.reveals}`,
    one.models && `models ${one.models.join(", ")}`, one.tiers && `tiers ${one.tiers.join(", ")}`];
  return rights.filter(Boolean).join("; ") || "all models";
}

async function loadTeams() {
  const { data } = await call("/admin/teams");
  teamNames = new Map(data.map((team) => [team.id, team.name]));
  return data;
}

async function loadKeys() {
  const query = new URLSearchParams({ limit: PAGE });
  if (after) query.set("after", after);
  if (find.value.trim()) query.set("name", find.value.trim());
  const [{ data, has_more: hasMore }] = await Promise.all([call(`/admin/keys?${query}`), loadTeams()]);
  const rows = data.map((one) => [opener(one.id, one.name, () => showKey(one)), one.prefix,
    teamNames.get(one.team) ?? one.team ?? "–", element("span", { class: `state ${one.status}` }, one.status),
    scopesText(one), limitsText(one.limits), day(one.expires_at)]);
  const none = find.value || after ? "No key is found." : "There is no key yet.";
  return [rowsOr(rows, ["name", "id", "team", "state", "may", "limits", "expires"], "Keys", none), ...pagesNodes(data, hasMore)];
}

// Buttons for the pages before and after this one. Each works once: a second press would skip a page.
function pagesNodes(data, hasMore) {
  const turn = (text, isOff, change) => {
    const made = element("button", { type: "button", "data-opens": text, ...(isOff ? { disabled: "" } : {}) }, text);
    made.addEventListener("click", () => { change(); look("keys"); }, { once: true });
    return made;
  };
  return hasMore || starts.length ? [element("p", { class: "pages" },
    turn("Previous", !starts.length, () => { after = starts.pop(); }),
    turn("Next", !hasMore, () => { starts.push(after); after = data.at(-1).id; }))] : [];
}

function findKeys() {
  after = "";
  starts.length = 0;
  look("keys");
}

// The fields of a key's rights; `one` is the key as it is, or null for a new one.
function keyFields(one) {
  const value = (name) => (one ? one[name] : null);
  return [
    { path: ["name"], label: "name", value: value("name") },
    { path: ["team"], label: "team", value: teamNames.get(value("team")) ?? value("team"), hint: "id or name; empty: none" },
    { path: ["models"], label: "models", kind: "names", value: value("models"), hint: "that it may name, with commas; empty: all" },
    { path: ["tiers"], label: "tiers", kind: "names", value: value("tiers"), hint: "that may answer; empty: all" },
    { path: ["reveals"], label: "answers reveal", kind: "choice", options: REVEALS, value: value("reveals") },
    { path: ["expires_at"], label: "expires", kind: "moment", value: value("expires_at"), hint: "empty: never" },
    { path: ["weight"], label: "weight", kind: "number", value: one ? one.weight : 1, hint: "share of a full queue" },
    { path: ["admin"], label: "may administrate", kind: "check", value: value("admin") },
    { path: ["metrics"], label: "may read /metrics", kind: "check", value: value("metrics") },
  ];
}

const limitFields = (limits, path) => LIMITS.map(([name, label]) => ({ path: [...path, name], label, kind: "number", value: limits?.[name] }));

// The limits of a key or team at `path`, of all tiers together, of one, or of each end user.
async function limitsForm(path, limits, changed) {
  const tiers = (await call("/admin/tiers")).data.map((tier) => tier.name);
  const names = [...new Set([...tiers, ...Object.keys(limits.models ?? {})])];
  const choice = makeField({ path: [], label: "limits of", kind: "choice",
    options: [["", "all tiers together"], ["end_user", "each end user"], ...names.map((name) => [`tier ${name}`, name])] });
  let form;
  const draw = () => {
    const of = choice.control.value, tier = of.startsWith("tier ") ? of.slice(5) : "";
    const at = tier ? ["models", tier] : of ? [of] : [];
    const inner = at.reduce((found, name) => found?.[name], limits);
    const next = makeForm("Save limits", limitFields(inner, ["limits", ...at]), async (body) => {
      ({ limits } = await call(path, "PATCH", body));
      return changed("Saved.");
    });
    if (form) form.replaceWith(next);
    form = next;
  };
  choice.control.addEventListener("change", draw);
  draw();
  return element("fieldset", {}, element("legend", {}, "Limits"), choice.view,
    hint("An empty field is no limit, 0 admits no request."), form);
}

function facts(pairs) {
  return element("dl", { class: "facts" }, ...pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

async function spentText(whose) {
  try {
    const { totals } = await call(`/v1/usage?${new URLSearchParams({ since: "30d", limit: 1, ...whose })}`);
    return `${brief(totals.requests)} requests, ${dollars(totals.charge_usd)}`;
  } catch (error) { return error.message; }
}

async function showKey(one) {
  const path = `/admin/keys/${encodeURIComponent(one.id)}`, changed = (told) => { look("keys"); return told; };
  const known = facts([["id", one.prefix], ["state", one.status], ["created", moment(one.created_at)], ["expires", moment(one.expires_at)],
    ["last 30 days", await spentText({ key: one.id })],
    ...Object.entries(one.labels).map(([name, value]) => [`label ${name}`, value])]);
  if (one.status === "revoked") { openPanel(one.name, known, hint("A revoked key stays revoked; its row stays for the ledger.")); return; }
  const edit = makeForm("Save", keyFields(one), async (body) => { await call(path, "PATCH", body); return changed("Saved."); });
  const rotate = makeForm("New secret", [{ path: ["grace_s"], label: "the old secret stays valid for", kind: "choice", value: "0",
    options: [["0", "no time"], ["3600", "an hour"], ["86400", "a day"], ["604800", "a week"]] }], async ({ grace_s: grace = "0" }) => {
    showSecret(await call(`${path}/rotate`, "POST", { grace_s: Number(grace) }));
    return changed();
  });
  const revoke = sureButton("Revoke", `Revoke ${one.name}`, async () => {
    try {
      showKey(await call(path, "DELETE"));
      changed();
    } catch (error) { fail(edit, error.message); }
  });
  openPanel(one.name, known, edit, await limitsForm(path, one.limits, changed),
    element("fieldset", {}, element("legend", {}, "Secret"), rotate),
    element("fieldset", {}, element("legend", {}, "Revoke"), hint("This is final. Requests in progress end at once."), revoke));
}

async function newKey() {
  await loadTeams().catch(() => []);
  const form = makeForm("Create key", [...keyFields(null), ...limitFields(null, ["limits"])], async (body) => {
    showSecret(await call("/admin/keys", "POST", body));
    look("keys");
  });
  openPanel("New key", form);
}

// The only time that a key is shown. It is a control's value: no part of the page's text.
function showSecret(made) {
  const secret = element("input", { id: "secret", readonly: "", "aria-label": `The key ${made.name}`, spellcheck: "false" });
  secret.value = made.key;
  openPanel(`The key ${made.name}`, hint("Copy it now. It is not shown again, and the gateway does not know it either."),
    element("div", { class: "entry" }, secret, plainButton("Copy", async ({ target }) => {
      secret.select();
      try {
        await navigator.clipboard.writeText(secret.value);
        target.textContent = "Copied";
      } catch { /* it is selected: without encryption browsers let no page write to the clipboard */ }
    })));
}

async function showTeams() {
  const teams = await loadTeams();
  const rows = teams.slice(0, MOST_SHOWN).map((one) => [
    opener(one.id, one.name, () => showTeam(one)), one.id, brief(one.weight), limitsText(one.limits), day(one.created_at)]);
  return [rowsOr(rows, ["name", "id", "#weight", "limits", "created"], "Teams", "There is no team yet."),
    ...(teams.length > MOST_SHOWN ? [hint(`The first ${MOST_SHOWN} of ${teams.length}.`)] : [])];
}

const teamFields = (one) => [{ path: ["name"], label: "name", value: one?.name ?? null },
  { path: ["weight"], label: "weight", kind: "number", value: one?.weight ?? 1, hint: "share of a full queue" }];

async function showTeam(one) {
  const path = `/admin/teams/${encodeURIComponent(one.id)}`, changed = (told) => { look("teams"); return told; };
  openPanel(one.name, facts([["id", one.id], ["created", moment(one.created_at)], ["last 30 days", await spentText({ team: one.id })]]),
    makeForm("Save", teamFields(one), async (body) => { await call(path, "PATCH", body); return changed("Saved."); }),
    await limitsForm(path, one.limits, changed));
}

function newTeam() {
  openPanel("New team", makeForm("Create team", [...teamFields(null), ...limitFields(null, ["limits"])], async (body) => {
    await call("/admin/teams", "POST", body);
    byId("panel").close();
    look("teams");
  }));
}

let finding = 0;
find.addEventListener("input", () => { clearTimeout(finding); finding = setTimeout(findKeys, 250); });
addSection("keys", "Keys", loadKeys, find, plainButton("New key", newKey, { "data-opens": "new-key" }));
addSection("teams", "Teams", showTeams, plainButton("New team", newTeam, { "data-opens": "new-team" }));
