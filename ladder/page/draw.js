// draw.js: a step as pictures and text. Nothing here computes attention: all numbers come from the steps of algorithm.js.
import {STATISTIC_BYTES, SUM_BYTES, INPUT_BYTES, bytesOf, tilesMet} from "./algorithm.js";

// ---- text ----

export function number(x, digits = 2) {
  if (x === null || x === undefined) return "";
  if (x === -Infinity) return "−∞";
  return x
    .toFixed(digits)
    .replace(/^-(0\.?0*)$/, "$1")
    .replace("-", "−");
}

export const range = ([first, end]) => (end - first === 1 ? `${first}` : `${first}–${end - 1}`);
const rowsOf = (rows) => `${rows[1] - rows[0] === 1 ? "row" : "rows"} ${range(rows)}`;
const keysOf = (keys) => `${keys[1] - keys[0] === 1 ? "key" : "keys"} ${range(keys)}`;
const count = (bytes) =>
  Math.round(bytes)
    .toString()
    .replace(/\B(?=(\d{3})+$)/g, "\u202f"); // a thin space every three digits
const inRange = (i, rows) => rows && i >= rows[0] && i < rows[1];

export const ORDER_NAMES = {standard: "Standard attention", v1: "v1: keys outside", v2: "v2: rows outside"};

// What a step does, in a few sentences; the last one is about the chosen row, where it takes part.
export function describe(step, settings, row) {
  const sentences = SENTENCES[step.kind](step, settings);
  if (inRange(row, step.rows)) sentences.push(ofRow(step, settings, row, row - step.rows[0]));
  return sentences.filter(Boolean).join(" ");
}

const SENTENCES = {
  start: () => ["Q, K and V lie in memory. Nothing has been computed yet."],
  clear: () => ["v1 keeps the state of every row in memory: O and the sum l start at 0, the maximum m at −∞."],
  rows: ({rows, chip}, {order}) => {
    if (order === "v2")
      return [
        `The Q tile of ${rowsOf(rows)} is copied on chip and stays.`,
        "O and the sums l start at 0, the maxima m at −∞.",
      ];
    if (order === "v1") return [`Q, O, m and l of ${rowsOf(rows)} come from memory, for these keys alone.`];
    if (chip.q) return [`Q of ${rowsOf(rows)} comes from memory.`];
    return [`${chip.v ? "P" : "S"} of ${rowsOf(rows)} comes back from memory.`];
  },
  keys: ({keys, chip}, {order}) => {
    if (order !== "standard") return [`The tiles of K and V of ${keysOf(keys)} are copied on chip.`];
    return chip.k
      ? ["Pass one, S = Q Kᵀ / √d.", "K comes from memory."]
      : ["Pass three, O = P V.", "V comes from memory."];
  },
  skip: ({rows, keys}, {order}) => [
    `Causal: ${rowsOf(rows)} may not look at ${keysOf(keys)}.`,
    `These tiles of ${order === "v1" ? "rows" : "keys"} are skipped: no copy, no work.`,
  ],
  scores: ({rows, keys, chip}, {order}) => [
    `Scores of ${rowsOf(rows)} and ${keysOf(keys)}: S = Q Kᵀ / √d.`,
    order !== "standard" && "They stay in registers.",
    chip.s.some((scores) => scores.includes(-Infinity)) && "Where a row may not look, the score is −∞.",
  ],
  max: ({rows, chip: {m, before}, moved}, {order}) => {
    if (order === "standard") return ["Pass two, the softmax.", "The maximum of each row."];
    const rising = moved.filter(Boolean).length,
      first = before.m.some((x, i) => x === -Infinity && m[i] > x);
    if (!rising) return [first ? "The first maxima of these rows." : "No maximum moves: nothing has to be rescaled."];
    return [
      `The maximum moves in ${rising} of ${rows[1] - rows[0]} rows.`,
      "Their l and O so far belong to the old maximum: the factor exp(old m − new m) corrects them.",
    ];
  },
  exp: (_, {order}) =>
    order === "standard"
      ? ["Weights P = exp(S − m) / l."]
      : ["Weights P = exp(S − m).", "The sum l is scaled by the factor, then takes in the new weights."],
  values: ({rows}, {order}) => {
    if (order === "standard") return [`O = P V for ${rowsOf(rows)}.`];
    if (order === "v2")
      return ["O is scaled by the factor, then takes in P V.", "It is divided by l only at the very end."];
    return ["O in memory is already divided by its sum: undo that, scale, add P V, divide by the new sum."];
  },
  store: ({rows, keys, chip}, {order}) => {
    if (order === "v2")
      return [`O / l is the output of ${rowsOf(rows)}: the only division.`, "It goes to memory with lse = m + log l."];
    if (order === "v1") return [`O, m and l of ${rowsOf(rows)} go back to memory.`];
    if (chip.o) return [`O of ${rowsOf(rows)} is written.`];
    if (chip.p) return [`P of ${rowsOf(rows)} is written over S.`];
    return [`S of ${rowsOf(rows)} is written to memory: ${keys[1]} ${keys[1] === 1 ? "number" : "numbers"} a row.`];
  },
  finish: () => [
    "O is read once more and rounded to the type of the output.",
    "m and l in memory give lse = m + log l.",
  ],
  end: () => [
    "Done.",
    "All three orders have the same output, up to rounding; what differs is what had to go through memory.",
  ],
};

