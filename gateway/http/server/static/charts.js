// ---- charts, drawn without a library ----------------------------------------------------------

const SPAN_S = 300;
const GAP_S = 15;  // a longer gap between two samples: no line joins its sides
const SOURCES = new Set(["model", "suffix", "prediction", "grammar", "head", "reused"]);

// ---- words and figures ---------------------------------------------------------------------

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function brief(value, unit = "") {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (unit === "ms" && size >= 10000) return `${brief(value / 1000)} s`;
  if (unit === "USD") return size && size < 0.01 ? `$${value.toExponential(1)}` : `$${value.toFixed(2)}`;
  if (unit === "%") return `${(value * 100).toFixed(size && size < 0.0995 ? 1 : 0)} %`;
  const text = size >= 1e6 ? `${(value / 1e6).toFixed(1)}M` : size >= 1e4 ? `${(value / 1e3).toFixed(1)}k`
    : size >= 100 || Number.isInteger(value) ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
  return unit ? `${text} ${unit}` : text;
}

// The colour of a series: a tier's or a source's own, else the text's.
const ink = (colour) => `--ink: ${colour ?? "var(--text)"}`;
const sourceLine = (name) => (SOURCES.has(name) ? `var(--${name}-line)` : "var(--text)");

// The top of an axis of counts: whole, and even where it has a line in the middle.
const roundUpCount = (value) => (value <= 1 ? 1 : Math.max(2, Math.ceil(roundUp(value) / 2) * 2));

// A round number at or above a value, that three grid lines divide well.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999) * power;
}

// ---- charts --------------------------------------------------------------------------------

const cards = new Map();

// A card in the grid, made when it is first wanted: its heading, legend and body stay.
function card(id, title, isWide = false) {
  if (cards.has(id)) return cards.get(id);
  const legend = element("div", { class: "legend" });
  const caption = element("figcaption", {}, element("h2", { id: `${id}-title` }, title), legend);
  const body = element("div");
  const figure = element("figure", { id, class: `card${isWide ? " wide" : ""}`, "aria-labelledby": `${id}-title` },
    caption, body);
  byId("charts").append(figure);
  const made = { figure, legend, body, cursor: null };
  cards.set(id, made);
  return made;
}

function showLegend(target, series) {
  const text = series.map((one) => one.name).join();
  if (target.dataset.names === text) return;
  target.dataset.names = text;
  target.replaceChildren(...series.map((one) => element("span",
    { style: ink(one.colour), class: [one.dashed && "dashed", one.band && "band", one.far && "far"].filter(Boolean).join(" ") }, one.name)));
}

// Grid lines with their figures; one in the middle unless it would be half of a count. A small chart has the top's alone.
function axes(svg, size, top, unit, isCount = false) {
  for (const part of isCount && top % 2 ? [0, 1] : [0, 0.5, 1]) {
    const y = size.bottom - part * (size.bottom - size.top);
    svg.append(drawn("line", { class: "grid", x1: size.left, x2: size.right, y1: y, y2: y }));
    if (size.isSpark && part < 1) continue;  // a nought would stand upon the bars
    svg.append(drawn("text", size.isSpark ? { x: 0, y: y - 3 } : { x: size.left - 6, y: y + 4, "text-anchor": "end" },
      brief(top * part, unit)));
  }
}

function canvas(place, label) {
  let svg = place.body.querySelector("svg");
  if (!svg) {
    svg = drawn("svg", { role: "img", tabindex: "0" });
    const readout = element("div", { class: "readout", "aria-hidden": "true" });
    place.body.append(svg);
    place.figure.append(readout);
    place.readout = readout;
    svg.addEventListener("pointermove", (event) => point(place, event.offsetX));
    svg.addEventListener("pointerleave", () => point(place, null));
    svg.addEventListener("blur", () => point(place, null));
    svg.addEventListener("keydown", (event) => stepCursor(place, event));
  }
  const width = Math.max(120, place.body.clientWidth), isSpark = width < 220;
  const height = isSpark ? 96 : 176;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", label);
  svg.replaceChildren();
  return { svg, size: { left: isSpark ? 0 : 58, right: width - 6, top: isSpark ? 14 : 10, bottom: height - 22, isSpark } };
}

