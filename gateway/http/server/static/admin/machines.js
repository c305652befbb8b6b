// ---- tiers, replicas, adapters, named prompts and experiments ---------------------------------

const perMillion = (text) => `$${Number((Number(text) * 1e6).toPrecision(6))}`;

// A price that clients pay, with what the operator pays where that is another.
function priceText({ pricing, cost }, name) {
  if (!pricing) return "–";
  const paid = perMillion(pricing[name]), own = perMillion(cost[name]);
  return paid === own ? paid : `${paid} (costs ${own})`;
}

const BREAKERS = { closed: "in use", open: "out of order", half_open: "on trial" };
const serverText = (one) => `${one.name}: ${one.is_ejected ? "left out as slow" : BREAKERS[one.breaker] ?? one.breaker}`;
const stateText = (isGood, text) => element("span", { class: `state ${isGood ? "active" : "down"}` }, text);

async function loadTiers() {
  const { data } = await call("/admin/tiers");
  const prices = ["prompt", "input_cache_read", "completion"];
  const rows = data.map((one) => [one.name, stateText(one.is_available, one.is_available ? "available" : "down"),
    one.model ?? "–", brief(one.ttft_p50_ms, "ms"), ...prices.map((name) => priceText(one, name)),
    one.is_local ? "this gateway's engines" : one.servers.map(serverText).join(", ")]);
  const troubles = data.filter((one) => one.reason).map((one) => element("p", { class: "warning" }, `${one.name}: ${one.reason}`));
  const heads = ["tier", "state", "model", "#first token", "#prompt", "#cached", "#answer", "servers"];
  return [...troubles, rowsOr(rows, heads, "Tiers", "There is no tier."), hint("Prices are USD for a million tokens.")];
}

async function loadReplicas() {
  const { data } = await call("/admin/replicas");
  const change = (one) => {
    const group = { group: one.group }, name = `the group ${one.group}`;
    if (!one.group) return "";
    const readmit = () => act("replicas", "/admin/replicas/readmit", "POST", group);
    if (one.is_draining) return plainButton("Readmit", readmit, { "aria-label": `Readmit ${name}` });
    return sureButton("Drain", `Drain ${name}`, () => act("replicas", "/admin/replicas/drain", "POST", group));
  };
  const rows = data.map((one) => [one.name, one.group || "–",
    stateText(one.is_up && !one.is_draining, one.is_draining ? "draining" : one.is_up ? "up" : "down"),
    brief(one.num_in_flight), brief(one.num_requests), one.reason || "–", change(one)]);
  return [
    rowsOr(rows, ["engine", "group", "state", "#in flight", "#requests", "why it takes none", ""], "Engines", "There is no engine."),
    hint("A group that drains gets no new requests and ends its answers.")];
}

async function loadModels() {
  const { data } = await call("/admin/models");
  const change = ({ name, state }) => {
    const path = `/admin/models/${encodeURIComponent(name)}`;
    if (state !== "loaded") return plainButton("Load", () => act("models", `${path}/load`, "POST"), { "aria-label": `Load ${name}` });
    return sureButton("Unload", `Unload ${name}`, () => act("models", `${path}/unload`, "POST"));
  };
  const rows = data.map((one) => [one.name,
    element("span", { class: `state ${{ loaded: "active", failed: "down" }[one.state] ?? ""}` }, one.state),
    `${brief(one.memory_bytes / 2 ** 30)} GiB`, brief(one.num_in_flight), brief(one.num_waiting),
    brief(one.idle_s, "s"), brief(one.load_s, "s"), brief(one.num_loads), brief(one.num_evictions), one.reason || "–", change(one)]);
  const heads = ["model", "state", "#memory", "#in flight", "#waiting", "#idle", "#loads in", "#loads", "#put out", "why it is not there", ""];
  return [rowsOr(rows, heads, "Models on demand", "There is no model on demand."),
    hint("A request that names a model loads it; one that is idle is put out when others need its memory.")];
}

async function loadAdapters() {
  const { data } = await call("/admin/adapters");
  const rows = data.slice(0, MOST_SHOWN).map((one) => [one.name, one.tier, one.path, brief(one.max_rank),
    isNumber(one.num_bytes) ? `${brief(one.num_bytes / 1e6)} MB` : "–", one.watched ? "folder" : "request",
    sureButton("Unload", `Unload ${one.name}`, () => act("adapters", `/admin/adapters/${encodeURIComponent(one.name)}`, "DELETE"))]);
  return [rowsOr(rows, ["name", "tier", "path", "#rank", "#size", "from", ""], "Adapters", "No adapter is loaded.")];
}

function newAdapter() {
  openPanel("Load an adapter", makeForm("Load", [
    { path: ["name"], label: "name", hint: "that requests use as model" },
    { path: ["path"], label: "path", hint: "its folder on the gateway's machine" },
    { path: ["tier"], label: "tier", kind: "choice", options: [["", "large"], ["small", "small"], ["auto", "large, routed between it and small"]] },
  ], async (body) => {
    await call("/admin/adapters", "POST", body);
    byId("panel").close();
    look("adapters");
  }));
}

async function loadPrompts() {
  const { data } = await call("/admin/prompts");
  const rows = data.slice(0, MOST_SHOWN).map((one) => [one.name, one.tenant,
    one.tiers.map((tier) => `${tier.tier}: ${tier.tokens} tokens`).join(", "),
    brief(Math.min(...one.tiers.map((tier) => tier.expires_in_s)) / 3600),
    sureButton("Delete", `Delete ${one.name}`, () => act("prompts",
      `/admin/prompts/${encodeURIComponent(one.name)}?tenant=${encodeURIComponent(one.tenant)}`, "DELETE"))]);
  return [rowsOr(rows, ["name", "tenant", "kept", "#hours left", ""], "Named prompts", "No prompt is kept.")];
}

async function loadExperiments() {
  const { data } = await call("/admin/experiments");
  const change = (one) => {
    const path = `/admin/experiments/${encodeURIComponent(one.name)}`;
    if (one.source === "file") return "of the settings";
    if (one.state === "running") return sureButton("Stop", `Stop ${one.name}`, () => act("experiments", `${path}/stop`, "POST"));
    return sureButton("Start", `Start ${one.name}`, () => act("experiments", `${path}/start`, "POST"));
  };
  const armText = ({ name, share, stopped }) => `${name} ${brief(share, "%")}${stopped ? ` stopped: ${stopped.reason}` : ""}`;
  const rows = data.slice(0, MOST_SHOWN).map((one) => [
    opener(`experiment ${one.name}`, one.name, () => showReport(one)), brief(one.version),
    element("span", { class: `state ${one.state === "running" ? "active" : ""}` }, one.state), brief(one.share, "%"),
    one.arms.map(armText).join(", "), one.metric, day(one.started_at), change(one)]);
  const heads = ["name", "#version", "state", "#takes part", "arms", "metric", "since", ""];
  return [rowsOr(rows, heads, "Experiments", "There is no experiment."),
    hint("Make one with outrider experiment create, or POST /admin/experiments.")];
}

async function showReport({ name }) {
  openPanel(name, showExperiment(await call(`/admin/experiments/${encodeURIComponent(name)}/report`)));
}

addSection("experiments", "Experiments", loadExperiments);
addSection("tiers", "Tiers", loadTiers);
addSection("replicas", "Engines", loadReplicas);
addSection("models", "On demand", loadModels);
addSection("adapters", "Adapters", loadAdapters, plainButton("Load one", newAdapter, { "data-opens": "new-adapter" }));
addSection("prompts", "Prompts", loadPrompts);