function ofRow({kind, chip}, {order}, row, n) {
  const after = (name) => number(chip[name][n], 3),
    before = chip.before;
  if (kind === "exp") return `Row ${row}: l = ${after("l")}.`;
  if (kind === "values" && order !== "standard")
    return `Row ${row}: O[0] goes from ${number(before.o[n][0], 3)} to ${number(chip.o[n][0], 3)}.`;
  if (kind !== "max") return "";
  if (order === "standard") return `Row ${row}: m = ${after("m")}.`;
  if (chip.m[n] === before.m[n]) return `Row ${row}: m stays ${after("m")}.`;
  const factor = before.m[n] === -Infinity ? "" : `, factor ${after("factor")}`;
  return `Row ${row}: m goes from ${number(before.m[n], 3)} to ${after("m")}${factor}.`;
}

// ---- SVG ----

function svg(tag, attributes, parent) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent?.append(node);
  return node;
}

function label(parent, x, y, text, className, anchor = "start") {
  svg("text", {x, y, class: className, "text-anchor": anchor}, parent).textContent = text;
}

const hatchPattern = (root, id) => {
  const pattern = svg(
    "pattern",
    {id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"},
    svg("defs", {}, root),
  );
  svg("line", {x1: 0, y1: 0, x2: 0, y2: 6, class: "hatch"}, pattern);
};

// How dark a number is drawn, from the smallest to the largest of its array.
const shade = (x, low, high) => (Number.isFinite(x) ? 0.07 + 0.85 * (high > low ? (x - low) / (high - low) : 0) : 0);
const limits = (rows) => {
  const all = rows.flat().filter(Number.isFinite);
  return [Math.min(...all), Math.max(...all)];
};

// ---- memory: the whole arrays ----

const LEAST_WIDTH = 200; // of a picture: a window may have no width at all, as in a hidden frame

export class MemoryPicture {
  constructor(host) {
    this.host = host;
  }

  // K and V stand transposed, so that a key is a column of K, of S and of V.
  layout(settings, inputs) {
    const {seqlenQ, seqlenK, headdim, causal} = settings,
      width = Math.max(LEAST_WIDTH, this.host.clientWidth);
    const gap = 24,
      statistics = 2,
      cells = 2 * headdim + seqlenK + statistics;
    const cell = Math.min(20, (width - 2 * gap - 16) / cells),
      left = (width - cells * cell - 2 * gap - 10) / 2 + 4;
    const d = headdim * cell,
      xS = left + d + gap,
      xO = xS + seqlenK * cell + gap,
      yK = 6,
      yS = yK + d + gap,
      yV = yS + seqlenQ * cell + gap;
    const box = (x, y, w, h) => ({x, y, w: w * cell, h: h * cell, cell});
    this.boxes = {
      Q: box(left, yS, headdim, seqlenQ),
      K: box(xS, yK, seqlenK, headdim),
      S: box(xS, yS, seqlenK, seqlenQ),
      V: box(xS, yV, seqlenK, headdim),
      O: box(xO, yS, headdim, seqlenQ),
      M: box(xO + d + 6, yS, statistics, seqlenQ),
    };
    Object.assign(this, {settings, inputs, cell, outputRange: limits(inputs.v)});

    const height = yV + d + 6;
    const root = svg("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": "Arrays in memory",
    });
    hatchPattern(root, "hatch-memory");
    this.cells = {};
    const {q, k, v} = inputs;
    (this.fill(root, "Q", q), this.fill(root, "K", transposed(k)), this.fill(root, "V", transposed(v)));
    this.cells.S = this.fill(
      root,
      "S",
      Array.from({length: seqlenQ}, () => Array(seqlenK).fill(null)),
    );
    this.cells.O = this.fill(
      root,
      "O",
      Array.from({length: seqlenQ}, () => Array(headdim).fill(null)),
    );
    this.cells.M = this.fill(
      root,
      "M",
      Array.from({length: seqlenQ}, () => Array(statistics).fill(null)),
    );
    this.under = svg("g", {}, root);
    if (causal) {
      // the staircase of what no row may see
      const {x, y} = this.boxes.S,
        points = [];
      for (let i = 0; i < seqlenQ; ++i) {
        const seen = Math.max(0, Math.min(seqlenK, i + 1 + seqlenK - seqlenQ));
        points.push(`${x + seen * cell},${y + i * cell}`, `${x + seen * cell},${y + (i + 1) * cell}`);
      }
      svg(
        "polygon",
        {
          points: `${x + seqlenK * cell},${y} ${points.join(" ")} ${x + seqlenK * cell},${y + seqlenQ * cell}`,
          fill: "url(#hatch-memory)",
        },
        root,
      );
    }
    for (const [name, {x, y, w, h}] of Object.entries(this.boxes))
      svg("rect", {x, y, width: w, height: h, class: `frame ${name}`}, root);
    this.drawGrid(root);
    const {Q, K, S, O, M, V} = this.boxes;
    (label(root, Q.x, Q.y - 7, "Q", "name Q"), label(root, K.x - 8, K.y + 13, "Kᵀ", "name K", "end"));
    (label(root, V.x - 8, V.y + 13, "Vᵀ", "name V", "end"), label(root, O.x, O.y - 7, "O", "name O"));
    this.labels = svg("g", {}, root);
    if (seqlenK * cell > 120) label(root, S.x + S.w, S.y + S.h + 14, `${seqlenK} keys`, "small", "end");
    if (d > 40) label(root, Q.x, Q.y + Q.h + 14, `${seqlenQ} rows`, "small");
    this.over = svg("g", {}, root);
    this.statisticsAt = {x: M.x, y: M.y - 7};
    this.host.replaceChildren(root);
    this.root = root;
  }
  fill(root, name, rows) {
    const {x, y, cell} = this.boxes[name],
      [low, high] = limits(rows),
      group = svg("g", {}, root);
    return rows.map((row, i) =>
      row.map((value, j) =>
        svg(
          "rect",
          {
            x: x + j * cell,
            y: y + i * cell,
            width: cell,
            height: cell,
            class: `cell ${name}`,
            "fill-opacity": value === null ? 0 : shade(value, low, high),
          },
          group,
        ),
      ),
    );
  }
  drawGrid(root) {
    // the borders of the tiles
    const {tileM, tileN, order} = this.settings,
      {Q, K, S, V, O} = this.boxes,
      {cell} = this;
    const lines = [];
    for (let i = tileM * cell; i < S.h - 0.5; i += tileM * cell)
      for (const {x, w} of [Q, S, O]) lines.push(`M${x},${S.y + i}h${w}`);
    if (order !== "standard")
      for (let j = tileN * cell; j < S.w - 0.5; j += tileN * cell)
        for (const {y, h} of [K, S, V]) lines.push(`M${S.x + j},${y}v${h}`);
    svg("path", {d: lines.join(""), class: "grid"}, root);
  }

  show(step, row) {
    const {settings, boxes, cell} = this,
      {memory, chip} = step;
    const isStandard = settings.order === "standard";
    this.paint(this.cells.S, isStandard ? memory.s : [], (i) =>
      memory.isP[i] ? [0, 1] : (this.range ??= limits(memory.s.filter(Boolean))),
    );
    this.range = null;
    this.paint(this.cells.O, memory.o, () => this.outputRange);
    this.paint(
      this.cells.M,
      memory.lse.map((lse, i) =>
        memory.m[i] !== null && settings.order === "v1" ? [memory.m[i], memory.l[i]] : [lse, null],
      ),
      () => [-4, 8],
    );

    (this.under.replaceChildren(), this.over.replaceChildren(), this.labels.replaceChildren());
    const place = ([r0, r1], [k0, k1], {x, y}) => ({
      x: x + k0 * cell,
      y: y + r0 * cell,
      width: (k1 - k0) * cell,
      height: (r1 - r0) * cell,
    });
    if (!isStandard)
      for (const {rows, keys, state} of step.tiles) {
        svg("rect", {...place(rows, keys, boxes.S), class: `tile-${state}`}, this.under);
        if (state === "skipped") {
          const at = place(rows, keys, boxes.S);
          if (at.width > 46 && at.height > 12)
            label(this.under, at.x + at.width / 2, at.y + at.height / 2 + 4, "skipped", "small", "middle");
        }
      }
    // what is on chip, outlined where it lives
    const all = [0, settings.headdim];
    if (chip.q) svg("rect", {...place(chip.q, all, boxes.Q), class: "outline Q"}, this.over);
    if (chip.k) svg("rect", {...place(all, chip.k, boxes.K), class: "outline K"}, this.over);
    if (chip.v) svg("rect", {...place(all, chip.v, boxes.V), class: "outline V"}, this.over);
    if (step.rows && step.keys && (chip.s || chip.p))
      svg("rect", {...place(step.rows, step.keys, boxes.S), class: "outline S"}, this.over);
    if (step.rows && chip.o) svg("rect", {...place(step.rows, all, boxes.O), class: "outline O"}, this.over);
    const {Q, S, O, M} = boxes,
      y = S.y + row * cell;
    for (const {x, w} of [Q, S, O, M])
      svg("rect", {x: x - 1, y: y - 1, width: w + 2, height: cell + 2, class: "row-mark"}, this.over);
    const tip = Q.x - 4,
      middle = y + cell / 2;
    svg(
      "path",
      {d: `M${tip - 6},${middle - 5}L${tip},${middle}L${tip - 6},${middle + 5}Z`, class: "row-arrow"},
      this.over,
    );

    const whole = isStandard ? (memory.isP[0] ? "P" : "S") : "S";
    label(this.labels, S.x - 8, S.y + 13, whole, "name S", "end");
    const {x: sx, y: sy} = this.statisticsAt;
    label(this.labels, sx + M.w / 2, sy, settings.order === "v1" ? "m l" : "lse", "small", "middle");
    if (!isStandard && S.w > 150) label(this.labels, S.x, S.y + S.h + 14, "S: never stored", "small");
  }
  paint(cells, rows, rangeOf) {
    cells.forEach((line, i) =>
      line.forEach((rect, j) => {
        const value = rows[i]?.[j],
          missing = value === null || value === undefined;
        const opacity = missing
          ? 0
          : value === -Infinity
            ? 0.04
            : shade(Math.max(rangeOf(i)[0], Math.min(rangeOf(i)[1], value)), ...rangeOf(i));
        if (rect.opacity !== opacity) rect.setAttribute("fill-opacity", (rect.opacity = opacity));
      }),
    );
  }
  rowAt(event) {
    const {top} = this.root.getBoundingClientRect(),
      {y, h} = this.boxes.S,
      at = event.clientY - top - y;
    return at >= 0 && at < h ? Math.floor(at / this.cell) : null;
  }
  rectangle(name, [first, end]) {
    const {left, top} = this.root.getBoundingClientRect(),
      {x, y, w, h} = this.boxes[name],
      {cell} = this;
    return name === "K" || name === "V"
      ? {x: left + x + first * cell, y: top + y, w: (end - first) * cell, h}
      : {x: left + x, y: top + y + first * cell, w, h: (end - first) * cell};
  }
}