// Values over time. `series`: [{name, values, ...}], values as long as `ages` (seconds ago). A series is a
// line, `dashed` or not; with `band` an area down to the values `base`, or to zero; `far` is a fainter one.
function lines(id, title, ages, series, unit, { most = null, isCount = false } = {}) {
  const place = card(id, title);
  showLegend(place.legend, series);
  const last = series.map((one) => `${one.name} ${brief(one.told?.findLast(isNumber) ?? one.values.findLast(isNumber), unit)}`).join(", ");
  const { svg, size } = canvas(place, `${title}, the latest: ${last}. Arrow keys read earlier values.`);
  const peak = Math.max(0, ...series.flatMap((one) => one.values.filter(isNumber)));
  const top = most ?? (isCount ? roundUpCount(peak) : roundUp(peak));
  axes(svg, size, top, unit, isCount);
  const x = (age) => size.right - Math.max(0, age) / SPAN_S * (size.right - size.left);
  const y = (value) => size.bottom - Math.min(value / top, 1) * (size.bottom - size.top);
  for (const minutes of size.isSpark ? [4, 0] : [4, 3, 2, 1, 0]) {
    const anchor = minutes ? "middle" : "end";
    svg.append(drawn("text", { x: x(minutes * 60), y: size.bottom + 16, "text-anchor": anchor },
      minutes ? `${minutes} min` : "now"));
  }
  for (const one of series) {
    const style = ink(one.colour);
    for (const run of runsOf(one.values, ages)) {
      const path = (values) => run.map((at) => `${x(ages[at]).toFixed(1)} ${y(values[at]).toFixed(1)}`);
      const shape = path(one.values), isAlone = run.length === 1;
      if (one.band && !isAlone) {
        const floor = path(one.base ?? ages.map(() => 0)).reverse();
        svg.append(drawn("path", { class: `area ${one.far ? "far" : ""}`, style, d: `M${[...shape, ...floor].join("L")}Z` }));
      } else if (isAlone) {
        svg.append(drawn("circle", { class: "dot", style, r: 2.2, cx: x(ages[run[0]]), cy: y(one.values[run[0]]) }));
      }
      if (!isAlone && !one.bare) svg.append(drawn("path", { class: `curve ${one.dashed ? "dashed" : ""}`, style, d: `M${shape.join("L")}` }));
    }
  }
  place.read = (at) => `${brief(Math.max(0, ages[at]))} s ago: ` +
    series.map((one) => `${one.name} ${brief((one.told ?? one.values)[at], unit)}`).join(", ");
  place.xs = ages.map(x);
  place.size = size;
  showCursor(place);
}

// The places of values that are joined: runs without a hole, within the time that is shown.
function runsOf(values, ages) {
  const runs = [[]];
  values.forEach((value, at) => {
    const isShown = isNumber(value) && ages[at] <= SPAN_S;
    if (!isShown || ages[at - 1] - ages[at] > GAP_S) runs.push([]);
    if (isShown) runs.at(-1).push(at);
  });
  return runs.filter((run) => run.length);
}

// Series upon one another: each is an area from the sum of those below it.
function stacked(series) {
  let base = series[0]?.values.map(() => 0) ?? [];
  return series.map((one) => {
    const values = one.values.map((value, at) => value + base[at]);
    const made = { ...one, values, base, told: one.values, band: true };
    base = values;
    return made;
  });
}

// Groups of bars. `groups`: names along the axis, each a `word`; `series`: [{name, values}].
function bars(id, title, groups, series, unit, most, word = "depth") {
  const place = card(id, title);
  showLegend(place.legend, series);
  const told = series.map((one) => `${one.name}: ${one.values.map((v) => brief(v, unit)).join(", ")}`).join("; ");
  const { svg, size } = canvas(place, `${title}, ${told || "nothing yet"}`);
  axes(svg, size, most, unit);
  const step = (size.right - size.left) / Math.max(1, groups.length);
  const thick = Math.min(22, step * 0.8 / Math.max(1, series.length));
  const middle = (at) => size.left + (at + 0.5) * step;
  const every = Math.ceil((6 + 7 * Math.max(0, ...groups.map((name) => name.length))) / Math.max(1, step));  // names have room
  groups.forEach((name, at) => {
    if (at % every === 0) {
      svg.append(drawn("text", { x: middle(at), y: size.bottom + 16, "text-anchor": "middle" }, name));
    }
    series.forEach((one, i) => {
      const value = one.values[at];
      if (!isNumber(value)) return;
      const height = Math.max(1, Math.min(1, value / most) * (size.bottom - size.top));
      svg.append(drawn("rect", { class: "bar", style: ink(series[i].colour), width: Math.max(1, thick - 2), height, rx: 2,
        x: middle(at) + (i - series.length / 2) * thick + 1, y: size.bottom - height }));
    });
  });
  place.read = (at) => `${word} ${groups[at]}: ` + series.map((one) => `${one.name} ${brief(one.values[at], unit)}`).join(", ");
  place.xs = groups.map((_, at) => middle(at));
  place.size = size;
  showCursor(place);
}

function point(place, x) {
  place.cursor = x === null || !place.xs?.length ? null
    : place.xs.reduce((best, at, i) => (Math.abs(at - x) < Math.abs(place.xs[best] - x) ? i : best), 0);
  showCursor(place);
}

function stepCursor(place, event) {
  const moves = { ArrowLeft: -1, ArrowRight: 1 };
  if (event.key === "Escape") { point(place, null); return; }
  if (!(event.key in moves) || !place.xs?.length) return;
  event.preventDefault();
  const count = place.xs.length;
  const from = place.cursor ?? (event.key === "ArrowLeft" ? count : -1);
  place.cursor = Math.max(0, Math.min(count - 1, from + moves[event.key]));
  showCursor(place);
  byId("spoken").textContent = place.read(place.cursor);
}

