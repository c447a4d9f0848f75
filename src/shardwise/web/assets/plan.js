// @ts-check
/* Every change of a control asks anew and puts the answer in place; the address always holds the question.
   Answers come as ready HTML from the same templates as the first page. */
"use strict";

(() => {
  const form = /** @type {HTMLFormElement} */ (document.getElementById("controls"));
  const parts = { answer: document.getElementById("answer"), scatter: document.getElementById("scatter") };
  /** @type {Record<string, string>} */
  const defaults = JSON.parse(form.dataset.defaults ?? "{}");
  /** @type {AbortController|null} */
  let asked = null;

  /** @returns {URLSearchParams} */
  function query() {
    const found = new URLSearchParams();
    for (const [key, value] of new FormData(form)) if (defaults[key] !== value) found.set(key, String(value));
    return found;
  }

  /** @param {string} name @param {string} question @param {AbortSignal} signal */
  async function put(name, question, signal) {
    const part = /** @type {HTMLElement} */ (parts[/** @type {"answer"|"scatter"} */ (name)]);
    const answer = await fetch(`/plan/${name}?${question}`, { signal });
    const text = await answer.text();
    if (signal.aborted) return;
    const arrived = performance.now();
    const open = [...part.querySelectorAll("details[open]")].map((d) => /** @type {HTMLElement} */ (d).dataset.key);
    // made by our own templates, which escape every value
    part.innerHTML = answer.ok ? text : "";
    if (!answer.ok) part.textContent = answer.status === 401 ? "the page was started anew: open its new address" : `no answer (${answer.status})`;
    for (const d of /** @type {NodeListOf<HTMLDetailsElement>} */ (part.querySelectorAll("details.stack"))) d.open = open.includes(d.dataset.key);
    place(part);
    part.dataset.put = (performance.now() - arrived).toFixed(1);
  }

  async function redraw() {
    asked?.abort();
    asked = new AbortController();
    const { signal } = asked;
    const question = query().toString();
    history.replaceState(null, "", question ? `/plan?${question}` : "/plan");
    const began = performance.now();
    parts.answer?.setAttribute("aria-busy", "true");
    try {
      await put("answer", question, signal);
      parts.answer?.setAttribute("data-milliseconds", (performance.now() - began).toFixed(1));
      parts.answer?.setAttribute("aria-busy", "false");
      const said = document.getElementById("said");
      if (said) said.textContent = document.getElementById("sentence")?.textContent ?? "";
      await put("scatter", question, signal);
      parts.scatter?.setAttribute("data-milliseconds", (performance.now() - began).toFixed(1));
      document.body.dataset.drawn = question;
    } catch (problem) {
      if (signal.aborted) return;
      parts.answer?.setAttribute("aria-busy", "false");
      if (parts.answer) parts.answer.textContent = "the page's server does not answer; is `shardwise web` still running?";
    }
  }

  /** Ticks of the scatter; a style attribute in the HTML would be refused by the page's policy. @param {HTMLElement} root */
  function place(root) {
    for (const t of /** @type {NodeListOf<HTMLElement>} */ (root.querySelectorAll(".x-tick"))) t.style.left = `${t.dataset.at}%`;
    for (const t of /** @type {NodeListOf<HTMLElement>} */ (root.querySelectorAll(".y-tick"))) t.style.top = `${t.dataset.at}%`;
    const recipe = root.querySelector("#recipe"), download = /** @type {HTMLAnchorElement|null} */ (root.querySelector("#download"));
    if (recipe && download) download.href = URL.createObjectURL(new Blob([recipe.textContent ?? ""], { type: "application/yaml" }));
  }

  /** A slider and the box beside it say the same. */
  function sliders() {
    for (const slider of /** @type {NodeListOf<HTMLInputElement>} */ (form.querySelectorAll("input[type=range]"))) {
      const box = /** @type {HTMLInputElement} */ (document.getElementById(slider.dataset.for ?? ""));
      const values = (slider.dataset.values ?? "").split(" ");
      const at = values.indexOf(box.value);
      if (at >= 0) slider.value = String(at);
      slider.setAttribute("aria-valuetext", box.value);
    }
  }

  /** Set the controls to a link's question. @param {string} href */
  function follow(href) {
    const wanted = new URL(href, location.href).searchParams;
    for (const field of /** @type {any} */ (form.elements)) {
      if (!field.name) continue;
      const value = wanted.get(field.name) ?? defaults[field.name] ?? "";
      if (field.tagName === "SELECT" && ![...field.options].some((o) => o.value === value)) field.add(new Option(value, value));
      field.value = value;
    }
    sliders();
    settable();
    redraw();
  }

  /** A model's name is asked for once it is whole: a listed one, or one that was typed to the end.
      @param {HTMLInputElement} box */
  const whole = (box) => [...(box.list?.options ?? [])].some((o) => o.value === box.value);

  /** Over the whole catalogue there is no number of GPUs to set, and a file has the tokens it has. */
  function settable() {
    const value = (/** @type {string} */ id) => /** @type {HTMLSelectElement|null} */ (document.getElementById(id))?.value ?? "";
    const off = { count: value("gpu") === "any", "count-slider": value("gpu") === "any", tokens: value("data") !== "", "tokens-slider": value("data") !== "" };
    for (const [id, disabled] of Object.entries(off)) /** @type {HTMLInputElement} */ (document.getElementById(id)).disabled = disabled;
  }

  form.addEventListener("change", (event) => {
    const box = /** @type {HTMLInputElement} */ (event.target);
    if (box.id === "model" && !whole(box)) redraw();
  });
  form.addEventListener("input", (event) => {
    const slider = /** @type {HTMLInputElement} */ (event.target);
    if (slider.type === "range") {
      const box = /** @type {HTMLInputElement} */ (document.getElementById(slider.dataset.for ?? ""));
      box.value = (slider.dataset.values ?? "").split(" ")[Number(slider.value)];
    }
    sliders();
    settable();
    if (slider.id !== "model" || whole(slider)) redraw();
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); redraw(); });

  document.addEventListener("click", (event) => {
    const target = /** @type {Element} */ (event.target);
    const link = target.closest("a[data-plan]");
    if (link) {
      event.preventDefault();
      follow(link.getAttribute("href") ?? "/plan");
      return;
    }
    const copy = /** @type {HTMLElement|null} */ (target.closest("[data-copy]"));
    if (copy) {
      const text = document.getElementById(copy.dataset.copy ?? "")?.textContent ?? "";
      navigator.clipboard.writeText(text).then(() => { copy.textContent = "Copied"; }, () => { copy.textContent = "Select it and copy by hand"; });
      return;
    }
    if (target.closest("#to-start")) sessionStorage.setItem("shardwise-recipe", document.getElementById("recipe")?.textContent ?? "");
    const term = target.closest("svg g[data-term]"), stack = /** @type {HTMLDetailsElement|null} */ (target.closest("details.stack"));
    if (term && stack) {
      event.preventDefault();
      stack.open = true;
      for (const row of stack.querySelectorAll("tr[data-term]")) row.classList.toggle("chosen", row.getAttribute("data-term") === term.getAttribute("data-term"));
    }
  });
  addEventListener("popstate", () => location.reload());
  sliders();
  settable();
  place(document.body);
})();
