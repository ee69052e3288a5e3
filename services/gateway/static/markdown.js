// Shows a model's Markdown. marked reads it; the elements are made here, each with its text as text. So no text of a
// model is ever read as HTML: the tags, attributes and schemes of links below are all that there can be.

import { lexer } from "./marked.js";
import { copyButton, make } from "./dom.js";

const MOST_CHARS = 100_000; // a longer text is shown as it is: to read hostile Markdown takes marked seconds then
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
const PLAIN = { strong: "strong", em: "em", del: "del", paragraph: "p", blockquote: "blockquote", list_item: "li" };
const NAMED = new Map([["amp", "&"], ["lt", "<"], ["gt", ">"], ["quot", '"'], ["apos", "'"], ["nbsp", "\u00a0"]]);
const shown = new WeakMap(); // the sources of an element's blocks

// Show `text` in `element`. Blocks that are as before stay, with what is selected in them.
export function show(element, text) {
  const blocks = blocksOf(text);
  const before = shown.get(element) ?? [];
  let same = 0;
  while (same < before.length && before[same] === blocks[same]?.raw) same++;
  const made = blocks.slice(same).map(node);
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...made);
  shown.set(element, blocks.map((block) => block.raw));
}

function blocksOf(text) {
  const plain = [{ type: "text", raw: text, text }];
  try {
    return text.length > MOST_CHARS ? plain : lexer(text, { gfm: true, breaks: true });
  } catch {
    return plain; // nested too deeply
  }
}

function node(token) {
  try {
    const child = made(token);
    return child.nodeType === Node.TEXT_NODE && child.data ? make("p", child.data) : child;
  } catch {
    return make("p", token.raw);
  }
}

function made(token) {
  switch (token.type) {
    case "space":
    case "def":
    case "checkbox":
      return document.createTextNode("");
    case "heading":
      return filled(`h${Math.min(token.depth + 2, 6)}`, token.tokens);
    case "hr":
    case "br":
      return make(token.type);
    case "code":
      return code(token);
    case "codespan":
      return make("code", token.text);
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "link":
      return link(token.href, filled("span", token.tokens));
    case "image":
      return link(token.href, make("span", token.text || token.href));
    case "html":
      return /^<br\s*\/?>\s*$/i.test(token.raw) ? make("br") : document.createTextNode(token.raw);
    default:
      if (token.type in PLAIN) return filled(PLAIN[token.type], token.tokens);
      return token.tokens ? filled("span", token.tokens) : document.createTextNode(decoded(token.text ?? token.raw));
  }
}

function filled(tag, tokens) {
  const element = make(tag);
  element.append(...tokens.map(made));
  return element;
}

// marked reads numbers of characters, and leaves their names to HTML.
const decoded = (text) => text.replace(/&(\w+);/g, (whole, name) => NAMED.get(name) ?? whole);

function link(given, content) {
  const href = decoded(given);
  if (!SAFE_LINK.test(href)) return content;
  const element = make("a");
  element.append(content);
  return Object.assign(element, { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function code({ text, lang }) {
  const head = make("div", "", "head");
  head.append(make("span", lang ?? ""), copyButton(() => text));
  const block = make("pre");
  block.append(make("code", text));
  block.tabIndex = 0; // a keyboard scrolls a long line
  const element = make("div", "", "code");
  element.append(head, block);
  return element;
}

function list({ ordered, start, items }) {
  const element = make(ordered ? "ol" : "ul");
  if (ordered && start !== 1) element.start = start;
  for (const item of items) {
    const entry = filled("li", item.tokens);
    if (item.task) entry.prepend(item.checked ? "☑ " : "☐ ");
    element.append(entry);
  }
  return element;
}

function table({ header, rows }) {
  const element = make("table");
  for (const line of [header, ...rows]) {
    const row = element.insertRow();
    for (const cell of line) row.append(filled(line === header ? "th" : "td", cell.tokens));
  }
  const box = make("div", "", "scrolls");
  box.append(element);
  return box;
}
