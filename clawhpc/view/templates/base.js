"use strict";
// Every text is set with textContent, never as HTML. Data waits in <script type="application/json"> until it is wanted.

const by = (id) => document.getElementById(id);
const read = (element) => (element ? JSON.parse(element.textContent) : null);
const formats = [0, 1].map((digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
const number = (value, digits = 0) => formats[digits].format(value);
const words = (name) => name.replaceAll("_", " ");

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") element.style.cssText = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// ---- theme ---------------------------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];
let theme = "system";
try { theme = localStorage.getItem("clawhpc-theme") ?? "system"; } catch { /* a page from disk may have no storage */ }
function applyTheme() {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  by("theme").textContent = `Theme: ${theme}`;
  try { localStorage.setItem("clawhpc-theme", theme); } catch { /* as above */ }
}
function nextTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  applyTheme();
}
by("theme").addEventListener("click", nextTheme);
applyTheme();

// ---- curves --------------------------------------------------------------------------------------------------------

const hover = read(by("data-hover")) ?? [];
for (const chart of document.querySelectorAll(".chart")) watchChart(chart.querySelector(".box"), hover[chart.dataset.chart]);

function watchChart(box, data) {
  const steps = [...new Set(data.series.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
  const span = data.x[1] - data.x[0] || 1;
  const cursor = box.querySelector(".cursor"), readout = box.querySelector(".readout");
  let at = steps.length - 1;
  const show = () => {
    const share = steps.length > 1 ? (steps[at] - data.x[0]) / span : 0.5;
    const lines = data.series.flatMap((one) => one.points.filter(([x]) => x === steps[at]).map(([, y]) => [one.name, y]));
    cursor.style.left = `${100 * share}%`;
    readout.style.cssText = share > 0.5 ? `right:${100 * (1 - share)}%;margin-right:8px` : `left:${100 * share}%;margin-left:8px`;
    readout.replaceChildren(make("div", {}, `step ${steps[at]}`), ...lines.map(([name, y]) =>
      make("div", {}, data.series.length > 1 ? `${name} ` : "", make("b", {}, `${Number(y.toPrecision(4))}${data.unit}`))));
    cursor.hidden = readout.hidden = false;
  };
  const hide = () => { cursor.hidden = readout.hidden = true; };
  box.addEventListener("pointermove", (event) => {
    const place = box.getBoundingClientRect();
    const x = data.x[0] + span * (event.clientX - place.left) / place.width;
    at = steps.reduce((best, step, index) => (Math.abs(step - x) < Math.abs(steps[best] - x) ? index : best), 0);
    show();
  });
  box.addEventListener("pointerleave", hide);
  box.addEventListener("blur", hide);
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    at = Math.min(Math.max(at + move, 0), steps.length - 1);
    show();
    event.preventDefault();
  });
}
