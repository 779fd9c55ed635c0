"use strict";
// Every text is set with textContent, never as HTML. Data waits in <script type="application/json"> until it is wanted.

const COLUMNS = ["id", "phase", "step", "task", "harness", "sample", "outcome", "reward", "calls", "drawn", "peak", "seconds"];
const ROWS_AT_ONCE = 200;
const FOLD_OVER = 1100, FOLD_HEAD = 380, FOLD_TAIL = 520; // characters
const SURPRISE = [0.11, 0.36, 0.92, 2.3, 4.6]; // -log-prob from which a token gets the next shade: p = 90, 70, 40, 10, 1 %

const by = (id) => document.getElementById(id);
const read = (element) => (element ? JSON.parse(element.textContent) : null);
const formats = [0, 1].map((digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
const number = (value, digits = 0) => formats[digits].format(value);
const inOrder = new Intl.Collator("en", { numeric: true }).compare;
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

const details = new Map([...document.querySelectorAll("script[data-rollout]")].map((element) => [element.dataset.rollout, element]));
const rows = (read(by("data-rows")) ?? []).map((values) => {
  const row = Object.fromEntries(COLUMNS.map((name, at) => [name, values[at]]));
  row.embedded = details.has(row.id) ? 1 : 0;
  row.words = [row.id, row.phase, row.task, row.harness, words(row.outcome)].join(" ").toLowerCase();
  return row;
});
const rowOf = new Map(rows.map((row) => [row.id, row]));
let texts = null;
const text = (place) => (texts ??= read(by("data-texts")))[place];

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

// ---- the table -----------------------------------------------------------------------------------------------------

const body = document.querySelector(".rollouts tbody");
const sorting = { key: "step", down: true };
let listed = [], limit = ROWS_AT_ONCE;

function fillChoices(id) {
  for (const value of [...new Set(rows.map((row) => row[id]))].sort()) by(id).append(make("option", { value }, words(value)));
}

function compare(left, right) {
  const [a, b] = [left[sorting.key], right[sorting.key]];
  if (a === null || b === null) return (a === null) - (b === null); // without a reward: last, either way
  const order = typeof a === "string" ? inOrder(a, b) : a - b;
  return sorting.down ? -order : order;
}

function list() {
  const wanted = by("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [phase, outcome, embedded] = [by("phase").value, by("outcome").value, by("embedded").checked];
  listed = rows.filter((row) => (!phase || row.phase === phase) && (!outcome || row.outcome === outcome)
    && (!embedded || row.embedded) && wanted.every((word) => row.words.includes(word))).sort(compare);
  for (const head of document.querySelectorAll(".rollouts th")) {
    if (head.dataset.key === sorting.key) head.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  body.replaceChildren(...listed.slice(0, limit).map(tableRow));
  by("shown").textContent = listed.length === rows.length ? `${number(rows.length)} rollouts` : `${number(listed.length)} of ${number(rows.length)}`;
  by("more").hidden = listed.length <= limit;
  by("more").textContent = `Show ${number(Math.min(ROWS_AT_ONCE, listed.length - limit))} more of ${number(listed.length - limit)}`;
}

function tableRow(row) {
  const cell = (value, kind) => make("td", { class: kind }, value);
  return make("tr", { tabindex: "0", "data-id": row.id, onclick: () => open(row.id) },
    make("td", { class: "has", title: row.embedded ? "its tree is on this page" : null }, row.embedded ? "●" : ""),
    cell(row.phase), cell(number(row.step), "num"), make("td", { class: "task", title: row.task }, row.task), cell(row.harness),
    cell(String(row.sample), "num"), make("td", {}, make("i", { class: `dot ${row.outcome}` }), words(row.outcome)),
    make("td", { class: "num" }, reward(row.reward)), cell(number(row.calls), "num"), cell(number(row.drawn), "num"),
    cell(number(row.peak), "num"), cell(number(row.seconds, 1), "num"));
}

function reward(value) {
  if (value === null) return make("span", { class: "none" }, "–");
  return make("span", { class: "reward" }, make("i", { style: `--share:${100 * value}%` }), value.toFixed(2));
}

if (body) {
  fillChoices("phase");
  fillChoices("outcome");
  const again = () => { limit = ROWS_AT_ONCE; list(); };
  for (const id of ["find", "phase", "outcome", "embedded"]) by(id).addEventListener("input", again);
  document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
  by("more").addEventListener("click", () => { limit += ROWS_AT_ONCE; list(); });
  for (const head of document.querySelectorAll(".rollouts th")) {
    head.querySelector("button").addEventListener("click", () => {
      const key = head.dataset.key, same = sorting.key === key;
      sorting.down = same ? !sorting.down : typeof (rows[0]?.[key] ?? 0) !== "string";
      sorting.key = key;
      again();
    });
  }
  list();
}
