// ---- a chat, of one side or two -------------------------------------------------------------

const ENOUGH = 4;  // questions from which on the speeds of two sides are compared
const EXAMPLES = [
  "Who are you?",
  "Add 4827 and 1965.",
  "Sort these words alphabetically: river, apple, moon.",
  "How many days are there between June 17 and October 20?",
];
const sides = ["A", "B"].map((name) => {
  const box = byId("side").content.cloneNode(true).firstElementChild;
  box.querySelector("b").textContent = name;
  byId("sides").append(box);
  const field = (what) => box.querySelector(`[name=${what}]`);
  field("arm").addEventListener("input", () => {  // the arm replaces the box
    field("speculation").disabled = Boolean(field("arm").value.trim());
  });
  return { name, box, model: field("model"), speculation: field("speculation"), arm: field("arm"), messages: [] };
});
let isPair = false;
const turnsSaid = [];  // of this chat: {prompt, node, before: messages of each side before it}
const pairs = [];  // of this comparison: what the two sides took, {a, b} as in `figuresOf`
let edited = null;  // the turn whose message is being edited

function showPair(wanted) {
  isPair = wanted;
  document.body.classList.toggle("pair", isPair);
  byId("one").setAttribute("aria-pressed", `${!isPair}`);
  byId("two").setAttribute("aria-pressed", `${isPair}`);
  byId("order-field").hidden = !isPair;
  sides[1].box.hidden = !isPair;
  if (isPair) sides[1].messages = [...sides[0].messages];
  pairs.length = 0;
  tree.hide();
  saySetup();
}

// The settings in one line, for when they are folded away.
function saySetup() {
  const used = isPair ? sides : sides.slice(0, 1);
  const words = used.map((side) => {
    const arm = side.arm.value.trim(), drafts = !arm && !side.speculation.closest("label").hidden;
    const rest = arm ? `, arm ${arm}` : drafts ? `, speculation ${side.speculation.checked ? "on" : "off"}` : "";
    return `${isPair ? `${side.name}: ` : ""}${side.model.value}${rest}`;
  });
  const temperature = Number(byId("temperature").value);
  if (temperature) words.push(`temperature ${temperature}`);
  if (byId("system").value.trim()) words.push("with a system prompt");
  byId("setup-said").textContent = words.join(" · ");
}

// `seed`: of a message that both sides answer, so that they draw with the same noise.
function requestOf(side, seed) {
  const options = {}, temperature = Number(byId("temperature").value) || 0;
  const isShown = (field) => !field.closest("label").hidden;
  if (isShown(side.speculation)) options.speculation = side.speculation.checked ? "on" : "off";
  if (side.arm.value.trim()) delete options.speculation;  // the arm sets it
  if (isShown(byId("policy")) && byId("policy").value) options.policy = byId("policy").value;
  if (isShown(byId("private")) && byId("private").checked) options.privacy = "private";
  if (byId("deadline").value) options.deadline_ms = Number(byId("deadline").value);
  const most = Number(byId("max-tokens").value), system = byId("system").value.trim();
  return {
    ...(most && { max_tokens: most }),
    ...(byId("json").checked && { response_format: { type: "json_object" } }),
    model: side.model.value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...side.messages],
    temperature,
    ...(temperature && seed !== null && { seed }),
    stream: true,
    stream_options: { include_usage: true },
    outrider: options,
  };
}

// Whether the answer came whole.
async function generate(view, side, signal) {
  const { seen } = view;
  seen.startMs = performance.now();
  const arm = side.arm.value.trim();
  view.request = { body: requestOf(side, view.card.turn.seed), arm };
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      signal,
      headers: { "content-type": "application/json", "x-outrider-trace": "1", ...(arm && { "x-outrider-arm": arm }) },
      body: JSON.stringify(view.request.body),
    });
    if (!response.ok) {
      const refusal = await refusalOf(response);
      view.fail(refusal.message);
      view.card.querySelector(".more").hidden = false;
      showFacts(view.card.querySelector("dl"), refusal.facts);
      if (response.status === 401) shut(refusal.why);
      return false;
    }
    seen.left = leftOf(response.headers);
    const told = (name) => response.headers.get(`x-outrider-${name}`);
    if (told("tier")) view.route(told("tier"), told("reason"), told("arm"));
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return true;
      if (!view.event(JSON.parse(data))) return false;
    }
    view.fail("The answer ends here: the connection was closed before it was complete.");
  } catch (error) {
    if (error.name === "AbortError") view.fail("Stopped.");
    else if (error instanceof SyntaxError) view.fail("The answer ends here: it cannot be read on.");
    else if (seen.chunks) view.fail("The answer ends here: the connection broke.");
    else view.fail("The gateway does not answer.");
  }
  return false;
}

