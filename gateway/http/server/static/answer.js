// ---- an answer on the page ------------------------------------------------------------------

const PART_TOKENS = 64;  // a longer answer is laid out in parts: only what is on show costs time
const running = new Set();  // the AbortControllers of the answers that are being written
// The data of each event. Upstream servers may format events differently, and send comments.
async function* readEvents(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += decoder.decode(value, { stream: true });
    const events = buffer.split(/\r\n\r\n|\n\n|\r\r/);
    buffer = events.pop();
    for (const event of events) {
      const lines = event.split(/\r\n|\n|\r/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.replace(/^data: ?/, "")).join("\n");
    }
  }
}

const waiting = new Set();  // answers with something to show
let frame = 0;

// Text comes faster than screens are drawn: what came is shown once a frame.
function soon(view) {
  waiting.add(view);
  frame ||= requestAnimationFrame(showWaiting);
}

function showWaiting() {
  frame = 0;
  const isAtEnd = scrollY + innerHeight >= document.documentElement.scrollHeight - 80;
  for (const view of waiting) view.flush();
  waiting.clear();
  if (isAtEnd) scrollTo(0, document.documentElement.scrollHeight);
}

// The legend names the origins that have occurred.
function showOrigin(origin) {
  byId("legend").querySelector(`[data-origin=${origin}]`)?.removeAttribute("hidden");
}

const shown = (text) => text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";

// Where the next token goes. Parts end with a line, so that the split does not show.
function partOf(target) {
  const last = target.lastElementChild;
  const isFull = last?.childElementCount >= PART_TOKENS && last.lastChild.textContent.endsWith("\n");
  if (last && !isFull) return last;
  const part = document.createElement("div");
  part.className = "part";
  target.append(part);
  return part;
}

class View {
  constructor(card) {
    this.card = card;
    this.text = card.querySelector(".text");
    this.thinking = card.querySelector(".thinking");
    this.tokens = [];  // {text, origin, step, from, span}; `from`: where it begins in the source
    this.trees = new Map();
    this.counts = {};
    this.queue = [];
    this.content = "";
    this.source = "";  // the answer as its tokens spell it
    this.places = [];  // the numbers of its tokens: those of thinking are no part of it
    this.markdown = byId("markdown").checked ? new Markdown(this.text, (from, to) => this.piece(from, to)) : null;
    this.request = null;
    this.seen = { startMs: 0, firstMs: 0, lastMs: 0, chunks: 0, tokens: 0, left: [] };
    this.text.view = this.thinking.view = this;
    this.text.classList.toggle("formatted", Boolean(this.markdown));
  }

  add(target, text, origin, step) {
    this.queue.push({ target, text, origin, step });
  }

  flush() {
    for (const queued of this.queue) {
      const token = { ...queued, from: this.source.length, span: null }, place = this.tokens.length;
      this.tokens.push(token);
      this.counts[token.origin] = (this.counts[token.origin] ?? 0) + 1;
      if (this.markdown && token.target === this.text) {
        this.source += token.text;
        this.places.push(place);
      } else {
        partOf(token.target).append(this.spanOf(place, token.text));
      }
    }
    if (this.markdown && this.queue.length) this.markdown.update(this.source);
    this.queue = [];
    this.showLive();
    if (tree.view === this && tree.isLast) tree.showStep(this, this.tokens.length - 1, true);
  }

  spanOf(place, text) {
    const token = this.tokens[place];
    const span = element("span", { class: `t ${token.origin}` }, text);
    span.token = place;
    token.span = span;
    if (tree.view === this && tree.place === place) span.classList.add("at");
    return span;
  }

  // A stretch of the source as spans: one for each token in it.
  piece(from, to) {
    const { tokens, places, source } = this;
    let low = 0, high = places.length - 1;
    while (low < high) {  // the last token that begins at or before it
      const middle = (low + high + 1) >> 1;
      if (tokens[places[middle]].from <= from) low = middle; else high = middle - 1;
    }
    const spans = [];
    for (; low < places.length && tokens[places[low]].from < to; low += 1) {
      const token = tokens[places[low]];
      const text = source.slice(Math.max(from, token.from), Math.min(to, token.from + token.text.length));
      if (text) spans.push(this.spanOf(places[low], text));
    }
    return spans;
  }

