"use strict";
/* Makes elements of a model's Markdown. The text is untrusted, so four things stand in its way:
   1. marked gets no HTML rule: a tag in the text is text.
   2. DOMPurify keeps the tags and attributes listed here, and returns nodes, not a string.
   3. The page's policy allows no script but the page's own, loads no image, and lets only
      DOMPurify turn a string into HTML (Trusted Types).
   4. An image is a link: nothing is loaded before a click.
   Formulas and colours of code are made as nodes, by Temml and from Prism's tokens. */

const ALLOWED = {
  ALLOWED_TAGS: (
    "p br hr h4 h5 h6 strong em del code pre blockquote ul ol li " +
    "table thead tbody tr th td a #text"
  ).split(" "),
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["start", "align"], // these are no addresses
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const asText = (text) => {
  const codes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => codes[character]);
};
/* `\\(…\\)` is a formula in a line; `\\[…\\]` and `$$…$$` are blocks. A single $ is often money. */
const INLINE_MATH = /^\\\(((?:[^\\]|\\(?!\)))+?)\\\)/;
const DISPLAY_MATH = /^(?:\\\[([^]+?)\\\]|\$\$([^]+?)\$\$)/;
const formula = (className) => ({
  renderer: ({ tex }) => `<code class="${className}">${asText(tex)}</code>`,
});
const MATH = [
  {
    name: "math",
    level: "inline",
    start: (source) => source.search(/\\[([]|\$\$/),
    tokenizer(source) {
      const inline = INLINE_MATH.exec(source);
      if (inline) return { type: "math", raw: inline[0], tex: inline[1] };
      const display = DISPLAY_MATH.exec(source);
      if (display) return { type: "display", raw: display[0], tex: display[1] ?? display[2] };
    },
    ...formula("math"),
  },
  {
    name: "display",
    level: "block",
    start: (source) => source.search(/^ {0,3}(?:\\\[|\$\$)/m),
    tokenizer(source) {
      const indent = /^ {0,3}/.exec(source)[0];
      const found = DISPLAY_MATH.exec(source.slice(indent.length));
      const rest = found && source.slice(indent.length + found[0].length);
      if (!found || !/^[ \t]*(?:\n|$)/.test(rest)) return;
      const end = /^[ \t]*\n*/.exec(rest)[0];
      return { type: "display", raw: indent + found[0] + end, tex: found[1] ?? found[2] };
    },
    ...formula("display"),
  },
];

/* Renders a formula as MathML; text that is no formula stays as it is written. */
function mathOf(tex, displayMode) {
  const box = h("span", { className: displayMode ? "formula display" : "formula" });
  try {
    temml.render(tex, box, { displayMode, throwOnError: true, trust: false, maxExpand: 500 });
  } catch {
    put(box, displayMode ? `\\[${tex}\\]` : `\\(${tex}\\)`);
  }
  return box;
}

/* Shows code in the colours of its language, where Prism knows it. */
const LANGUAGES = { sh: "bash", shell: "bash", console: "bash", "c++": "cpp", golang: "go", jsonc: "json" };
const MOST_COLOURED = 50_000; // characters; a longer text stays plain
function paintCode(code, text, language) {
  const name = language.toLowerCase();
  const grammar = Object.hasOwn(Prism.languages, name)
    ? Prism.languages[name]
    : Prism.languages[LANGUAGES[name]];
  const isKnown = typeof grammar === "object" && text.length <= MOST_COLOURED;
  const nodeOf = (token) => {
    if (typeof token === "string") return token;
    const inner = [token.content].flat().map(nodeOf);
    return h("span", { className: `t-${token.type}` }, ...inner);
  };
  code.replaceChildren(...(isKnown ? Prism.tokenize(text, grammar).map(nodeOf) : [text]));
}

const markdown = new marked.Marked({
  extensions: MATH,
  gfm: true,
  breaks: true, // models break lines where they mean it
  tokenizer: {
    html() {},
    tag(source) {
      const found = /^<br ?\/?>/i.exec(source);
      if (found) return { type: "br", raw: found[0] };
    },
  },
  renderer: {
    heading({ tokens, depth }) {
      const tag = `h${Math.min(6, depth + 3)}`; // below the headings of the page
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
    image({ href, text }) {
      return `<a href="${asText(href)}">${asText(text || href)}</a>`;
    },
  },
});

function copyButton(text) {
  const copy = h("button", { type: "button", className: "plain", textContent: "Copy" });
  copy.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text());
      put(copy, "Copied");
    } catch {
      put(copy, "The browser forbids it");
    }
    setTimeout(() => put(copy, "Copy"), 1500);
  };
  return copy;
}

function codeBlock(text, language) {
  const code = h("code");
  paintCode(code, text, language || "");
  const name = h("span", { textContent: language || "code" });
  const head = h(
    "header",
    {},
    name,
    copyButton(() => code.textContent),
  );
  return h("div", { className: "block" }, head, h("pre", { tabIndex: 0 }, code));
}

const languageOf = (info) => (info || "").match(/^\S*/)[0];

/* Turns the HTML of marked into nodes that are safe to show. */
function clean(html) {
  const fragment = DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a[href]"))
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow" });
  for (const code of fragment.querySelectorAll("code.math, code.display"))
    code.replaceWith(mathOf(code.textContent, code.className === "display"));
  for (const pre of fragment.querySelectorAll("pre")) {
    const language = (pre.firstElementChild?.className || "").replace(/^language-/, "");
    pre.replaceWith(codeBlock(pre.textContent.replace(/\n$/, ""), language));
  }
  for (const element of fragment.querySelectorAll("[class^=language-]"))
    element.removeAttribute("class");
  for (const table of fragment.querySelectorAll("table")) {
    const box = h("div", { className: "table", tabIndex: 0 });
    table.replaceWith(box);
    box.append(table);
  }
  return [...fragment.childNodes];
}

/* Makes `element` show `text`. Blocks that have not changed keep their nodes, so a stream
   costs one block per update, and a selection above it survives. */
function renderMarkdown(element, text) {
  const had = element.blocks || [];
  const blocks = [];
  for (const token of markdown.lexer(text)) {
    if (token.type === "space" || token.type === "def") continue;
    const isCode = token.type === "code";
    const key = isCode ? `${languageOf(token.lang)}\n${token.text}` : markdown.parser([token]);
    const old = had[blocks.length];
    if (old && old.isCode === isCode && old.key === key) {
      blocks.push(old);
    } else if (old && old.isCode && isCode && old.language === languageOf(token.lang)) {
      paintCode(old.nodes[0].querySelector("code"), token.text, old.language);
      blocks.push({ ...old, key });
    } else {
      const language = languageOf(token.lang);
      const nodes = isCode ? [codeBlock(token.text, language)] : clean(key);
      blocks.push({ key, isCode, language, nodes });
    }
  }
  element.blocks = blocks;
  let at = element.firstChild;
  for (const node of blocks.flatMap((block) => block.nodes)) {
    if (node === at) at = at.nextSibling;
    else element.insertBefore(node, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}