async function answer(view, side, prompt, stopper) {
  side.messages.push({ role: "user", content: prompt });
  view.card.classList.remove("waiting");
  const isWhole = !stopper.signal.aborted && await generate(view, side, stopper.signal);
  if (isWhole && view.content) side.messages.push({ role: "assistant", content: view.content });
  else side.messages.pop();
  view.end();
  return isWhole;
}

// What a side took for its answer: its own figures, and the time between the first and the last text.
const figuresOf = (view) => ({ speed: view.speed, firstMs: view.seen.firstMs - view.seen.startMs });

const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
};
const range = (values, digits) => {
  const [low, high] = [Math.min(...values), Math.max(...values)].map((value) => value.toFixed(digits));
  return low === high ? low : `${low} to ${high}`;
};

// Says how the sides compare. One run says nothing of speed: that takes several, of new questions.
function compare(views, line) {
  const [a, b] = views;
  pairs.push({ a: figuresOf(a), b: figuresOf(b) });
  const words = [a.content === b.content ? "Both gave the same answer." : "The answers differ."];
  const ratios = pairs.filter((pair) => pair.a.speed && pair.b.speed).map((pair) => pair.a.speed / pair.b.speed);
  if (ratios.length < ENOUGH) {
    words.push(`How fast they are takes ${ENOUGH} questions or more to say: machines are noisy.`);
  } else {
    const middle = median(ratios);
    const [name, other, factors] = middle >= 1 ? ["A", "B", ratios] : ["B", "A", ratios.map((one) => 1 / one)];
    const isClear = Math.min(...factors) > 1.05;
    words.push(`Over ${ratios.length} questions ${name} wrote ${median(factors).toFixed(1)} times as fast as ${other} in the middle,`
      + ` ${range(factors, 1)} times in all${isClear ? "" : ": no clear difference"}.`);
  }
  if (byId("order").value === "turn" && views[order(sides)[1]].counts.suffix) {
    words.push(`${sides[order(sides)[1]].name} came second, and drafted from the first answer too.`);
  }
  const more = element("button", { type: "button" }, `Ask ${ENOUGH} more`);
  more.addEventListener("click", () => { more.disabled = true; askMore(); });
  line.replaceChildren(words.join(" "), " ", more);
  line.hidden = false;
}

// New questions, so that no answer is remembered from the time before.
async function askMore() {
  const below = (most) => Math.floor(Math.random() * most);
  for (let round = 0; round < ENOUGH && !running.size; round += 1) {
    const figures = [1000 + below(9000), 1000 + below(9000)];
    if (!await run([`Add ${figures[0]} and ${figures[1]}.`, `What is ${figures[0]} - ${Math.floor(figures[1] / 10)}?`,
      `How much is ${100 + below(900)} plus ${figures[1]}?`][round % 3])) return;
  }
}

// The sides in the order in which they are asked: one that drafts comes first, for the other's answer
// would be remembered and draft it.
function order(used) {
  const drafts = used.map((side) => side.speculation.checked && !side.speculation.disabled);
  return used.length > 1 && drafts[1] && !drafts[0] ? [1, 0] : [...used.keys()];
}

// Takes a turn and all after it out of the chat.
function dropFrom(turn) {
  const place = turnsSaid.indexOf(turn);
  if (place < 0) return;
  sides.forEach((side, at) => { side.messages = turn.before[at]; });
  for (const { node } of turnsSaid.splice(place)) node.remove();
  tree.hide();
}

function edit(turn) {
  edited = turn;
  byId("editing").hidden = !turn;
  prompt.value = turn?.prompt ?? "";
  grow();
  prompt.focus();
}

