// ---- one rollout ---------------------------------------------------------------------------------------------------

let current = null, tab = 0, place = 0;
const DRIFT = {
  extended: "calls that extend an earlier draw", copied: "calls that repeat it behind another prompt", reencoded: "calls that repeat it in other ids",
  unexplained_leaves: "live leaves that no call explains",
};
const TABS = ["Tree", "Messages", "Verdict and logs"];
const open = (id) => { location.hash = `/${encodeURIComponent(id)}`; };

function route() {
  const id = decodeURIComponent(location.hash.slice(2));
  const row = rowOf.get(id) ?? null;
  if (!current && row) place = scrollY;
  const back = current;
  current = row;
  by("tip").hidden = true;
  by("overview").hidden = Boolean(row);
  by("rollout").hidden = !row;
  if (row) {
    showRollout(row);
    scrollTo(0, 0);
    by("rollout").focus({ preventScroll: true });
  } else if (back) {
    scrollTo(0, place);
    body.querySelector(`tr[data-id="${CSS.escape(back.id)}"]`)?.focus({ preventScroll: true });
  }
}

function neighbour(step) {
  const at = listed.indexOf(current) + step;
  if (listed[at]) open(listed[at].id);
}

function showRollout(row) {
  const detail = read(details.get(row.id));
  const siblings = rows.filter((one) => ["phase", "step", "task", "harness"].every((key) => one[key] === row[key])).sort((a, b) => a.sample - b.sample);
  const panel = make("div", { role: "tabpanel" });
  by("rollout").replaceChildren(
    make("nav", { class: "crumbs" }, make("button", { type: "button", onclick: () => { location.hash = ""; } }, "← All rollouts"), make("span", { class: "gap" }),
      make("button", { type: "button", onclick: () => neighbour(-1) }, "Previous"), make("button", { type: "button", onclick: () => neighbour(1) }, "Next")),
    make("h2", { class: "title" }, row.task),
    make("p", { class: "facts" }, fact("", `${row.phase} step ${row.step}, no. ${row.sample}`), fact("", row.harness),
      make("span", {}, make("i", { class: `dot ${row.outcome}` }), make("b", {}, words(row.outcome))), fact("reward ", row.reward === null ? "none" : row.reward.toFixed(2)),
      fact("calls ", number(row.calls)), fact("drawn ", `${number(row.drawn)} tokens`), fact("longest prompt ", `${number(row.peak)} tokens`), fact("seconds ", number(row.seconds, 1))),
    make("p", { class: "siblings" }, "Its group:", siblings.map((one) => make("a", { href: `#/${encodeURIComponent(one.id)}`, title: words(one.outcome), "aria-current": one === row ? "true" : null },
      one.reward === null ? words(one.outcome) : one.reward.toFixed(2)))),
    ...(detail ? [times(detail), make("pre", { class: "instruction message-text" }, text(detail.instruction)), tabs(detail, panel), panel]
      : [make("p", { class: "empty" }, "The tree of this rollout is not on this page. Write the page again with a larger --trees.")]));
  if (detail) showTab(detail, panel);
}

const fact = (label, value) => make("span", {}, label, make("b", {}, value));

function times(detail) {
  const total = detail.parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  return make("div", {}, make("div", { class: "parts" }, detail.parts.map(([, seconds], at) => make("i", { class: `slot-${at}`, style: `width:${100 * seconds / total}%` }))),
    make("ul", { class: "legend" }, detail.parts.map(([name, seconds], at) => make("li", {}, make("i", { class: `key slot-${at}` }), `${name} `, make("b", {}, `${number(seconds, 1)} s`)))));
}

function tabs(detail, panel) {
  return make("div", { class: "tabs", role: "tablist" }, TABS.map((name, at) =>
    make("button", { type: "button", role: "tab", onclick: () => { tab = at; showTab(detail, panel); } }, name)));
}

function showTab(detail, panel) {
  by("tip").hidden = true;
  document.querySelectorAll(".tabs button").forEach((button, at) => button.setAttribute("aria-selected", String(at === tab)));
  panel.replaceChildren(...[showTree, showMessages, showVerdict][tab](detail));
}