function showCursor(place) {
  const svg = place.body.querySelector("svg");
  svg.querySelector(".cursor")?.remove();
  const isOn = place.cursor !== null && place.cursor < place.xs.length;
  place.readout.textContent = isOn ? place.read(place.cursor) : "";
  if (isOn) {
    const x = place.xs[place.cursor];
    svg.append(drawn("line", { class: "cursor", x1: x, x2: x, y1: place.size.top, y2: place.size.bottom }));
  }
}

function table(heads, rows, label) {
  const names = heads.map((head) => head.replace("#", ""));
  const row = (cells, isHead) => element("tr", {}, ...cells.map((cell, i) => {
    const attributes = isHead ? { scope: "col" } : i === 0 ? { scope: "row" } : { "data-head": names[i] };
    if (heads[i].startsWith("#")) attributes.class = "number";
    return element(isHead || i === 0 ? "th" : "td", attributes, cell instanceof Node ? cell : String(cell));
  }));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    element("table", {}, element("thead", {}, row(names, true)),
      element("tbody", {}, ...rows.map((cells) => row(cells, false)))));
}

// New content in a card, without losing where a table is scrolled to and what has the focus.
function renew(target, ...nodes) {
  const before = [...target.querySelectorAll(".scroll")];
  const left = before.map((one) => one.scrollLeft), focused = before.indexOf(document.activeElement);
  target.replaceChildren(...nodes);
  [...target.querySelectorAll(".scroll")].forEach((one, i) => {
    one.scrollLeft = left[i] ?? 0;
    if (i === focused) one.focus({ preventScroll: true });
  });
}

function meter(share) {
  if (!isNumber(share)) return "–";
  const bar = element("i", { style: `width: ${(share * 100).toFixed(1)}%` });
  return element("span", {}, element("span", { class: "meter", "aria-hidden": "true" }, bar), brief(share, "%"));
}

// ---- reports on experiments ----------------------------------------------------------------

function interval(range, low, high, zero) {
  const x = (value) => 4 + Math.max(0, Math.min(1, (value - low) / (high - low || 1))) * 136;
  const svg = drawn("svg", { class: "interval", viewBox: "0 0 144 16", "aria-hidden": "true" });
  if (isNumber(zero)) svg.append(drawn("line", { class: "zero", x1: x(zero), x2: x(zero), y1: 1, y2: 15 }));
  svg.append(drawn("line", { x1: x(range.low ?? low), x2: x(range.high ?? high), y1: 8, y2: 8 }));
  if (isNumber(range.estimate)) svg.append(drawn("circle", { cx: x(range.estimate), cy: 8, r: 3.4 }));
  return svg;
}

const PRIMARY = {  // the metric that an experiment decides by: where an arm has it, and how it reads
  attainment: ["shares", "attained", 100, "points", "%", "objectives met"],
  ttft: ["means", "ttft_s", 1000, "ms", "ms", "time to first token"],
  tpot: ["means", "inter_token_s", 1000, "ms", "ms", "time between tokens"],
  e2e: ["means", "duration_s", 1000, "ms", "ms", "time to the end"],
  cost: ["means", "cost_usd", 1, "USD", "USD", "cost of a request"],
};

// An interval in words; an arm's share is a percentage, a difference of shares is in points.
function spread(range, scale, unit) {
  if (!range || !isNumber(range.estimate)) return "–";
  const told = (value) => (isNumber(value) ? brief(value * scale, unit === "points" ? "" : unit) : "?");
  const tail = unit === "points" ? " points" : "";
  return `${told(range.estimate)}${tail} (${told(range.low)} to ${told(range.high)})`;
}

function differenceOf(comparison, scale, unit, widest) {
  const range = comparison?.primary?.difference;
  if (!range) return "–";
  const text = spread(range, scale, unit);
  return element("span", {}, interval(range, -widest, widest, 0), ` ${text}`);
}

function showExperiment(one) {
  const [kind, name, scale, unit, armUnit, words] = PRIMARY[one.metric] ?? [];
  const armScale = armUnit === "%" ? 1 : scale;
  const differences = one.comparisons.map((each) => each.primary?.difference).filter(Boolean);
  const bounds = differences.flatMap((range) => [range.low, range.high, range.estimate]).filter(isNumber);
  const widest = Math.max(...bounds.map(Math.abs), 1e-12);
  const rows = one.arms.map((arm) => {
    const comparison = one.comparisons.find((each) => each.arm === arm.arm);
    const note = arm.stopped ? `stopped: ${arm.stopped}` : arm.arm === one.control ? "control" : brief(arm.weight, "%");
    return [arm.arm, note, brief(arm.requests), kind ? spread(arm[kind][name], armScale, armUnit) : "–",
      spread(arm.quantiles.ttft_s?.p95, 1000, "ms"),
      arm.arm === one.control ? "–" : differenceOf(comparison, scale ?? 1, unit ?? "", widest)];
  });
  const title = `${one.experiment}, version ${one.version}, ${one.state}`;
  return element("section", { class: "experiment" }, element("h3", {}, title),
    element("p", {}, one.state === "draft" ? `It has not begun: outrider experiment start ${one.experiment}` : one.verdict.text),
    table(["arm", "", "#requests", words ?? one.metric, "first token p95", "difference to the control"],
      rows, `Arms of ${one.experiment}`));
}