const transposed = (rows) => rows[0].map((_, j) => rows.map((row) => row[j]));

// ---- on chip: the tiles at hand, with their numbers where there is room ----

export class ChipPicture {
  constructor(host) {
    this.host = host;
  }

  layout(settings, inputs) {
    Object.assign(this, {settings, inputs});
    const {headdim, seqlenK, order} = settings,
      width = Math.max(LEAST_WIDTH, this.host.clientWidth),
      wide = width > 440;
    const tileM = Math.min(settings.tileM, settings.seqlenQ),
      tileN = order === "standard" ? seqlenK : Math.min(settings.tileN, seqlenK);
    const d = Math.max(30, Math.min(headdim * 9, width * 0.16)),
      statistic = 38,
      gap = 12;
    const statistics = wide && order !== "standard" ? 3 : wide ? 2 : 0;
    const column = Math.min(46, (width - 2 * d - statistics * statistic - 4 * gap - 4) / tileN);
    const line = Math.max(9, Math.min(26, 190 / tileM)),
      height = Math.max(46, Math.min(headdim * 9, 84));
    const total = 2 * d + tileN * column + statistics * statistic + (statistics ? 3 : 2) * gap,
      left = Math.max(2, (width - total) / 2);
    const xS = left + d + gap,
      xM = xS + tileN * column + gap,
      xO = xM + (statistics ? statistics * statistic + gap : 0);
    const yK = 22,
      yS = yK + height + 26,
      yV = yS + tileM * line + 26;
    this.boxes = {
      Q: {x: left, y: yS, w: d, h: tileM * line},
      K: {x: xS, y: yK, w: tileN * column, h: height},
      S: {x: xS, y: yS, w: tileN * column, h: tileM * line},
      V: {x: xS, y: yV, w: tileN * column, h: height},
      M: {x: xM, y: yS, w: statistics * statistic, h: tileM * line},
      O: {x: xO, y: yS, w: d, h: tileM * line},
    };
    Object.assign(this, {column, line, statistic, statistics, height: yV + height + 6, width});
  }

