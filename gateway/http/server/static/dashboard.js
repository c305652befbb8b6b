const EVERY_MS = 2000;
const UNSET = "set prices";
const MAX_DEPTH = 16;  // deeper guesses are few
const STAGES = [["route", "routing"], ["prompt", "a prompt"]];  // that hold the event loop
let isPaused = false, timer = 0, last = null;  // last: the figures on show

// ---- what is shown -------------------------------------------------------------------------

function showTiles(data) {
  const { requests, latency, engine } = data;
  const sum = (name) => engine.tiers.reduce((total, tier) => total + tier[name], 0);
  const counted = data.classes.reduce((total, one) => total + one.num, 0);
  const good = data.classes.reduce((total, one) => total + one.num_attained, 0);
  const tiles = [
    ["requests", brief(requests.per_s), "/s"],
    ["first token p95", brief(latency.ttft_ms.p95, "ms"), ""],
    ["tokens", brief(requests.tokens_per_s), "/s"],
    ["objectives met", brief(counted ? good / counted : null, "%"), ""],
    ["failed or refused", brief(requests.num_failed + requests.num_refused), `of ${requests.num}`],
    costTile(data),
  ];
  const more = [
    ["between tokens p95", brief(latency.inter_token_ms.p95, "ms")],
    ["goodput", `${brief(requests.goodput)} /s`],
  ];
  if (engine) {
    more.push(["running", brief(sum("num_running"))], ["waiting", brief(sum("num_waiting"))]);
    more.push(["held back by the queue", brief(sum("num_held"))]);
    for (const tier of engine.tiers) {
      if (isNumber(tier.held_mean_ms)) more.push([`mean time held back, ${tier.name} model`, brief(tier.held_mean_ms, "ms")]);
    }
    more.push(["tokens a step", brief(engine.acceptance.tokens_per_step)]);
    more.push(["plain steps that one with drafts lasts", brief(engine.acceptance.stretch)]);
    more.push(["a step of the engine", brief(engine.step_ms, "ms")]);
    more.push(["of it beside the models' passes", brief(engine.host_ms, "ms")]);
    for (const tier of engine.tiers) more.push([`prompt found in the ${tier.name} model's cache`, brief(tier.prefix_hit_share, "%")]);
    const folder = engine.kv_folder;
    if (folder) {
      more.push(["prompts found in memory", brief(folder.memory_share, "%")], ["prompts found on the disk", brief(folder.disk_share, "%")]);
      more.push(["computing that the disk saved", brief(folder.saved_s * 1000, "ms")]);
      more.push(["keys and values read from the disk", bytes(folder.num_read_bytes)], ["written to the disk", bytes(folder.num_written_bytes)]);
    }
  }
  if (data.replicas) {
    const up = data.replicas.filter((one) => one.is_up).length;
    more.push(["engine replicas up", `${up} of ${data.replicas.length}`]);
  }
  if (data.gateway) {
    more.push(["event loop's lag p99", brief(data.gateway.loop_lag_p99_ms, "ms")]);
    for (const [stage, words] of STAGES) {
      const held = data.gateway.stages_p99_ms[stage];
      if (isNumber(held)) more.push([`the loop held by ${words} p99`, brief(held, "ms")]);
    }
    more.push(["the gateway's processor time a request", brief(data.gateway.cpu_ms_per_request, "ms")]);
  }
  byId("tiles").replaceChildren(...tiles.map(([name, value, unit]) => element("div", { class: "card" },
    element("dt", {}, name), element("dd", { class: value === UNSET ? "unset" : "" }, value, " ", element("small", {}, unit)))));
  byId("prices").hidden = tiles.at(-1)[1] !== UNSET;
  byId("more").replaceChildren(...more.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

const bytes = (number) => number < 1e9 ? `${brief(number / 1e6)} MB` : `${brief(number / 1e9)} GB`;

// Answers without any cost have tiers without prices: zero dollars would be a wrong figure.
function costTile({ requests, scope }) {
  const isAll = scope === "all", name = isAll ? "cost" : "charged";
  if (isAll && requests.num_answered && !requests.cost_usd_per_s) {
    return [name, UNSET, ""];
  }
  return [name, requests.num ? brief(requests.cost_usd_per_s * 3600, "USD") : "–", requests.num ? "/h" : ""];
}

function showRequests({ series, scope }) {
  const { age_s: ages } = series;
  const whole = ages.filter((age) => age >= 0).length;  // the cell that has begun says too little
  const cut = (values) => values.slice(0, whole);
  const middle = cut(ages).map((age) => age + series.cell_s / 2);
  const quantiles = ({ p50, p95, p99 }) => [
    { name: "p99", values: cut(p99), base: cut(p95), band: true, far: true, bare: true },
    { name: "p95", values: cut(p95), base: cut(p50), band: true, bare: true },
    { name: "p50", values: cut(p50) },
  ];
  lines("ttft", "Time to first token", middle, quantiles(series.ttft_ms), "ms");
  lines("inter-token", "Time between tokens", middle, quantiles(series.inter_token_ms), "ms");
  lines("e2e", "Time to the end", middle, quantiles(series.e2e_ms), "ms");
  lines("rate", "Requests per second", middle, [
    { name: "met their objectives", values: cut(series.goodput), band: true, bare: true },
    { name: "ended", values: cut(series.requests_per_s) },
  ], "");
  lines("tokens", "Tokens per second", middle, [{ name: "of ended answers", values: cut(series.tokens_per_s) }], "");
  const costs = cut(series.cost_usd_per_s);
  lines("cost", scope === "all" ? "Cost per hour" : "Charged per hour", middle,
    [{ name: "USD", values: costs.map((usd) => usd * 3600) }], "USD");
  cards.get("cost").figure.hidden = scope === "all" && !costs.some((usd) => usd);
}

function showEngine(engine) {
  for (const id of ["queue", "kv", "depth"]) if (cards.has(id)) cards.get(id).figure.hidden = !engine;
  if (!engine) return;
  const { history, acceptance } = engine, names = engine.tiers.map((tier) => tier.name);
  lines("queue", "Running and waiting", history.age_s, stacked(names.flatMap((name) => [
    { name: `${name} running`, values: history.num_running[name], colour: tierLine(name) },
    { name: `${name} waiting`, values: history.num_waiting[name], colour: tierLine(name), dashed: true, far: true },
  ])), "", { isCount: true });
  lines("kv", "KV cache in use", history.age_s,
    names.map((name) => ({ name, values: history.kv_cache_usage[name], colour: tierLine(name) })), "%", { most: 1 });
  const depth = Math.min(MAX_DEPTH, Math.max(1, ...acceptance.sources.map((one) => one.by_depth.length)));
  bars("depth", "Accepted drafts by depth", Array.from({ length: depth }, (_, i) => `${i + 1}`),
    acceptance.sources.map((one) => ({ name: one.name, values: one.by_depth, colour: sourceLine(one.name) })), "%", 1);
}

function showTiers(tiers) {
  const place = card("tiers", "Answers by tier", true);
  place.body.replaceChildren(
    element("div", { class: "stack", "aria-hidden": "true" },
      ...tiers.map((one) => element("i", { style: `${ink(tierLine(one.name))}; flex: ${one.share}` }))),
    element("ul", { class: "shares" }, ...(tiers.length ? tiers.map((one) =>
      element("li", { style: ink(tierLine(one.name)) }, `${one.name}: ${brief(one.share, "%")}, ${one.num} answer${one.num === 1 ? "" : "s"}`))
      : ["No answers yet."])));
}

function showClasses(classes) {
  const place = card("classes", "Objectives by class", true);
  const limit = (value) => (isNumber(value) ? `≤ ${brief(value, "ms")}` : "–");
  const rows = classes.map((one) => [one.name, limit(one.ttft_ms), limit(one.inter_token_ms),
    brief(one.num), meter(one.attainment), brief(one.goodput)]);
  renew(place.body, table(
    ["class", "first token", "between tokens", "#requests", "all met", "#goodput /s"], rows, "Objectives by class"));
}

// Text at the head of prompts that changes each time, such as a clock, keeps all behind it out of the cache.
function showHeads(clients) {
  if (!clients.length && !cards.has("heads")) return;
  const place = card("heads", "Prompts whose beginning changes", true);
  place.figure.hidden = !clients.length;
  const rows = clients.map((one) => [[one.key_id, one.agent].filter(Boolean).join(", "), `${one.num_changed} of ${one.num_requests}`,
    brief(one.num_repeated_tokens / one.num_changed), brief(one.num_repeated_tokens / one.num_prompt_tokens, "%")]);
  renew(place.body,
    element("p", { class: "hint" }, "These clients send what they sent before, but for something in the first 64 tokens, such as a clock. " +
      "So none of it is found in the prefix cache. Put what changes at the end."),
    table(["client", "#prompts", "#tokens computed again, each", "#of the prompt"], rows, "Clients whose prompts change at the beginning"));
}

function draw(data) {
  last = data;
  byId("board").hidden = false;
  byId("scope").hidden = data.scope === "all";
  byId("window").textContent = data.window_s >= 90 ? `${(data.window_s / 60).toFixed(0)} minutes` : `${data.window_s.toFixed(0)} seconds`;
  showTiles(data);
  showRequests(data);
  showEngine(data.engine);
  showTiers(data.tiers);
  showClasses(data.classes);
  showHeads(data.changing_heads);
  showExperiments(data.experiments);
}

function showExperiments(experiments) {
  if (!experiments && !cards.has("experiments")) return;
  const place = card("experiments", "Experiments", true);
  place.figure.hidden = !experiments;
  if (!experiments) return;
  renew(place.body, ...(experiments.length ? experiments.map(showExperiment)
    : [element("p", { class: "hint" }, "There is no experiment.")]));
}

// ---- time ----------------------------------------------------------------------------------

async function look() {
  clearTimeout(timer);
  if (isShut || isPaused || document.hidden) return;
  let wait = EVERY_MS;
  try {
    const response = await ask(page.path);
    if (isShut) return;
    if (response.status === 401) { shut(await reasonOf(response)); return; }
    if (response.ok) {
      const data = await response.json();
      if (isPaused || isShut) return;
      draw(data);
      setState("live", "ready");
    } else {
      setState(await reasonOf(response), "broken");
      wait = 5000;
    }
  } catch {
    setState("no connection", "broken");
  }
  clearTimeout(timer);
  timer = setTimeout(look, wait);
}

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  if (isPaused) setState("paused", ""); else look();
});
document.addEventListener("visibilitychange", look);
let resizing = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => { if (last && !isShut) draw(last); });
});
Object.assign(page, {
  path: "/v1/dashboard",
  opened: look,
  closed() {
    last = null;
    clearTimeout(timer);
    setState("a key is required", "");
  },
  show() { if (isShut) byId("board").hidden = true; },
});
startAccess();
look();
