// gradients.js: the backward pass of one head as a list of steps, and decode with its keys in pieces. Like algorithm.js it computes and
// draws nothing.
//
//     P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta), delta_i = dO_i . O_i
//     dV = P^T dO         dK = dS^T Q / sqrt(d)               dQ = dS K / sqrt(d)
//
// A block owns a tile of keys (or of rows) and walks over the tiles of the other side. What it owns stays on chip; to the sum of the other
// side it adds in memory, when its turn comes or whenever it is ready.
import {arithmetic, definition, dot, each, hidden, randomInputs, size, tiles, zeros} from "./algorithm.js";

// The gradient of the output, for inputs of any seed.
export function gradientOfOutput({seqlenQ, headdim}) {
  return randomInputs({seqlenQ: 1, seqlenK: seqlenQ, headdim, seed: 1234}).k;
}

// float64, row by row: what every order is compared with.
export function gradientDefinition({q, k, v}, dout, causal) {
  const {out, lse} = definition({q, k, v}, causal),
    scale = 1 / Math.sqrt(q[0].length),
    exactly = (x) => x;
  const [dq, dk, dv] = [q, k, v].map((x) => x.map((row) => row.map(() => 0)));
  q.forEach((query, i) => {
    const delta = dot(dout[i], out[i], exactly);
    k.forEach((key, j) => {
      if ((causal && j > i + k.length - q.length) || lse[i] === -Infinity) return;
      const p = Math.exp(scale * dot(query, key, exactly) - lse[i]),
        ds = p * (dot(dout[i], v[j], exactly) - delta);
      query.forEach((x, d) => {
        dq[i][d] += scale * ds * key[d];
        dk[j][d] += scale * ds * x;
        dv[j][d] += p * dout[i][d];
      });
    });
  });
  return {dq, dk, dv};
}

export function gradientDifference(a, b) {
  let largest = 0;
  for (const name of ["dq", "dk", "dv"])
    a[name].forEach((row, i) => row.forEach((x, d) => (largest = Math.max(largest, Math.abs(x - b[name][i][d])))));
  return largest;
}

// Which block adds next, again and again. `visits`: for each block the tiles of the other side that it visits, in order. With turns the
// blocks add to a tile in ascending order, and all blocks that may do so work at once; without, chance decides who is ready.
export function additions(visits, {turns, seed}) {
  const next = visits.map(() => 0),
    added = new Map(), // tile of the other side -> how many blocks have added
    list = [];
  const before = (block, tile) => visits.slice(0, block).filter((one) => one.includes(tile)).length;
  const left = () => visits.map((_, block) => block).filter((block) => next[block] < visits[block].length);
  let state = seed >>> 0,
    round = 0;
  const chance = (count) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 4294967296) * count);
  };
  while (left().length) {
    const ready = left().filter((block) => {
      const tile = visits[block][next[block]];
      return !turns || (added.get(tile) ?? 0) === before(block, tile);
    });
    for (const block of turns ? ready : [ready[chance(ready.length)]]) {
      const tile = visits[block][next[block]++];
      added.set(tile, (added.get(tile) ?? 0) + 1);
      list.push({block, tile, round});
    }
    ++round;
  }
  return list;
}