  show(step, row) {
    const {boxes, column, line, statistic, settings} = this,
      {chip} = step,
      {headdim} = settings;
    const root = svg("svg", {
      width: this.width,
      height: this.height,
      viewBox: `0 0 ${this.width} ${this.height}`,
      role: "img",
      "aria-label": "Tiles on chip",
    });
    hatchPattern(root, "hatch-chip");
    const {q, k, v} = this.inputs;
    const operand = (name, present, rows, text) => {
      const {x, y, w, h} = boxes[name];
      if (present) {
        const [low, high] = rows.limits,
          cellW = name === "K" || name === "V" ? column : w / headdim;
        const cellH = name === "K" || name === "V" ? h / headdim : line;
        rows.values.forEach((values, i) =>
          values.forEach((value, j) =>
            svg(
              "rect",
              {
                x: x + j * cellW,
                y: y + i * cellH,
                width: cellW,
                height: cellH,
                class: `cell ${name}`,
                "fill-opacity": shade(value, low, high),
              },
              root,
            ),
          ),
        );
        const shown = {w: rows.values[0].length * cellW, h: rows.values.length * cellH};
        svg("rect", {x, y, width: shown.w, height: shown.h, class: `outline ${name}`}, root);
      } else {
        svg("rect", {x, y, width: w, height: h, class: "frame empty"}, root);
      }
      label(root, x, y - 7, text, `name ${name}`);
    };
    const slice = (rows, part) => rows.slice(...part);
    operand("Q", chip.q, chip.q && {values: slice(q, chip.q), limits: limits(q)}, "Q");
    operand("K", chip.k, chip.k && {values: transposed(slice(k, chip.k)), limits: limits(k)}, "Kᵀ");
    operand("V", chip.v, chip.v && {values: transposed(slice(v, chip.v)), limits: limits(v)}, "Vᵀ");
    operand("O", chip.o, chip.o && {values: chip.o, limits: limits([...chip.o, [0]])}, "O");
    for (const [name, part] of [
      ["K", chip.k],
      ["V", chip.v],
    ])
      if (part) label(root, boxes[name].x + 24, boxes[name].y - 7, keysOf(part), "small");

    // S, or P once it is there
    const {x, y, w, h} = boxes.S,
      scores = chip.p ?? chip.s;
    if (scores) {
      const numbers = column >= 31 && line >= 14,
        [low, high] = chip.p ? [0, 1] : limits([...scores, [0]]);
      scores.forEach((values, i) =>
        values.forEach((value, j) => {
          const at = {x: x + j * column, y: y + i * line, width: column, height: line},
            opacity = shade(value, low, high) * 0.9;
          if (value === -Infinity) svg("rect", {...at, fill: "url(#hatch-chip)"}, root);
          else svg("rect", {...at, class: "cell S", "fill-opacity": opacity}, root);
          if (numbers) {
            const text = svg("text", {x: at.x + column / 2, y: at.y + line / 2 + 0.5, class: "number"}, root);
            if (opacity > 0.5) text.style.fill = "var(--paper)";
            text.textContent = number(value);
          }
        }),
      );
      svg("rect", {x, y, width: scores[0].length * column, height: scores.length * line, class: "outline S"}, root);
    } else {
      svg("rect", {x, y, width: w, height: h, class: "frame empty"}, root);
    }
    label(root, x, y - 7, chip.p ? "P" : "S", "name S");

    // m, l and the factor
    const titles = ["m", "l", "factor"].slice(0, this.statistics);
    titles.forEach((title, n) => {
      const at = boxes.M.x + n * statistic,
        values = {m: chip.m, l: chip.l, factor: chip.factor}[title];
      label(root, at + statistic / 2, y - 7, title, n < 2 ? "name S" : "small", "middle");
      svg("rect", {x: at, y, width: statistic, height: h, class: "frame" + (values ? "" : " empty")}, root);
      values?.forEach((value, i) => {
        const moved = step.kind === "max" && step.moved[i] && title !== "l";
        if (moved)
          svg("rect", {x: at + 1, y: y + i * line + 1, width: statistic - 2, height: line - 2, class: "moved"}, root);
        if (line >= 11)
          svg("text", {x: at + statistic / 2, y: y + i * line + line / 2 + 0.5, class: "number"}, root).textContent =
            number(value);
      });
    });
    if (inRange(row, step.rows) && (chip.q || chip.s || chip.p || chip.o)) {
      const at = y + (row - step.rows[0]) * line,
        first = boxes.Q.x,
        end = boxes.O.x + boxes.O.w;
      svg("rect", {x: first - 1, y: at, width: end - first + 2, height: line, class: "row-mark"}, root);
    }
    this.host.replaceChildren(root);
    this.root = root;
  }
  rectangle(name, part) {
    const {left, top} = this.root.getBoundingClientRect(),
      {x, y, w, h} = this.boxes[name],
      size = part[1] - part[0];
    return name === "K" || name === "V"
      ? {x: left + x, y: top + y, w: Math.min(w, size * this.column), h}
      : {x: left + x, y: top + y, w, h: Math.min(h, size * this.line)};
  }
}

