// The last steps: how long each took, and in the lanes below who computed what. Wide bars are prompts, dots are decodes.

import { fill, legend, lookOf, onTheme, prepare, themeColour } from "./colours.js";
import { count, seconds, words } from "./format.js";

const LEFT = 54, BARS = 54, GAP = 18, LANE = 11, MOST_LANES = 12, COLUMNS = 48;

const names = (step) => [...step.prefill.map(([name]) => name), ...step.decode];

export class Timeline {
  constructor(canvas, caption, legendList) {
    Object.assign(this, { canvas, caption, legendList, steps: [], chosen: null }); // chosen: number of a step
    canvas.addEventListener("mousemove", (event) => this.choose(this.at(event.offsetX)));
    canvas.addEventListener("mouseleave", () => this.choose(null));
    canvas.addEventListener("blur", () => this.choose(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    onTheme(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(steps, changes) {
    this.steps = steps;
    this.changes = new Set(changes.map((change) => change.step));
    this.lanes = [...new Set(steps.toReversed().flatMap(names))].slice(0, MOST_LANES).reverse(); // of the latest
    this.draw();
  }

  draw() {
    if (!this.canvas.clientWidth) return;
    const context = prepare(this.canvas, BARS + GAP + MOST_LANES * LANE);
    this.column = (this.canvas.clientWidth - LEFT) / COLUMNS;
    this.drawFrame(context);
    this.steps.forEach((step, index) => this.drawStep(context, step, LEFT + index * this.column));
    this.describe();
  }

  drawFrame(context) {
    this.longest = Math.max(0, ...this.steps.map((step) => step.ms));
    context.font = "10px system-ui, sans-serif";
    context.fillStyle = themeColour("quiet");
    context.textAlign = "right";
    if (this.steps.length) context.fillText(words(seconds(this.longest / 1000)), LEFT - 6, 9);
    context.fillText("0", LEFT - 6, BARS);
    (this.lanes ?? []).forEach((name, lane) => context.fillText(name, LEFT - 6, BARS + GAP + lane * LANE + 8));
    context.fillStyle = themeColour("line");
    context.fillRect(LEFT, BARS, this.canvas.clientWidth - LEFT, 1);
  }

  drawStep(context, step, x) {
    const width = Math.max(2, this.column - 1.5), height = this.longest ? (BARS - 2) * (step.ms / this.longest) : 0;
    context.fillStyle = themeColour(step.step === this.chosen ? "ink" : "accent");
    context.fillRect(x, BARS - height, width, height);
    if (this.changes.has(step.step)) {
      context.fillStyle = themeColour("ink");
      context.fillText("▾", x + width, BARS + 12);
    }
    const lane = (name) => BARS + GAP + this.lanes.indexOf(name) * LANE;
    for (const [name] of step.prefill) if (this.lanes.includes(name)) fill(context, lookOf(name), x, lane(name), width, LANE - 2);
    for (const name of step.decode) {
      if (!this.lanes.includes(name)) continue;
      context.fillStyle = lookOf(name).colour;
      context.fillRect(x, lane(name) + 3, width, 3);
    }
  }

  describe() {
    const step = this.steps.find((one) => one.step === this.chosen);
    const last = this.steps.at(-1);
    const text = step ? this.words(step) : last ? `${this.words(last)}` : "No step yet. Send a prompt from the playground.";
    if (this.caption.textContent !== text) this.caption.textContent = text;
    this.canvas.setAttribute("aria-label", `The last ${this.steps.length} steps. ${text} Arrow keys move from step to step.`);
    legend(this.legendList, [
      [(c, x, y, size) => { c.fillStyle = themeColour("quiet"); c.fillRect(x, y + 1, size, size - 2); }, "prefill: a piece of a prompt"],
      [(c, x, y, size) => { c.fillStyle = themeColour("quiet"); c.fillRect(x, y + 4.5, size, 3); }, "decode: one token"],
    ]);
  }

  words(step) {
    const prefill = step.prefill.map(([name, start, length]) => `${name} ${count(length)} (${start}–${start + length - 1})`);
    const some = (list) => (list.length > 6 ? `${list.slice(0, 6).join(", ")} and ${count(list.length - 6)} more` : list.join(", "));
    const parts = [`Step ${count(step.step)}, ${words(seconds(step.ms / 1000))}`];
    if (prefill.length) parts.push(`prefill ${some(prefill)}`);
    if (step.decode.length) parts.push(`decode ${some(step.decode)}`);
    if (step.more) parts.push(`${count(step.more)} others`);
    return `${parts.join(" · ")}.`;
  }

  at(x) {
    return this.steps[Math.floor((x - LEFT) / this.column)]?.step ?? null;
  }

  choose(number) {
    if (number === this.chosen) return;
    this.chosen = number;
    this.draw();
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move === undefined || !this.steps.length) return;
    event.preventDefault();
    const now = this.steps.findIndex((step) => step.step === this.chosen);
    const next = now < 0 ? this.steps.length - 1 : Math.max(0, Math.min(this.steps.length - 1, now + move));
    this.choose(this.steps[next].step);
  }
}
