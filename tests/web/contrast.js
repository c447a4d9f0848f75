// Run as a function body: texts whose contrast with what lies behind them is under 4.5 : 1 (WCAG AA).
const rgb = (c) => c.match(/[\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
return [...document.querySelectorAll('main *')].filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .filter((e) => !e.closest('svg, canvas, option, script, button:disabled, .u-legend, .bar') && e.getClientRects().length)
  .map((e) => { const a = light(rgb(getComputedStyle(e).color)), b = light(behind(e));
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.className + ' ' + e.innerText.slice(0, 40)]; })
  .filter(([ratio]) => ratio < 4.5).map(String);
