// below.js: the sections below the explorer: the gradients of its inputs, and its last row as a step of decode.
import {definition} from "./algorithm.js";
import {number, range} from "./draw.js";
import {gradientDefinition, gradientDifference, gradientOfOutput, gradientWalk, splitKeys} from "./gradients.js";

const find = (id) => document.getElementById(id);
const plural = (range_, one, more) => `${range_[1] - range_[0] === 1 ? one : more} ${range(range_)}`;

// Redraws on a change of the explorer's inputs, and on its own controls.
export class Gradients {
  constructor() {
    this.plan = {owner: "keys", turns: false, seed: 1};
    this.index = 0;
    for (const radio of document.querySelectorAll("#backward input[type=radio]"))
      radio.addEventListener("change", () =>
        this.change(radio.name === "owner" ? {owner: radio.value} : {turns: radio.value === "turns"}),
      );
    find("gradient-step").addEventListener("input", () => this.go(+find("gradient-step").value));
    find("gradient-next").addEventListener("click", () => this.go(this.index + 1));
    find("gradient-timing").addEventListener("click", () => this.change({seed: this.plan.seed + 1}));
  }
  inputs(inputs, settings) {
    Object.assign(this, {given: inputs, settings, dout: gradientOfOutput(settings)});
    this.exact = gradientDefinition(inputs, this.dout, settings.causal);
    this.compute();
  }
  change(plan) {
    Object.assign(this.plan, plan);
    this.compute();
  }
  compute() {
    this.walk = gradientWalk(this.given, this.dout, this.settings, this.plan);
    const other = gradientWalk(this.given, this.dout, this.settings, {...this.plan, seed: this.plan.seed + 1});
    this.same = ["dq", "dk", "dv"].every((name) => JSON.stringify(this.walk[name]) === JSON.stringify(other[name]));
    this.go(Math.min(this.index, this.walk.steps.length - 1));
  }
  go(index) {
    const {steps} = this.walk;
    this.index = Math.max(0, Math.min(steps.length - 1, index));
    Object.assign(find("gradient-step"), {max: steps.length - 1, value: this.index});
    find("gradient-count").value = `${this.index} / ${steps.length - 1}`;
    find("gradient-next").disabled = this.index === steps.length - 1;
    const step = steps[this.index];
    find("gradient-text").textContent = this.text(step);
    find("gradient-grid").innerHTML = this.grid(step);
    const difference = gradientDifference(this.walk, this.exact);
    find("gradient-check").textContent =
      `At the end, the largest difference from the definition in float64 is ${difference === 0 ? "0" : difference.toExponential(1)}. ` +
      (this.same ? "Another timing gives the same bits." : "Another timing gives other bits: float additions are not associative.");
  }
  text(step) {
    const byKeys = this.plan.owner === "keys",
      gradient = byKeys ? "dQ" : "dK and dV";
    if (step.kind === "start")
      return byKeys
        ? "Each block owns a tile of keys: its dK and dV will stay on chip. dQ of all rows is 0 in memory."
        : "Each block owns a tile of rows: its dQ will stay on chip. dK and dV of all keys are 0 in memory.";
    if (step.kind === "end") return `Done. Every block writes what it owns once; ${gradient} took an addition of every block that met it.`;
    const {block, tile, order, rows, keys, dq, dk} = step,
      count = order[tile].length;
    const own = byKeys ? `dK and dV of ${plural(keys, "key", "keys")}` : `dQ of ${plural(rows, "row", "rows")}`,
      to = byKeys ? `dQ of ${plural(rows, "row", "rows")}` : `dK and dV of ${plural(keys, "key", "keys")}`;
    const value = byKeys
      ? `dQ[${rows[0]}][0] is now ${number(dq[rows[0]][0], 3)}`
      : `dK[${keys[0]}][0] is now ${number(dk[keys[0]][0], 3)}`;
    return (
      `Block ${block} computes S and P again, then dP and dS = P (dP − delta). ${own} take in their part on chip. ` +
      `Then the block adds to ${to} in memory, the ${["first", "second", "third"][count - 1] ?? `${count}th`} to do so: ${value}.`
    );
  }
  grid(step) {
    const {own, others, visits} = this.walk,
      byKeys = this.plan.owner === "keys",
      [side, leaving, staying] = byKeys ? ["rows", "dQ", "dK, dV"] : ["keys", "dK, dV", "dQ"],
      when = new Map(step.done.map(({block, tile}, n) => [`${block} ${tile}`, n + 1]));
    const head = own.map((part, block) => `<th scope="col">block ${block}<small>${byKeys ? "keys" : "rows"} ${range(part)}</small></th>`);
    const lines = others.map((part, tile) => {
      const cells = own.map((_, block) => {
        const n = when.get(`${block} ${tile}`),
          now = step.kind === "tile" && step.block === block && step.tile === tile;
        const kind = !visits[block].includes(tile) ? "skipped" : now ? "now" : n ? "done" : "";
        return `<td class="${kind}">${kind === "skipped" ? "–" : (n ?? "")}</td>`;
      });
      const sum = step.order[tile].map((block) => `block ${block}`).join(" + ");
      return `<tr><th scope="row">${side} ${range(part)}</th>${cells.join("")}<td class="sum">0${sum ? ` + ${sum}` : ""}</td></tr>`;
    });
    return (
      `<thead><tr><td></td>${head.join("")}<th scope="col">${leaving} in memory</th></tr></thead><tbody>${lines.join("")}</tbody>` +
      `<tfoot><tr><th scope="row">on chip</th>${own.map(() => `<td>${staying}</td>`).join("")}<td></td></tr></tfoot>`
    );
  }
}

