// controls.js: the state of the page, its controls and keys. The state is the settings, the step and the row; all else follows from them.
import {bytesOf, definition, largestDifference, randomInputs, walk} from "./algorithm.js";
import {ChipPicture, MemoryPicture, describe, fly, realSize, rowNumbers, traffic} from "./draw.js";
import {TimeLine} from "./timeline.js";
import {Gradients, Pieces} from "./below.js";

const $ = (id) => document.getElementById(id);
const json = (id) => JSON.parse($(id).textContent);
const examples = json("examples-data").map((example) => ({...example, lse: example.lse.map((x) => x ?? -Infinity)}));

// name of the setting: label, least, most
const SLIDERS = {
  seqlenQ: ["Rows (seqlen_q)", 1, 32],
  seqlenK: ["Keys (seqlen_k)", 1, 32],
  headdim: ["Head dim", 1, 16],
  tileM: ["Tile: rows", 2, 16],
  tileN: ["Tile: keys", 2, 16],
  seed: ["Seed", 1, 99],
};
const OF_INPUTS = ["seqlenQ", "seqlenK", "headdim", "seed"]; // moving one of these leaves the example
const SPEEDS = [0.5, 1, 2, 4, 10, 30]; // steps a second

const state = {
  settings: {...examples[0].settings, order: "v2", precision: 32, seed: 1, example: 0},
  index: 0,
  row: 1,
  playing: false,
  speed: 2,
};
let inputs, walks, exact, timer;
const memory = new MemoryPicture($("memory")),
  chip = new ChipPicture($("chip")),
  below = {gradients: new Gradients(), pieces: new Pieces()};
const steps = () => walks[state.settings.order].steps;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

// ---- from settings to steps ----

function compute() {
  const {settings} = state,
    example = examples[settings.example];
  inputs = example ?? randomInputs(settings);
  walks = Object.fromEntries(["standard", "v1", "v2"].map((order) => [order, walk(inputs, {...settings, order})]));
  // An example's answer was made for its own mask; with the other mask the page's definition says what is right.
  exact = example && example.settings.causal === settings.causal ? example : definition(inputs, settings.causal);
  state.row = Math.min(state.row, settings.seqlenQ - 1);
  state.index = Math.min(state.index, steps().length - 1);
  for (const section of Object.values(below)) section.inputs(inputs, settings);
}

function change(settings, {restart = true} = {}) {
  Object.assign(state.settings, settings);
  if (restart) (pause(), (state.index = 0));
  (compute(), layout(), showControls(), remember());
}

function layout() {
  (memory.layout(state.settings, inputs), chip.layout(state.settings, inputs));
  show();
}

// ---- showing ----

function show(moved = false) {
  const {settings, index, row} = state,
    all = steps(),
    step = all[index];
  $("step-text").textContent = describe(step, settings, row);
  $("step-text").setAttribute("aria-live", state.playing ? "off" : "polite"); // a screen reader cannot keep pace with the player
  (memory.show(step, row), chip.show(step, row));
  if (moved && !calm.matches && SPEEDS[state.speed] <= 4)
    fly(step, memory, chip, Math.min(520, 700 / SPEEDS[state.speed]));
  $("row-numbers").innerHTML = rowNumbers(all, index, settings, row);
  $("traffic").firstElementChild.innerHTML = traffic(walks, settings.order, index);
  (($("row").value = row), ($("row-name").value = row));
  Object.assign($("seek"), {max: all.length - 1, value: index});
  $("seek").setAttribute("aria-valuetext", `step ${index} of ${all.length - 1}`);
  $("count").value = `${index} / ${all.length - 1}`;
}

function showControls() {
  const {settings} = state;
  for (const name of Object.keys(SLIDERS))
    (($(name).value = settings[name]), ($(`${name}-value`).value = settings[name]));
  $("example").value = settings.example;
  $("causal").checked = settings.causal;
  $("row").max = settings.seqlenQ - 1;
  for (const name of ["order", "precision"])
    document
      .querySelectorAll(`input[name=${name}]`)
      .forEach((radio) => (radio.checked = radio.value === String(settings[name])));
  $("traffic").lastElementChild.innerHTML = realSize(settings.causal);
  const difference = largestDifference(walks[settings.order], exact),
    shipped = exact === examples[settings.example];
  const against = shipped
    ? "the Python reference (float64, made with the example)"
    : "standard attention in float64, computed here from its definition";
  $("check").textContent =
    `Largest difference of out and lse from ${against}: ${difference === 0 ? "0" : difference.toExponential(1)}. ` +
    (settings.precision === 32 ? "Every operation is rounded to float32." : "Every operation is float64.");
  (($("speed").value = state.speed), ($("speed-name").value = `${SPEEDS[state.speed]} / s`));
  $("speed").setAttribute("aria-valuetext", `${SPEEDS[state.speed]} steps a second`);
}

// ---- playing ----

