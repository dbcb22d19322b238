// A client's own page: is it better off, its losses, its weight and contribution, and every decision with its reason.
"use strict";

const client = { id: 0, run: 0, arm: null, seed: null, round: null, decision: "" };
const SHOWN_ROWS = 300;

function readClient(where) {
  const run = Number(where.get("run") ?? 0), arms = state.data.runs[run]?.arms ?? [];
  const arm = arms.findIndex((one) => one.name === where.get("arm"));
  Object.assign(client, { id: Number(where.get("client")), run, arm: arm < 0 ? null : arm, seed: where.get("seed"), round: where.get("round"), decision: "" });
}

function renderClient(place) {
  const at = valid(client, () => true);
  const who = at && state.data.runs[at.run].clients.find((one) => one.id === at.id);
  if (!who) return show(place, el("h1", {}, "No such client"), el("p", {}, el("a", { href: "#clients" }, "Back to the report")));
  Object.assign(client, at, { seed: at.seed === "all" ? String(state.data.runs[at.run].arms[at.arm].seeds[0].seed) : at.seed });
  const run = state.data.runs[client.run], arm = run.arms[client.arm], seed = seedOf(client);
  const columns = seed.clients.find((one) => one.id === who.id);
  const again = (changed) => { Object.assign(client, changed); renderClient(place); };
  for (const chart of place.charts ?? []) chart.remove();
  place.charts = [];
  const parts = [
    el("p", {}, el("a", { href: "#clients" }, "← Back to the report")),
    el("h1", { tabindex: "-1", id: "client-name" }, `${columns?.priority ? "Priority" : "Free"} client ${who.name}`),
    (run.hostile[seed.seed] ?? []).includes(who.name) ? el("p", { class: "bad" }, `In seed ${seed.seed} this client is hostile: it attacks on purpose.`) : null,
    el("p", {}, clientWords(who, arm)),
    el("h2", {}, "Is it better off?"), ...betterOff(who, run),
    el("h2", {}, "Rounds"),
    el("div", { class: "controls" }, ...chooser(client, () => true, again)),
  ];
  if (!columns) return show(place, ...parts, el("p", {}, "This seed has no finished round yet."));
  show(place, ...parts, ...clientCharts(place, columns, seed, arm), ...decisionTable(columns, seed, again));
}

function clientWords(who, arm) {
  const rows = arm.seeds.map((seed) => seed.clients.find((one) => one.id === who.id)).filter(Boolean);
  const letters = rows.flatMap((row) => [...row.decisions]);
  const count = (wanted) => letters.filter((letter) => wanted.includes(letter)).length;
  const parts = Object.entries(LETTERS).filter(([letter]) => count(letter)).map(([letter, word]) => `${word} in ${count(letter)}`);
  const weights = rows.flatMap((row) => row.weight.filter((weight) => weight > 0));
  const gains = rows.flatMap((row) => row.contribution ?? []).filter((value) => value !== null);
  let words = `With ${arm.name}, of ${letters.length} rounds in ${rows.length} ${rows.length === 1 ? "seed" : "seeds"}: ${parts.join(", ")}.`;
  if (weights.length) words += ` Its mean weight in the aggregate, when it took part, was ${number(mean(weights), true)}.`;
  if (gains.length) {
    const change = mean(gains);
    words += ` Measured by the priority clients, its updates changed their loss by ${change > 0 ? "+" : ""}${number(change)} % on average: they ${change < 0 ? "helped" : "harmed"}.`;
  }
  const given = rows.map((row) => row.gave?.at(-1)).filter((value) => value !== undefined && value !== null);
  if (given.length) {
    const total = mean(given);
    words += ` By the ledger it gave ${total > 0 ? "+" : ""}${number(total)}: by so much its updates lowered the priority clients' loss, summed over rounds.`;
  }
  return words;
}

function betterOff(who, run) {
  const own = run.own === null ? undefined : run.tests[run.own]?.[who.id];
  const arms = run.arms.filter((arm) => arm.name !== run.own && run.tests[arm.name]?.[who.id] !== undefined);
  if (!arms.length) return [el("p", {}, "Nobody measured the final models on this client's test data.")];
  if (own === undefined) return [
    el("p", {}, "Only a run with the arm local can tell: it trains a model on this client's data alone."),
    table("Accuracy on this client's own test data", ["arm", "shared model"], arms.map((arm) => [arm.name, number(run.tests[arm.name][who.id], true)]))];
  const better = arms.filter((arm) => run.tests[arm.name][who.id] > own).map((arm) => arm.name);
  return [
    el("p", {}, better.length ? `Yes, with the shared model of ${better.join(", ")}. ` : "No: its own model serves it at least as well as every shared model. ",
      `On its own test data, a model trained by this client alone reaches ${number(own, true)} (means over seeds, after the last round).`),
    table("Accuracy on this client's own test data", ["arm", "shared model", "own model", "difference"], arms.map((arm) => {
      const gap = 100 * (run.tests[arm.name][who.id] - own);
      return [arm.name, number(run.tests[arm.name][who.id], true), number(own, true), `${gap > 0 ? "+" : ""}${gap.toFixed(1)} points`.replace("-", "−")];
    }))];
}

