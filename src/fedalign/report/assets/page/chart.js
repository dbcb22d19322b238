// One interactive chart: uPlot draws it; this adds the legend with values, zoom buttons, keys and words for screen readers.
"use strict";

const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3], [5, 3], [14, 3, 2, 3, 2, 3], [1, 4], [14, 4]];
const charts = new Set();

class Chart {
  // host: an empty element; label: what the chart shows, in words.
  constructor(host, label) {
    this.host = host;
    this.zoom = null;
    this.shape = null;
    this.plot = null;
    this.area = el("div", {
      class: "plot", tabindex: "0", role: "group", "aria-roledescription": "interactive chart",
      onkeydown: (event) => this.key(event),
    });
    this.readout = el("ul", { class: "readout" });
    this.reset = el("button", { type: "button", onclick: () => this.setZoom(null) }, "Reset zoom");
    const tools = el("div", { class: "tools" },
      el("button", { type: "button", onclick: () => this.scaleZoom(0.5) }, "Zoom in"),
      el("button", { type: "button", onclick: () => this.scaleZoom(2) }, "Zoom out"),
      this.reset,
      el("span", { class: "hint" }, "Drag to zoom, double-click to reset. With the keyboard: ← → moves, + − zooms, 0 resets."));
    host.replaceChildren(this.area, this.readout, tools);
    this.label(label);
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.area);
    charts.add(this);
  }

  label(text) {
    this.area.setAttribute("aria-label", text);
  }

  // spec: x, xLabel, xLog, whole (ticks at whole numbers), yLabel, yScale ("log"/"asinh"), format, series, mark
  draw(spec) {
    const reach = [spec.x[0], spec.x.at(-1)];
    if (this.zoom && !(this.zoom[0] < reach[1] && this.zoom[1] > reach[0])) this.zoom = null;
    const shape = JSON.stringify([spec.xLabel, spec.xLog, spec.yLabel, spec.yScale, spec.mark,
      spec.series.map((s) => [s.label, s.tint, s.dash, s.width, s.points])]);
    const before = this.spec;
    this.spec = spec;
    const data = [spec.x, ...spec.series.map((series) => series.values)];
    if (this.plot && shape === this.shape && before.x.length) {
      this.plot.setData(data, false);
      this.applyZoom();
    } else {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new uPlot(this.options(), data, this.area);
      this.applyZoom();
    }
    this.say(null);
  }

  options() {
    const spec = this.spec, format = (value) => spec.format(value);
    const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { stroke: () => css("--grid") },
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif" };
    const logarithmic = spec.yScale === "log" ? { distr: 3 } : spec.yScale === "asinh" ? { distr: 4, asinh: 0.01 } : {};
    return {
      ...this.size(),
      legend: { show: false },
      cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
      scales: { x: { time: false, ...(spec.xLog ? { distr: 3 } : {}) }, y: { ...logarithmic, range: (plot, low, high) => this.range(low, high) } },
      axes: [
        { ...axis, label: spec.xLabel, labelSize: 20, size: 34,
          ...(spec.whole ? { incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000, 50000, 100000] } : {}) },
        { ...axis, label: spec.yLabel, labelSize: 20, size: 62, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))) },
      ],
      series: [{}, ...spec.series.map((series) => ({
        label: series.label, width: series.width ?? 2, dash: series.dash ?? [], spanGaps: Boolean(spec.joined),
        stroke: () => css(series.tint),
        ...(series.points ? { paths: () => null, points: { show: true, size: series.points, fill: () => css(series.tint), stroke: () => css(series.tint), width: 0 } }
          : { points: { show: spec.x.length < 3 } }),
      }))],
      hooks: {
        setCursor: [(plot) => this.say(plot.cursor.idx)],
        setSelect: [(plot) => this.selected(plot)],
        drawClear: [(plot) => this.drawMark(plot)],
      },
    };
  }

  // The steep climb of the first rounds must not flatten the rest: it is cut off, unless the reader zooms in on it.
  range(low, high) {
    const skip = this.spec.settle && !this.zoom ? Math.floor(this.spec.x.length / 20) : 0;
    if (skip) {
      const settled = this.spec.series.flatMap((series) => series.values.slice(skip)).filter((value) => value !== null && value !== undefined);
      if (settled.length) [low, high] = [settled.reduce((a, b) => Math.min(a, b)), settled.reduce((a, b) => Math.max(a, b))];
    }
    if (low === null || high === null) return [0, 1];
    return this.spec.yScale ? uPlot.rangeAsinh(low, high, 10, true) : uPlot.rangeNum(low, high, 0.08, false);
  }

  size() {
    const width = Math.max(200, this.area.clientWidth);
    return { width, height: Math.round(Math.min(400, Math.max(230, width * 0.45))) };
  }

  fit() {
    if (this.plot && this.area.clientWidth && this.size().width !== this.plot.width) this.plot.setSize(this.size());
  }

  drawMark(plot) {
    const mark = this.spec.mark;
    if (!mark || this.spec.xLog) return;
    const x = Math.round(plot.valToPos(mark, "x", true)), box = plot.bbox;
    if (x <= box.left || x >= box.left + box.width) return;
    const pen = plot.ctx;
    pen.save();
    pen.strokeStyle = css("--soft");
    pen.fillStyle = css("--soft");
    pen.setLineDash([3, 4]);
    pen.beginPath();
    pen.moveTo(x, box.top);
    pen.lineTo(x, box.top + box.height);
    pen.stroke();
    pen.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    pen.fillText("warm-up ends", x + 5 * devicePixelRatio, box.top + box.height - 6 * devicePixelRatio);
    pen.restore();
  }

  selected(plot) {
    if (plot.select.width < 4) return;
    this.setZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.applyZoom();
    announce(zoom ? `Showing ${this.spec.xLabel} ${number(zoom[0])} to ${number(zoom[1])}` : "Showing everything");
  }

  applyZoom() {
    const x = this.spec.x;
    const [min, max] = this.zoom ?? [x[0] ?? 0, x.at(-1) ?? 1];
    this.plot.setScale("x", min === max ? { min: min - 0.5, max: max + 0.5 } : { min, max });
    this.reset.disabled = this.zoom === null;
  }

  scaleZoom(factor) {
    const x = this.spec.x;
    if (x.length < 3) return;
    const bend = (value) => (this.spec.xLog ? Math.log(value) : value), back = (value) => (this.spec.xLog ? Math.exp(value) : value);
    const [low, high] = (this.zoom ?? [x[0], x.at(-1)]).map(bend), [first, last] = [x[0], x.at(-1)].map(bend);
    const index = this.plot.cursor.idx, centre = index === null || index === undefined ? (low + high) / 2 : bend(x[index]);
    const half = ((high - low) * factor) / 2;
    const wanted = [Math.max(first, centre - half), Math.min(last, centre + half)];
    this.setZoom(wanted[1] - wanted[0] >= last - first ? null : wanted.map(back));
  }

  key(event) {
    const last = this.spec.x.length - 1, at = this.plot.cursor.idx ?? 0, step = event.shiftKey ? 10 : 1;
    const moves = { ArrowLeft: at - step, ArrowRight: at + step, Home: 0, End: last };
    if (event.key in moves) {
      const to = Math.min(last, Math.max(0, moves[event.key]));
      this.plot.setCursor({ left: this.plot.valToPos(this.spec.x[to], "x"), top: this.plot.over.clientHeight / 2 });
      announce([...this.readout.children].map((row) => row.textContent).join("; "));
    } else if (event.key === "+" || event.key === "=") this.scaleZoom(0.5);
    else if (event.key === "-") this.scaleZoom(2);
    else if (event.key === "0" || event.key === "Escape") this.setZoom(null);
    else return;
    event.preventDefault();
  }

  // The legend: the values under the pointer, or the last ones.
  say(index) {
    const spec = this.spec, x = spec.x;
    if (!x.length) return this.readout.replaceChildren(el("li", {}, "No round has this figure."));
    const rows = spec.series.filter((series) => series.label).map((series) => {
      let at = index ?? x.length - 1;
      // Against costs, and without a pointer, the value before counts: arms have values at places of their own, runs end at other rounds.
      const known = (i) => series.values[i] !== null && series.values[i] !== undefined;
      if (spec.joined || index === null || index === undefined) while (at > 0 && !known(at)) at--;
      const value = series.values[at];
      const extra = series.extra ? series.extra[at] : null;
      return el("li", {}, swatch(series), el("span", {}, series.label), " ",
        series.quiet ? null : el("b", {}, value === null || value === undefined ? "–" : spec.format(value)),
        extra ? el("span", { class: "soft" }, ` ± ${spec.format(extra)}`) : null);
    });
    const where = index === null || index === undefined ? "last" : number(x[index]);
    this.readout.replaceChildren(el("li", { class: "where" }, `${spec.xLabel}: ${where}`), ...rows);
    this.moved?.(index);
  }

  remove() {
    this.observer.disconnect();
    this.plot?.destroy();
    charts.delete(this);
  }
}

function swatch(series) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of [["width", 26], ["height", 10], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  const mark = document.createElementNS("http://www.w3.org/2000/svg", series.points ? "circle" : "line");
  const shape = series.points ? { cx: 13, cy: 5, r: Math.max(2, series.points / 2) } : { x1: 1, x2: 25, y1: 5, y2: 5, "stroke-width": series.width ?? 2 };
  for (const [name, value] of Object.entries(shape)) mark.setAttribute(name, value);
  mark.style.stroke = mark.style.fill = `var(${series.tint})`;
  if (series.dash?.length) mark.setAttribute("stroke-dasharray", series.dash.join(" "));
  svg.append(mark);
  return svg;
}

function tintOf(style) {
  return `--s${style % 12}`;
}

function redrawCharts() {
  for (const chart of charts) chart.plot?.redraw(false);
}