// settings: as for walk() of algorithm.js. plan: owner ("keys" or "rows"), turns, seed.
export function gradientWalk(inputs, dout, settings, plan) {
  const {seqlenQ, seqlenK, headdim, tileM, tileN, causal} = settings,
    {q, k, v} = inputs;
  const math = arithmetic(inputs, settings),
    {round} = math,
    scale = round(1 / Math.sqrt(headdim));
  const {out, lse} = definition(inputs, causal);
  const delta = dout.map((row, i) => dot(row, out[i].map(round), round));
  const rowTiles = tiles(seqlenQ, tileM),
    keyTiles = tiles(seqlenK, tileN),
    byKeys = plan.owner === "keys",
    [own, others] = byKeys ? [keyTiles, rowTiles] : [rowTiles, keyTiles];
  const pair = (block, tile) => (byKeys ? [rowTiles[tile], keyTiles[block]] : [rowTiles[block], keyTiles[tile]]);
  const visits = own.map((_, block) => others.map((_, tile) => tile).filter((tile) => !hidden(settings, ...pair(block, tile))));
  let state = {dq: zeros([0, seqlenQ], headdim), dk: zeros([0, seqlenK], headdim), dv: zeros([0, seqlenK], headdim)};
  let order = others.map(() => []); // for each tile of the other side the blocks that have added, in this order
  const steps = [{kind: "start", ...state, order, done: []}];

  // name[rows or keys][d] += the sum over the other side of weight * matrix
  const add = (name, range, count, weight, matrix, factor) => {
    const array = [...state[name]];
    for (let n = 0; n < size(range); ++n)
      array[range[0] + n] = array[range[0] + n].map((x, d) => {
        let sum = 0;
        for (let m = 0; m < count; ++m) sum = round(sum + round(weight(n, m) * matrix(m)[d]));
        return round(x + round(factor * sum));
      });
    state = {...state, [name]: array};
  };
  let done = [];
  for (const {block, tile, round: when} of additions(visits, plan)) {
    const [rows, keys] = pair(block, tile),
      [m, n] = [size(rows), size(keys)];
    const s = math.scores(rows, keys);
    const p = s.map((row, i) => row.map((x) => (x === -Infinity ? 0 : round(Math.exp(round(x - round(lse[rows[0] + i])))))));
    const dp = each(rows, (i) => each(keys, (j) => dot(dout[i], v[j], round)));
    const ds = p.map((row, i) => row.map((x, j) => round(x * round(dp[i][j] - delta[rows[0] + i]))));
    add("dv", keys, m, (j, i) => p[i][j], (i) => dout[rows[0] + i], 1);
    add("dk", keys, m, (j, i) => ds[i][j], (i) => q[rows[0] + i], scale);
    add("dq", rows, n, (i, j) => ds[i][j], (j) => k[keys[0] + j], scale);
    order = order.map((blocks, at) => (at === tile ? [...blocks, block] : blocks));
    done = [...done, {block, tile, round: when}];
    steps.push({kind: "tile", block, tile, rows, keys, s, p, dp, ds, ...state, order, done});
  }
  steps.push({kind: "end", ...state, order, done});
  return {steps, own, others, visits, ...state};
}

// ---- decode ----

// The last row over all its keys, in pieces of equal length. A piece that begins after the last key is empty: its out was never written.
export function splitKeys(inputs, settings, pieces) {
  const {seqlenQ, seqlenK} = settings,
    math = arithmetic(inputs, settings),
    {round} = math,
    row = [seqlenQ - 1, seqlenQ],
    length = Math.ceil(seqlenK / pieces);
  const parts = each([0, pieces], (piece) => {
    const keys = [Math.min(seqlenK, piece * length), Math.min(seqlenK, (piece + 1) * length)];
    if (keys[0] === keys[1]) return {keys, lse: -Infinity, out: null};
    const s = math.scores(row, keys),
      m = math.largest(s, [-Infinity]),
      p = math.exponentials(s, m),
      l = math.sums(p);
    return {keys, lse: math.lse(m, l)[0], out: math.divide(math.product(p, keys), l)[0]};
  });
  const top = Math.max(...parts.map(({lse}) => lse)),
    weights = parts.map(({lse}) => round(Math.exp(round(lse - top)))),
    sum = weights.reduce((total, x) => round(total + x), 0);
  const merged = parts.map((part, n) => ({...part, weight: round(weights[n] / sum)}));
  const out = each([0, settings.headdim], (d) =>
    merged.reduce((total, {out, weight}) => (out ? round(total + round(weight * out[d])) : total), 0),
  );
  return {parts: merged, out, lse: round(top + round(Math.log(sum))), longest: length};
}
