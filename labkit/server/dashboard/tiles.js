// The numbers. Each tile says what it is made from; what was not measured is said in words, never shown as 0.

import { bytes, count, number, percent, perSecond, seconds, words } from "./format.js";

const NOT_MEASURED = "not measured on this machine";
const QUIET = { value: "–", detail: "none in the last 10 s" };

const percentiles = (p) => (p ? { value: seconds(p.p50), detail: `p95 ${words(seconds(p.p95))} · n ${count(p.count)}` } : QUIET);
const rate = (value, total) =>
  value === null ? { value: "–", detail: "measuring" } : { value: perSecond(value), detail: `${count(total)} so far` };
const measured = (value, show) => (value === null || value === undefined ? { value: null } : { value: show(value) });

// [key, label, explanation, (event, derived) → {value: [number, unit], text or null; detail}]
const ENGINE = [
  ["tokens_out", "Tokens out", "Tokens drawn, a second, over the last two seconds.",
    (e, d) => rate(d.out, e.tokens_out)],
  ["tokens_in", "Tokens in", "Prompt tokens of requests that were admitted, a second, over the last two seconds; those found in the prefix cache count too.",
    (e, d) => rate(d.in, e.tokens_in)],
  ["running", "Running", "Answers that hold a seat in the batch now. Max batch is how many seats there are.",
    (e) => ({ value: count(e.running), detail: `of ${count(e.settings.max_num_seqs)} seats` })],
  ["waiting", "Waiting", "Answers that wait for a seat, or for free blocks, in the order of the policy.",
    (e) => ({ value: count(e.waiting), detail: `policy ${e.settings.policy}` })],
  ["preempted", "Preempted", "How often a running answer had to give back its blocks because the pool was full. It waits, and is computed again.",
    (e) => ({ value: count(e.preempted), detail: "times so far" })],
  ["ttft", "Time to first token, p50", "From a request's arrival in the engine to its first token: half of the answers of the last ten seconds were faster (p50), 95 of 100 were faster than p95. n is how many there were.",
    (e) => percentiles(e.ttft)],
  ["gap", "Between tokens, p50", "The pause between two tokens of an answer, as this server's HTTP process sees them come, over the last ten seconds: half were shorter (p50), 95 of 100 shorter than p95. n is how many there were, the last 4,096 at most.",
    (e) => percentiles(e.gap)],
  ["kv", "KV blocks in use", "Share of the KV pool that running answers hold. Cached blocks keep an ended prompt's beginning for the next one and are given up when needed.",
    (e) => ({
      value: percent(e.kv_blocks_in_use / e.kv_blocks_total),
      detail: `${count(e.kv_blocks_in_use)} of ${count(e.kv_blocks_total)}`,
    })],
  ["prefix", "Prefix hits", "Of all prompt tokens that were looked up in the prefix cache so far, the share that was found and needed no computing.",
    (e) => e.prefix_cache_queries
      ? { value: percent(e.prefix_hit_rate), detail: `${count(e.prefix_cache_hits)} of ${count(e.prefix_cache_queries)}` }
      : { value: "–", detail: e.settings.enable_prefix_caching ? "nothing looked up yet" : "prefix caching is off" }],
  ["speculation", "Speculation", "Share of drafted tokens that the model accepted. Off unless the engine was started with a draft.",
    (e) => !e.speculative ? { value: "off", detail: "no draft model" }
      : e.draft_tokens ? { value: percent(e.acceptance_rate), detail: `${count(e.accepted_tokens)} of ${count(e.draft_tokens)} drafts` }
        : { value: "–", detail: "nothing drafted yet" }],
];

const gpu = (e) => e.machine?.gpu ?? {};
const MACHINE = [
  ["cpu", "Engine CPU", "Processor time the engine's process uses, in cores, over the last second.",
    (e) => measured(e.machine?.process.cpu_cores, (v) => [v.toFixed(2), "cores"])],
  ["memory", "Engine memory", "Resident memory of the engine's process: weights, KV pool and Python on a CPU; on a GPU only its host side.",
    (e) => measured(e.machine?.process.memory_bytes, (v) => bytes(v, 1))],
  ["gpu_memory", "GPU memory", "Memory in use on the card, by all programs, from NVML.",
    (e) => measured(gpu(e).memory_used_bytes, bytes)],
  ["gpu_use", "GPU use", "Share of NVML's last sample period in which some kernel ran. It does not say how busy that kernel kept the card.",
    (e) => measured(gpu(e).utilization, percent)],
  ["power", "Power", "What the card draws now, from NVML.", (e) => measured(gpu(e).power_watts, (v) => [number(v), "W"])],
  ["energy", "Energy a token", "Joules the card took, divided by the tokens drawn in the same ten seconds; its idle draw is in it.",
    (e, d) => gpu(e).energy_joules === null || gpu(e).energy_joules === undefined ? { value: null }
      : d.joules === null ? { value: "–" } : { value: [number(d.joules), "J"] }],
  ["temperature", "Temperature", "Of the GPU's chip, from NVML.", (e) => measured(gpu(e).temperature_celsius, (v) => [count(v), "°C"])],
  ["clocks", "Clocks, SM / memory", "Present clock of the multiprocessors and of the memory, from NVML.",
    (e) => gpu(e).sm_clock_mhz == null || gpu(e).memory_clock_mhz == null ? { value: null }
      : { value: [`${count(gpu(e).sm_clock_mhz)} / ${count(gpu(e).memory_clock_mhz)}`, "MHz"] }],
];

const element = (tag, className, text = "") => {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
};

class Tile {
  constructor([key, label, explanation, read], explain) {
    this.read = read;
    this.box = element("div", "tile");
    this.box.dataset.tile = key;
    this.box.tabIndex = 0;
    this.box.role = "group";
    this.value = element("p", "value");
    this.number = element("span", "number");
    this.unit = element("span", "unit");
    this.value.append(this.number, this.unit);
    this.detail = element("p", "detail");
    this.box.append(element("p", "label", label), this.value, this.detail);
    this.box.setAttribute("aria-label", label);
    this.box.setAttribute("aria-description", explanation);
    for (const kind of ["mouseenter", "focus"]) this.box.addEventListener(kind, () => explain(`${label}: ${explanation}`));
    this.box.addEventListener("mouseleave", () => explain(null));
    this.box.addEventListener("blur", () => explain(null));
  }

  show(event, derived) {
    const { value, detail } = this.read(event, derived);
    this.box.classList.toggle("unmeasured", value === null);
    const [shown, unit] = value === null ? [NOT_MEASURED, ""] : Array.isArray(value) ? value : [value, ""];
    this.number.textContent = shown;
    this.unit.textContent = unit;
    this.detail.textContent = detail ?? "";
    this.detail.hidden = detail === undefined;
    this.box.setAttribute("aria-label", `${this.box.firstChild.textContent}: ${shown} ${unit}. ${detail ?? ""}`);
  }
}

/** Fills the two grids; returns a function that shows an event. */
export function makeTiles(engineGrid, machineGrid, explainLine) {
  const hint = "Point at a number, or move to it with the Tab key, to read what it is.";
  const explain = (text) => { explainLine.textContent = text ?? hint; };
  explain(null);
  const tiles = [[ENGINE, engineGrid], [MACHINE, machineGrid]].flatMap(([rows, grid]) =>
    rows.map((row) => {
      const tile = new Tile(row, explain);
      grid.append(tile.box);
      return tile;
    }));
  return (event, derived) => { for (const tile of tiles) tile.show(event, derived); };
}