  showLive() {
    const { seen, card } = this;
    const say = (name, text) => { card.querySelector(`[data-live=${name}]`).textContent = text; };
    if (seen.firstMs) {
      card.querySelector(".live").hidden = false;
      say("ttft", milliseconds((seen.firstMs - seen.startMs) / 1000));
    }
    say("tokens", `${seen.tokens}`);
    if (this.speed) say("speed", this.speed.toFixed(0));
    const mix = card.querySelector(".mix");
    const kinds = Object.keys(ORIGINS).filter((origin) => this.counts[origin]);
    for (const origin of kinds) showOrigin(origin);
    mix.hidden = !kinds.length;
    while (mix.children.length < kinds.length) mix.append(document.createElement("i"));
    kinds.forEach((origin, place) => {
      mix.children[place].className = origin;
      mix.children[place].style.flexGrow = this.counts[origin];
    });
    const words = kinds.map((origin) => `${this.counts[origin]} ${ORIGINS[origin][0]}`).join(", ");
    mix.title = words;
    mix.setAttribute("aria-label", `Tokens: ${words}`);
  }

  get speed() {
    const { seen } = this, spanMs = seen.lastMs - seen.firstMs;
    return seen.tokens > 1 && spanMs > 10 ? (seen.tokens - 1) / spanMs * 1000 : 0;
  }

  route(tier, reason, arm, handOff) {
    const line = this.card.querySelector(".route span"), name = element("em", {}, tier);
    name.style.setProperty("--ink", tierLine(tier));
    const isLocal = tier === "small" || tier === "large";
    line.replaceChildren(isLocal ? "The " : "", name, isLocal ? " model " : " ", `${sentenceOf(reason, handOff)}${arm ? ` Arm ${arm}.` : ""}`);
    line.title = reason ?? "";
  }

  fail(message) { fail(this.card, message); }

  report(report, usage) {
    if (usage) this.seen.tokens = usage.completion_tokens ?? this.seen.tokens;
    const facts = factsOf(report, usage, this.seen).concat(this.seen.left);
    this.card.querySelector(".more").hidden = false;
    showFacts(this.card.querySelector("dl"), facts);
    this.route(report.tier, report.reason, report.arm, report.hand_off);
    this.card.querySelector(".warning").textContent = report.degraded
      ? "Another server should have answered and could not." : "";
  }

  // Shows one event's data. Returns false where it ends the answer with an error.
  event(event) {
    const { seen } = this;
    if (event.error) {
      const what = event.error.message ?? "It broke off.";
      this.fail(seen.chunks ? `The answer ends here. ${what}` : what);
      if (event.outrider?.tier) this.report(event.outrider, null);
      return false;
    }
    seen.model = event.model || seen.model;
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? {};
    seen.finish = choice?.finish_reason ?? seen.finish;
    const thinking = delta.reasoning_content ?? delta.reasoning;
    if (thinking || delta.content) {
      seen.lastMs = performance.now();
      seen.firstMs ||= seen.lastMs;
      seen.chunks += 1;
      this.content += delta.content ?? "";
      this.take(thinking ? this.thinking : this.text, thinking || delta.content, event.outrider);
      soon(this);
    }
    if (event.usage && event.outrider?.tier) this.report(event.outrider, event.usage);
    return true;
  }

  take(target, text, traced) {
    if (!traced?.tokens) {
      this.seen.tokens += 1;
      this.add(target, text, "untraced", -1);
      return;
    }
    for (const { step, nodes } of traced.trees ?? []) this.trees.set(step, nodes);
    traced.tokens.forEach(([piece, drafted], place) => {
      this.seen.tokens += 1;
      const origin = traced.origins?.[place] ?? (drafted ? "model" : "target");
      this.add(target, piece, origin, traced.steps?.[place] ?? -1);
    });
  }

  end() {
    this.flush();
    this.card.classList.remove("running", "waiting");
    this.text.removeAttribute("aria-busy");
    this.card.querySelector(".acts").hidden = false;
  }
}