function clientCharts(place, columns, seed, arm) {
  const step = state.data.step, rounds = columns.loss.map((_, i) => i * step + 1);
  const reference = rounds.map((round) => seed.reference[round - 1] ?? null);
  const made = [];
  const add = (title, series, format) => {
    if (!series.some((one) => one.values.some((value) => value !== null))) return;
    const host = el("div", { class: "chart small" });
    made.push(el("div", {}, el("h3", {}, title), host));
    const chart = new Chart(host, `${title}, over rounds`);
    place.charts.push(chart);
    queueMicrotask(() => chart.draw({ x: rounds, series, xLabel: "round", whole: true, yLabel: "", format }));
  };
  const border = (sign) => rounds.map((round, i) => {
    const epsilon = seed.epsilon[round - 1];
    const value = typeof epsilon === "number" && epsilon > 0 && reference[i] !== null ? reference[i] + sign * epsilon : null;
    return value !== null && value > 0 ? value : null; // no loss is below 0
  });
  const borders = [{ label: "F(w) + ε", values: border(1), tint: "--soft", dash: [2, 3], width: 1 }, { label: "F(w) − ε", values: border(-1), tint: "--soft", dash: [2, 3], width: 1 }];
  add("Loss of the model it received", [
    { label: "on this client's data", values: columns.loss, tint: tintOf(arm.style) },
    { label: "F(w), of the priority clients", values: reference, tint: "--soft", dash: [6, 4], width: 1.6 },
    ...(columns.priority ? [] : borders.filter((one) => one.values.some((value) => value !== null)))], number);
  add("Weight in the aggregate", [{ label: "weight", values: columns.weight, tint: tintOf(arm.style) }], (value) => number(value, true));
  if (columns.contribution) add("Contribution: change of the priority clients' loss with its update (below 0 helps)",
    [{ label: "change", values: columns.contribution, tint: tintOf(arm.style) }], (value) => `${number(value)} %`);
  if (columns.gave) add("Given so far: fall of the priority clients' loss due to its updates",
    [{ label: "given so far", values: columns.gave, tint: tintOf(arm.style) }], number);
  const tell = (i) => `round ${i + 1}: ${LETTERS[columns.decisions[i]]}`;
  const used = [...new Set(columns.decisions)].filter((letter) => letter !== "-");
  return [el("div", { class: "side-by-side" }, ...made), el("h3", {}, "Decisions"), decisionLegend(used),
    strip(columns.decisions.length, paintDecisions(columns.decisions), "decisions", null, tell)];
}

function decisionTable(columns, seed, again) {
  const step = state.data.step, wanted = client.round === null ? null : Number(client.round);
  const seen = [...new Set(columns.decisions)];
  let rows = columns.reasons.map((reason, i) => ({ round: i * step + 1, letter: columns.decisions[i * step], reason: state.data.reasons[reason], i }))
    .filter((row) => client.decision === "" || row.letter === client.decision);
  const cut = rows.length > SHOWN_ROWS;
  if (cut) rows = rows.slice(Math.max(0, Math.min(rows.length - SHOWN_ROWS, rows.findIndex((row) => row.round >= (wanted ?? 0)) - 20))).slice(0, SHOWN_ROWS);
  const head = ["round", "decision", "loss", "accuracy", "weight", "reason"];
  const body = rows.map((row) => el("tr", { class: row.round === wanted ? "picked" : null },
    el("th", { scope: "row" }, String(row.round)), el("td", {}, LETTERS[row.letter]), el("td", {}, number(columns.loss[row.i])),
    el("td", {}, number(columns.accuracy[row.i], true)), el("td", {}, number(columns.weight[row.i], true)), el("td", { class: "words" }, row.reason)));
  const box = el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Decisions with reasons" },
    el("table", {}, el("caption", { class: "hidden" }, "Every round's decision about this client, and why"),
      el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", class: text === "reason" ? "words" : null }, text)))), el("tbody", {}, ...body)));
  queueMicrotask(() => {
    const picked = box.querySelector(".picked");
    if (picked) box.scrollTop = picked.offsetTop - box.clientHeight / 2;
  });
  return [
    el("div", { class: "controls" }, select("Show decisions", [["", "all"], ...seen.map((letter) => [letter, LETTERS[letter]])], client.decision, (decision) => again({ decision }))),
    step > 1 ? el("p", { class: "soft" }, `This run is large: the page holds every ${step}th round in detail.`) : null,
    cut ? el("p", { class: "soft" }, `${SHOWN_ROWS} of the rows are shown.`) : null, box].filter(Boolean);
}
