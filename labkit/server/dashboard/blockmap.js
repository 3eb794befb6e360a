// The KV pool: a square for each block, in the colour of the request that holds it.

import { fill, legend, lookOf, onTheme, prepare, themeColour } from "./colours.js";
import { count } from "./format.js";

const FREE = 0, CACHED = 1, SHARED = 3; // 2: in use by one. As engine/picture.py has them.
const NOBODY = 0, OTHERS = 255;
const OTHER_LOOK = { colour: "#8a94a0", pattern: "plain" };
const HEIGHT = 190, LARGEST = 16, MOST_IN_LEGEND = 8;

const decode = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));

/** A square with its mark: shared blocks have a bright core, cached ones are hollow, free ones faint. */
function square(context, state, look, x, y, size) {
  if (state === FREE) {
    context.fillStyle = themeColour("free");
    context.fillRect(x, y, size, size);
  } else if (state === CACHED) {
    context.fillStyle = themeColour("cached");
    context.fillRect(x, y, size, size);
    const rim = size >= 6 ? 1.5 : 1;
    context.fillStyle = themeColour("panel");
    context.fillRect(x + rim, y + rim, size - 2 * rim, size - 2 * rim);
  } else {
    fill(context, look, x, y, size, size);
    if (state === SHARED) {
      const core = size * 0.44, at = (size - core) / 2;
      context.fillStyle = "#000000";
      context.fillRect(x + at - 1, y + at - 1, core + 2, core + 2);
      context.fillStyle = "#ffffff";
      context.fillRect(x + at, y + at, core, core);
    }
  }
}

export class BlockMap {
  constructor(canvas, caption, legendList) {
    Object.assign(this, { canvas, caption, legendList, chosen: null, picture: null });
    canvas.addEventListener("mousemove", (event) => this.choose(this.at(event.offsetX, event.offsetY)));
    canvas.addEventListener("mouseleave", () => this.choose(null));
    canvas.addEventListener("blur", () => this.choose(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    onTheme(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(picture, numbers) {
    this.picture = picture;
    this.numbers = numbers;
    this.states = decode(picture.states);
    this.owners = decode(picture.owners);
    this.draw();
  }

  look(owner) {
    if (owner === NOBODY || owner === OTHERS) return OTHER_LOOK;
    return lookOf(this.picture.requests[owner - 1][0]);
  }

  draw() {
    if (!this.picture || !this.canvas.clientWidth) return;
    const cells = this.states.length, width = this.canvas.clientWidth;
    this.pitch = Math.max(3, Math.min(LARGEST, Math.floor(Math.sqrt((width * HEIGHT) / cells))));
    this.columns = Math.max(1, Math.floor(width / this.pitch));
    const size = this.pitch - (this.pitch > 4 ? 1 : 0.5);
    const context = prepare(this.canvas, Math.ceil(cells / this.columns) * this.pitch);
    for (let i = 0; i < cells; i += 1) {
      const x = (i % this.columns) * this.pitch, y = Math.floor(i / this.columns) * this.pitch;
      square(context, this.states[i], this.states[i] > CACHED ? this.look(this.owners[i]) : null, x, y, size);
      if (i === this.chosen) {
        context.strokeStyle = themeColour("ink");
        context.lineWidth = 2;
        context.strokeRect(x, y, size, size);
      }
    }
    this.describe();
  }

  describe() {
    const { picture, numbers } = this;
    const shared = this.states.reduce((sum, state) => sum + (state === SHARED), 0);
    const each = picture.blocks_per_cell > 1 ? `; a square is ${picture.blocks_per_cell} blocks` : "";
    const whole = `${count(numbers.kv_blocks_in_use)} of ${count(numbers.kv_blocks_total)} blocks in use, ` +
      `${shared ? `${count(shared)} ${picture.blocks_per_cell > 1 ? "squares " : ""}shared, ` : ""}${count(numbers.kv_blocks_cached)} cached, ` +
      `${count(numbers.kv_blocks_free)} free; ${numbers.block_size} tokens in a block${each}.`;
    const text = this.chosen !== null && this.chosen < this.states.length ? this.words(this.chosen) : whole;
    if (this.caption.textContent !== text) this.caption.textContent = text;
    this.canvas.setAttribute("aria-label", `${whole} Arrow keys move from block to block.`);
    this.canvas.dataset.shared = shared;
    this.drawLegend();
  }

  drawLegend() {
    const { requests } = this.picture;
    const kind = (state) => (context, x, y, size) => square(context, state, OTHER_LOOK, x, y, size);
    const shown = requests.slice(0, MOST_IN_LEGEND).map(([name, tokens]) => [lookOf(name), `${name}, ${count(tokens)} tokens`]);
    const more = this.numbers.running - shown.length;
    legend(this.legendList, [
      ...shown,
      ...(more > 0 ? [[OTHER_LOOK, `${count(more)} more`]] : []),
      [kind(SHARED), "shared prefix"], [kind(CACHED), "cached"], [kind(FREE), "free"],
    ]);
  }

  words(index) {
    const { blocks_per_cell: each, requests } = this.picture, owner = this.owners[index];
    const name = each === 1 ? `Block ${index}` : `Blocks ${index * each} to ${(index + 1) * each - 1}`;
    const state = this.states[index];
    if (state === FREE) return `${name}: free.`;
    if (state === CACHED) return `${name}: cached; nobody uses it, but the next prompt with this beginning will.`;
    const who = owner === NOBODY || owner === OTHERS ? "an answer without a name here" : `${requests[owner - 1][0]}`;
    return `${name}: held by ${who}${state === SHARED ? ", shared with others that have the same beginning" : ""}.`;
  }

  at(x, y) {
    if (!this.pitch) return null;
    const column = Math.floor(x / this.pitch), index = Math.floor(y / this.pitch) * this.columns + column;
    return column < this.columns && index < this.states.length ? index : null;
  }

  choose(index) {
    if (index === this.chosen) return;
    this.chosen = index;
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (step === undefined || !this.states) return;
    event.preventDefault();
    const next = this.chosen === null ? 0 : this.chosen + step;
    if (next >= 0 && next < this.states.length) this.choose(next);
  }
}
