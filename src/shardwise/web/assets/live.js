// @ts-check
/* A run while it goes on: asks for news every two seconds, shows the log's end, stops it and goes on with it. */
"use strict";

/** @param {string} id */
const part = (id) => document.getElementById(id);

/** @param {string} path @param {unknown} [sent] */
async function ask(path, sent) {
  const options = sent === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent) };
  const answer = await fetch(path, options);
  if (answer.status === 204) return null;
  const told = await answer.json();
  if (!answer.ok) throw new Error([told.error, told.why, told.hint].filter(Boolean).join(" - "));
  return told;
}

(() => {
  const data = part("compare-data"), box = part("compare-charts");
  if (data && box) runCharts(box, JSON.parse(data.textContent ?? "[]"));
})();

(() => {
  const actions = part("run-actions");
  if (!actions) return;
  const name = /** @type {string} */ (actions.dataset.run);
  const here = `/runs/${encodeURIComponent(name)}`;
  const word = part("run-word");
  let seen = "", failures = 0;

  /** @param {string} text */
  const say = (text) => { if (word) word.textContent = text; };

  async function news() {
    const told = await ask(`${here}/live.json?seen=${encodeURIComponent(seen)}`);
    if (told) {
      seen = told.seen;
      runCharts(/** @type {HTMLElement} */ (part("run-charts")), [told]);
      const fresh = new DOMParser().parseFromString(told.body, "text/html");
      for (const id of ["run-facts", "run-comparison", "run-samples", "run-files"]) {
        const old = part(id), made = fresh.getElementById(id);
        if (old && made) old.replaceWith(made);
      }
      const state = part("run-state");
      if (state) { state.textContent = told.state; state.className = `state state-${told.state}`; }
      const choice = /** @type {HTMLSelectElement|null} */ (part("log-name"));
      if (choice) for (const log of told.logs) if (![...choice.options].some((o) => o.value === log)) choice.add(new Option(log));
      if (choice?.options.length) for (const e of [choice, ...choice.labels]) e.hidden = false;
      const running = told.state === "running";
      /** @type {HTMLElement} */ (part("stop")).hidden = !running;
      if (running) /** @type {HTMLElement} */ (part("resume")).hidden = true;
    }
    await log();
    return told ? told.state === "running" : part("run-state")?.textContent === "running";
  }

  async function log() {
    const choice = /** @type {HTMLSelectElement|null} */ (part("log-name")), box = part("log");
    if (!choice?.value || !box) return;
    const told = await ask(`${here}/log.json?name=${encodeURIComponent(choice.value)}`);
    if (!told || box.textContent === told.text) return;
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    box.textContent = told.text;
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  async function follow() {
    try {
      const running = await news();
      if (failures) say("");
      failures = 0;
      if (!running) return;
    } catch (problem) {
      failures += 1;
      say(`no news: ${problem instanceof Error ? problem.message : problem}; trying again`);
    }
    setTimeout(follow, Math.min(30000, 2000 * (1 + failures)));
  }

  part("log-name")?.addEventListener("change", () => log().catch((p) => say(p.message)));
  part("stop")?.addEventListener("click", async () => {
    try {
      await ask(`${here}/stop`, {});
      say("asked to stop; it ends at the next step with its state saved");
    } catch (problem) { say(problem instanceof Error ? problem.message : String(problem)); }
  });
  part("resume")?.addEventListener("click", async () => {
    try {
      await ask(`${here}/resume`, {});
      say("starting again from the last checkpoint ...");
      for (;;) {
        await new Promise((done) => setTimeout(done, 700));
        const told = await ask(`/start/${encodeURIComponent(name)}.json`);
        if (told.state === "running") { location.reload(); return; }
        if (told.exit_code !== null) throw new Error(told.said.trim().split("\n").slice(-4).join(" "));
      }
    } catch (problem) { say(problem instanceof Error ? problem.message : String(problem)); }
  });
  follow();
})();
