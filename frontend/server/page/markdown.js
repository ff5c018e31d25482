"use strict";
/* A model's Markdown as elements. The text is untrusted, so four things stand in its way:
   1. marked gets no HTML rule: a tag in the text is text.
   2. DOMPurify keeps the tags and attributes listed here, and returns nodes, not a string.
   3. The page's policy allows no script but the page's own, loads no image, and lets only
      DOMPurify turn a string into HTML (Trusted Types).
   4. An image is a link: nothing is loaded before a click. */

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
const markdown = new marked.Marked({
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
  const code = h("code", { textContent: text });
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

/* HTML of marked -> nodes that are safe to show. */
function clean(html) {
  const fragment = DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a[href]"))
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow" });
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

/* Brings `element` to show `text`. Blocks that have not changed keep their nodes, so a stream
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
      old.nodes[0].querySelector("code").textContent = token.text;
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
