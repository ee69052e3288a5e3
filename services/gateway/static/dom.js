// Elements, lists whose elements stay, and figures in words. A text is set as text: no markup is read.

export const find = (id) => document.getElementById(id);

export function make(tag, text = "", kind = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

export function button(text, act, kind = "") {
  const element = make("button", text, kind);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

// An equal text is not set again: what a person has selected in it stays selected.
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

// One child of `parent` for each item, in their order. An item's child is made once and then updated, and it is moved
// only if the order of the items changes: the focus and selections in it stay.
export function keep(parent, items, keyOf, build, update) {
  const keys = new Set(items.map((item) => String(keyOf(item))));
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  for (const [key, child] of before) if (!keys.has(key)) child.remove();
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    const child = before.get(key) ?? build(item);
    child.dataset.key = key;
    update(child, item);
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
  }
}

// The texts of a row's cells. null: the cell is another's.
export function cells(line, ...values) {
  values.forEach((value, i) => {
    const cell = line.cells[i] ?? line.insertCell();
    if (value !== null) put(cell, String(value ?? ""));
  });
}

export function copyButton(textOf) {
  const element = button("Copy", async () => {
    put(element, (await copied(textOf())) ? "Copied" : "Not copied");
    setTimeout(() => put(element, "Copy"), 1500);
  }, "quiet");
  return element;
}

async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  // Browsers have no clipboard for a page of plain HTTP, unless it is of this machine.
  const area = Object.assign(make("textarea"), { value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

// A bar that is filled from a part of its width on; both are parts of 1.
export function bar(part, from = 0) {
  const outer = make("div", "", "bar");
  const inner = make("i");
  inner.style.width = `${100 * Math.min(1, part)}%`;
  inner.style.left = `${100 * from}%`;
  outer.append(inner);
  return outer;
}

export const count = (value) => Number(value ?? 0).toLocaleString("en");

export function ms(value) {
  if (value === undefined) return "";
  return value < 1000 ? `${value.toFixed(0)} ms` : `${(value / 1000).toFixed(2)} s`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let i = 0;
  for (; value >= 1000 && i < units.length - 1; i++) value /= 1000;
  return `${value.toFixed(i ? 1 : 0)} ${units[i]}`;
}