// Long texts show their head and tail until they are asked for.
function folded(content, render = plain) {
  if (content.length <= FOLD_OVER) return make("pre", {}, render(content));
  const box = make("pre", {}, render(content.slice(0, FOLD_HEAD)));
  const rest = content.length - FOLD_HEAD - FOLD_TAIL;
  box.append(make("button", { type: "button", class: "unfold", onclick: () => box.replaceChildren(...render(content)) }, `⋯ ${number(rest)} more characters`), ...render(content.slice(-FOLD_TAIL)));
  return box;
}

const plain = (content) => [content];
const marked = (content) => content.split(/(<\|[a-z_]+\|>)/i).map((piece, at) => (at % 2 ? make("span", { class: "mark" }, piece) : piece));

function showMessages(detail) {
  if (!detail.calls.length) return [make("p", { class: "empty" }, "It made no call.")];
  return detail.calls.map((call) => make("section", { class: `call ${call.role === "main" ? "" : "side-role"}` },
    make("header", {}, make("b", {}, `Call ${call.id}`), make("span", {}, call.role), call.continues === null ? make("span", {}, "opens a conversation") : make("span", {}, `continues call ${call.continues}`),
      make("span", {}, `${number(call.input)} in, ${number(call.output)} out`), make("span", {}, `${call.seconds} s, engine ${call.engine_s} s`),
      call.tools.length ? make("span", { title: call.tools.join(", ") }, `${call.tools.length} tools`) : null,
      call.reencoded ? make("span", { class: "failure" }, `${call.reencoded} replies encoded again`) : null, call.reply && !call.delivered ? make("span", { class: "failure" }, "not delivered") : null),
    call.messages.map((message) => showMessage(message.role, message, message.role)),
    call.incidents.map((incident) => make("p", { class: "failure" }, text(incident))),
    call.reply ? showMessage(`reply, ${words(call.reply.finish)}`, call.reply, "reply") : make("p", { class: "failure" }, text(call.failure) || "No reply.")));
}

function showMessage(who, message, kind) {
  const [said, thought] = [text(message.text), text(message.thinking)];
  const silent = !said && !thought && !message.tool_calls.length;
  return make("div", { class: `message ${kind}` }, make("div", { class: "who" }, who), make("div", {},
    thought ? make("div", { class: "thinking" }, folded(thought)) : null, said ? folded(said) : null, silent ? make("span", { class: "none" }, "(empty)") : null,
    message.tool_calls.map((call) => make("div", { class: "tool-call" }, make("b", {}, call.name), folded(pretty(text(call.arguments)))))));
}

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

function showVerdict(detail) {
  const log = (title, content) => [make("h3", {}, title), content ? make("pre", { class: "plain" }, content) : make("p", { class: "empty" }, "Empty."), make("br")];
  const parts = Object.entries(detail.breakdown);
  return [
    make("table", { class: "plain-table" }, detail.unshaped === null ? null : make("tr", {}, make("th", {}, "reward before shaping"), make("td", { class: "num" }, String(detail.unshaped))),
      parts.map(([name, value]) => make("tr", {}, make("th", {}, name), make("td", { class: "num" }, String(value)))),
      detail.failed_attempts.map((why, at) => make("tr", {}, make("th", {}, `attempt ${at + 1} failed`), make("td", {}, why))),
      Object.entries(detail.dropped_leaves).map(([rule, count]) => make("tr", {}, make("th", {}, `leaves dropped as ${rule}`), make("td", { class: "num" }, String(count)))),
      Object.entries(detail.overridden).map(([name, count]) => make("tr", {}, make("th", {}, `calls whose ${name} was overridden`), make("td", { class: "num" }, String(count)))),
      Object.entries(detail.unlisted).map(([name, count]) => make("tr", {}, make("th", {}, `calls with the unlisted field ${name}`), make("td", { class: "num" }, String(count)))),
      Object.entries(DRIFT).map(([name, label]) => detail.drift[name] ? make("tr", {}, make("th", {}, label), make("td", { class: "num" }, String(detail.drift[name]))) : null),
      detail.exec ? make("tr", {}, make("th", {}, "exit code of the harness"), make("td", { class: "num" }, `${detail.exec.exit_code}${detail.exec.timed_out ? ", out of time" : ""}`)) : null,
      make("tr", {}, make("th", {}, "CPU seconds of the harness"), make("td", { class: "num" }, number(detail.harness_cpu_s, 1))),
      make("tr", {}, make("th", {}, "worker"), make("td", {}, detail.worker)), make("tr", {}, make("th", {}, "seed"), make("td", { class: "num" }, String(detail.seed)))),
    make("br"), ...showJudgement(detail.judgement), ...showServers(detail), ...log("Why it ended so", text(detail.detail)), ...(detail.exec ? [...log("Standard output, tail", text(detail.exec.stdout)), ...log("Standard error, tail", text(detail.exec.stderr))] : []),
  ];
}