function go(index) {
  const moved = index === state.index + 1;
  state.index = Math.max(0, Math.min(steps().length - 1, index));
  const {rows} = steps()[state.index];
  if ($("follow").checked && rows && (state.row < rows[0] || state.row >= rows[1])) state.row = rows[0];
  (show(moved), remember());
}
function tick() {
  if (state.index >= steps().length - 1) return pause();
  go(state.index + 1);
  timer = setTimeout(tick, 1000 / SPEEDS[state.speed]);
}
// Scrolls to the text of the step and the picture of memory below it, unless the whole picture is in view.
function reveal() {
  const {top, bottom} = $("memory").getBoundingClientRect(),
    end = document.querySelector(".transport").getBoundingClientRect().top,
    down = $("controls").getBoundingClientRect().bottom;
  if (top < 0 || bottom > end) scrollBy({top: down, behavior: calm.matches ? "auto" : "smooth"});
}
function play() {
  reveal();
  ((state.playing = true), ($("play").textContent = "Pause"));
  if (state.index >= steps().length - 1) state.index = 0;
  (clearTimeout(timer), tick());
}
function pause() {
  clearTimeout(timer);
  const was = state.playing;
  ((state.playing = false), ($("play").textContent = "Play"));
  if (was) show();
}
const toggle = () => (state.playing ? pause() : play());
function stepTo(index) {
  (pause(), go(index));
}
function chooseRow(row) {
  state.row = Math.max(0, Math.min(state.settings.seqlenQ - 1, row));
  (show(), remember());
}
function setSpeed(speed) {
  state.speed = Math.max(0, Math.min(SPEEDS.length - 1, speed));
  showControls();
}
const reseed = () => change({seed: (state.settings.seed % 99) + 1, example: -1});

// ---- the address keeps the state ----

const LETTERS = {
  q: "seqlenQ",
  k: "seqlenK",
  d: "headdim",
  m: "tileM",
  n: "tileN",
  seed: "seed",
  order: "order",
  causal: "causal",
  precision: "precision",
  example: "example",
};

let remembering;
function remember() {
  // not at every step: browsers limit how often an address may change
  clearTimeout(remembering);
  remembering = setTimeout(() => {
    const parts = Object.entries(LETTERS).map(
      ([letter, name]) => `${letter}=${name === "order" ? state.settings.order : Number(state.settings[name])}`,
    );
    history.replaceState(null, "", `#${parts.join("&")}&row=${state.row}&step=${state.index}`);
  }, 250);
}
function recall() {
  const given = new URLSearchParams(location.hash.slice(1)),
    {settings} = state;
  const whole = (letter, least, most, otherwise) => {
    const value = Number(given.get(letter) ?? NaN);
    return Number.isInteger(value) && value >= least && value <= most ? value : otherwise;
  };
  settings.example = whole(
    "example",
    -1,
    examples.length - 1,
    [..."qkd", "seed"].some((letter) => given.has(letter)) ? -1 : 0,
  );
  if (settings.example >= 0) Object.assign(settings, examples[settings.example].settings);
  for (const [letter, name] of Object.entries(LETTERS)) {
    const [, least, most] = SLIDERS[name] ?? [];
    if (most && !(settings.example >= 0 && OF_INPUTS.includes(name) && name !== "seed"))
      settings[name] = whole(letter, least, most, settings[name]);
  }
  if (given.has("causal")) settings.causal = given.get("causal") === "1";
  if (["standard", "v1", "v2"].includes(given.get("order"))) settings.order = given.get("order");
  if (given.get("precision") === "64") settings.precision = 64;
  compute();
  state.row = whole("row", 0, settings.seqlenQ - 1, Math.min(state.row, settings.seqlenQ - 1));
  state.index = whole("step", 0, steps().length - 1, 0);
}

// ---- theme ----

const THEMES = ["system", "light", "dark"];
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme-name").textContent = theme;
}
const nextTheme = () => setTheme(THEMES[(THEMES.indexOf($("theme-name").textContent) + 1) % THEMES.length]);

// ---- controls ----

