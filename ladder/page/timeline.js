// timeline.js: a trace of one block of the Hopper kernel as a chart of who works when. recording.py describes the data.

const DOES = {
  wait_full: (e) => `waits for ${e.operand ?? "K or V"} ${e.tile}`,
  wait_empty: (e) => `waits for an empty stage for ${e.operand ?? "tile"} ${e.tile}`,
  wait_turn: () => "waits for its turn",
  copy: (e) => `copies ${e.operand ?? "K and V"} ${e.tile}`,
  scores: (e) => `multiplies S(${e.tile}) = Q K(${e.tile})ᵀ`,
  softmax: (e) => `computes the softmax of S(${e.tile})`,
  values: (e) => `multiplies O += P(${e.tile}) V(${e.tile})`,
};
const TEXT = {
  copy: (e) => `${e.operand ?? "KV"} ${e.tile}`,
  scores: (e) => `S ${e.tile}`,
  softmax: (e) => `softmax ${e.tile}`,
  values: (e) => `PV ${e.tile}`,
};

export const isModel = ({source}) => source.startsWith("model:");

// What each stage of the rings holds, from the copies and from the products that read them: tile, begin (the copy begins), full, end (the
// last consumer has read it).
export function ringOf({events, stages = 2}, operand) {
  const copies = events
    .filter((e) => e.event === "copy" && (e.operand ?? operand) === operand)
    .sort((a, b) => a.begin_ns - b.begin_ns);
  const reader = operand === "K" ? "scores" : "values";
  return copies.map((copy, n) => {
    const again = copies.slice(n + 1).find((later) => later.tile === copy.tile); // the same tile of another item
    const readers = events.filter(
      (e) =>
        e.event === reader &&
        e.tile === copy.tile &&
        e.begin_ns >= copy.begin_ns &&
        e.begin_ns < (again?.begin_ns ?? Infinity),
    );
    return {
      stage: n % stages,
      tile: copy.tile,
      begin: copy.begin_ns,
      full: copy.end_ns,
      end: Math.max(copy.end_ns, ...readers.map((e) => e.end_ns)),
    };
  });
}

export class TimeLine {
  constructor(trace, {names, host, legend, source}) {
    Object.assign(this, {trace, names, host});
    this.start = Math.min(...trace.events.map((e) => e.begin_ns));
    this.end = Math.max(...trace.events.map((e) => e.end_ns));
    this.rings = {K: ringOf(trace, "K"), V: ringOf(trace, "V")};
    this.now = this.start;
    this.consumers = [...new Set(trace.events.map(({role}) => role))].filter((role) => role !== "producer").sort();
    const {stages = 2} = trace,
      each = (operand) => Array.from({length: stages}, (_, n) => [`ring${operand}`, n]);
    const lane = (name, role, events) => ({
      name,
      items: trace.events.filter((e) => e.role === role && events.includes(e.event)),
    });
    const ring = ([kind, stage]) => ({
      name: `${kind.slice(-1)} stage ${stage}`,
      ring: kind,
      items: this.rings[kind.slice(-1)].filter((held) => held.stage === stage),
    });
    this.lanes = [
      lane("Producer", "producer", ["copy", "wait_empty"]),
      ...each("K").map(ring),
      ...each("V").map(ring),
      ...this.consumers.flatMap((role) => {
        const name = role.replace("consumer", "Consumer ");
        return [
          lane(`${name} products`, role, ["scores", "values", "wait_turn", "wait_full"]),
          lane(`${name} softmax`, role, ["softmax"]),
        ];
      }),
    ];
    const title = isModel(trace) ? "<strong>A model, not a measurement.</strong>" : "<strong>Measured.</strong>";
    source.innerHTML = `${title} <span></span>`;
    source.lastElementChild.textContent = `${trace.source.replace(/^model: /, "")}. ${trace.about ?? ""}`;
    legend.innerHTML =
      [
        ["copyK", "copy of K"],
        ["copyV", "copy of V"],
        ["scores", "S = Q Kᵀ"],
        ["softmax", "softmax"],
        ["values", "O += P V"],
        ["wait", "waiting"],
      ]
        .map(
          ([name, text]) =>
            `<span><svg width="22" height="12" aria-hidden="true"><rect class="event ${name}" width="22" height="12"/></svg>${text}</span>`,
        )
        .join("") + "<span>stages: pale while a copy arrives</span>";
  }

