// The choices of AutoALIGN and of verified rounds: what was tried, what was chosen, and what it promised.
"use strict";

const choices = { run: 0, arm: null, seed: null, view: "relative", round: null };
const VIEWS = { relative: "loss, relative to nobody admitted", admitted: "free clients chosen", epsilon: "chosen ε" };

function choosesCandidates(arm) {
  return arm.seeds.some((seed) => seed.choices);
}

function nobodyLoss(choice) {
  return choice.tried.find((tried) => tried[1] === 0)?.[2] ?? null;
}

function choiceWords(seed, arm) {
  const made = seed.choices.filter(Boolean), picked = made.map((choice) => choice.tried[choice.chosen]).filter(Boolean);
  const some = picked.filter((tried) => tried[1] > 0);
  const gains = made.map((choice) => {
    const nobody = nobodyLoss(choice), best = choice.tried[choice.chosen]?.[2];
    return nobody && best !== null && best !== undefined ? 100 * (1 - best / nobody) : null;
  });
  const fallen = made.filter((choice) => choice.fallback).length;
  return `In seed ${seed.seed}, the priority clients measured candidates in ${made.length} rounds of ${arm.name}. ` +
    (some.length
      ? `They chose one with free clients in ${some.length} of them, with ${mean(some.map((tried) => tried[1])).toFixed(1)} free clients on average. ` +
        `The chosen candidate's held-out loss was ${(mean(gains) ?? 0).toFixed(1)} % below that of the candidate without free clients, on average. `
      : "They never chose one with free clients. ") +
    (fallen ? `In ${fallen} rounds the priority-only model was served instead, because the choices were behind it.` : "The priority-only model never had to be served instead.");
}

function choiceSeries(seed) {
  const rows = seed.choices, most = Math.max(0, ...rows.map((row) => row?.tried.length ?? 0));
  const ratio = (row, tried) => {
    const nobody = row && nobodyLoss(row);
    return nobody && tried && tried[2] !== null ? tried[2] / nobody : null;
  };
  const chosen = (figure) => rows.map((row) => (row && row.chosen !== null ? figure(row, row.tried[row.chosen]) : null));
  if (choices.view === "admitted") return { format: number, series: [{ label: "chosen", values: chosen((_, tried) => tried[1]), tint: "--s5", points: 6 }] };
  if (choices.view === "epsilon") {
    const finite = rows.flatMap((row) => row?.tried.map((tried) => tried[0]) ?? []).filter((value) => typeof value === "number");
    const top = 2 * Math.max(0.01, ...finite);
    return { yScale: "asinh", format: (value) => (value >= top ? "∞" : number(value)),
      series: [{ label: "chosen ε", values: chosen((_, tried) => (tried[0] === "inf" ? top : tried[0])), tint: "--s5", points: 6 },
        { label: "priority-only model served", values: rows.map((row) => (row?.fallback ? 0 : null)), tint: "--s1", points: 7 }] };
  }
  const others = Array.from({ length: most }, (_, i) => ({ label: i === 0 ? "other candidates" : "", tint: "--faint", points: 3, quiet: true,
    values: rows.map((row) => { const value = ratio(row, row?.tried[i]); return value === null ? null : Math.min(value, 2); }) }));
  return { format: number, series: [...others, { label: "chosen", values: chosen(ratio), tint: "--s5", points: 6 }] };
}

function renderChoices(place) {
  const at = valid(choices, choosesCandidates);
  const section = place.closest("section");
  section.hidden = !at && !section.querySelector("table");
  if (!at) return show(place);
  Object.assign(choices, at, { seed: at.seed === "all" || at.seed === null ? String(state.data.runs[at.run].arms[at.arm].seeds[0].seed) : at.seed });
  const arm = state.data.runs[choices.run].arms[choices.arm], seed = seedOf(choices);
  const again = (changed) => { Object.assign(choices, changed); renderChoices(place); };
  const controls = el("div", { class: "controls" }, ...chooser(choices, choosesCandidates, again, [],
    [select("Show", Object.entries(VIEWS).filter(([key]) => key !== "epsilon" || hasEpsilon(seed)), choices.view, (view) => again({ view }))]));
  if (!seed.choices) return show(place, controls, el("p", {}, "No candidates were measured in this seed yet."));
  if (choices.view === "epsilon" && !hasEpsilon(seed)) choices.view = "relative";
  place.chart?.remove();
  place.promise?.remove();
  place.promise = null;
  const host = el("div", { class: "chart" }), rounds = seed.choices.map((_, i) => i + 1);
  const held = seed.choices.map((row, i) => (row ? i : null)).filter((i) => i !== null);
  const inspector = el("div", {});
  const pick = (i) => { choices.round = i; inspectRound(inspector, seed, i, pick); };
  show(place, controls, el("p", {}, choiceWords(seed, arm)), host, inspector, choiceTable(seed, arm), seed.promise ? el("div", {}) : null);
  place.chart = new Chart(host, `${arm.name}: ${VIEWS[choices.view]}, over rounds`);
  place.chart.draw({ x: rounds, xLabel: "round", whole: true, yLabel: VIEWS[choices.view], ...choiceSeries(seed) });
  place.chart.moved = (i) => { if (i !== null && i !== undefined && seed.choices[i]) pick(i); };
  pick(held.includes(choices.round) ? choices.round : held.at(-1));
  if (seed.promise) drawPromise(place, place.lastElementChild, seed, arm);
}

