const COLUMNS = ["id", "phase", "step", "task", "harness", "sample", "outcome", "reward", "calls", "drawn", "peak", "seconds"];
const ROWS_AT_ONCE = 200;
const FOLD_OVER = 1100, FOLD_HEAD = 380, FOLD_TAIL = 520; // characters
const SURPRISE = [0.11, 0.36, 0.92, 2.3, 4.6]; // -log-prob from which a token gets the next shade: p = 90, 70, 40, 10, 1 %

const inOrder = new Intl.Collator("en", { numeric: true }).compare;
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
