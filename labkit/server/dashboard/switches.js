// Settings of the running engine: shown as they are, changed by POST /dashboard/settings.

import { call } from "./events.js";
import { clock, count } from "./format.js";

const NAMES = { policy: "policy", enable_prefix_caching: "prefix caching", max_num_batched_tokens: "chunk size", max_num_seqs: "max batch" };
const word = (value) => (value === true ? "on" : value === false ? "off" : typeof value === "number" ? count(value) : value);

export class Switches {
  /** `key()` is the key of now. */
  constructor(form, status, list, key) {
    Object.assign(this, { form, status, list, key, marks: [], seen: "", sending: new Set() });
    this.inputs = [...form.querySelectorAll("[data-setting]")];
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      document.activeElement.blur(); // Enter in a number: that is a change
    });
    for (const input of this.inputs) input.addEventListener("change", () => this.send(input));
  }

  async send(input) {
    const name = input.dataset.setting;
    const value = input.type === "checkbox" ? input.checked : input.type === "number" ? input.valueAsNumber : input.value;
    if (Number.isNaN(value)) {
      this.say(`Not changed: ${NAMES[name]} must be a whole number.`, true);
      return this.fill(this.settings, null);
    }
    this.say(`Changing ${NAMES[name]} …`);
    this.sending.add(input);
    try {
      const body = JSON.stringify({ [name]: value });
      const { settings } = await (await call("dashboard/settings", this.key(), { method: "POST", body })).json();
      this.settings = settings;
      this.say(`Done: ${NAMES[name]} is ${word(settings[name])}.`);
    } catch (error) {
      this.say(`Not changed: ${error.message}.`, true);
    }
    this.sending.delete(input);
    if (this.settings) this.fill(this.settings, null);
  }

  say(text, failed = false) {
    this.status.textContent = text;
    this.status.classList.toggle("failed", failed);
  }

  /** What the engine says. `busy`, the control that is being used, is left alone, and one whose change is on its way. */
  fill(settings, busy) {
    this.settings = settings;
    for (const input of this.inputs) {
      const value = settings[input.dataset.setting];
      if (input === busy || this.sending.has(input)) continue;
      if (input.type === "checkbox") input.checked = value;
      else input.value = value;
    }
  }

  show(event) {
    this.fill(event.settings, document.activeElement);
    for (const input of this.inputs) {
      const most = event.most[input.dataset.setting];
      if (input.type !== "number") continue;
      input.max = most;
      input.labels[0].querySelector("small").textContent = `1 to ${count(most)}, as launched`;
    }
    this.showChanges(event);
  }

  showChanges(event) {
    const { changes, t } = event.picture;
    const key = changes.map((change) => change.t).join();
    if (key === this.seen) return;
    this.seen = key;
    this.marks = changes.map((change, index) => ({ time: event.time - (t - change.t), number: index + 1, ...change }));
    this.list.replaceChildren(...this.marks.toReversed().map((mark) => {
      const item = document.createElement("li");
      const text = `${NAMES[mark.name]} ${word(mark.was)} → ${word(mark.value)}`;
      item.textContent = `${mark.number} · ${clock(mark.time)} · ${text}, from step ${count(mark.step)}`;
      return item;
    }));
  }
}