function showJudgement(judgement) {
  if (!judgement) return [];
  const fact = (name, value) => make("tr", {}, make("th", {}, name), make("td", { class: "num" }, value));
  return [make("h3", {}, "Judges"),
    make("table", { class: "plain-table" },
      judgement.agreement === null ? null : fact("agreement", judgement.agreement.toFixed(3)),
      judgement.agreement === null ? null : Object.entries(judgement.spread).map(([name, value]) => fact(`spread of ${name}`, value.toFixed(3))),
      fact("requests", String(judgement.requests)), fact("tokens in, out", `${number(judgement.input)}, ${number(judgement.output)}`),
      fact("cost", judgement.cost_usd === null ? "not known" : `${judgement.cost_usd.toFixed(4)} USD`), fact("prompt and rubric", judgement.digest)),
    ...judgement.opinions.map((opinion) => make("section", { class: "call" },
      make("header", {}, make("b", {}, opinion.model), opinion.shown < 1 ? ` was shown in ${opinion.shown} of the room` : null),
      make("table", { class: "plain-table" }, opinion.scores.map(([name, score, reason]) =>
        make("tr", {}, make("th", {}, name), make("td", { class: "num" }, String(score)), make("td", {}, text(reason))))))),
    make("br")];
}

function showServers(detail) {
  const counts = Object.entries(detail.mcp_counts);
  if (!counts.length && !detail.mcp_calls.length) return [];
  const part = (who, content) => make("div", { class: "message" }, make("div", { class: "who" }, who), make("div", {}, folded(pretty(content))));
  return [make("h3", {}, "MCP servers on the host"),
    make("table", { class: "plain-table" }, counts.map(([what, count]) => make("tr", {}, make("th", {}, what), make("td", { class: "num" }, String(count))))),
    ...detail.mcp_calls.map((call) => make("section", { class: "call" },
      make("header", {}, make("b", {}, `${call.server}: ${call.name}`), make("span", {}, call.method), make("span", {}, `after ${call.after_s} s`), make("span", {}, `${call.seconds} s`)),
      part("asked", text(call.arguments)), text(call.result) ? part("answered", text(call.result)) : null,
      text(call.error) ? make("p", { class: "failure" }, text(call.error)) : null)),
    make("br")];
}

// ---- keys ----------------------------------------------------------------------------------------------------------

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input, select");
  if (event.key === "Escape") return typing ? event.target.blur() : current && (location.hash = "");
  if (typing) return;
  const focused = document.activeElement?.closest?.(".rollouts tbody tr");
  const actions = {
    "/": () => !current && by("find")?.focus(), t: nextTheme, "[": () => current && neighbour(-1), "]": () => current && neighbour(1),
    1: () => chooseTab(0), 2: () => chooseTab(1), 3: () => chooseTab(2),
    ArrowDown: () => focused?.nextElementSibling?.focus(), ArrowUp: () => focused?.previousElementSibling?.focus(), Enter: () => focused && open(focused.dataset.id),
  };
  const isMove = event.key.startsWith("Arrow") || event.key === "Enter";
  if (!actions[event.key] || (isMove && !focused)) return;
  event.preventDefault();
  actions[event.key]();
});
const chooseTab = (at) => { if (current) document.querySelectorAll(".tabs button")[at]?.click(); };

addEventListener("hashchange", route);
route();