function connect() {
  for (const [name, [text, least, most]] of Object.entries(SLIDERS)) {
    const label = document.createElement("label");
    label.htmlFor = name; // else the label would be the output's, which comes first
    label.innerHTML =
      `<span>${text}</span><output id="${name}-value" for="${name}"></output>` +
      `<input type="range" id="${name}" min="${least}" max="${most}">`;
    $("sliders").append(label);
    $(name).addEventListener("input", () =>
      change({[name]: +$(name).value, ...(OF_INPUTS.includes(name) ? {example: -1} : {})}),
    );
  }
  $("example").append(...examples.map(({name}, n) => new Option(name, n)), new Option("Random numbers", -1));
  $("example").addEventListener("change", () => {
    const example = +$("example").value;
    change({example, ...(examples[example]?.settings ?? {})});
  });
  $("causal").addEventListener("change", () => change({causal: $("causal").checked}));
  for (const radio of document.querySelectorAll("#controls input[type=radio]"))
    radio.addEventListener("change", () => change({[radio.name]: radio.name === "order" ? radio.value : +radio.value}));
  $("controls").addEventListener("submit", (event) => event.preventDefault());

  const press = {
    first: () => stepTo(0),
    back: () => stepTo(state.index - 1),
    play: toggle,
    next: () => stepTo(state.index + 1),
    last: () => stepTo(Infinity),
    theme: nextTheme,
  };
  for (const [id, act] of Object.entries(press)) $(id).addEventListener("click", act);
  $("seek").addEventListener("input", () => stepTo(+$("seek").value));
  $("speed").addEventListener("input", () => setSpeed(+$("speed").value));
  $("row").addEventListener("input", () => chooseRow(+$("row").value));
  $("memory").addEventListener("click", (event) => {
    const row = memory.rowAt(event);
    if (row !== null) chooseRow(row);
  });
  $("memory").addEventListener("keydown", (event) => {
    const by = {ArrowUp: -1, ArrowDown: 1}[event.key];
    if (by) (event.preventDefault(), chooseRow(state.row + by));
  });

  $("traffic").append(document.createElement("div"), document.createElement("div"));
  document.addEventListener("keydown", shortcut);
  new ResizeObserver(() => {
    if ($("memory").clientWidth !== layout.width) ((layout.width = $("memory").clientWidth), layout());
  }).observe($("memory"));
}

const KEYS = {
  " ": toggle,
  arrowleft: () => stepTo(state.index - 1),
  arrowright: () => stepTo(state.index + 1),
  home: () => stepTo(0),
  end: () => stepTo(Infinity),
  k: () => chooseRow(state.row - 1),
  j: () => chooseRow(state.row + 1),
  "-": () => setSpeed(state.speed - 1),
  "+": () => setSpeed(state.speed + 1),
  "=": () => setSpeed(state.speed + 1),
  c: () => change({causal: !state.settings.causal}),
  1: () => change({order: "standard"}),
  2: () => change({order: "v1"}),
  3: () => change({order: "v2"}),
  r: reseed,
  t: nextTheme,
};

// A control keeps the keys it needs itself: a slider its arrows, a button its Space, a list all of them.
function shortcut(event) {
  if (!$("shortcuts").checked || event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key.toLowerCase(),
    {tagName, type} = event.target;
  if (tagName === "SELECT" || !KEYS[key]) return;
  if (key.length > 1 && (type === "range" || type === "radio" || event.target.closest("#gantt, .scroll"))) return;
  if (key === " " && (["BUTTON", "SUMMARY"].includes(tagName) || type === "checkbox" || type === "radio")) return;
  event.preventDefault();
  KEYS[key]();
}

// ---- the time line ----

function connectTimeLine() {
  const trace = json("trace-data");
  const line = new TimeLine(trace, {
    names: $("gantt-names"),
    host: $("gantt"),
    legend: $("trace-legend"),
    source: $("trace-source"),
  });
  const showTime = (ns, follow) => {
    $("time-text").textContent = line.show(ns, follow);
    $("time").value = line.now;
    const since = line.now - line.start;
    $("time-name").value = `${(since / 1e3).toFixed(2)} µs, cycle ${Math.round((since * trace.clock_mhz) / 1e3)}`;
  };
  Object.assign($("time"), {min: line.start, max: line.end, step: (line.end - line.start) / 400});
  $("zoom").max = Math.max(8, Math.ceil(trace.tiles / 2.5));
  const draw = () => line.layout(+$("zoom").value);
  const shown = Math.min(1, 10 / trace.tiles); // some ten tiles at first, on a phone four
  $("zoom").value = ($("gantt").clientWidth < 520 ? 2.5 : 1) / shown;
  $("time").addEventListener("input", () => showTime(+$("time").value, true));
  $("zoom").addEventListener("input", () => (draw(), showTime(line.now, true)));
  $("gantt").addEventListener("click", (event) =>
    showTime(line.at(event.clientX - line.root.getBoundingClientRect().left), false),
  );
  let width = 0;
  new ResizeObserver(() => {
    if ($("gantt").clientWidth !== width) ((width = $("gantt").clientWidth), draw());
  }).observe($("gantt"));
  (draw(), showTime(line.start + 0.45 * shown * (line.end - line.start), false));
  return line;
}

connect();
recall();
showControls();
layout();
const line = connectTimeLine();
setTheme("system");

// For the console, and for the tests.
window.picture = {
  state,
  examples,
  change,
  go,
  inputs: () => inputs,
  walks: () => walks,
  exact: () => exact,
  line,
  memory,
  below,
  bytesOf,
  difference: () => largestDifference(walks[state.settings.order], exact),
};
document.documentElement.dataset.ready = "yes";