// Asks all sides; true if every answer came whole.
async function run(prompt) {
  byId("welcome").hidden = true;
  byId("setup").open = false;
  byId("new").hidden = false;
  const turn = {
    prompt,
    seed: isPair ? Math.floor(Math.random() * 2 ** 31) : null,
    before: sides.map((side) => [...side.messages]),
    node: element("div", { class: "turn" }),
  };
  const edits = element("button", { type: "button", class: "edit", "aria-label": "Edit this message" }, "Edit");
  edits.addEventListener("click", () => { if (!running.size) edit(turn); });
  const answers = element("div", { class: "answers" });
  const verdict = element("p", { class: "verdict", role: "status", hidden: "" });
  const used = isPair ? sides : sides.slice(0, 1);
  const views = used.map((side) => {
    const card = byId("answer").content.cloneNode(true).firstElementChild;
    card.querySelector(".name").textContent = side.name;
    card.classList.add("waiting");
    card.turn = turn;
    answers.append(card);
    return new View(card);
  });
  turn.node.append(element("div", { class: "said" }, edits, element("p", { class: "prompt" }, prompt)), answers, verdict);
  turnsSaid.push(turn);
  byId("turns").append(turn.node);
  scrollTo(0, document.documentElement.scrollHeight);
  const stopper = new AbortController();
  running.add(stopper);
  byId("send").textContent = "Stop";
  byId("send").classList.add("stop");
  const each = (place) => answer(views[place], used[place], prompt, stopper);
  const whole = [];
  if (byId("order").value === "once") whole.push(...await Promise.all(used.map((_, place) => each(place))));
  else for (const place of order(used)) whole.push(await each(place));
  running.delete(stopper);
  byId("send").textContent = "Send";
  byId("send").classList.remove("stop");
  const isWhole = whole.every(Boolean);
  if (isPair && whole.length === 2 && isWhole) compare(views, verdict);
  return isWhole;
}

// ---- what there is to choose from -----------------------------------------------------------

function optionOf(card) {
  const option = document.createElement("option");
  const model = card.outrider[0]?.model_id;
  const isTier = card.outrider.length === 1 && card.id === card.outrider[0].tier;
  option.value = card.id;
  option.textContent = isTier && model && model !== card.id ? `${card.id}: ${model}` : card.id;
  return option;
}

// The names that `model` accepts, grouped by server. Local checkpoints have a device.
function showModels(cards) {
  for (const side of sides) showNames(side.model, cards);
  const local = cards.flatMap((card) => card.outrider).filter((behind) => "device" in behind);
  const tiers = new Set(local.map((behind) => behind.tier));
  const has = {
    drafts: tiers.has("large"),
    choice: tiers.size > 0 && cards.some((card) => card.outrider.some((one) => !("device" in one))),
  };
  for (const item of document.querySelectorAll("[data-needs]")) item.hidden = !has[item.dataset.needs];
  saySetup();
}

function showNames(select, cards) {
  const chosen = select.value;
  const groups = new Map();
  for (const card of cards.filter((card) => card.id !== "auto")) {
    const behind = card.outrider[0] ?? {};
    const place = !behind.tier || "device" in behind
      ? "on this machine" : `${behind.tier} (${behind.server})`;
    if (!groups.has(place)) groups.set(place, []);
    groups.get(place).push(optionOf(card));
  }
  select.replaceChildren(optionOf({ id: "auto", outrider: [] }), ...[...groups].map(([name, options]) => {
    const group = document.createElement("optgroup");
    group.label = name;
    group.append(...options);
    return group;
  }));
  if (cards.some((card) => card.id === chosen)) select.value = chosen;
}

let listed = "";  // the last answer of /v1/models

function showList(list) {
  if (list !== listed) showModels(JSON.parse(list).data);  // an open menu is left alone
  listed = list;
}

async function list() {
  const response = await ask("/v1/models");
  if (response.status === 401 && !isShut) shut(await reasonOf(response));
  else if (response.ok) showList(await response.text());
}

async function showState() {
  let text = "no connection", ready = false, why = "";
  try {
    const response = await fetch("/ready");
    ready = response.ok;
    text = "ready";
    if (!ready) {
      const { error } = await response.json();
      text = error.code === "engine_not_ready" ? "loading" : "not ready";
      why = error.message;
    }
    if (!isShut) await list();
  } catch { /* shown as no connection */ }
  byId("state").textContent = text;
  byId("state").title = why;
  byId("state").className = ready ? "ready" : text === "no connection" ? "broken" : "";
  setTimeout(showState, ready ? 10000 : 1000);
}