// The copies of a step as rectangles that fly from one picture to the other.
export function fly(step, memory, chip, milliseconds) {
  for (const {name, range: part, to} of step.moves) {
    const ends = [memory.rectangle(name, part), chip.rectangle(name, part)],
      [from, into] = to === "chip" ? ends : ends.reverse();
    const ghost = document.createElement("div");
    ghost.className = `ghost ${name}`;
    ghost.style.cssText = `width:${into.w}px;height:${into.h}px`;
    document.body.append(ghost);
    const at = ({x, y, w, h}) => `translate(${x}px, ${y}px) scale(${w / into.w}, ${h / into.h})`;
    ghost
      .animate(
        [
          {transform: at(from), opacity: 0.7},
          {transform: at(into), opacity: 0.35},
        ],
        {duration: milliseconds, easing: "ease-in-out"},
      )
      .finished.then(
        () => ghost.remove(),
        () => ghost.remove(),
      );
  }
}

// ---- the chosen row ----

const element = (tag, attributes, ...children) => {
  const written = Object.entries(attributes)
    .filter(([, value]) => value)
    .map(([name, value]) => ` ${name}="${value}"`);
  return `<${tag}${written.join("")}>${children.join("")}</${tag}>`;
};
const heading = (text, className) => element("th", {scope: "row", class: className}, text);
const empty = (width) => "<td></td>".repeat(width);
const tableRow = (head, cells) => element("tr", {}, head, cells);
const numbers = (values, className = () => "") =>
  values.map((x) => element("td", {class: className(x)}, number(x))).join("");

