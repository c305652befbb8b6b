// ---- what is said of answers, in plain words --------------------------------------------------

const HAND_OFFS = {
  policy: "its policy asks for that",
  quality: "the question looks too hard for the small model",
  confidence: "the small model's beginning was too weak",
  load: "the local models are busy",
  capability: "the local models cannot do this",
  failure: "the first choice failed",
};
// In the order of the bars; what each is called, and what is said of a token.
const ORIGINS = {
  small: ["small model's answer", "Written by the small model."],
  model: ["drafted by the small model", "Drafted by the small model, accepted by the large one."],
  head: ["drafted by reading the large model", "Drafted from the large model's hidden states, accepted by it."],
  suffix: ["drafted from repeated text", "Drafted from text that repeats, accepted by the large model."],
  prediction: ["drafted from the prediction", "The request had predicted it, and the large model confirmed it."],
  reused: ["reused at escalation", "The small model had written it before the large one took over, which confirmed it."],
  grammar: ["forced by the grammar", "The only token that the grammar allowed."],
  target: ["large model's own", "Chosen by the large model."],
  untraced: ["not traced", "The server does not report the source of this text."],
};

const milliseconds = (seconds) => `${(seconds * 1000).toFixed(0)} ms`;
const plural = (count, noun, nouns = `${noun}s`) => `${count} ${count === 1 ? noun : nouns}`;
const chance = (text) => `${Math.round(Number(text) * 100)} %`;

