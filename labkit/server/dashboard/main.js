// Connects, and hands each event to whoever draws a part of it.

import { BlockMap } from "./blockmap.js";
import { makeCharts, SERIES } from "./charts.js";
import { themeButton } from "./colours.js";
import { call, eventsOf } from "./events.js";
import { History, Rates } from "./history.js";
import { Playground } from "./playground.js";
import { Switches } from "./switches.js";
import { makeTiles } from "./tiles.js";
import { Timeline } from "./timeline.js";

const LATE_SECONDS = 3, RETRY_SECONDS = 2;
const $ = (id) => document.getElementById(id);
const local = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);

let key = sessionStorage.getItem("labkit-key");
let reading = null; // AbortController of the stream
let heard = 0; // when the last event came
let latest = null;

const history = new History(SERIES, ["ttft95", "gap95", "waiting"]);
const rates = new Rates(2), energy = new Rates(10);
const showTiles = makeTiles($("tiles"), $("machine"), $("explain"));
const map = new BlockMap($("map"), $("map-caption"), $("map-legend"));
const timeline = new Timeline($("timeline"), $("timeline-caption"), $("timeline-legend"));
const switches = new Switches($("switches"), $("switch-status"), $("changes"), () => key);
const playground = new Playground($("playground"), $("readout"), $("answer"), $("alternatives"), () => key, () => latest?.model);
let showCharts = null; // made when they have a width
themeButton($("theme"));

// ---------------------------------------------------------------------------------------- an event

function derive(event) {
  rates.push(event.picture.t, event);
  const gpu = event.machine?.gpu;
  if (gpu && gpu.energy_joules !== null) energy.push(event.machine.t, { joules: gpu.energy_joules, tokens: event.machine.tokens_out });
  const tokens = energy.rise("tokens");
  return { out: rates.rate("tokens_out"), in: rates.rate("tokens_in"), joules: tokens ? energy.rise("joules") / tokens : null };
}

const milliseconds = (value) => (value === undefined || value === null ? null : 1000 * value);

function show(event) {
  heard = performance.now();
  $("model").textContent = event.model;
  if (event.state === "loading") return say("late", "Loading the model");
  latest = event;
  say("live", event.state === "draining" ? "Shutting down: takes no new requests" : "Live");
  const derived = derive(event);
  history.push(event.time, {
    out: derived.out, in: derived.in, running: event.running, waiting: event.waiting,
    ttft50: milliseconds(event.ttft?.p50), ttft95: milliseconds(event.ttft?.p95),
    gap50: milliseconds(event.gap?.p50), gap95: milliseconds(event.gap?.p95),
  });
  playground.allow(event.chat);
  switches.show(event);
  showTiles(event, derived);
  $("machine-title").replaceChildren("Machine", Object.assign(document.createElement("small"), { textContent: event.machine?.gpu?.name ?? "" }));
  if (document.hidden) return; // numbers go on, pictures wait until somebody looks
  showCharts(history, Number($("range").value));
  map.show(event.picture, event);
  timeline.show(event.picture.steps, event.picture.changes);
}

// ---------------------------------------------------------------------------------------- the connection

function say(state, text) {
  $("state").dataset.state = state;
  if ($("state").textContent !== text) $("state").textContent = text;
  document.body.classList.toggle("late", state === "late" || state === "bad");
}

function view(connected) {
  $("welcome").hidden = connected;
  $("live").hidden = !connected;
  document.body.classList.toggle("connected", connected);
  if (connected) showCharts ??= makeCharts($("charts"), () => switches.marks);
}

async function connect() {
  reading = new AbortController();
  const { signal } = reading;
  while (!signal.aborted) {
    try {
      const answer = await call("dashboard/events", key, { signal });
      sessionStorage.setItem("labkit-key", key);
      view(true);
      for await (const event of eventsOf(answer)) show(event);
      say("bad", "The server has ended the stream; trying again");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) return leave("This server does not know that key.");
      if (!document.body.classList.contains("connected")) $("key-error").textContent = `Not connected: ${error.message}`;
      say("bad", `No connection: ${error.message}; trying again`);
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * RETRY_SECONDS));
  }
}

function leave(reason = "") {
  reading?.abort();
  sessionStorage.removeItem("labkit-key");
  key = null;
  view(false);
  say("off", "Not connected");
  $("model").textContent = "";
  $("key-error").textContent = reason;
  $("key").value = "";
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  reading?.abort();
  key = $("key").value.trim();
  $("key-error").textContent = "";
  connect();
});
$("leave").addEventListener("click", () => leave());
$("range").addEventListener("change", () => latest && showCharts(history, Number($("range").value)));
setInterval(() => {
  const silent = (performance.now() - heard) / 1000;
  if (silent > LATE_SECONDS && $("state").dataset.state === "live") say("late", "The engine is silent: one long step, or no connection");
}, 1000);
if (local) $("key-hint").textContent = "Started without --api-key? Then the key is dev-key, for browsers on this machine.";
if (key) connect();
