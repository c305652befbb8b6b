// ---- the tree of a step ---------------------------------------------------------------------

const LETTER_PX = 7.3, ROW_PX = 26;

// nodes: [text, parent, sources, accepted], the root first; `own`: what the target added itself.
function nodesOf(nodes, own) {
  const all = nodes.map(([text, parent, sources, right]) => ({ text, parent, kind: sources[0] ?? "root", right }));
  if (own !== null) {
    all.push({ text: own, parent: all.findLastIndex((node) => node.right), kind: "own", right: true });
  }
  const children = all.map(() => []);
  all.forEach((node, place) => {
    node.label = [...shown(node.text)].slice(0, 14).join("");
    node.width = node.label.length * LETTER_PX + 12;
    node.depth = node.parent < 0 ? 0 : all[node.parent].depth + 1;
    if (node.parent >= 0) children[node.parent].push(place);
  });
  let row = 0;
  const lay = (place) => {  // the accepted child first, so that the answer is a straight line
    children[place].sort((a, b) => all[b].right - all[a].right);
    if (!children[place].length) row += 1;
    all[place].row = children[place].length ? (lay(children[place][0]), all[children[place][0]].row) : row - 1;
    children[place].slice(1).forEach(lay);
  };
  lay(0);
  return all;
}

// Where columns begin whose widest boxes are these.
function starts(all, key, gap) {
  const widths = [];
  for (const node of all) widths[node[key]] = Math.max(widths[node[key]] ?? 0, node.width);
  return widths.reduce((lefts, width = 0) => [...lefts, lefts.at(-1) + width + gap], [0]);
}

// Steps go down in a column beside the text, and to the right in a bar below it.
function drawTree(nodes, own, isDown) {
  const all = nodesOf(nodes, own), lefts = starts(all, isDown ? "row" : "depth", isDown ? 10 : 18);
  const rows = Math.max(...all.map((node) => (isDown ? node.depth : node.row))) + 1;
  const pitch = isDown ? ROW_PX + 8 : ROW_PX;
  const drawing = drawn("svg", { width: lefts.at(-1), height: rows * pitch, role: "img",
    "aria-label": `Tree of ${plural(nodes.length - 1, "guess", "guesses")}` });
  for (const node of all) {
    node.x = lefts[isDown ? node.row : node.depth] + 1;
    node.y = (isDown ? node.depth : node.row) * pitch + 1;
  }
  for (const node of all) {
    const { x, y, width } = node, from = all[node.parent];
    if (from) {
      const down = `M${from.x + 12} ${from.y + 22}C${from.x + 12} ${y - 4} ${x + 12} ${from.y + 26} ${x + 12} ${y}`;
      const across = `M${from.x + from.width} ${from.y + 11}C${x - 9} ${from.y + 11} ${x - 9} ${y + 11} ${x} ${y + 11}`;
      drawing.prepend(drawn("path", { d: isDown ? down : across, class: node.right ? "right" : "" }));
    }
    drawing.append(drawn("g", { class: node.right ? node.kind : "wrong" },
      drawn("rect", { x, y, rx: 4, width, height: 22 }), drawn("text", { x: x + 6, y: y + 15 }, node.label)));
  }
  return drawing;
}

const beside = matchMedia("(min-width: 78rem)");  // as in the style: is there room beside the text?

// The tree on show, docked beside the text or above the message: it never covers what is read.
const tree = {
  view: null,
  place: -1,
  isLast: false,

  hide() {
    this.leave();
    this.view = null;
    this.isLast = false;
    byId("tree").hidden = true;
    byId("tree-last").setAttribute("aria-pressed", "false");
  },

  leave() {
    this.view?.tokens[this.place]?.span?.classList.remove("at");
    this.view?.card.querySelector(".last").setAttribute("aria-expanded", "false");
  },

  showStep(view, place, isLast = false) {
    const token = view.tokens[place];
    if (!token) return;
    if (this.view !== view || this.place !== place || this.isLast !== isLast) this.leave();
    Object.assign(this, { view, place, isLast });
    token.span?.classList.add("at");
    const nodes = view.trees.get(token.step);
    const mates = view.tokens.filter((other) => other.step === token.step);
    const right = nodes ? nodes.filter((node) => node[3]).length - 1 : 0;
    let said = `“${shown(token.text)}” ${ORIGINS[token.origin][1]}`;
    if (token.step >= 0) {
      said += nodes
        ? ` Step ${token.step + 1}: ${plural(nodes.length - 1, "token was", "tokens were")} drafted, ${right} accepted.`
        : ` Step ${token.step + 1}: no token was drafted.`;
    }
    byId("tree-said").textContent = said;
    const own = mates.length > right ? mates.at(-1).text : null;
    byId("tree-drawn").replaceChildren(...(nodes ? [drawTree(nodes, own, beside.matches && !isPair)] : []));
    byId("tree").hidden = false;
    byId("tree-last").setAttribute("aria-pressed", `${isLast}`);
    if (isLast) view.card.querySelector(".last").setAttribute("aria-expanded", "true");
    else this.reveal(token.span);
  },

  // Scrolls a token out from under the bar that has just opened.
  reveal(span) {
    const at = span?.getClientRects()[0], bar = byId("tree").getBoundingClientRect();
    if (at && bar.width > innerWidth / 2 && at.bottom > bar.top) scrollBy(0, at.bottom - bar.top + 8);
  },
};

function walk(event) {
  const view = event.target.view;
  if (!view?.tokens.length || !event.target.classList.contains("text")) return;
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const from = tree.view === view ? tree.place : step > 0 ? -1 : view.tokens.length;
  tree.showStep(view, Math.min(Math.max(from + step, 0), view.tokens.length - 1));
}
