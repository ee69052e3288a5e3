"""Runs the modules of the gateway's page in node, with a document of its own making.

The document is no browser's: it has elements, their texts and attributes, and prints them as a tree of lists
`[tag, {attribute: value}, [child, …]]`, where a text is a string. So a test sees every element that a module
makes, and every attribute that it sets.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from support.source_tree import ROOT

STATIC = ROOT / "services" / "gateway" / "static"
DOCUMENT = """
class Node {
  static TEXT_NODE = 3;
  remove() { this.parent.childNodes.splice(this.parent.childNodes.indexOf(this), 1); }
  get nextElementSibling() { return this.parent.children[this.parent.children.indexOf(this) + 1] ?? null; }
}
class Text extends Node {
  nodeType = 3;
  constructor(data) { super(); this.data = data; }
  get tree() { return this.data; }
}
class Element extends Node {
  constructor(tag) {
    super();
    const hidden = { own: { tag, children: [] }, parent: null, dataset: {} };
    for (const [name, value] of Object.entries(hidden)) {
      Object.defineProperty(this, name, { value, writable: true });
    }
  }
  get childNodes() { return this.own.children; }
  get children() { return this.own.children.filter((child) => child instanceof Element); }
  get firstElementChild() { return this.children[0] ?? null; }
  get textContent() { return this.own.children.map((child) => child.data ?? child.textContent).join(""); }
  insertBefore(child, next) {
    if (child.parent) child.remove();
    this.put(child, next ? this.own.children.indexOf(next) : this.own.children.length);
  }
  get lastChild() { return this.own.children.at(-1); }
  set textContent(text) { this.own.children.splice(0, Infinity, ...(text ? [new Text(text)] : [])); }
  append(...all) { for (const each of all) this.put(each, this.own.children.length); }
  prepend(...all) { all.reverse().forEach((each) => this.put(each, 0)); }
  put(child, at) {
    const node = typeof child === "string" ? new Text(child) : child;
    node.parent = this;
    this.own.children.splice(at, 0, node);
  }
  insertRow() { const row = new Element("tr"); this.append(row); return row; }
  addEventListener() {}
  get tree() { return [this.own.tag, { ...this }, this.own.children.map((child) => child.tree)]; }
}
globalThis.Node = Node;
globalThis.document = {
  createElement: (tag) => new Element(tag), createTextNode: (data) => new Text(data),
};
"""


def run(folder: Path, script: str) -> Any:
    """What `script`, a module beside those of the page, gives to `report`. `folder`: an empty one for copies,
    since node reads modules only where a package.json has that word."""
    for file in (*STATIC.glob("*.js"), STATIC / "marked" / "marked.js"):
        shutil.copy(file, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "document.js").write_text(DOCUMENT)
    report = "const report = (found) => console.log(JSON.stringify(found));\n"
    (folder / "test.js").write_text('import "./document.js";\n' + report + script)
    done = subprocess.run(
        ["node", folder / "test.js"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
