// @ts-check
/* The curves of one run, or of several over each other. */
"use strict";

/** @typedef {{name: string, series: any, evaluations: {step: number, loss: number}[], memory: {name: string, estimate: number|null}[]}} RunData */

const runCharts = (() => {
  /** Exponential mean of the last tenth of a curve's points, without its start's bias.
   * @param {(number|null)[]} values */
  function smooth(values) {
    const keep = 1 - 1 / Math.max(3, Math.min(50, values.length / 20));
    let sum = 0, weight = 0;
    return values.map((v) => {
      if (v === null) return null;
      sum = keep * sum + (1 - keep) * v;
      weight = keep * weight + (1 - keep);
      return sum / weight;
    });
  }

  /** All steps of all runs, in order. @param {number[][]} lists */
  const union = (...lists) => [...new Set(lists.flat())].sort((a, b) => a - b);

  /** Values of a run on a common axis. @param {number[]} x @param {number[]} steps @param {(number|null)[]} values */
  function on(x, steps, values) {
    const at = new Map(steps.map((s, i) => [s, values[i]]));
    return x.map((s) => at.get(s) ?? null);
  }

  /** @param {RunData} run @returns {any[]} */
  function one(run) {
    const s = run.series, steps = s.step;
    const held = run.evaluations.map((e) => e.step);
    const x = union(steps, held);
    const estimate = run.memory.find((r) => r.name === "peak allocated")?.estimate;
    const known = (/** @type {any[]} */ column) => column.some((v) => v !== null);
    const charts = [
      { title: "loss", x, show: shardwise.plain, lines: [
        { label: "training", values: on(x, steps, s.loss), width: 0.8, dash: [] },
        { label: "training, smoothed", values: on(x, steps, smooth(s.loss)), width: 2.5, dash: [], color: 0 },
        { label: "held-out", values: on(x, held, run.evaluations.map((e) => e.loss)), points: true, color: 1 },
      ] },
      { title: "learning rate", x: steps, show: shardwise.plain, lines: [{ label: "learning rate", values: s.learning_rate }] },
      { title: "gradient norm, before clipping", x: steps, show: shardwise.plain, lines: [{ label: "gradient norm", values: s.grad_norm }] },
      { title: "tokens per second", x: steps, show: shardwise.plain, lines: [{ label: "tokens/s", values: s.tokens_per_second }] },
      { title: "memory", x: steps, show: shardwise.bytes, lines: [
        { label: "live tensors after the step", values: s.allocated_bytes, color: 0 },
        { label: "peak so far", values: s.peak_allocated_bytes, color: 1 },
        { label: "estimated peak", values: steps.map(() => estimate ?? null), color: 2 },
        { label: "resident set", values: s.resident_bytes, color: 3 },
      ].filter((l) => known(l.values)) },
    ];
    return charts.filter((c) => c.x.length > 0 && c.lines.some((l) => known(l.values)));
  }

  /** @param {RunData[]} runs @returns {any[]} */
  function several(runs) {
    const x = union(...runs.map((r) => r.series.step), ...runs.map((r) => r.evaluations.map((e) => e.step)));
    const line = (/** @type {string} */ column, /** @type {any} */ change) => runs.map((r, i) => ({
      label: r.name, values: on(x, r.series.step, change(r.series[column])), color: i }));
    const same = (/** @type {any} */ v) => v;
    return [
      { title: "training loss, smoothed", x, show: shardwise.plain, lines: line("loss", smooth) },
      { title: "held-out loss", x, show: shardwise.plain, lines: runs.map((r, i) => ({
        label: r.name, values: on(x, r.evaluations.map((e) => e.step), r.evaluations.map((e) => e.loss)), points: true, color: i })) },
      { title: "learning rate", x, show: shardwise.plain, lines: line("learning_rate", same) },
      { title: "gradient norm, before clipping", x, show: shardwise.plain, lines: line("grad_norm", same) },
      { title: "tokens per second", x, show: shardwise.plain, lines: line("tokens_per_second", same) },
      { title: "memory, peak so far", x, show: shardwise.bytes, lines: line("peak_allocated_bytes", same) },
    ];
  }

  /** @param {HTMLElement} box @param {RunData[]} runs */
  return (box, runs) => shardwise.draw(box, runs.length === 1 ? one(runs[0]) : several(runs));
})();

(() => {
  const data = document.getElementById("run-data"), box = document.getElementById("run-charts");
  if (data && box) runCharts(box, [JSON.parse(data.textContent ?? "")]);
})();