// A table that scrolls inside itself when it is wider than the window.
function table(name, corner, columns, ...lines) {
  const head = element(
    "thead",
    {},
    tableRow(heading(corner), columns.map((text) => element("th", {scope: "col"}, text)).join("")),
  );
  const body = element("tbody", {}, ...lines);
  return element(
    "div",
    {class: "scroll", tabindex: "0", role: "region", "aria-label": name},
    element("table", {}, head, body),
  );
}

const indices = ([first, end]) => Array.from({length: end - first}, (_, n) => first + n);
const minus = (x) => (x < 0 && x !== -Infinity ? `(${number(x, 3)})` : number(x === -Infinity ? 0 : x, 3)); // of an empty row: 0

// The rules of a step with the row's numbers in them; `n` is the row's place in the tile. [name, whether this step applies it, text].
function rules({kind, chip, memory}, order, row, n) {
  const {before, s, p} = chip;
  if (kind === "store" && order === "v2")
    return [
      ["O", true, before.l[n] ? `O / l, with l = ${number(before.l[n], 3)}` : "0: this row sees no key"],
      ["lse", true, `m + log l = ${number(memory.lse[row], 3)}`],
    ];
  if (!before || !s) return [];
  const largest = Math.max(...s[n]),
    m = number(chip.m[n], 3),
    known = kind !== "scores";
  if (order === "standard")
    return [
      ["m", kind === "max", known && `max(s) = ${m}`],
      ["l", kind === "exp", p && `Σ exp(s − m) = ${number(chip.l[n], 3)}`],
    ];
  const moved = known && chip.m[n] > before.m[n] && before.m[n] > -Infinity;
  const mark = (text) => (moved ? element("span", {class: "moved"}, text) : text);
  const output = order === "v1" ? "(factor · l before · O + p V) / l" : "factor · O + p V";
  return [
    ["m", kind === "max", known && `max(${number(before.m[n], 3)}, ${number(largest, 3)}) = ${mark(m)}`],
    [
      "factor",
      kind === "max",
      known && `exp(${number(before.m[n], 3)} − ${minus(chip.m[n])}) = ${mark(number(chip.factor[n], 3))}`,
    ],
    ["l", kind === "exp", p && `factor · ${number(before.l[n], 3)} + Σp = ${number(chip.l[n], 3)}`],
    ["O", kind === "values", (kind === "values" || kind === "store") && output],
  ];
}