const prompt = byId("prompt");
const grow = () => { prompt.style.height = "1.6em"; prompt.style.height = `${prompt.scrollHeight}px`; };
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running.size) { running.forEach((stopper) => stopper.abort()); return; }
  const text = prompt.value.trim();
  if (!text) return;
  if (edited) dropFrom(edited);
  edit(null);
  run(text);
});
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !running.size) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
byId("new").addEventListener("click", () => {
  running.forEach((stopper) => stopper.abort());
  tree.hide();
  for (const side of sides) side.messages = [];
  turnsSaid.length = pairs.length = 0;
  byId("turns").replaceChildren();
  for (const item of byId("legend").children) item.hidden = true;
  byId("welcome").hidden = false;
  byId("new").hidden = true;
  byId("setup").open = true;
  edit(null);
});
byId("keep").addEventListener("click", () => edit(null));
byId("setup").addEventListener("input", () => { pairs.length = 0; saySetup(); });
byId("one").addEventListener("click", () => showPair(false));
byId("two").addEventListener("click", () => {
  showPair(true);
  if (!sides[1].speculation.closest("label").hidden && sides[0].model.value === sides[1].model.value) {
    for (const side of sides) side.model.value = "large";
    sides[1].speculation.checked = !sides[0].speculation.checked;
    saySetup();
  }
});
const turns = byId("turns");
turns.addEventListener("mouseover", (event) => {
  const token = event.target.token;
  if (token !== undefined && !tree.isLast) tree.showStep(event.target.closest(".text, .thinking").view, token);
});
turns.addEventListener("keydown", walk);
turns.addEventListener("copy", (event) => {  // without the line ends that browsers put between parts
  const range = getSelection().rangeCount ? getSelection().getRangeAt(0) : null;
  const from = range?.commonAncestorContainer;
  if (!from?.parentElement?.closest(".text, .thinking") && !from?.classList?.contains("text")) return;
  event.clipboardData.setData("text/plain", range.cloneContents().textContent);
  event.preventDefault();
});
turns.addEventListener("click", (event) => {
  const button = event.target.closest("article button"), card = button?.closest("article");
  if (!button) return;
  const { view } = card.querySelector(".text");
  if (button.classList.contains("last")) {
    if (tree.isLast && tree.view === view) tree.hide();
    else tree.showStep(view, view.tokens.length - 1, true);
  } else if (button.classList.contains("retry")) {
    if (running.size) return;
    dropFrom(card.turn);
    run(card.turn.prompt);
  } else if (button.dataset.copy) {
    copy(button, button.dataset.copy === "text" ? view.content : codeOf(view.request, button.dataset.copy));
  }
});
byId("tree-close").addEventListener("click", () => tree.hide());
byId("tree-last").addEventListener("click", () => {
  if (tree.view) tree.showStep(tree.view, tree.isLast ? tree.place : tree.view.tokens.length - 1, !tree.isLast);
});
new ResizeObserver(() => {  // the tree's bar stands on the message's
  byId("tree").style.setProperty("--below", `${byId("composer").offsetHeight}px`);
}).observe(byId("composer"));
beside.addEventListener("change", () => tree.hide());
addEventListener("keydown", (event) => { if (event.key === "Escape") { tree.hide(); if (edited) edit(null); } });

for (const [origin, [name]] of Object.entries(ORIGINS)) {
  if (origin === "untraced") continue;
  byId("legend").append(element("li", { "data-origin": origin, hidden: "" }, element("span", { class: origin }, name)));
}
for (const text of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => { if (!running.size) run(text); });
  byId("examples").append(button);
}
showPair(false);
const query = new URLSearchParams(location.search).get("prompt");
if (query) { prompt.value = query; }
Object.assign(page, {
  path: "/v1/models",
  async opened(response) {
    if (response.ok) showList(await response.text());
    byId("prompt").focus();
  },
  closed() { listed = ""; },
  show() {
    if (isShut) tree.hide();
    byId("composer").hidden = byId("setup").hidden = byId("welcome").hidden = byId("legend").hidden = isShut;
  },
});
startAccess();
showState();
