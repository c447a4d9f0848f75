// @ts-check
/* Line charts with uPlot: colours from the style sheet, numbers beside every mark, a table of values for whoever
   cannot see the canvas. */
"use strict";

/** @typedef {{label: string, values: (number|null)[], dash?: number[], points?: boolean, width?: number, color?: number}} Line */
/** @typedef {{title: string, x: number[], lines: Line[], show: (v: number) => string, log?: boolean}} Chart */

const shardwise = (() => {
  const POWERS = Array.from({ length: 50 }, (_, i) => 2 ** i);
  const STEPS = [1, 2, 5, 10, 20, 50].concat(Array.from({ length: 12 }, (_, i) => [1, 2, 5].map((m) => m * 10 ** (i + 2))).flat());
  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 4], [12, 4]];
  /** @type {{plot: any, holder: HTMLElement, chart: Chart}[]} */
  let drawn = [];

  /** @param {string} name */
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /** @param {number} v */
  const bytes = (v) => {
    for (const [size, name] of /** @type {[number, string][]} */ ([[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]))
      if (Math.abs(v) >= size) return Number.isInteger(v / size) ? `${v / size} ${name}` : `${(v / size).toFixed(v / size >= 100 ? 0 : 2)} ${name}`;
    return `${v.toFixed(0)} B`;
  };
  /** @param {number} v */
  const plain = (v) => (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(2) : String(+v.toPrecision(5)));

  /** @param {HTMLElement} parent @param {string} tag @param {string} [text] @param {string} [kind] */
  const add = (parent, tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    parent.append(made);
    return made;
  };

  /** Without a pointer over it, a chart's legend shows each line's last value. @param {any} plot */
  function latest(plot) {
    const idxs = plot.data.map((/** @type {(number|null)[]} */ column) => column.findLastIndex((v) => v !== null));
    if (idxs[0] >= 0) plot.setLegend({ idxs });
  }

  /** @param {Chart} chart @param {HTMLElement} holder */
  function plot(chart, holder) {
    const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
    const options = {
      width: Math.max(240, holder.clientWidth),
      height: 230,
      scales: { x: { time: false }, y: { distr: chart.log ? 3 : 1 } },
      hooks: { setCursor: [(/** @type {any} */ u) => { if (u.cursor.left < 0) latest(u); }] },
      axes: [
        { ...axis, incrs: STEPS, values: (/** @type {any} */ _u, /** @type {number[]} */ ticks) => ticks.map((t) => t.toLocaleString("en")) },
        { ...axis, size: 74, ...(chart.show === bytes ? { incrs: POWERS } : {}), values: (/** @type {any} */ _u, /** @type {(number|null)[]} */ ticks) => ticks.map((t) => (t === null ? "" : chart.show(t))) },
      ],
      series: [
        { label: "step" },
        ...chart.lines.map((line, i) => ({
          label: line.label,
          stroke: css(`--s${((line.color ?? i) % 6) + 1}`),
          width: line.width ?? 1.8,
          dash: line.dash ?? DASHES[i % DASHES.length],
          points: line.points ? { show: true, size: 7 } : { show: chart.x.length < 3 },
          spanGaps: true,
          value: (/** @type {any} */ _u, /** @type {number|null} */ v) => (v === null || v === undefined ? "-" : chart.show(v)),
        })),
      ],
    };
    // @ts-ignore uPlot is a global of its own file
    const made = new uPlot(options, [chart.x, ...chart.lines.map((l) => l.values)], holder);
    latest(made);
    return made;
  }

  /** @param {Chart} chart @param {HTMLElement} box */
  function table(chart, box) {
    const details = /** @type {HTMLDetailsElement} */ (add(box, "details"));
    add(details, "summary", "values");
    details.addEventListener("toggle", () => {
      details.querySelector(".values")?.remove();
      if (!details.open) return;
      const made = add(add(details, "div", undefined, "values"), "table", undefined, "numbers");
      const head = add(add(made, "thead"), "tr");
      add(head, "th", "step");
      for (const line of chart.lines) add(head, "th", line.label);
      const body = add(made, "tbody");
      const every = Math.max(1, Math.ceil(chart.x.length / 100));
      chart.x.forEach((x, i) => {
        if (i % every && i !== chart.x.length - 1 && !chart.lines.some((l) => l.points && l.values[i] != null)) return;
        const row = add(body, "tr");
        add(row, "th", x.toLocaleString("en"));
        for (const line of chart.lines) add(row, "td", line.values[i] == null ? "-" : chart.show(/** @type {number} */ (line.values[i])));
      });
    });
  }

  /** Draw charts into `box`, or put new values into those that stand there.
   * @param {HTMLElement} box @param {Chart[]} charts */
  function draw(box, charts) {
    const shape = JSON.stringify(charts.map((c) => [c.title, c.lines.map((l) => l.label)]));
    if (box.dataset.shape === shape) {
      charts.forEach((chart, i) => {
        Object.assign(drawn[i].chart, chart);
        drawn[i].plot.setData([chart.x, ...chart.lines.map((l) => l.values)]);
        if (drawn[i].plot.cursor.idx == null) latest(drawn[i].plot);
      });
      return;
    }
    for (const one of drawn) one.plot.destroy();
    box.replaceChildren();
    // all cards first: the grid gives a lone card its whole width, and canvases would be drawn that wide
    drawn = charts.map((chart) => {
      const card = add(box, "figure", undefined, "chart");
      card.style.margin = "0";
      add(card, "h3", chart.title);
      const holder = add(card, "div");
      holder.setAttribute("role", "img");
      holder.setAttribute("aria-label", `${chart.title} over steps; the values are in the table below it`);
      table(chart, card);
      return { plot: null, holder, chart };
    });
    redraw();
    box.dataset.shape = shape;
  }

  function redraw() {
    for (const one of drawn) {
      one.plot?.destroy();
      one.plot = plot(one.chart, one.holder);
    }
  }

  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const one of drawn) one.plot.setSize({ width: Math.max(240, one.holder.clientWidth), height: 230 });
    }, 100);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  return { draw, add, bytes, plain };
})();