// A route's reason as a sentence: [pattern of the gateway's words, the sentence after the tier's name].
// The last reason of several is the one that decided.
const REASONS = [
  [/cascade: small answer too weak \(([\d.]+) < ([\d.]+)\) after (\d+)/, (found) => `answered. The small model began; after ${plural(Number(found[3]), "token")} it was ${chance(found[1])} likely to be right, and ${chance(found[2])} are wanted.`],
  [/cascade: small answer went astray .*after (\d+)/, (found) => `went on. The small model had begun, and went astray after ${plural(Number(found[1]), "token")}.`],
  [/cascade: small answer kept \(([\d.]+)/, (found) => `answered. Its beginning was judged: ${chance(found[1])} likely to be right.`],
  [/small model begins under watch/, () => "begins, and its first tokens are judged."],
  [/small model likely right \(([\d.]+)/, (found) => `answered. The question looks easy: ${chance(found[1])} likely to be right.`],
  [/small model too weak \(([\d.]+)/, (found) => `answered. The question looks hard for the small one: ${chance(found[1])} likely to be right.`],
  [/^requested|^named|asked for/, () => "answered, as you asked."],
  [/too long/, () => "answered. The conversation is too long for the other model."],
  [/, (\w+) answers all$/, () => "answered. Nothing is set up to choose between models here."],
];

function sentenceOf(reason, handOff) {
  const last = (reason ?? "").split("; ").findLast((part) => REASONS.some(([pattern]) => pattern.test(part)));
  const [pattern, words] = REASONS.find(([one]) => last !== undefined && one.test(last)) ?? [];
  if (pattern) return words(pattern.exec(last));
  if (HAND_OFFS[handOff]) return `answered, because ${HAND_OFFS[handOff]}.`;
  return reason ? `answered: ${reason.replace(/^router: /, "")}.` : "answered.";
}

function showFacts(list, facts) {
  list.replaceChildren(...facts.map(
    ([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

// What is known of an answer. An upstream tier reports other fields than a local one, and an
// error event only some of them.
function factsOf(report, usage, seen) {
  const facts = [["tier", report.tier]];
  if (seen.model && seen.model !== report.tier) facts.push(["model", seen.model]);
  facts.push(["reason", report.reason]);
  if (report.hand_off) {
    facts.push(["handed off", HAND_OFFS[report.hand_off] ?? report.hand_off]);
  }
  if (report.confidence != null) facts.push(["confidence", report.confidence.toFixed(2)]);
  if (report.escalated) {
    const small = (report.reused_tokens ?? 0) + report.discarded_tokens;
    facts.push(["small model's beginning", report.reused_tokens === undefined
      ? `${plural(small, "token")} given up` : `${report.reused_tokens} of ${small} tokens reused`]);
  }
  const ttftS = report.ttft_s ?? (seen.firstMs ? (seen.firstMs - seen.startMs) / 1000 : null);
  if (ttftS !== null) facts.push(["first token", milliseconds(ttftS)]);
  const tokens = usage?.completion_tokens;
  if (tokens > 1 && seen.lastMs - seen.firstMs > 10) {  // less is one packet: no rate
    const rate = (tokens - 1) / (seen.lastMs - seen.firstMs) * 1000;
    facts.push(["speed", `${rate.toFixed(0)} tok/s`]);
  }
  if (tokens != null) {
    const source = report.usage_source;
    facts.push(["tokens", source && source !== "reported" ? `${tokens}, ${source}` : `${tokens}`]);
  }
  if (report.cost_usd != null) facts.push(["cost", `$${report.cost_usd.toFixed(6)}`]);
  if (report.attempts > 1) facts.push(["attempts", `${report.attempts}`]);
  if (report.hedged) facts.push(["hedged", "yes"]);
  if (report.continuations > 0) facts.push(["continued", plural(report.continuations, "time")]);
  if (report.drafted_tokens > 0) {
    facts.push(["drafted", `${report.drafted_tokens}, ${report.accepted_tokens} accepted`]);
    facts.push(["per pass", report.mean_emitted_tokens.toFixed(2)]);
  }
  if (seen.finish && seen.finish !== "stop") facts.push(["ended by", seen.finish]);
  return facts;
}

// What a status means, in front of the gateway's own words.
function meaningOf(response, error) {
  if (response.status === 401) return "The gateway refused the key.";
  if (response.status === 403) return "This is not allowed.";
  if (response.status !== 429) return "";
  return {
    rate_limit_exceeded: "A limit is reached.",
    insufficient_quota: "The quota is used up.",
    too_many_wrong_keys: "",
  }[error.code] ?? "The gateway is busy.";
}

function duration(seconds) {
  if (seconds < 90) return `${seconds} s`;
  const minutes = Math.ceil(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.ceil(hours / 24)} days`;
}

// When to retry a refused request; empty if unknown.
function adviceOf(response) {
  const waitS = Number(response.headers.get("retry-after"));
  const isWorthIt = response.headers.get("x-should-retry") !== "false";
  if (waitS) return isWorthIt ? `in ${duration(waitS)}` : `not before ${duration(waitS)} have passed`;
  return isWorthIt ? "" : "does not help";
}

// Remaining quota; empty without limits.
function leftOf(headers) {
  return ["requests", "tokens"].filter((unit) => headers.has(`x-ratelimit-limit-${unit}`)).map((unit) => {
    const [left, limit] = ["remaining", "limit"].map(
      (what) => Number(headers.get(`x-ratelimit-${what}-${unit}`)).toLocaleString("en"));
    const reset = headers.get(`x-ratelimit-reset-${unit}`);
    return [`${unit} left`, `${left} of ${limit}${left === limit ? "" : `, all in ${reset}`}`];
  });
}

async function refusalOf(response) {
  const error = await errorOf(response), words = messageOf(response, error);
  const meaning = meaningOf(response, error);
  const limit = /\blimit ([a-z]+(?:_[a-z]+)+(?: for [\w./:-]*\w)?)/.exec(words);
  const facts = [["status", [response.status, error.code].filter(Boolean).join(" ")]];
  if (limit && response.status === 429) facts.push(["limit", limit[1]]);
  if (adviceOf(response)) facts.push(["try again", adviceOf(response)]);
  return {
    message: `${meaning} ${words}`.trim(),
    facts: facts.concat(leftOf(response.headers)),
    why: KEY_TROUBLE[error.code] ?? words,
  };
}