function hasEpsilon(seed) {
  return Boolean(seed.choices?.some((row) => row?.tried.some((tried) => tried[0] !== null)));
}

function candidateName(tried) {
  const clients = tried[1] === 0 ? "no free client" : tried[1] === 1 ? "1 free client" : `${tried[1]} free clients`;
  return tried[0] === null ? clients : `ε = ${number(tried[0])}: ${clients}`;
}

function inspectRound(place, seed, i, pick) {
  const choice = seed.choices[i], losses = choice.tried.map((tried) => tried[2]).filter((loss) => loss !== null);
  const low = Math.min(...losses), high = Math.max(...losses);
  const slider = el("input", { type: "range", min: 1, max: seed.choices.length, value: i + 1, oninput: (event) => {
    const wanted = Number(event.target.value) - 1;
    const held = seed.choices.map((row, k) => (row ? k : null)).filter((k) => k !== null);
    pick(held.reduce((best, k) => (Math.abs(k - wanted) < Math.abs(best - wanted) ? k : best), held[0]));
  } });
  const rows = choice.tried.map((tried, k) => el("tr", { class: k === choice.chosen ? "best" : null },
    el("th", { scope: "row" }, candidateName(tried)), el("td", {}, number(tried[2])),
    el("td", { class: "wide" }, el("span", { class: "bar", style: `--part: ${tried[2] === null ? 0 : 15 + 85 * ((tried[2] - low) / (high - low || 1))}%` })),
    el("td", {}, k === choice.chosen ? "chosen" : "")));
  const served = choice.fallback ? "The priority-only model was served instead: over the last rounds, the choices were behind it." : "The chosen candidate was served.";
  const had = place.querySelector("input");
  const heading = el("h3", {}, `Round ${i + 1}: ${choice.tried.length} candidates, held-out loss of each`);
  const box = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Candidates of this round" }, el("table", { class: "candidates" },
    el("caption", { class: "hidden" }, "Candidates"), el("thead", {}, el("tr", {}, ...["candidate", "loss", "", ""].map((text) => (text ? el("th", { scope: "col" }, text) : el("td", {}))))), el("tbody", {}, ...rows)));
  const note = el("p", { class: "soft" }, served, choice.alone === null ? "" : ` The priority-only model's loss: ${number(choice.alone)}.`);
  if (had) { // The slider stays the same element, so that it can be dragged.
    had.value = i + 1;
    had.setAttribute("aria-valuetext", `round ${i + 1}`);
    place.replaceChildren(place.firstElementChild, heading, box, note);
  } else place.replaceChildren(field("Look into a round", slider, "field wide"), heading, box, note);
}

function choiceTable(seed, arm) {
  const rows = seed.choices.flatMap((choice, i) => {
    if (!choice || choice.chosen === null) return [];
    const tried = choice.tried[choice.chosen], nobody = nobodyLoss(choice);
    return [[String(i + 1), candidateName(tried), number(tried[2]), nobody ? `${number(100 * (tried[2] / nobody - 1))} %` : "–", choice.fallback ? "priority-only model" : "chosen candidate"]];
  });
  const details = el("details", {}, el("summary", {}, "The choice of every round as a table"));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) {
      details.append(table(`Choices of ${arm.name}`, ["round", "chosen", "held-out loss", "against nobody", "served"], rows));
      details.lastElementChild.classList.add("tall");
    }
  });
  return details;
}

function drawPromise(place, host, seed, arm) {
  const figure = (k) => seed.promise.map((row) => (row ? row[k] : null));
  const chart = el("div", { class: "chart" });
  host.append(el("h3", {}, "By how much the served model may be worse than the priority-only model"), chart);
  place.promise = new Chart(chart, `${arm.name}: by how much the served model may be worse than the priority-only model, over rounds`);
  place.promise.draw({ x: seed.promise.map((_, i) => i + 1), xLabel: "round", whole: true, yLabel: "worse by", format: (value) => number(value, true), series: [
    { label: "measured", values: figure(0), tint: "--soft", width: 1.2 }, { label: "at most", values: figure(1), tint: "--s5" },
    { label: "at most, strict", values: figure(2), tint: "--s5", dash: [6, 4] }] });
}