export class Pieces {
  constructor() {
    find("pieces").addEventListener("input", () => this.show());
  }
  inputs(inputs, settings) {
    Object.assign(this, {given: inputs, settings});
    this.exact = definition(inputs, settings.causal);
    this.show();
  }
  show() {
    const count = +find("pieces").value,
      {seqlenK, seqlenQ, headdim} = this.settings;
    find("pieces-value").value = count;
    this.result = splitKeys(this.given, this.settings, count);
    const {parts, out, lse, longest} = this.result,
      last = seqlenQ - 1;
    const line = ({keys, lse, weight, out}, n) =>
      `<tr><th scope="row">piece ${n}</th><td>${keys[0] === keys[1] ? "no key" : range(keys)}</td><td>${number(lse, 3)}</td>` +
      `<td>${number(weight, 3)}</td><td class="o">${out ? number(out[0], 3) : "never written"}</td></tr>`;
    find("pieces-table").innerHTML =
      `<thead><tr><td></td>${["keys", "lse", "weight", "out[0]"].map((name) => `<th scope="col">${name}</th>`).join("")}</tr></thead>` +
      `<tbody>${parts.map(line).join("")}</tbody><tfoot><tr><th scope="row">merged</th><td>${range([0, seqlenK])}</td>` +
      `<td>${number(lse, 3)}</td><td>1</td><td class="o">${number(out[0], 3)}</td></tr></tfoot>`;
    const empty = parts.filter(({out}) => !out).length,
      exact = this.exact.out[last];
    this.difference = Math.max(...out.map((x, d) => Math.abs(x - exact[d])), Math.abs(lse - this.exact.lse[last]));
    find("pieces-text").textContent =
      `Row ${last} over ${seqlenK} keys: ${count === 1 ? "one block reads" : `${count} blocks at a time read at most`} ${longest} ` +
      `${longest === 1 ? "key" : "keys"}${count === 1 ? "" : ` each, then a merge reads ${count} pieces of ${4 * (headdim + 1)} bytes`}. ` +
      (empty
        ? `${empty} of the pieces have no key: lse is −∞, the weight 0, and their out is left out instead of multiplied by 0. `
        : "") +
      `Largest difference from the definition: ${this.difference === 0 ? "0" : this.difference.toExponential(1)}.`;
  }
}