function whereTheRowIs({kind, rows, memory}, settings, row, here) {
  if (kind === "end") return `lse = ${number(memory.lse[row], 3)}`;
  if (here) return "The row is on chip.";
  const some = rows && rows[1] - rows[0] < settings.seqlenQ;
  return some ? `Row ${row} is not on chip: the step is about ${rowsOf(rows)}.` : "No row is at work in this step.";
}

export function rowNumbers(steps, index, settings, row) {
  const step = steps[index],
    {chip, keys, kind, rows} = step,
    {order, headdim} = settings,
    standard = order === "standard";
  const here = inRange(row, rows) && !["skip", "clear", "finish"].includes(kind),
    n = here ? row - rows[0] : -1;
  const parts = [];

  const s = here && keys ? chip.s?.[n] : null,
    p = here && keys ? chip.p?.[n] : null;
  const columns = s || p ? indices(keys) : ["–"],
    largest = s && Math.max(...s);
  const ofScore = (x) => (x === -Infinity ? "masked" : x === largest ? "best" : "");
  parts.push(
    table(
      "Scores and weights of the row",
      "key",
      columns,
      tableRow(heading("<i>s</i>", "s"), s ? numbers(s, ofScore) : empty(columns.length)),
      tableRow(heading("<i>p</i>", "s"), p ? numbers(p, (x) => (x === 0 ? "masked" : "")) : empty(columns.length)),
    ),
  );

  const applied = (here ? rules(step, order, row, n) : []).map(([name, now, text]) =>
    element("div", {class: now ? "now" : text ? "" : "waits"}, element("i", {}, name), text ? ` ← ${text}` : " –"),
  );
  if (!applied.length) applied.push(element("div", {class: "waits"}, whereTheRowIs(step, settings, row, here)));
  parts.push(element("div", {class: "rules"}, ...applied));

  const output = here && chip.o ? chip.o[n] : step.memory.o[row];
  const old = here && kind === "values" && chip.before && !standard ? chip.before.o[n] : null;
  parts.push(
    table(
      "O of the row",
      "column",
      indices([0, headdim]),
      standard ? "" : tableRow(heading("<i>O</i> before", "o"), old ? numbers(old) : empty(headdim)),
      tableRow(heading("<i>O</i>", "o"), output ? numbers(output, () => "o") : empty(headdim)),
    ),
  );

  if (!standard) {
    const met = tilesMet(steps, index, row),
      shown = met.slice(-6);
    const lines = shown.map(({keys: part, largest: top, m, factor, l, moved}) => {
      const cell = (x, className) => element("td", {class: className}, number(x, 3)),
        how = moved && "moved";
      return tableRow(heading(range(part)), cell(top) + cell(m, how) + cell(factor, how) + cell(l));
    });
    const earlier = met.length > shown.length ? `, the last ${shown.length} of ${met.length} tiles` : "";
    parts.push(
      element(
        "p",
        {class: "note"},
        `What this row has met${earlier}. Shaded: the maximum moved, and l and O were rescaled.`,
      ),
    );
    parts.push(
      element(
        "div",
        {class: "met"},
        table(
          "Tiles that the row has met",
          "keys",
          ["largest s", "m", "factor", "l"],
          ...lines,
          lines.length ? "" : tableRow(heading("none yet"), ""),
        ),
      ),
    );
  }
  return parts.join("");
}

