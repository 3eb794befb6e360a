// The answer, token by token, and what else might have come at each place.

/** One entry for each token of a chunk, whichever of the two APIs it comes from: {text, logprob, top: [[text, logprob]]}. */
export function tokensOf(choice) {
  const logprobs = choice.logprobs;
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({
      text: token, logprob, top: top.map((other) => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((text, i) => ({
    text, logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs[i] ?? {}),
  }));
}

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(nothing)";

export class Answer {
  constructor(box, panel) {
    Object.assign(this, { box, panel, entries: [], chosen: -1, held: [] });
    box.addEventListener("mouseover", (event) => this.choose(this.spans().indexOf(event.target)));
    box.addEventListener("focus", () => this.chosen < 0 && this.choose(0));
    box.addEventListener("keydown", (event) => this.key(event));
    this.clear("The answer appears here, token by token.");
  }

  spans() {
    return [...this.box.querySelectorAll(".token")];
  }

  clear(text = "") {
    Object.assign(this, { entries: [], chosen: -1, held: [] });
    this.box.replaceChildren();
    this.note(text);
    this.explain("Point at a token of the answer, or move through it with the arrow keys, to see what else was likely there.");
  }

  note(text, className = "quiet") {
    if (!text) return;
    const note = document.createElement("span");
    note.className = className;
    note.textContent = text;
    this.box.append(note);
  }

  /** Text that has come, with the tokens it is made of. A token that is a part of a character waits for the rest of it. */
  add(text, tokens) {
    this.held.push(...tokens);
    if (!text) return;
    const near = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 30;
    const whole = this.held.map((token) => token.text).join("") === text;
    for (const [piece, of] of whole ? this.held.map((token) => [token.text, [token]]) : [[text, this.held]]) {
      const span = document.createElement("span");
      span.className = "token";
      span.textContent = piece;
      this.entries.push(of);
      this.box.append(span);
    }
    this.held = [];
    if (near) this.box.scrollTop = this.box.scrollHeight;
  }

  choose(index) {
    const spans = this.spans();
    if (index < 0 || index >= spans.length) return;
    spans[this.chosen]?.classList.remove("chosen");
    this.chosen = index;
    spans[index].classList.add("chosen");
    spans[index].scrollIntoView({ block: "nearest" });
    this.showAlternatives(this.entries[index].at(-1));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(this.entries.length - 1, this.chosen + step)));
  }

  explain(text) {
    const line = document.createElement("p");
    line.className = "quiet";
    line.textContent = text;
    this.panel.replaceChildren(line);
  }

  showAlternatives(token) {
    if (!token) return this.explain("The server gave no probabilities for this text.");
    const rows = [...token.top];
    if (!rows.some(([text]) => text === token.text)) rows.push([token.text, token.logprob]);
    const table = document.createElement("table");
    table.createCaption().textContent = "What the model itself thought, before temperature and filters; the drawn token is bold.";
    for (const [text, logprob] of rows.sort((a, b) => b[1] - a[1])) {
      const row = table.insertRow(), share = Math.exp(logprob), meter = document.createElement("meter");
      if (text === token.text) row.className = "drawn";
      row.insertCell().textContent = visible(text);
      meter.value = share;
      row.insertCell().append(meter);
      row.insertCell().textContent = share >= 0.001 ? `${(100 * share).toFixed(1)} %` : "< 0.1 %";
    }
    this.panel.replaceChildren(table);
  }
}
