// The curves over rounds, or over what the rounds cost: arms, runs and seeds on and off, smoothing, spread, differences.
"use strict";

const COSTS = { round: "round", sent: "models sent, to and from clients", samples: "samples trained on" };
const curves = { measure: null, against: "round", window: 1, spread: "mean", from: "" };

function keyOf(run, arm) {
  return JSON.stringify([run, arm]);
}

function labelOf(run, arm) {
  return state.data.runs.length > 1 ? `${arm.name} · ${run.label}` : arm.name;
}

function measureOf(key) {
  return state.data.measures.find((measure) => measure.key === key) ?? state.data.measures[0];
}

// The figures of an arm's seeds that are switched on, smoothed, and less those of the arm to compare with.
function seedFigures(run, arm) {
  const other = curves.from === "" ? null : run.arms.find((one) => one.name === curves.from);
  return arm.seeds.filter((seed) => !state.seedsOff.has(seed.seed)).map((seed) => {
    const values = smooth(seed.values[curves.measure] ?? [], curves.window);
    if (curves.from === "") return values;
    const base = smooth(other?.seeds.find((one) => one.seed === seed.seed)?.values[curves.measure] ?? [], curves.window);
    return values.map((value, i) => (value === null || base[i] === null || base[i] === undefined ? null : value - base[i]));
  });
}

function shownArms() {
  return state.data.runs.flatMap((run, r) => run.arms.map((arm) => ({ run, r, arm })))
    .filter(({ r, arm }) => !state.off.has(keyOf(r, arm.name)) && (curves.against === "round" || !arm.alone));
}

function curveSeries() {
  const tables = [], series = [];
  for (const { run, r, arm } of shownArms()) {
    const seeds = seedFigures(run, arm);
    const length = Math.max(0, ...seeds.map((values) => values.length));
    if (!seeds.some((values) => values.some((value) => value !== null))) continue;
    const column = (i) => seeds.map((values) => values[i] ?? null);
    const over = (figure) => Array.from({ length }, (_, i) => figure(column(i)));
    const costs = arm.seeds.filter((seed) => !state.seedsOff.has(seed.seed)).map((seed) => cumulated(seed[curves.against] ?? []));
    const x = Array.from({ length }, (_, i) => (curves.against === "round" ? i + 1 : mean(costs.map((cost) => cost[i] ?? null))));
    const dash = DASHES[(state.data.runs.length > 1 ? r : arm.style) % DASHES.length];
    const base = { tint: tintOf(arm.style), dash };
    const add = (values, more) => { tables.push([x, values]); series.push({ ...base, values, ...more }); };
    const spreads = over(deviation);
    if (curves.spread === "seeds") for (const values of seeds) add(Array.from({ length }, (_, i) => values[i] ?? null), { width: 0.8, dash: [] });
    if (curves.spread === "quartiles" && seeds.length > 1)
      for (const part of [0.25, 0.75]) add(over((values) => quantile(values, part)), { width: 1, dash: [2, 3] });
    add(over(mean), { label: labelOf(run, arm), width: 2.2, extra: spreads });
  }
  if (!tables.length) return { x: [], series: [] };
  const joined = uPlot.join(tables.map(([x, y]) => [x, y]));
  const at = new Map(joined[0].map((value, i) => [value, i]));
  return {
    x: joined[0],
    series: series.map((one, i) => {
      const extra = one.extra && new Array(joined[0].length).fill(null);
      if (extra) tables[i][0].forEach((value, k) => { extra[at.get(value)] = one.extra[k]; });
      return { ...one, values: joined[i + 1], extra };
    }),
  };
}

function toggles(legend, items, off, change) {
  return el("fieldset", {}, el("legend", {}, legend), ...items.map(({ key, label, mark }) =>
    el("label", { class: "toggle" },
      el("input", { type: "checkbox", checked: !off.has(key), value: String(key), onchange: (event) => {
        event.target.checked ? off.delete(key) : off.add(key);
        change();
      } }), mark ? swatch(mark) : null, el("span", {}, label))));
}

