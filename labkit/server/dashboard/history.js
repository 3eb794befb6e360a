// Sixty minutes of numbers in bounded memory: the last five as they came, the rest as one point for every five seconds.

const FINE = 600; // points of half a second
const COARSE = 720;
const COARSE_SECONDS = 5;

class Ring {
  constructor(size, width) {
    this.size = size;
    this.width = width;
    this.values = new Float64Array(size * width); // NaN where there was nothing to measure
    this.count = 0; // ever pushed
  }

  push(row) {
    this.values.set(row, (this.count % this.size) * this.width);
    this.count += 1;
  }

  *rows() {
    for (let i = Math.max(0, this.count - this.size); i < this.count; i += 1) {
      const at = (i % this.size) * this.width;
      yield this.values.subarray(at, at + this.width);
    }
  }
}

export class History {
  /** `names` of the numbers. Of several points that become one, those in `peaks` keep the greatest, the others the mean. */
  constructor(names, peaks = []) {
    this.names = names;
    this.peaks = new Set(peaks);
    this.fine = new Ring(FINE, names.length + 1);
    this.coarse = new Ring(COARSE, names.length + 1);
    this.open = []; // rows of the five seconds that are not over
  }

  /** Add one point: seconds since 1970 and a number, or null, for each name. */
  push(time, numbers) {
    const row = [time, ...this.names.map((name) => numbers[name] ?? NaN)];
    this.fine.push(row);
    if (this.open.length && Math.floor(time / COARSE_SECONDS) !== Math.floor(this.open[0][0] / COARSE_SECONDS)) {
      this.coarse.push(this.merge(this.open));
      this.open = [];
    }
    this.open.push(row);
  }

  merge(rows) {
    return rows[0].map((time, column) => {
      if (column === 0) return time;
      const values = rows.map((row) => row[column]).filter((value) => !Number.isNaN(value));
      if (!values.length) return NaN;
      if (this.peaks.has(this.names[column - 1])) return Math.max(...values);
      return values.reduce((a, b) => a + b, 0) / values.length;
    });
  }

  /** [times, values of names[0], …] of the last seconds, for uPlot; null where there was nothing to measure. */
  view(seconds, names) {
    const columns = [0, ...names.map((name) => this.names.indexOf(name) + 1)];
    const out = columns.map(() => []);
    const end = this.last;
    const fineFrom = this.fine.rows().next().value?.[0] ?? Infinity;
    const add = (row) => columns.forEach((column, i) => out[i].push(Number.isNaN(row[column]) ? null : row[column]));
    for (const row of this.coarse.rows()) if (row[0] > end - seconds && row[0] < fineFrom) add(row);
    for (const row of this.fine.rows()) if (row[0] > end - seconds) add(row);
    return out;
  }

  get last() {
    if (!this.fine.count) return 0;
    return this.fine.values[((this.fine.count - 1) % FINE) * this.fine.width];
  }
}

/** How fast counters rose over the last seconds, from events that carry both them and the engine's clock. */
export class Rates {
  constructor(seconds) {
    this.seconds = seconds;
    this.points = [];
  }

  push(t, counters) {
    if (this.points.length && t < this.points.at(-1).t) this.points = []; // another engine: it began anew
    if (t !== this.points.at(-1)?.t) this.points.push({ t, counters });
    while (this.points.length > 2 && this.points[1].t <= t - this.seconds) this.points.shift();
  }

  /** By how much a counter rose; null before there are two points. */
  rise(name) {
    if (this.points.length < 2) return null;
    return this.points.at(-1).counters[name] - this.points[0].counters[name];
  }

  rate(name) {
    const rise = this.rise(name);
    return rise === null ? null : rise / (this.points.at(-1).t - this.points[0].t);
  }
}
