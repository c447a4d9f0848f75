// @ts-check
/* Recipe, plan, confirmation, start. A change of the recipe takes the confirmation back. */
"use strict";

(() => {
  /** @param {string} id @returns {any} */
  const part = (id) => document.getElementById(id);
  const recipe = part("recipe"), confirmed = part("confirmed"), start = part("start"), word = part("start-word");
  let digest = "";

  /** @param {string} path @param {unknown} [sent] */
  async function ask(path, sent) {
    const answer = await fetch(path, sent === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent) });
    const told = await answer.json();
    if (!answer.ok) throw new Error([told.error, told.why, told.hint].filter(Boolean).join("\n"));
    return told;
  }

  const stored = sessionStorage.getItem("shardwise-recipe");
  if (stored && !recipe.value) recipe.value = stored;
  sessionStorage.removeItem("shardwise-recipe");

  function forget() {
    digest = "";
    confirmed.checked = false;
    start.disabled = true;
    part("plan-part").hidden = true;
  }
  recipe.addEventListener("input", forget);

  part("check").addEventListener("click", async () => {
    forget();
    word.textContent = "reading the model and the data ...";
    part("check").disabled = true;
    try {
      const told = await ask("/start/check", { recipe: recipe.value });
      digest = told.ok ? told.digest : "";
      part("plan-text").textContent = told.plan;
      part("confirm-part").hidden = !told.ok;
      part("plan-part").hidden = false;
      word.textContent = told.ok ? "" : "this recipe cannot run as it stands";
    } catch (problem) {
      part("plan-text").textContent = problem instanceof Error ? problem.message : String(problem);
      part("confirm-part").hidden = true;
      part("plan-part").hidden = false;
      word.textContent = "this recipe cannot run as it stands";
    }
    part("check").disabled = false;
  });

  confirmed.addEventListener("change", () => { start.disabled = !(confirmed.checked && digest); });

  start.addEventListener("click", async () => {
    start.disabled = true;
    word.textContent = "starting ...";
    try {
      const { run } = await ask("/start/run", { digest, confirmed: confirmed.checked });
      for (;;) {
        const told = await ask(`/start/${encodeURIComponent(run)}.json`);
        if (told.exists) { location.href = `/runs/${encodeURIComponent(run)}`; return; }
        if (told.exit_code !== null) throw new Error(told.said);
        await new Promise((done) => setTimeout(done, 700));
      }
    } catch (problem) {
      word.textContent = "it did not start";
      part("plan-text").textContent = problem instanceof Error ? problem.message : String(problem);
    }
  });
})();
