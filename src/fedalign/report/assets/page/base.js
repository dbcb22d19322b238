// Helpers that every part of the page uses. Text goes into the page as text nodes only: names and reasons come from strangers.
"use strict";

const LETTERS = { t: "trained", a: "admitted", b: "base", d: "declined", r: "refused", l: "lost", "-": "absent" };
const state = { data: null, off: new Set(), seedsOff: new Set(), controls: 0 };

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

function quantile(values, part) {
  const known = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  if (!known.length) return null;
  const at = part * (known.length - 1), low = Math.floor(at), high = Math.ceil(at);
  return known[low] + (known[high] - known[low]) * (at - low);
}

function deviation(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length < 2) return null;
  const middle = mean(known);
  return Math.sqrt(known.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (known.length - 1));
}

// The mean of a window of rounds around each round; rounds without a figure stay without one.
function smooth(values, window) {
  if (window <= 1) return values;
  const reach = Math.floor(window / 2);
  return values.map((value, i) => (value === null ? null : mean(values.slice(Math.max(0, i - reach), i + reach + 1))));
}

function cumulated(values) {
  let total = 0;
  return values.map((value) => (total += value));
}

function number(value, percent = false) {
  return plain(value, percent).replace(/^-/, "−");
}

function plain(value, percent) {
  if (value === null || value === undefined) return "–";
  if (value === "inf" || value === Infinity) return "∞";
  if (percent) return `${(100 * value).toFixed(1)} %`;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

// A control with its visible label.
function field(label, control, kind = "field") {
  control.id ||= `control-${++state.controls}`;
  return el("span", { class: kind }, el("label", { for: control.id }, label), control);
}

function select(label, options, value, change) {
  const box = el("select", { onchange: (event) => change(event.target.value) });
  for (const [key, text] of options) box.append(el("option", { value: key, selected: String(key) === String(value) }, text));
  return field(label, box);
}

// Replaces what a place shows, and keeps the focus where it was: on the control in the same position.
function show(place, ...children) {
  const controls = () => [...place.querySelectorAll("select, input, button, a, [tabindex]")];
  const focused = controls().indexOf(document.activeElement);
  place.replaceChildren(...children.filter(Boolean));
  if (focused >= 0) controls()[focused]?.focus({ preventScroll: true });
}

function table(caption, headings, rows) {
  const head = el("tr", {}, ...headings.map((text) => el("th", { scope: "col" }, text)));
  const body = rows.map((cells) =>
    el("tr", {}, ...cells.map((cell, i) => (i === 0 ? el("th", { scope: "row" }, cell) : el("td", {}, cell)))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", { class: "hidden" }, caption), el("thead", {}, head), el("tbody", {}, ...body)));
}

function announce(text) {
  document.getElementById("announcements").textContent = text;
}

function armsOf(run, wanted = () => true) {
  return state.data.runs[run].arms.map((arm, index) => ({ ...arm, index })).filter(wanted);
}

// The selects for run, arm and seed that several sections have; a run's select is left out if there is one run only.
function chooser(at, wanted, change, seeds = [], extra = []) {
  const set = (key) => (value) => change({ ...at, [key]: key === "seed" ? value : Number(value) });
  const arms = armsOf(at.run, wanted);
  return [
    state.data.runs.length > 1
      ? select("Run", state.data.runs.map((run, i) => [i, run.label]), at.run, set("run")) : null,
    select("Arm", arms.map((arm) => [arm.index, arm.name]), at.arm, set("arm")),
    select("Seed", [...seeds, ...state.data.runs[at.run].arms[at.arm].seeds.map((seed) => [seed.seed, `seed ${seed.seed}`])],
      at.seed, set("seed")),
    ...extra,
  ];
}

// Corrects a choice of run, arm and seed that the data does not have (any more).
function valid(at, wanted, preferred = "auto") {
  const run = state.data.runs[at.run] ? at.run : 0;
  const arms = armsOf(run, wanted);
  if (!arms.length) return null;
  const arm = arms.find((one) => one.index === at.arm) ?? arms.find((one) => one.name === preferred) ?? arms.at(-1);
  const seeds = arm.seeds.map((seed) => String(seed.seed));
  const seed = at.seed === "all" || seeds.includes(String(at.seed)) ? String(at.seed) : seeds[0];
  return { ...at, run, arm: arm.index, seed };
}

function seedOf(at) {
  const seeds = state.data.runs[at.run].arms[at.arm].seeds;
  return seeds.find((seed) => String(seed.seed) === String(at.seed)) ?? seeds[0];
}