  layout(zoom) {
    const narrow = this.host.parentElement.clientWidth < 520,
      height = 26,
      top = 8;
    const groups = (index) =>
      this.lanes.slice(0, index + 1).filter(({name}, n) => n === 1 || / products$/.test(name)).length;
    const y = (index) => top + index * height + 8 * groups(index),
      bottom = y(this.lanes.length - 1) + height;
    const names = node("svg", {width: narrow ? 82 : 158, height: bottom + 30, "aria-hidden": "true"});
    this.lanes.forEach(({name}, index) => {
      const short = narrow ? name.replace("Consumer ", "C").replace(" stage", "") : name;
      const text = node(
        "text",
        {
          x: narrow ? 76 : 150,
          y: y(index) + 16,
          "text-anchor": "end",
          class: /stage|softmax/.test(name) ? "small" : "",
        },
        names,
      );
      text.textContent = short;
    });
    this.names.replaceChildren(names);

    const width = Math.max(200, (this.host.clientWidth || 600) - 2) * zoom,
      scale = (width - 12) / (this.end - this.start);
    const x = (ns) => 2 + (ns - this.start) * scale;
    const root = node("svg", {
      width,
      height: bottom + 30,
      role: "img",
      "aria-label": "Time line; the text below says what happens at the chosen time",
    });
    const microseconds = this.tick((this.end - this.start) / 1e3, width);
    for (let us = 0; us * 1e3 <= this.end - this.start; us += microseconds) {
      node(
        "line",
        {x1: x(this.start + us * 1e3), x2: x(this.start + us * 1e3), y1: 0, y2: bottom + 6, class: "grid"},
        root,
      );
      if (x(this.start + us * 1e3) > width - 44) continue;
      const text = node("text", {x: x(this.start + us * 1e3) + 3, y: bottom + 20, class: "small"}, root);
      text.textContent = `${Number(us.toFixed(3))} µs`;
    }
    this.shapes = [];
    const bar = (begin, end, at, className, text, thin) => {
      const w = Math.max(0.5, (end - begin) * scale - 1);
      const rect = node(
        "rect",
        {x: x(begin), y: at + (thin ? 6 : 2), width: w, height: height - (thin ? 12 : 4), class: `event ${className}`},
        root,
      );
      if (text && w > 7 * text.length + 4) {
        const label = node(
          "text",
          {
            x: x(begin) + w / 2,
            y: at + height / 2 + 0.5,
            class: className.includes("arriving") || className.includes("wait") ? "on over" : "on",
          },
          root,
        );
        label.textContent = text;
      } else if (text && w > 16) {
        const label = node("text", {x: x(begin) + w / 2, y: at + height / 2 + 0.5, class: "on"}, root);
        label.textContent = text.match(/\d+$/)[0];
      }
      this.shapes.push({rect, begin, end});
    };
    this.lanes.forEach(({ring, items}, index) => {
      for (const item of items)
        if (ring) {
          bar(item.begin, item.full, y(index), `${ring} arriving`, "");
          bar(item.full, item.end, y(index), ring, `${ring.slice(-1)} ${item.tile}`);
        } else {
          const waits = item.event.startsWith("wait"),
            kind = waits ? "wait" : item.event === "copy" ? `copy${item.operand ?? ""}` : item.event;
          bar(item.begin_ns, item.end_ns, y(index), kind, waits ? "" : TEXT[item.event](item), waits);
        }
    });
    this.cursor = node("line", {y1: 0, y2: bottom + 6, class: "cursor"}, root);
    Object.assign(this, {x, root, at: (px) => this.start + (px - 2) / scale});
    this.host.replaceChildren(root);
    this.show(this.now);
  }
  tick(total, width) {
    const wanted = total / (width / 90),
      power = 10 ** Math.floor(Math.log10(wanted));
    return power * [1, 2, 5, 10].find((n) => n * power >= wanted);
  }

  // Marks the time and says what happens then; returns the text.
  show(ns, follow = false) {
    this.now = Math.max(this.start, Math.min(this.end, ns));
    const at = this.x(this.now),
      holds = (begin, end) => begin <= this.now && this.now < end;
    (this.cursor.setAttribute("x1", at), this.cursor.setAttribute("x2", at));
    for (const {rect, begin, end} of this.shapes) rect.classList.toggle("now", holds(begin, end));
    if (follow && (at < this.host.scrollLeft + 40 || at > this.host.scrollLeft + this.host.clientWidth - 40))
      this.host.scrollLeft = at - this.host.clientWidth / 3;
    const does = ["producer", ...this.consumers].map((role) => {
      const name = role === "producer" ? "the producer" : role.replace("consumer", "consumer ");
      const mine = this.trace.events
        .filter((e) => e.role === role && holds(e.begin_ns, e.end_ns))
        .map((e) => DOES[e.event](e));
      return `${name} ${mine.length ? mine.join(" and ") : "has nothing to do"}`;
    });
    const stages = Object.entries(this.rings).map(([operand, held]) => {
      const now = held.filter(({begin, end}) => holds(begin, end)).sort((a, b) => a.stage - b.stage);
      const has = ({stage, tile, full}) => `stage ${stage} ${this.now < full ? "receives" : "holds"} tile ${tile}`;
      return `${operand}: ${now.map(has).join(", ") || "all stages empty"}`;
    });
    const text = `${does.join("; ")}. ${stages.join(". ")}.`;
    return text[0].toUpperCase() + text.slice(1);
  }
}

function node(tag, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent?.append(made);
  return made;
}