function renderCurves(place) {
  const data = state.data;
  if (!data.measures.length) return show(place, el("p", {}, "No round has a figure yet."));
  curves.measure = data.measures.some((m) => m.key === curves.measure) ? curves.measure
    : data.measures.some((m) => m.key === data.headline) ? data.headline : data.measures[0].key;
  const structure = JSON.stringify([data.measures, data.runs.map((run) => [run.label, run.rounds, run.arms.map((arm) => [arm.name, arm.seeds.map((seed) => seed.seed)])])]);
  if (place.structure !== structure) {
    place.structure = structure;
    place.chart?.remove();
    const host = el("div", { class: "chart", id: "curves-chart" });
    place.figures = el("div", {});
    show(place, ...curveControls(() => drawCurves(place)), host, place.figures);
    place.chart = new Chart(host, "");
  }
  drawCurves(place);
}

function curveControls(draw) {
  const data = state.data, many = data.runs.length > 1;
  const rounds = Math.max(1, ...data.runs.map((run) => run.rounds));
  const set = (key) => (value) => { curves[key] = value; draw(); };
  const arms = data.runs.flatMap((run, r) => run.arms.map((arm) => ({
    key: keyOf(r, arm.name), label: labelOf(run, arm),
    mark: { tint: tintOf(arm.style), dash: DASHES[(many ? r : arm.style) % DASHES.length] },
  })));
  const seeds = [...new Set(data.runs.flatMap((run) => run.arms.flatMap((arm) => arm.seeds.map((seed) => seed.seed))))];
  const names = [...new Set(data.runs.flatMap((run) => run.arms.map((arm) => arm.name)))];
  const told = el("span", {}, "");
  const slider = el("input", { type: "range", min: 1, max: Math.max(1, Math.floor(rounds / 4)), value: curves.window, oninput: (event) => smoothing(Number(event.target.value)) });
  const smoothing = (window) => {
    curves.window = window;
    told.textContent = `Smoothing: ${window === 1 ? "none" : `${window} rounds`}`;
    slider.setAttribute("aria-valuetext", window === 1 ? "none" : `${window} rounds`);
    draw();
  };
  told.textContent = `Smoothing: ${curves.window === 1 ? "none" : `${curves.window} rounds`}`;
  return [
    el("div", { class: "controls" },
      select("Figure", data.measures.map((m) => [m.key, m.label]), curves.measure, set("measure")),
      select("Against", Object.entries(COSTS), curves.against, set("against")),
      select("Spread over seeds", [["mean", "mean only"], ["quartiles", "mean and quartiles"], ["seeds", "every seed"]], curves.spread, set("spread")),
      select("Show", [["", "the figures"], ...names.map((arm) => [arm, `difference from ${arm}`])], curves.from, set("from")),
      field(told, slider)),
    el("div", { class: "controls" }, toggles("Arms", arms, state.off, draw),
      seeds.length > 1 ? toggles("Seeds", seeds.map((seed) => ({ key: seed, label: `seed ${seed}` })), state.seedsOff, draw) : null),
  ];
}

function drawCurves(place) {
  const data = state.data, measure = measureOf(curves.measure), drawn = curveSeries();
  const difference = curves.from === "" ? "" : `, difference from ${curves.from}`;
  const format = measure.percent && difference ? (value) => (100 * value).toFixed(1) : (value) => number(value, measure.percent);
  const byRound = curves.against === "round";
  place.chart.label(`${measure.label}${difference}, against ${COSTS[curves.against]}, one line for each arm`);
  place.chart.draw({ ...drawn, xLabel: COSTS[curves.against], xLog: !byRound, whole: byRound, joined: !byRound, settle: byRound, format,
    yLabel: measure.label + (measure.percent && difference ? ", difference in points" : difference && ", difference"),
    mark: byRound && data.runs.length === 1 && data.runs[0].warmup ? data.runs[0].warmup + 0.5 : null });
  place.figures.replaceChildren(curveTable(drawn, measure.label + difference, format));
}

function curveTable(drawn, title, format) {
  const named = drawn.series.filter((series) => series.label), last = drawn.x.length - 1;
  const picked = [...new Set(Array.from({ length: 11 }, (_, i) => Math.round((i * last) / 10)))].filter((i) => i >= 0);
  // Against costs every arm has values at its own places: the one before counts.
  const until = (values, i) => (curves.against === "round" ? values[i] : values.slice(0, i + 1).findLast((value) => value !== null && value !== undefined));
  const rows = picked.map((i) => [number(drawn.x[i]), ...named.map((series) => {
    const value = until(series.values, i);
    return value === null || value === undefined ? "–" : format(value);
  })]);
  return el("details", {}, el("summary", {}, "These figures as a table"),
    table(`${title}, mean over seeds`, [COSTS[curves.against], ...named.map((series) => series.label)], rows));
}
