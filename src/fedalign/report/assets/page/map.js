// The map of admitted clients: a row for each client, a column for each round; a click opens the client's page.
"use strict";

const map = { run: 0, arm: null, seed: "all", order: "admitted", who: "free" };
const MOST_CLIENTS = 1000; // rows of the map; more would make the page slow
const MANY_CLIENTS = 25; // from here on, clients can be searched for
const HEIGHTS = { t: 1, a: 1, b: 0.75, r: 0.5, l: 0.35, d: 0.25, "-": 0 };

function selects(arm) {
  return !arm.alone && arm.seeds.some((seed) => seed.clients.some((client) => !client.priority));
}

// For every round: the share of the seeds in which the client was free and its update was used.
function shares(seeds, id) {
  const rows = seeds.map((seed) => seed.clients.find((client) => client.id === id)).filter((client) => client && !client.priority);
  const length = Math.max(0, ...rows.map((row) => row.decisions.length));
  return Array.from({ length }, (_, i) => mean(rows.map((row) => (i < row.decisions.length ? Number("ab".includes(row.decisions[i])) : null))));
}

function strip(rounds, paint, label, open, tell) {
  const canvas = el("canvas", { width: Math.max(1, rounds), height: 20, class: "strip", "aria-hidden": "true" });
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return Math.min(rounds - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * rounds)));
  };
  canvas.addEventListener("mousemove", (event) => { canvas.title = tell(at(event)); });
  if (open) canvas.addEventListener("click", (event) => open(at(event)));
  canvas.paint = () => {
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, canvas.width, canvas.height);
    paint(pen, canvas.height);
  };
  canvas.paint();
  return canvas;
}

function paintDecisions(decisions) {
  return (pen, height) => {
    [...decisions].forEach((letter, i) => {
      const tall = Math.round(HEIGHTS[letter] * height);
      pen.fillStyle = css(`--d-${LETTERS[letter]}`);
      pen.fillRect(i, height - tall, 1, tall);
    });
  };
}

function paintShares(values) {
  return (pen, height) => {
    pen.fillStyle = css("--d-admitted");
    values.forEach((value, i) => {
      pen.globalAlpha = value ?? 0;
      pen.fillRect(i, 0, 1, height);
    });
    pen.globalAlpha = 1;
  };
}

function decisionLegend(letters) {
  return el("ul", { class: "legend" }, ...letters.map((letter) => el("li", {},
    el("span", { class: "key", style: `--tall: ${HEIGHTS[letter]}; --tint: var(--d-${LETTERS[letter]})` }), LETTERS[letter])));
}

function clientLink(at, id, round) {
  const where = new URLSearchParams({ client: id, run: at.run, arm: state.data.runs[at.run].arms[at.arm].name });
  if (at.seed !== "all") where.set("seed", at.seed);
  if (round !== undefined) where.set("round", round + 1);
  return `#${where}`;
}

function renderMap(place) {
  const at = valid(map, selects);
  if (!at) return show(place, el("p", {}, "There are no free clients to admit."));
  Object.assign(map, at);
  const run = state.data.runs[at.run], arm = run.arms[at.arm], all = at.seed === "all";
  const seeds = all ? arm.seeds : [seedOf(at)];
  const again = (changed) => { Object.assign(map, changed); renderMap(place); };
  const rows = run.clients.map((client) => clientRow(client, seeds)).filter((row) => at.who === "all" || row.free);
  rows.sort((one, other) => (at.order === "admitted" ? (other.share ?? -1) - (one.share ?? -1) : 0) || one.id - other.id);
  const controls = el("div", { class: "controls" },
    ...chooser(at, selects, again, [["all", "all seeds"]]),
    select("Order", [["admitted", "most often admitted first"], ["id", "as in the data"]], at.order, (order) => again({ order })),
    select("Clients", [["free", "free clients"], ["all", "all clients"]], at.who, (who) => again({ who })),
    rows.length > MANY_CLIENTS ? field("Find a client", el("input", { type: "search", oninput: (event) => filterRows(place, event.target.value) })) : null);
  const used = rows.filter((row) => row.share > 0).length, free = rows.filter((row) => row.free).length;
  const training = rows.some((row) => row.columns.some((column) => column.decisions.includes("b")));
  const words = `${arm.name} used the updates of ${used} of ${free} free clients in at least one round${all && seeds.length > 1 ? " of some seed" : ""}` +
    `${training ? ", in the model that it served or in the one that it trained on" : ""}. ` +
    "Choose a client to see its losses, the decisions about it and the reasons.";
  const attacks = (name) => seeds.filter((seed) => (run.hostile[seed.seed] ?? []).includes(name)).length;
  const hostile = (name) => (attacks(name) === seeds.length ? "hostile" : `hostile in ${attacks(name)} of ${seeds.length} seeds`);
  const told = el("p", { class: "soft" }, "Point at a round to read it here.");
  const body = rows.slice(0, MOST_CLIENTS).map((row) => {
    const length = Math.max(0, ...seeds.map((seed) => seed.rounds));
    const values = all ? shares(seeds, row.id) : [];
    const decisions = all ? "" : row.columns[0]?.decisions ?? "";
    const tell = all
      ? (i) => `${row.name}, round ${i + 1}: used in ${number(values[i] ?? 0, true)} of the seeds`
      : (i) => `${row.name}, round ${i + 1}: ${LETTERS[decisions[i]] ?? "no record"}`;
    const drawn = strip(length, all && row.free ? paintShares(values) : paintDecisions(all ? row.columns[0]?.decisions ?? "" : decisions), row.name,
      (round) => { location.hash = clientLink(at, row.id, round); }, (i) => (told.textContent = tell(i)));
    return el("tr", {},
      el("th", { scope: "row" }, el("a", { href: clientLink(at, row.id) }, row.name),
        attacks(row.name) ? el("span", { class: "tag" }, hostile(row.name)) : null, row.free ? null : el("span", { class: "tag" }, "priority")),
      el("td", { class: "wide" }, drawn), el("td", {}, row.share === null ? "–" : number(row.share, true)));
  });
  const legend = all ? el("p", { class: "soft" }, "The stronger the colour, the more seeds used the client's update in that round.") : decisionLegend([..."abrdl"]);
  const cut = rows.length > MOST_CLIENTS ? el("p", { class: "soft" }, `The first ${MOST_CLIENTS} of ${rows.length} clients are shown.`) : null;
  show(place, controls, el("p", {}, words), legend, cut, told, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Map of admitted clients" },
    el("table", { class: "map" }, el("caption", { class: "hidden" }, `Clients whose updates ${arm.name} used`),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "client"), el("th", { scope: "col" }, `rounds 1 to ${Math.max(0, ...seeds.map((seed) => seed.rounds))}`), el("th", { scope: "col" }, "rounds used"))),
      el("tbody", {}, ...body))));
}

function filterRows(place, text) {
  for (const row of place.querySelectorAll("tbody tr")) row.hidden = !row.querySelector("a").textContent.toLowerCase().includes(text.toLowerCase());
}

function clientRow(client, seeds) {
  const columns = seeds.map((seed) => seed.clients.find((one) => one.id === client.id)).filter(Boolean);
  const free = columns.filter((one) => !one.priority);
  const letters = free.flatMap((one) => [...one.decisions]);
  return { ...client, columns, free: free.length > 0, share: letters.length ? letters.filter((letter) => "ab".includes(letter)).length / letters.length : null };
}
