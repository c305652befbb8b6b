// Markdown as elements, while it is being written. Nothing becomes markup but what is built here, and
// nothing of the source is lost: its marks (`**`, fences, line ends between blocks) stay in the document
// in hidden spans, so that an element's textContent is the source.
const LONG_BLOCK = 300;  // characters; a longer block is split at a line end, so that a frame redraws little
const NEAR = 1000;  // characters within which a closing mark is looked for
const ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])[ \t]+/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*$/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const INLINE = /\\[!-'*-/:-@^-`{-~]|`+|\*\*|__|~~|[*_]|!?\[[^[\]\n]*\]\([^()\s]+\)/g;
const TAGS = { "**": "strong", __: "strong", "~~": "s", "*": "em", _: "em" };

// The lines of a text from a place on: where each begins, its text, and where the next one begins.
function linesOf(source, from) {
  const lines = [];
  while (from < source.length) {
    const end = source.indexOf("\n", from);
    const to = end < 0 ? source.length : end;
    lines.push({ from, text: source.slice(from, to), to, next: end < 0 ? to : end + 1 });
    from = lines.at(-1).next;
  }
  return lines;
}

const isSpecial = (text) => !text.trim() || ITEM.test(text) || HEADING.test(text) || RULE.test(text)
  || FENCE.test(text) || QUOTE.test(text);

// The blocks of a text from a place on. `open`: the fence that an earlier part has opened there.
// A block has a kind, its place (from, to), and `parts`: [from, to, "text" or "mark"] in order.
function blocksOf(source, from, open = null) {
  const lines = linesOf(source, from), blocks = [];
  let at = 0;
  const take = (kind, parts, extra = {}) => blocks.push({ kind, from: parts[0][0], to: parts.at(-1)[1], parts, ...extra });
  while (at < lines.length) {
    const line = lines[at];
    const fence = open ? null : FENCE.exec(line.text);
    const heading = HEADING.exec(line.text), item = ITEM.exec(line.text);
    if (open || fence) {
      const mark = open?.mark ?? fence[1], isMore = Boolean(open);
      const parts = [];
      if (fence) { parts.push([line.from, line.next, "mark"]); at += 1; }
      const first = lines[at]?.from ?? line.next;
      let to = first, isClosed = false;
      while (at < lines.length && to - first < 2 * LONG_BLOCK) {
        const inner = lines[at], text = inner.text.trim();
        at += 1;
        if (text.startsWith(mark) && !text.replaceAll(mark[0], "")) {
          parts.push([first, to, "text"], [to, inner.next, "mark"]);
          isClosed = true;
          break;
        }
        to = inner.next;
      }
      if (!isClosed) parts.push([first, to, "text"]);
      open = isClosed || at >= lines.length ? null : { mark };
      take("fence", parts, { isMore, fence: isClosed ? null : { mark } });
    } else if (!line.text.trim()) {
      take("gap", [[line.from, line.next, "mark"]]);
      at += 1;
    } else if (heading) {
      const inner = line.from + heading[0].length;
      take("heading", [[line.from, inner, "mark"], [inner, line.to, "text"], [line.to, line.next, "mark"]],
        { level: heading[1].length });
      at += 1;
    } else if (RULE.test(line.text)) {
      take("rule", [[line.from, line.next, "mark"]]);
      at += 1;
    } else if (QUOTE.test(line.text)) {
      const parts = [];
      for (; at < lines.length && QUOTE.test(lines[at].text); at += 1) {
        const inner = lines[at].from + QUOTE.exec(lines[at].text)[0].length;
        parts.push([lines[at].from, inner, "mark"], [inner, lines[at].next, "text"]);
      }
      take("quote", parts);
    } else if (item) {
      const inner = line.from + item[0].length;
      let to = line.to, next = line.next;
      for (at += 1; at < lines.length && /^\s+\S/.test(lines[at].text) && !isSpecial(lines[at].text); at += 1) {
        to = lines[at].to;
        next = lines[at].next;
      }
      take("item", [[line.from, inner, "mark"], [inner, to, "text"], [to, next, "mark"]],
        { depth: Math.min(4, Math.floor(item[1].replace(/\t/g, "    ").length / 2)), number: item[3] });
    } else if (line.text.includes("|") && lines[at + 1]?.text.includes("-") && DELIMITERS.test(lines[at + 1].text)
      && lines[at + 1].text.includes("|")) {
      const rows = [line];
      const delimiters = lines[at + 1];
      for (at += 2; at < lines.length && lines[at].text.includes("|"); at += 1) rows.push(lines[at]);
      take("table", [[line.from, rows.at(-1).next > delimiters.next ? rows.at(-1).next : delimiters.next, "text"]],
        { rows, delimiters });
    } else {
      const isMore = blocks.at(-1)?.kind === "paragraph";
      let to = line.to, next = line.next;
      for (at += 1; at < lines.length && next - line.from < LONG_BLOCK && !isSpecial(lines[at].text); at += 1) {
        if (lines[at].text.includes("|") && DELIMITERS.test(lines[at + 1]?.text ?? "")) break;
        to = lines[at].to;
        next = lines[at].next;
      }
      take("paragraph", [[line.from, to, "text"], [to, next, "mark"]], { isMore });
    }
  }
  return blocks;
}

// Draws a growing text into an element. `piece(from, to)` makes the nodes of a stretch of the source.
class Markdown {
  constructor(target, piece) {
    Object.assign(this, { target, piece, source: "", from: 0, open: null, loose: [], isAfter: false });
  }

  // Shows the source, of which what was shown before is the beginning.
  update(source) {
    this.source = source;
    for (const node of this.loose) node.remove();
    const blocks = blocksOf(source, this.from, this.open);
    if (this.isAfter && blocks[0]?.kind === "paragraph") blocks[0].isMore = true;
    // The last two may become something else with the next characters.
    const settled = Math.max(0, blocks.length - 2);
    const nodes = blocks.map((block) => this.build(block));
    this.target.append(...nodes);
    this.loose = nodes.slice(settled);
    if (!settled) return;
    const last = blocks[settled - 1];
    this.from = last.to;
    this.open = last.kind === "fence" ? last.fence : null;
    this.isAfter = last.kind === "paragraph";
  }

  build(block) {
    const made = this[block.kind](block);
    made.classList.add("part");
    return made;
  }

  parts(node, block, show = (from, to) => this.inline(from, to)) {
    for (const [from, to, kind] of block.parts) {
      if (from < to) node.append(...(kind === "mark" ? [this.mark(from, to)] : show(from, to)));
    }
    return node;
  }

  mark(from, to) { return element("span", { class: "mark" }, ...this.piece(from, to)); }

  gap(block) { return this.parts(element("div", { class: "gap" }), block); }

  rule(block) { return this.parts(element("div", { class: "rule", role: "separator" }), block); }

  paragraph(block) { return this.parts(element("p", block.isMore ? { class: "more-of" } : {}), block); }

  quote(block) { return this.parts(element("blockquote"), block); }

  heading(block) { return this.parts(element(`h${Math.min(6, block.level + 2)}`, { class: "heading" }), block); }

  item(block) {
    const list = block.number ? element("ol", { start: block.number }) : element("ul");
    list.className = `in${block.depth}`;
    list.append(this.parts(element("li"), block));
    return list;
  }

  fence(block) {
    return this.parts(element("pre", block.isMore ? { class: "more-of" } : {}), block, (from, to) => this.piece(from, to));
  }

  table(block) {
    const { rows, delimiters } = block;
    const made = element("table"), row = (line, name) => {
      const cells = element("tr");
      let from = line.from;
      for (const found of [...line.text.matchAll(/(?<!\\)\|/g), null]) {
        const to = found ? line.from + found.index : line.to;
        const isEdge = !this.source.slice(from, to).trim() && (from === line.from || !found);
        if (!isEdge) cells.append(element(name, {}, ...this.inline(from, to)));
        else if (from < to) (cells.lastChild ?? cells).append(this.mark(from, to));
        if (found) (cells.lastChild ?? cells).append(this.mark(to, to + 1));
        from = to + 1;
      }
      if (line.to < line.next) (cells.lastChild ?? cells).append(this.mark(line.to, line.next));
      return cells;
    };
    const head = row(rows[0], "th");
    head.lastChild.append(this.mark(delimiters.from, delimiters.next));
    made.append(element("thead", {}, head), element("tbody", {}, ...rows.slice(1).map((line) => row(line, "td"))));
    return element("div", { class: "wide-table" }, made);
  }

  // Emphasis, code, links and escapes of a stretch of the source, as nodes.
  inline(from, to, depth = 0) {
    const { source } = this, nodes = [];
    const seek = new RegExp(INLINE.source, "g");
    let shown = from;
    seek.lastIndex = from;
    const add = (start, made, end) => {
      if (shown < start) nodes.push(...this.piece(shown, start));
      nodes.push(...made);
      shown = seek.lastIndex = end;
    };
    for (let found = seek.exec(source); found && found.index < to; found = seek.exec(source)) {
      const at = found.index, mark = found[0], after = at + mark.length;
      if (after > to) break;
      if (mark[0] === "\\") add(at, [this.mark(at, at + 1), ...this.piece(at + 1, after)], after);
      else if (mark[0] === "`") {
        const end = this.closing(mark, after, to, (place) => source[place - 1] !== "`" && source[place + mark.length] !== "`");
        if (end) add(at, [this.mark(at, after), element("code", {}, ...this.piece(after, end)), this.mark(end, end + mark.length)], end + mark.length);
      } else if (mark.length > 2) {
        const split = mark.indexOf("]("), url = mark.slice(split + 2, -1);
        if (!/^(https?:\/\/|mailto:)/i.test(url)) continue;
        const label = at + mark.indexOf("[") + 1, end = at + split;
        add(at, [this.mark(at, label),
          element("a", { href: url, rel: "noopener noreferrer nofollow", target: "_blank" }, ...this.piece(label, end)),
          this.mark(end, after)], after);
      } else if (depth < 6) {
        const end = this.emphasised(mark, at, after, from, to);
        if (end) {
          add(at, [this.mark(at, after), element(TAGS[mark], {}, ...this.inline(after, end, depth + 1)), this.mark(end, end + mark.length)],
            end + mark.length);
        }
      }
    }
    if (shown < to) nodes.push(...this.piece(shown, to));
    return nodes;
  }

  // Stricter than CommonMark: a mark inside a word or a sum, such as 2*3*4, is none.
  emphasised(mark, at, after, from, to) {
    const { source } = this;
    const isWord = (letter) => /[\p{L}\p{N}_]/u.test(letter ?? "");
    if (/\s/.test(source[after] ?? " ") || source[after] === mark[0]) return 0;
    if (at > from && (isWord(source[at - 1]) || source[at - 1] === mark[0])) return 0;
    return this.closing(mark, after, to, (place) => !/\s/.test(source[place - 1]) && source[place - 1] !== mark[0]
      && !isWord(source[place + mark.length]) && (mark.length > 1 || source[place + 1] !== mark));
  }

  closing(mark, after, to, isRight) {
    const last = Math.min(to - mark.length, after + NEAR);
    for (let place = this.source.indexOf(mark, after + 1); place >= 0 && place <= last; place = this.source.indexOf(mark, place + 1)) {
      if (isRight(place)) return place;
    }
    return 0;
  }
}
