// ---- spend, of the ledger ------------------------------------------------------------------

const MOST_GROUPS = 200;
const BY = ["key", "team", "model", "tier", "day"];
const SINCE = [["24h", "24 hours"], ["7d", "7 days"], ["30d", "30 days"], ["90d", "90 days"], ["", "all time"]];
const spendBy = element("select", { "aria-label": "Sum by" }, ...BY.map((name) => element("option", { value: name }, `by ${name}`)));
const spendSince = element("select", { "aria-label": "Time" }, ...SINCE.map(([value, text]) => element("option", { value }, text)));
const charts = element("div", { id: "charts", hidden: "" });

async function loadSpend() {
  const by = spendBy.value, query = new URLSearchParams({ by, limit: by === "day" ? 1000 : MOST_GROUPS });
  if (spendSince.value) query.set("since", spendSince.value);
  const usage = await call(`/v1/usage?${query}`);
  const { data, totals, savings } = usage;
  const cells = (one) => [brief(one.requests), brief(one.prompt_tokens), brief(one.cached_tokens), brief(one.completion_tokens),
    dollars(one.cost_usd), dollars(one.charge_usd)];
  const shareOf = (one) => meter(totals.charge_nanos ? one.charge_nanos / totals.charge_nanos : null);
  const rows = (by === "day" ? data.toReversed() : data).map((one) => [nameOf(one), ...cells(one), shareOf(one)]);
  if (data.length) rows.push(["all", ...cells(totals), ""]);
  showDays(by === "day" ? data : []);
  const heads = [by, "#requests", "#prompt tokens", "#of them cached", "#answer tokens", "#cost", "#charged", "share"];
  return [rowsOr(rows, heads, `Spend by ${by}`, "Nothing was spent in this time."),
    ...(usage.has_more ? [hint(`The ${data.length} dearest; the sum is of all.`)] : []),
    ...(savings ? [hint(`The ${savings.tier} tier alone would have cost ${dollars(savings.always_usd)}: ` +
      `${dollars(Math.abs(savings.saved_usd))} ${savings.saved_usd < 0 ? "less" : "more"}.`)] : [])];
}

const nameOf = (one) => (one.name ? `${one.name} (${one.group})` : one.group || "none");

// The days as bars. A chart has a width only once it is on show.
function showDays(days) {
  charts.hidden = days.length < 2;
  if (charts.hidden) return;
  card("days", "Charged a day", true);
  const series = [{ name: "charged", values: days.map((one) => one.charge_usd) }];
  bars("days", "Charged a day", days.map((one) => one.group.slice(5)), series, "USD", roundUp(Math.max(...series[0].values)), "day");
}

for (const choice of [spendBy, spendSince]) choice.addEventListener("change", () => look("spend"));
spendSince.value = "30d";
addSection("spend", "Spend", loadSpend, spendBy, spendSince);
sections.get("spend").list.before(charts);