// ---- bytes ----

// walks: {standard, v1, v2}; the others stand at the same share of their steps as the one that is shown.
export function traffic(walks, order, index) {
  const most = Math.max(...Object.values(walks).map(({bytes}) => bytes)),
    share = index / (walks[order].steps.length - 1);
  const percent = (x) => `${((100 * x) / most).toFixed(2)}%`;
  const bars = Object.entries(walks).map(([name, {steps, bytes}]) => {
    const {read, written} = steps[name === order ? index : Math.round(share * (steps.length - 1))];
    const counted = `<b>${count(read + written)}</b> of ${count(bytes)} bytes`;
    return element(
      "div",
      {class: name === order && "here", "data-order": name},
      element("div", {class: "line"}, element("span", {}, ORDER_NAMES[name]), element("span", {}, counted)),
      element(
        "div",
        {class: "bar"},
        element("i", {class: "total", style: `width:${percent(bytes)}`}),
        element("i", {class: "read", style: `width:${percent(read)}`}),
        element("i", {class: "written", style: `left:${percent(read)};width:${percent(written)}`}),
      ),
    );
  });
  const swatch = (name) => element("span", {class: `swatch ${name}`}) + name;
  return (
    element("div", {class: "bytes"}, ...bars) +
    element(
      "p",
      {class: "note"},
      `${swatch("read")} &nbsp; ${swatch("written")} &nbsp; Outline: the whole run. `,
      "The other orders stand at the same share of their steps.",
    )
  );
}

export function realSize(causal) {
  const size = {seqlenQ: 8192, seqlenK: 8192, headdim: 128, tileM: 128, tileN: 128, causal};
  const megabytes = (order) => `${count(bytesOf({...size, order}) / 1e6)} MB`;
  return (
    element(
      "p",
      {class: "note"},
      `One head of 8192 rows and keys, headdim 128, tiles of 128 × 128${causal ? ", causal" : ""}: `,
      `standard ${megabytes("standard")}, v1 ${megabytes("v1")}, v2 ${megabytes("v2")}.`,
    ) +
    element(
      "details",
      {},
      "<summary>What is counted</summary>",
      element(
        "p",
        {},
        `Every number that is copied on chip or written back: ${INPUT_BYTES} bytes for Q, K, V and the output, `,
        `${SUM_BYTES} for S, P and the O that v1 carries, ${STATISTIC_BYTES} for m, l and lse. Caches in between are `,
        "not counted, with one gift to standard attention: it reads each of Q, K and V once. Larger tiles of rows read K and V less often.",
      ),
    )
  );
}
