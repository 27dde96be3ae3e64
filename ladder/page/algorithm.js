// algorithm.js: attention of one head in three orders of its loops, as a list of steps. A step holds everything that can be shown after
// it: the tiles on chip, the arrays in memory, the bytes moved so far. Steps never change, so a reader can walk them in both directions.
//
//     standard   S = Q K^T, P = softmax(S), O = P V: three passes, S and P whole in memory
//     v1         keys outside, rows inside: O, m and l of a row come from memory and go back for every tile of keys
//     v2         rows outside, keys inside: O, m and l stay on chip until their rows are done
//
// Names: q (seqlenQ, headdim), k and v (seqlenK, headdim), arrays of rows; m the running maximum of a row, l its sum of exponentials.
// Ranges are [first, end). Causal is aligned at the bottom right, as in flash_attn_func: row i sees key j <= i + seqlenK - seqlenQ.

// ---- inputs ----

// Standard normal numbers from a seed, rounded to 1/64 so that what is shown is what is multiplied. Q is 1.5 times as large: rows then have
// clear favourites, and the maximum moves.
export function randomInputs({seqlenQ, seqlenK, headdim, seed}) {
  let state = seed >>> 0;
  const uniform = () => {
    // mulberry32
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const normal = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  const matrix = (rows, scale) =>
    Array.from({length: rows}, () => Array.from({length: headdim}, () => Math.round(64 * scale * normal()) / 64));
  return {q: matrix(seqlenQ, 1.5), k: matrix(seqlenK, 1), v: matrix(seqlenK, 1)};
}

// ---- the definition, float64, row by row: what every order is compared with ----

export function definition({q, k, v}, causal) {
  const out = [],
    lse = [];
  for (const [i, query] of q.entries()) {
    const seen = causal ? Math.min(k.length, i + 1 + k.length - q.length) : k.length;
    const scores = k.slice(0, Math.max(0, seen)).map((key) => dot(query, key, exactly) / Math.sqrt(query.length));
    const largest = Math.max(0, ...scores); // any shift will do
    const weights = scores.map((s) => Math.exp(s - largest));
    const sum = weights.reduce((a, b) => a + b, 0);
    out.push(query.map((_, d) => (sum ? weights.reduce((total, w, j) => total + w * v[j][d], 0) / sum : 0)));
    lse.push(sum ? largest + Math.log(sum) : -Infinity);
  }
  return {out, lse};
}

// Over out and lse. An infinite lse has to be the same infinity.
export function largestDifference(a, b) {
  let largest = 0;
  const meet = (x, y) => {
    if (x !== y) largest = Math.max(largest, Number.isFinite(x - y) ? Math.abs(x - y) : Infinity);
  };
  a.out.forEach((row, i) => row.forEach((x, d) => meet(x, b.out[i][d])));
  a.lse.forEach((x, i) => meet(x, b.lse[i]));
  return largest;
}

// ---- arithmetic: every operation rounded to the chosen precision ----

const exactly = (x) => x; // JavaScript's numbers are float64

export function dot(a, b, round) {
  let sum = 0;
  for (let d = 0; d < a.length; ++d) sum = round(sum + round(a[d] * b[d]));
  return sum;
}

const orZero = (m) => (m === -Infinity ? 0 : m); // a row that has seen no key yet subtracts 0: -inf - -inf is NaN

export function arithmetic({q, k, v}, {headdim, causal, precision}) {
  const round = precision === 32 ? Math.fround : exactly;
  const scale = round(1 / Math.sqrt(headdim));
  const exp = (x) => round(Math.exp(round(x)));
  return {
    round,
    scores: (rows, keys) =>
      each(rows, (i) =>
        each(keys, (j) => (causal && j > i + k.length - q.length ? -Infinity : round(scale * dot(q[i], k[j], round)))),
      ),
    largest: (s, before) => s.map((row, i) => Math.max(before[i], ...row)),
    factors: (before, m) => before.map((x, i) => exp(x - orZero(m[i]))),
    exponentials: (s, m) => s.map((row, i) => row.map((x) => exp(x - orZero(m[i])))),
    sums: (p) => p.map((row) => row.reduce((sum, x) => round(sum + x), 0)),
    // P V: row i of P (keys) times column d of V.
    product: (p, keys) =>
      p.map((row) =>
        each([0, headdim], (d) => row.reduce((sum, x, j) => round(sum + round(x * v[keys[0] + j][d])), 0)),
      ),
    divide: (o, l) => o.map((row, i) => row.map((x) => (l[i] ? round(x / l[i]) : 0))),
    lse: (m, l) => m.map((x, i) => (l[i] ? round(orZero(x) + round(Math.log(l[i]))) : -Infinity)),
  };
}

export function each([first, end], make) {
  return Array.from({length: Math.max(0, end - first)}, (_, n) => make(first + n));
}

export function tiles(length, size) {
  return each([0, Math.ceil(length / size)], (n) => [n * size, Math.min(length, (n + 1) * size)]);
}

// ---- bytes ----

export const INPUT_BYTES = 2; // a number of Q, K, V or of the output: half precision
export const SUM_BYTES = 4; // a number of S, of P, or of v1's O on its way: single precision
export const STATISTIC_BYTES = 4; // a row's m, l or lse

// ---- the steps ----

// A recorder of steps. `chip` and `memory` are replaced, never written into.
class Walk {
  constructor(inputs, settings) {
    const {seqlenQ, seqlenK} = settings;
    Object.assign(this, {settings, steps: [], read: 0, written: 0, moves: []});
    this.math = arithmetic(inputs, settings);
    this.chip = {};
    this.memory = {
      o: Array(seqlenQ).fill(null),
      m: Array(seqlenQ).fill(null),
      l: Array(seqlenQ).fill(null),
      lse: Array(seqlenQ).fill(null),
      s: Array(seqlenQ).fill(null),
      isP: Array(seqlenQ).fill(false),
    };
    this.tiles = []; // {rows, keys, state: "done" or "skipped"}
    this.seqlenK = seqlenK;
  }
  toChip(name, range, bytes) {
    (this.moves.push({name, range, bytes, to: "chip"}), (this.read += bytes));
  }
  toMemory(name, range, bytes) {
    (this.moves.push({name, range, bytes, to: "memory"}), (this.written += bytes));
  }
  hold(change) {
    this.chip = {...this.chip, ...change};
  }
  keep(name, rows, values) {
    const array = [...this.memory[name]];
    values.forEach((value, n) => (array[rows[0] + n] = value));
    this.memory = {...this.memory, [name]: array};
  }
  mark(rows, keys, state) {
    this.tiles = [...this.tiles, {rows, keys, state}];
  }
  step(kind, rows, keys, more = {}) {
    const {chip, memory, tiles, read, written, moves} = this;
    this.steps.push({kind, rows, keys, chip, memory, tiles, read, written, moves, ...more});
    this.moves = [];
  }
  // Scores, maximum, exponentials and values of one tile: the heart of v1 and v2. `normalised`: O has been divided by its sum (v1).
  tile(rows, keys, normalised) {
    const {math, chip} = this,
      {round} = math;
    const before = {m: chip.m, l: chip.l, o: chip.o};
    const s = math.scores(rows, keys);
    this.hold({s, p: null, before, factor: null});
    this.step("scores", rows, keys);
    const m = math.largest(s, before.m),
      factor = math.factors(before.m, m);
    this.hold({m, factor});
    this.step("max", rows, keys, {moved: m.map((x, i) => x > before.m[i] && before.m[i] > -Infinity)});
    const p = math.exponentials(s, m),
      sums = math.sums(p);
    const l = before.l.map((x, i) => round(round(factor[i] * x) + sums[i]));
    this.hold({p, l});
    this.step("exp", rows, keys);
    const product = math.product(p, keys);
    const weight = normalised ? factor.map((f, i) => round(f * before.l[i])) : factor;
    let o = before.o.map((row, i) => row.map((x, d) => round(round(weight[i] * x) + product[i][d])));
    if (normalised) o = math.divide(o, l);
    this.hold({o});
    this.mark(rows, keys, "done");
    this.step("values", rows, keys);
  }
}

export const zeros = (rows, headdim) => each(rows, () => Array(headdim).fill(0));
const alike = (rows, value) => each(rows, () => value);
export const size = ([first, end]) => end - first;

// Whether no row of the range sees a key of the range.
export const hidden = ({causal, seqlenQ, seqlenK}, rows, keys) => causal && keys[0] > rows[1] - 1 + seqlenK - seqlenQ;

function flashV2(walk) {
  const {seqlenQ, seqlenK, headdim, tileM, tileN} = walk.settings,
    row = headdim * INPUT_BYTES;
  for (const rows of tiles(seqlenQ, tileM)) {
    walk.toChip("Q", rows, size(rows) * row);
    walk.chip = {q: rows, m: alike(rows, -Infinity), l: alike(rows, 0), o: zeros(rows, headdim)};
    walk.step("rows", rows, null);
    for (const keys of tiles(seqlenK, tileN)) {
      if (hidden(walk.settings, rows, keys)) {
        // and so are all tiles after it
        walk.hold({k: null, v: null, s: null, p: null, factor: null});
        walk.mark(rows, [keys[0], seqlenK], "skipped");
        walk.step("skip", rows, [keys[0], seqlenK]);
        break;
      }
      walk.toChip("K", keys, size(keys) * row);
      walk.toChip("V", keys, size(keys) * row);
      walk.hold({k: keys, v: keys, s: null, p: null, factor: null, before: null});
      walk.step("keys", rows, keys);
      walk.tile(rows, keys, false);
    }
    const {m, l, o} = walk.chip,
      out = walk.math.divide(o, l);
    walk.keep("o", rows, out);
    walk.keep("lse", rows, walk.math.lse(m, l));
    walk.toMemory("O", rows, size(rows) * (row + STATISTIC_BYTES));
    walk.hold({k: null, v: null, s: null, p: null, factor: null, o: out, before: {m, l, o}});
    walk.step("store", rows, null);
  }
}

function flashV1(walk) {
  const {seqlenQ, seqlenK, headdim, tileM, tileN} = walk.settings;
  const row = headdim * INPUT_BYTES,
    sums = headdim * SUM_BYTES + 2 * STATISTIC_BYTES; // a row of O with m and l
  const all = [0, seqlenQ];
  (walk.keep("o", all, zeros(all, headdim)),
    walk.keep("m", all, alike(all, -Infinity)),
    walk.keep("l", all, alike(all, 0)));
  walk.toMemory("O", all, seqlenQ * sums);
  walk.step("clear", all, null);
  for (const keys of tiles(seqlenK, tileN)) {
    walk.toChip("K", keys, size(keys) * row);
    walk.toChip("V", keys, size(keys) * row);
    walk.chip = {k: keys, v: keys};
    walk.step("keys", null, keys);
    const seeing = tiles(seqlenQ, tileM).filter((rows) => !hidden(walk.settings, rows, keys));
    const first = seeing[0][0]; // the last row sees every key
    if (first > 0) {
      walk.mark([0, first], keys, "skipped");
      walk.step("skip", [0, first], keys);
    }
    for (const rows of seeing) {
      const {o, m, l} = walk.memory,
        mine = (array) => array.slice(...rows);
      walk.toChip("Q", rows, size(rows) * row);
      walk.toChip("O", rows, size(rows) * sums);
      walk.hold({q: rows, o: mine(o), m: mine(m), l: mine(l), s: null, p: null, factor: null, before: null});
      walk.step("rows", rows, keys);
      walk.tile(rows, keys, true);
      for (const name of ["o", "m", "l"]) walk.keep(name, rows, walk.chip[name]);
      walk.toMemory("O", rows, size(rows) * sums);
      walk.step("store", rows, keys);
      walk.chip = {k: keys, v: keys};
    }
  }
  const {m, l} = walk.memory;
  walk.chip = {};
  walk.keep("lse", all, walk.math.lse(m, l));
  walk.toChip("O", all, seqlenQ * headdim * SUM_BYTES);
  walk.toMemory("O", all, seqlenQ * row);
  walk.step("finish", all, null);
}

// K and V are counted once, as if a cache held them whole: a gift to standard attention.
function standard(walk) {
  const {seqlenQ, seqlenK, headdim, tileM} = walk.settings,
    row = headdim * INPUT_BYTES,
    {math} = walk;
  const keys = [0, seqlenK],
    m = [],
    l = [];
  walk.toChip("K", keys, seqlenK * row);
  walk.chip = {k: keys};
  walk.step("keys", null, keys);
  for (const rows of tiles(seqlenQ, tileM)) {
    walk.toChip("Q", rows, size(rows) * row);
    walk.chip = {k: keys, q: rows};
    walk.step("rows", rows, keys);
    walk.hold({s: math.scores(rows, keys)});
    walk.step("scores", rows, keys);
    walk.keep("s", rows, walk.chip.s);
    walk.toMemory("S", rows, size(rows) * seqlenK * SUM_BYTES);
    walk.step("store", rows, keys);
  }
  for (const rows of tiles(seqlenQ, tileM)) {
    const s = walk.memory.s.slice(...rows),
      before = {m: alike(rows, -Infinity), l: alike(rows, 0)};
    walk.toChip("S", rows, size(rows) * seqlenK * SUM_BYTES);
    walk.chip = {s, before, m: before.m, l: before.l};
    walk.step("rows", rows, keys);
    const largest = math.largest(s, before.m);
    walk.hold({m: largest});
    walk.step("max", rows, keys, {moved: alike(rows, false)});
    const weights = math.exponentials(s, largest),
      sums = math.sums(weights);
    walk.hold({p: math.divide(weights, sums), l: sums});
    (m.push(...largest), l.push(...sums));
    walk.step("exp", rows, keys);
    (walk.keep("s", rows, walk.chip.p), walk.keep("isP", rows, alike(rows, true)));
    walk.keep("lse", rows, math.lse(largest, sums));
    walk.toMemory("S", rows, size(rows) * seqlenK * SUM_BYTES);
    walk.step("store", rows, keys);
  }
  walk.toChip("V", keys, seqlenK * row);
  walk.chip = {v: keys};
  walk.step("keys", null, keys);
  for (const rows of tiles(seqlenQ, tileM)) {
    walk.toChip("S", rows, size(rows) * seqlenK * SUM_BYTES);
    walk.chip = {
      v: keys,
      p: walk.memory.s.slice(...rows),
      m: m.slice(...rows),
      l: l.slice(...rows),
      o: zeros(rows, headdim),
    };
    walk.step("rows", rows, keys);
    walk.hold({o: math.product(walk.chip.p, keys), before: {m: walk.chip.m, l: walk.chip.l, o: walk.chip.o}});
    walk.mark(rows, keys, "done");
    walk.step("values", rows, keys);
    walk.keep("o", rows, walk.chip.o);
    walk.toMemory("O", rows, size(rows) * row);
    walk.step("store", rows, keys);
  }
}

const ORDERS = {standard, v1: flashV1, v2: flashV2};

// settings: seqlenQ, seqlenK, headdim, tileM, tileN, causal, order, precision (32 or 64). The first step is the start: nothing done yet.
export function walk(inputs, settings) {
  const one = new Walk(inputs, settings);
  one.step("start", null, null);
  ORDERS[settings.order](one);
  one.chip = {};
  one.step("end", null, null);
  const {steps, memory, read, written} = one;
  return {steps, out: memory.o, lse: memory.lse, read, written, bytes: read + written};
}

// The tiles of keys that a row has met up to a step: what the running maximum and sum went through.
export function tilesMet(steps, upTo, row) {
  const met = [];
  for (const [index, {kind, rows, keys, chip}] of steps.slice(0, upTo + 1).entries()) {
    if (kind !== "exp" || row < rows[0] || row >= rows[1]) continue;
    const n = row - rows[0];
    met.push({
      index,
      keys,
      largest: Math.max(...chip.s[n]),
      m: chip.m[n],
      factor: chip.factor ? chip.factor[n] : null,
      l: chip.l[n],
      moved: chip.m[n] > chip.before.m[n] && chip.before.m[n] > -Infinity,
    });
  }
  return met;
}

// ---- the same bytes without the steps, for sizes that no picture holds ----

export function bytesOf({order, seqlenQ, seqlenK, headdim, tileM, tileN, causal}) {
  const row = headdim * INPUT_BYTES,
    sums = headdim * SUM_BYTES + 2 * STATISTIC_BYTES;
  if (order === "standard") return (2 * seqlenQ + 2 * seqlenK) * row + 4 * seqlenQ * seqlenK * SUM_BYTES;
  let keysRead = 0,
    rowsRead = 0; // by all tiles of rows, by all pairs of tiles
  for (const rows of tiles(seqlenQ, tileM)) {
    const seen = causal ? Math.max(0, Math.min(seqlenK, rows[1] + seqlenK - seqlenQ)) : seqlenK,
      count = Math.ceil(seen / tileN);
    ((keysRead += Math.min(seqlenK, count * tileN)), (rowsRead += count * size(rows)));
  }
  if (order === "v2") return seqlenQ * (2 * row + STATISTIC_BYTES) + 2 * keysRead * row;
  return (
    seqlenQ * sums + 2 * seqlenK * row + rowsRead * (row + 2 * sums) + seqlenQ * headdim * (SUM_BYTES + INPUT_BYTES)
  );
}
