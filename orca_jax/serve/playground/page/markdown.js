// Markdown as elements of the page. The lexer only splits the text: no HTML is ever read, and no address but https is a link.

import { element } from "./dom.js";
import { lexer } from "./marked.js";

// Lines with more marks of quotes and lists than these at their begin: the lexer reads such a text once for each mark.
const DEEP = /^(?:[ \t]*(?:>|[-*+][ \t]|\d{1,9}[.)][ \t])){17}/m;
const INLINE = { strong: "strong", em: "em", del: "del" };

/** Shows a text that grows. Its last block is made again for each piece; the blocks before it stay as they are. */
export class Markdown {
  constructor(body) {
    this.body = body;
    this.source = ""; // of the last block
    this.elements = []; // of the last block
  }

  add(text) {
    this.source += text;
    const found = blocks(this.source);
    let last = found.length - 1;
    while (last > 0 && found[last].type === "space") last -= 1;
    // Of a list, `raw` lacks the blanks at its end, so the source may begin with them.
    this.source = this.source.slice(found.slice(0, last).reduce((sum, each) => sum + each.raw.length, 0));
    const done = found.slice(0, last).flatMap(block);
    const open = found.slice(last).flatMap(block);
    for (const each of this.elements) each.remove();
    this.body.append(...done, ...open);
    this.elements = open;
  }
}

/** The blocks of a text. One with deep quotes or lists is not split from there on, up to a blank line. */
function blocks(source) {
  const found = [];
  let rest = source;
  for (let deep = DEEP.exec(rest); deep !== null; deep = DEEP.exec(rest)) {
    const blank = rest.indexOf("\n\n", deep.index);
    const end = blank < 0 ? rest.length : blank;
    found.push(...lexer(rest.slice(0, deep.index)), { type: "plain", raw: rest.slice(deep.index, end) });
    rest = rest.slice(end);
  }
  return rest === "" ? found : [...found, ...lexer(rest)];
}

function block(token) {
  switch (token.type) {
    case "space":
      return [];
    case "heading":
      return [element(`h${Math.min(6, token.depth + 3)}`, {}, ...inline(token.tokens))];
    case "paragraph":
      return [element("p", {}, ...inline(token.tokens))];
    case "text": // of a list without blank lines
      return inline(token.tokens ?? [token]);
    case "code":
      return [element("pre", { tabindex: 0 }, element("code", {}, token.text))];
    case "blockquote":
      return [element("blockquote", {}, ...token.tokens.flatMap(block))];
    case "hr":
      return [element("hr")];
    case "list": {
      const items = token.items.map((item) => element("li", {}, ...item.tokens.flatMap(block)));
      return [element(token.ordered ? "ol" : "ul", { start: token.ordered && token.start !== 1 && token.start }, ...items)];
    }
    case "table": {
      const row = (cells, tag) => element("tr", {}, ...cells.map((cell) => element(tag, {}, ...inline(cell.tokens))));
      const body = token.rows.map((cells) => row(cells, "td"));
      return [element("table", {}, element("thead", {}, row(token.header, "th")), element("tbody", {}, ...body))];
    }
    default: // HTML among others
      return [element("p", {}, token.raw)];
  }
}

function inline(tokens) {
  return tokens.flatMap((token) => {
    if (INLINE[token.type]) return [element(INLINE[token.type], {}, ...inline(token.tokens))];
    switch (token.type) {
      case "codespan":
        return [element("code", {}, token.text)];
      case "br":
        return [element("br")];
      case "escape":
        return [token.text];
      case "text":
        return token.tokens ? inline(token.tokens) : [token.text];
      case "link":
        if (!/^https?:/i.test(token.href)) return [token.raw];
        return [element("a", { href: token.href, target: "_blank", rel: "noopener noreferrer" }, ...inline(token.tokens))];
      default: // HTML and images among others
        return [token.raw];
    }
  });
}
