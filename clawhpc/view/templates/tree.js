// ---- the tree of one rollout ---------------------------------------------------------------------------------------

const LANE = 15, NODE_MIN = 7; // pixels
const kindOf = (node) => (node.call !== undefined ? "drawn" : node.continues !== null ? "copy" : "context");

function showTree(detail) {
  if (!detail.nodes.length) return [make("p", { class: "empty" }, detail.note)];
  const tree = grow(detail.nodes);
  const reading = make("div", { class: "reading" });
  tree.roots.forEach((root, at) => {
    if (at) reading.append(make("p", { class: "hint" }, "Another root: these calls share no token with those above."));
    reading.append(...readOn(tree, root));
  });
  reading.addEventListener("pointermove", explainToken);
  reading.addEventListener("pointerleave", () => { by("tip").hidden = true; });
  return [guide(), drawMap(tree), reading];
}

// Children, the weight of each subtree, and the trunk: the child through which the last live call is reached.
function grow(nodes) {
  const children = nodes.map(() => []), last = nodes.map(() => -1), roots = [];
  nodes.forEach((node, at) => (node.parent === null ? roots : children[node.parent]).push(at));
  for (let at = nodes.length - 1; at >= 0; at--) {
    const node = nodes[at];
    const own = node.call === undefined ? -1 : node.dropped ? node.call - 1e6 : node.call;
    last[at] = Math.max(own, ...children[at].map((child) => last[child]), -1e9);
  }
  for (const below of children) below.sort((a, b) => last[b] - last[a]);
  roots.sort((a, b) => (last[a] < 0) - (last[b] < 0) || a - b);
  return { nodes, children, roots };
}

function guide() {
  const item = (kind, label) => make("span", {}, make("i", { class: `is-${kind}` }), label);
  return make("p", { class: "guide" }, item("drawn", "drawn by the policy"), item("context", "context"), item("copy", "copy of an earlier reply"), item("dropped", "dropped"),
    make("span", {}, make("i", { class: "ramp" }), "surprise of a drawn token; point at one for its log-prob"));
}

// One lane per path; the length of a bar is the square root of its tokens, so that a reply shows beside a long prompt.
function drawMap(tree) {
  const lanes = [];
  let next = 0, end = 1, longest = 0;
  const place = (start, lane) => {
    const waiting = [[start, lane, 0, 1]];
    while (waiting.length) {
      const [at, row, x, depth] = waiting.pop();
      const width = Math.max(Math.sqrt(tree.nodes[at].length), 1);
      lanes[at] = [row, x, width];
      [end, longest] = [Math.max(end, x + width), Math.max(longest, depth)];
      tree.children[at].forEach((child, order) => waiting.push([child, order ? ++next : row, x + width, depth + 1]));
    }
  };
  for (const root of tree.roots) place(root, root === tree.roots[0] ? 0 : ++next);
  const sheet = make("div", { class: "sheet", style: `height:${next * LANE + 10}px;min-width:${longest * NODE_MIN}px` });
  const share = (units) => `${(100 * units / end).toFixed(3)}%`;
  tree.nodes.forEach((node, at) => {
    const [row, x, width] = lanes[at];
    const style = `left:${share(x)};width:calc(${share(width)} - 1px);top:${row * LANE}px`;
    sheet.append(make("a", { class: `is-${node.dropped ? "dropped" : kindOf(node)}`, style, href: location.hash, title: describe(node), onclick: (event) => goTo(event, at) }));
    for (const child of tree.children[at]) {
      const [below, from] = lanes[child];
      if (below > row) sheet.append(make("i", { style: `left:${share(from)};top:${row * LANE + 9}px;height:${(below - row) * LANE - 4}px` }));
    }
  });
  return make("div", { class: "map", role: "navigation", "aria-label": "Map of the tree" }, sheet);
}

function goTo(event, at) {
  event.preventDefault();
  document.querySelector(".node.found")?.classList.remove("found");
  const target = by(`node-${at}`);
  target.classList.add("found");
  target.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

function describe(node) {
  const size = `${number(node.length)} ${node.length === 1 ? "token" : "tokens"}`;
  if (node.call !== undefined) return `call ${node.call}: ${size} drawn${node.dropped ? `, dropped as ${node.dropped}` : ""}`;
  return node.continues !== null ? `copy of call ${node.continues}'s reply: ${size}` : `context: ${size}`;
}

// The trunk runs straight down; side branches stand indented where they leave it.
function readOn(tree, start) {
  const blocks = [];
  for (let at = start; at !== undefined; at = tree.children[at][0]) {
    blocks.push(nodeBlock(tree.nodes[at], at));
    const sides = tree.children[at].slice(1).sort((a, b) => a - b);
    sides.forEach((side) => blocks.push(make("div", { class: "branch" }, make("p", {}, "Another path from here:"), readOn(tree, side))));
  }
  return blocks;
}

function nodeBlock(node, at) {
  const kind = kindOf(node);
  const title = { drawn: `call ${node.call}, drawn`, copy: `copy of call ${node.continues}'s reply`, context: "context" }[kind];
  const versions = (node.versions ?? []).map(([version]) => version);
  return make("article", { class: `node ${kind} ${node.dropped ? "dropped" : ""}`, id: `node-${at}` },
    make("header", {}, make("b", {}, title), make("span", {}, `${number(node.length)} ${node.length === 1 ? "token" : "tokens"}`), make("span", {}, `from position ${number(node.start)}`),
      versions.length && node.length ? make("span", {}, `by policy ${[...new Set(versions)].join(", ")}`) : null,
      kind === "drawn" && node.length ? make("span", {}, `mean log-prob ${mean(node.logprobs).toFixed(3)}`) : null,
      node.dropped ? make("span", { class: "badge" }, `dropped: ${node.dropped}`) : null),
    kind === "drawn" ? make("pre", {}, drawnTokens(node)) : folded(text(node.text), marked));
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function drawnTokens(node) {
  if (!node.length) return make("span", { class: "none" }, "(empty)");
  return node.pieces.map((piece, at) => {
    const shade = SURPRISE.filter((bound) => -node.logprobs[at] >= bound).length;
    const token = make("span", { class: `tok s${shade} ${/^<\|.*\|>$/.test(piece) ? "mark" : ""}` }, piece);
    token.facts = [piece, node.ids[at], node.logprobs[at], node.start + at];
    return token;
  });
}

function explainToken(event) {
  const tip = by("tip"), facts = event.target.facts;
  tip.hidden = !facts;
  if (!facts) return;
  const [piece, id, logprob, position] = facts;
  tip.replaceChildren(make("code", {}, JSON.stringify(piece)), make("div", {}, `log-prob ${logprob.toFixed(3)}, p = ${(100 * Math.exp(logprob)).toPrecision(3)} %`), make("div", {}, `id ${id}, position ${number(position)}`));
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 18, innerHeight - tip.offsetHeight - 8)}px`;
}
