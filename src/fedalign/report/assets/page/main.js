// Starts the page: theme, which of its two views is shown, and following a run that is still going on.
"use strict";

const SECTIONS = [["curves", renderCurves], ["map", renderMap], ["choices", renderChoices]];

function setTheme(theme) {
  applyTheme(theme);
  try { // A page opened from a file may not be allowed to remember.
    localStorage.setItem("fedalign-theme", theme);
  } catch (error) {
    console.debug("the theme is not remembered:", error.message);
  }
  repaint();
}

function repaint() {
  redrawCharts();
  for (const canvas of document.querySelectorAll("canvas.strip")) canvas.paint();
}

// What is under the hash: a client's page, or the report.
function route() {
  const where = new URLSearchParams(location.hash.slice(1));
  const wanted = where.has("client");
  document.getElementById("report").hidden = wanted;
  document.getElementById("sections").hidden = wanted;
  document.getElementById("client").hidden = !wanted;
  if (wanted) {
    readClient(where);
    renderClient(document.getElementById("client"));
    scrollTo(0, 0);
    document.getElementById("client-name")?.focus({ preventScroll: true });
  } else if (location.hash) document.querySelector(`[id="${CSS.escape(location.hash.slice(1))}"]`)?.scrollIntoView();
}

function render() {
  for (const [id, draw] of SECTIONS) {
    const place = document.getElementById(id);
    const busy = document.activeElement;
    if (state.drawn && place.contains(busy) && ["SELECT", "INPUT"].includes(busy.tagName) && id !== "curves") continue; // in use
    draw(place);
  }
  state.drawn = true;
}

async function follow() {
  const status = document.getElementById("live");
  const parts = {};
  let tag = null, pause = 1000;
  for (;;) {
    try {
      const answer = await fetch("data", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      pause = Math.max(1000, 1000 * Number(answer.headers.get("X-Pause") ?? 2));
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        const fresh = await answer.json();
        for (const [id, html] of Object.entries(fresh.html)) {
          if (parts[id] === html) continue; // what the reader has unfolded stays so
          parts[id] = html;
          document.getElementById(id).innerHTML = html; // rendered by the server, which escapes all names
        }
        state.data = await unpack(fresh.data);
        status.textContent = fresh.status;
        render();
        if (!document.getElementById("client").hidden && !["SELECT", "INPUT"].includes(document.activeElement.tagName)) renderClient(document.getElementById("client"));
      }
    } catch (error) {
      status.textContent = "Connection lost: the server has ended, or the network is down. This page shows the last state.";
      pause = 5000;
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

async function start() {
  const chosen = document.getElementById("theme");
  chosen.value = document.documentElement.dataset.chosen;
  chosen.addEventListener("change", () => setTheme(chosen.value));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  if (typeof DecompressionStream === "undefined") {
    document.getElementById("curves").textContent = "This browser is too old for the interactive part; the tables have all final figures.";
    return;
  }
  state.data = await unpack(document.getElementById("data").textContent);
  render();
  route();
  addEventListener("hashchange", route);
  document.documentElement.dataset.ready = "yes";
  if (document.body.dataset.live !== undefined) follow();
}

start();
