// A prompt, its answer, and how long that took as this page saw it.

import { call, eventsOf } from "./events.js";
import { number, seconds, words } from "./format.js";
import { Answer, tokensOf } from "./tokens.js";

const TOP = 5; // alternatives

/** Times of one answer, by the page's own clock: from the click to the first text, and tokens a second after it. */
class Stopwatch {
  constructor() {
    Object.assign(this, { begin: performance.now(), first: null, last: null, tokens: 0, early: 0 });
  }

  saw(tokens) {
    this.last = performance.now();
    if (this.first === null) Object.assign(this, { first: this.last, early: tokens });
    this.tokens += tokens;
  }

  readings() {
    const after = this.tokens - this.early, time = (this.last - this.first) / 1000;
    return [
      ["First token", this.first === null ? "–" : words(seconds((this.first - this.begin) / 1000))],
      ["Tokens/s", after > 0 && time > 0 ? number(after / time) : "–"],
      ["Tokens", this.tokens ? String(this.tokens) : "–"],
    ];
  }
}

export class Playground {
  /** `key()` is the key of now; `model()` the model's name. */
  constructor(form, readout, answerBox, alternatives, key, model) {
    Object.assign(this, { form, readout, key, model, running: null });
    this.answer = new Answer(answerBox, alternatives);
    this.field = (name) => form.querySelector(`#${name}`);
    for (const slider of form.querySelectorAll("input[type=range]")) {
      const show = () => { slider.nextElementSibling.value = slider.id === "top_k" && slider.value === "0" ? "off" : slider.value; };
      slider.addEventListener("input", show);
      show();
    }
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.generate();
    });
    this.field("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.field("stop").addEventListener("click", () => this.running?.abort());
    this.field("api").addEventListener("change", () => this.suggest());
    this.suggest();
    this.show(null);
  }

  /** A prompt that fits the choice, unless somebody has written another. */
  suggest() {
    const { options, selectedOptions } = this.field("api"), prompt = this.field("prompt");
    if (["", ...[...options].map((option) => option.dataset.prompt)].includes(prompt.value)) prompt.value = selectedOptions[0].dataset.prompt;
  }

  /** A model without a chat template continues texts and does nothing else. */
  allow(chat) {
    const api = this.field("api"), option = api.querySelector("[value=chat]");
    option.disabled = !chat;
    if (chat || !option.selected) return;
    api.value = "text";
    this.suggest();
  }

  request(chat) {
    const prompt = this.field("prompt").value, n = Number(this.field("copies").value);
    const same = Object.fromEntries(["temperature", "top_p", "top_k", "max_tokens"].map((name) => [name, Number(this.field(name).value)]));
    const own = chat
      ? { messages: [{ role: "user", content: prompt }], logprobs: true, top_logprobs: TOP }
      : { prompt, logprobs: TOP };
    return { model: this.model(), ...same, ...own, n, stream: true };
  }

  async generate() {
    if (this.running) return;
    const chat = this.field("api").value === "chat", watch = new Stopwatch();
    this.running = new AbortController();
    this.busy(true);
    this.answer.clear();
    try {
      const path = chat ? "v1/chat/completions" : "v1/completions";
      const options = { method: "POST", body: JSON.stringify(this.request(chat)), signal: this.running.signal };
      for await (const chunk of eventsOf(await call(path, this.key(), options))) this.take(chunk, chat, watch);
      if (watch.first === null) this.answer.note("The model ended the answer at once.");
    } catch (error) {
      if (error.name === "AbortError") this.answer.note(" (stopped)");
      else this.answer.note(`${watch.first === null ? "" : "\n"}Failed: ${error.message}`, "failed");
    }
    this.show(watch);
    this.running = null;
    this.busy(false);
  }

  /** Of several answers at once the first is shown and timed; the others are load. */
  take(chunk, chat, watch) {
    for (const choice of chunk.choices) {
      if (choice.index !== 0) continue;
      const text = (chat ? choice.delta.content : choice.text) ?? "", tokens = tokensOf(choice);
      if (!text && !tokens.length) continue;
      watch.saw(tokens.length);
      this.answer.add(text, tokens);
      this.show(watch);
    }
  }

  show(watch) {
    const readings = watch?.readings() ?? [["First token", "–"], ["Tokens/s", "–"], ["Tokens", "–"]];
    this.readout.replaceChildren(...readings.map(([name, value]) => {
      const pair = document.createElement("div"), term = document.createElement("dt"), shown = document.createElement("dd");
      term.textContent = name;
      shown.textContent = value;
      pair.append(term, shown);
      return pair;
    }));
  }

  busy(now) {
    this.field("generate").disabled = now;
    this.field("stop").disabled = !now;
  }
}
