// Numbers as they are shown: [value, unit].

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** About three digits, with a thousands separator. */
export function number(value) {
  const size = Math.abs(value);
  if (size >= 100 || value === 0) return whole.format(value);
  return size >= 1 ? value.toFixed(size >= 10 ? 1 : 2) : String(Number(value.toPrecision(3)));
}

const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 3 });

/** A number at an axis. */
export const tick = (value) => (value >= 10_000 ? short : plain).format(value);

export const count = (value) => whole.format(value);
export const perSecond = (value) => [number(value), "/s"];
export const percent = (share) => [(100 * share).toFixed(1), "%"];
export const seconds = (value) => (value < 1 ? [number(1000 * value), "ms"] : [number(value), "s"]);

/** With `digits` after the point, or about three digits in all. */
export function bytes(value, digits = null) {
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return [digits === null ? number(value / size) : (value / size).toFixed(digits), unit];
  }
  return [whole.format(value), "B"];
}

export const words = ([value, unit]) => (unit === "%" || unit === "/s" ? `${value}${unit === "%" ? " " : ""}${unit}` : `${value} ${unit}`);

/** 14:03:09, of seconds since 1970. */
export const clock = (time) => new Date(1000 * time).toTimeString().slice(0, 8);
