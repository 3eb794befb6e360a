// The four curves, with a numbered line wherever a setting was changed.

import uPlot from "./vendor/uPlot.esm.js";
import { onTheme, themeColour } from "./colours.js";
import { clock, number, tick } from "./format.js";

const HEIGHT = 170;
const LEAST_SECONDS = 60; // wide, also when there is less to show
const CHARTS = [
  { title: "Tokens a second", unit: "", series: [["out", "out"], ["in", "in"]] },
  { title: "Requests", unit: "", whole: true, series: [["running", "running"], ["waiting", "waiting"]] },
  { title: "Time to first token", unit: "ms", series: [["ttft50", "p50"], ["ttft95", "p95"]] },
  { title: "Between tokens", unit: "ms", series: [["gap50", "p50"], ["gap95", "p95"]] },
];
export const SERIES = CHARTS.flatMap((chart) => chart.series.map(([name]) => name));

class Chart {
  constructor(place, spec, marks) {
    this.spec = spec;
    this.names = spec.series.map(([name]) => name);
    this.box = document.createElement("section");
    this.box.className = "panel chart";
    const title = document.createElement("h2"), unit = document.createElement("small");
    unit.textContent = spec.unit;
    title.append(`${spec.title} `, unit);
    this.keys = document.createElement("p");
    this.keys.className = "keys";
    this.box.append(title, this.keys);
    place.append(this.box);
    this.plot = new uPlot(this.options(spec, marks), [[], [], []], this.box);
    new ResizeObserver(() => this.plot.setSize({ width: this.width(), height: HEIGHT })).observe(this.box);
  }

  width() {
    return Math.max(200, this.box.clientWidth - 28);
  }

  options(spec, marks) {
    const axis = { stroke: () => themeColour("quiet"), font: "11px system-ui, sans-serif", ticks: { show: false },
      grid: { stroke: () => themeColour("line"), width: 1 } };
    const line = (second) => ({ stroke: () => themeColour(second ? "second" : "accent"), width: 1.75,
      dash: second ? [5, 4] : undefined, points: { show: false } });
    const top = (max) => (spec.whole ? Math.max(4, Math.ceil(max * 1.1)) : Math.max(max * 1.1, 1));
    return {
      width: this.width(),
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: true }, y: { range: (_, __, max) => [0, top(max ?? 0)] } },
      axes: [
        { ...axis, size: 22, gap: 4, space: 80, values: (_, ticks) => ticks.map(clock) },
        { ...axis, size: 46, gap: 6, space: 32, values: (_, ticks) => ticks.map(tick) },
      ],
      series: [{}, line(false), line(true)],
      hooks: { draw: [(plot) => drawMarks(plot, marks())], setCursor: [() => this.describe()] },
    };
  }

  show(history, seconds) {
    const data = history.view(seconds, this.names);
    const from = Math.max(history.last - seconds, Math.min(data[0][0], history.last - LEAST_SECONDS));
    this.plot.setData(data, false);
    this.plot.setScale("x", { min: from, max: history.last });
    this.describe();
    this.box.dataset.points = data[0].length;
  }

  /** The key: what is drawn how, with the numbers under the pointer, or the latest. */
  describe() {
    const { data, cursor } = this.plot, pointed = cursor.idx != null && cursor.left >= 0;
    const index = pointed ? cursor.idx : data[0].length - 1;
    const format = (v) => (v == null ? "–" : this.spec.whole ? String(Math.round(v)) : number(v));
    const texts = this.spec.series.map(([, label], i) => `${label} ${format(data[i + 1][index])}`);
    this.keys.replaceChildren(...texts.map((text, i) => {
      const key = document.createElement("span");
      key.className = i ? "key second" : "key";
      key.textContent = text;
      return key;
    }), pointed ? clock(data[0][index]) : "");
    if (!pointed) this.box.setAttribute("aria-label", `${this.spec.title}: ${texts.join(", ")} ${this.spec.unit}`);
  }
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = themeColour("ink");
  ctx.lineWidth = ratio;
  ctx.setLineDash([2 * ratio, 3 * ratio]);
  ctx.font = `600 ${10 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  let drawn = 0, before = -Infinity, level = 0;
  for (const { time, number: name } of marks) {
    const x = plot.valToPos(time, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    level = x - before < 14 * ratio ? level + 1 : 0; // numbers that would lie on one another go below
    before = x;
    const top = bbox.top + 11 * ratio * (level + 1);
    ctx.beginPath();
    ctx.moveTo(x, top + 2 * ratio);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(String(name), x, top - ratio);
    drawn += 1;
  }
  ctx.restore();
  plot.root.parentElement.dataset.marks = drawn;
}

/** Puts the charts into `place`. `marks()` are the changes: {time, number}. Returns a function that shows a history. */
export function makeCharts(place, marks) {
  const charts = CHARTS.map((spec) => new Chart(place, spec, marks));
  onTheme(() => charts.forEach((chart) => chart.plot.redraw(false, true)));
  return (history, seconds) => { for (const chart of charts) chart.show(history, seconds); };
}
