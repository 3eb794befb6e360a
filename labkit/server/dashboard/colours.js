// One look for each request, the same in every picture: an Okabe-Ito colour (without yellow, which is lost on white) and,
// so that colour is not all, a pattern.

const OKABE_ITO = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"];
const PATTERNS = ["plain", "stripes", "dots"];

/** Colour and pattern of a request by its name, "r12" or "r12/3": its number decides, so neighbours differ. */
export function lookOf(name) {
  const [number, choice] = name.match(/\d+/g)?.map(Number) ?? [0];
  const place = number + 3 * (choice ?? 0);
  return { colour: OKABE_ITO[place % 6], pattern: PATTERNS[Math.floor(place / 6) % 3] };
}

/** Fill a rectangle with a look. Patterns need a few pixels; below that only the colour is drawn. */
export function fill(context, look, x, y, width, height) {
  context.fillStyle = look.colour;
  context.fillRect(x, y, width, height);
  if (look.pattern === "plain" || width < 5 || height < 5) return;
  context.fillStyle = "rgb(0 0 0 / 45%)";
  if (look.pattern === "stripes") {
    for (let at = x + 1; at + 1 < x + width; at += 4) context.fillRect(at, y, 1.5, height);
  } else {
    for (let at = x + 1.5; at + 1 < x + width; at += 4) {
      for (let down = y + 1.5; down + 1 < y + height; down += 4) context.fillRect(at, down, 1.5, 1.5);
    }
  }
}

const probe = document.createElement("i");
const known = new Map();

/** What a colour of the style sheet is in the present theme. */
export function themeColour(name) {
  if (!known.has(name)) {
    probe.hidden = true;
    document.body.append(probe);
    probe.style.color = `var(--${name})`;
    known.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return known.get(name);
}

/** Call `then` now that colours may have changed, and whenever the theme does. */
const listeners = [];
export function onTheme(then) {
  listeners.push(then);
}
function themeChanged() {
  known.clear();
  for (const then of listeners) then();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

/** The button that goes round: as the system has it, light, dark. */
export function themeButton(button) {
  const themes = ["system", "light", "dark"];
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    themeChanged();
  };
  let now = Math.max(0, themes.indexOf(localStorage.getItem("labkit-theme")));
  button.addEventListener("click", () => {
    now = (now + 1) % themes.length;
    localStorage.setItem("labkit-theme", themes[now]);
    show(themes[now]);
  });
  show(themes[now]);
}

/** A canvas as wide as its place, `height` high, sharp on any screen. Returns its context in CSS pixels. */
export function prepare(canvas, height) {
  const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** List entries for a legend: [look, text] each. */
export function legend(list, entries) {
  while (list.children.length > entries.length) list.lastChild.remove();
  entries.forEach(([look, text], index) => {
    const item = list.children[index] ?? list.appendChild(document.createElement("li"));
    const [swatch, words] = item.children.length ? item.children : [document.createElement("canvas"), document.createElement("span")];
    if (!item.children.length) item.append(swatch, words);
    if (words.textContent !== text) words.textContent = text;
    swatch.width = swatch.height = 24;
    const context = swatch.getContext("2d");
    context.scale(2, 2);
    if (typeof look === "function") look(context, 0, 0, 12);
    else fill(context, look, 0, 0, 12, 12);
  });
}
