"""A model's Markdown becomes elements; a model's HTML stays text, and its links go nowhere but to the web."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.page_modules import run

SCRIPT = """
import { show } from "./markdown.js";
const trees = TEXTS.map((text) => {
  const element = document.createElement("div");
  show(element, text);
  return element.tree[2];
});
report(trees);
"""

P, LI, UL = "p", "li", "ul"


def span(text: str) -> list[Any]:
    return ["span", {}, [text]]


SHOWN: dict[str, list[Any]] = {
    "a *b* **c** ~~d~~ `e < f`": [
        [P, {}, ["a ", ["em", {}, ["b"]], " ", ["strong", {}, ["c"]], " ", ["del", {}, ["d"]], " ",
                 ["code", {}, ["e < f"]]]]
    ],
    "one\ntwo": [[P, {}, ["one", ["br", {}, []], "two"]]],
    "# A\n\ntext": [["h3", {}, ["A"]], [P, {}, ["text"]]],
    "5 &lt; 6 &amp; &#8364; &nosuch; &toString;": [[P, {}, ["5 < 6 & € &nosuch; &toString;"]]],
    "\\*no\\*": [[P, {}, ["*", "no", "*"]]],
    "3. c\n4. d": [["ol", {"start": 3}, [[LI, {}, [span("c")]], [LI, {}, [span("d")]]]]],
    "- a\n  - b\n- [x] c": [
        [UL, {}, [[LI, {}, [span("a"), [UL, {}, [[LI, {}, [span("b")]]]]]], [LI, {}, ["☑ ", "", span("c")]]]]
    ],
    "> q": [["blockquote", {}, [[P, {}, ["q"]]]]],
    "---": [["hr", {}, []]],
    "|a|b|\n|-|-|\n|1|`2`|": [
        ["div", {"className": "scrolls"}, [["table", {}, [
            ["tr", {}, [["th", {}, ["a"]], ["th", {}, ["b"]]]],
            ["tr", {}, [["td", {}, ["1"]], ["td", {}, [["code", {}, ["2"]]]]]],
        ]]]]
    ],
    "a<br>b <b>c</b>": [[P, {}, ["a", ["br", {}, []], "b ", "<b>", "c", "</b>"]]],
    "<script>alert(1)</script>": [[P, {}, ["<script>alert(1)</script>"]]],
    "![alt](https://x/y.png)": [
        [P, {}, [["a", {"href": "https://x/y.png", "title": "https://x/y.png", "target": "_blank",
                        "rel": "noopener noreferrer nofollow"}, [["span", {}, ["alt"]]]]]]
    ],
}  # fmt: skip

HOSTILE = [
    "[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))", "[a](java\nscript:alert(1))",
    "[a](&#106;avascript:alert(1))", "[a](&#x6A;avascript&#58;alert(1))", "[a](\x01javascript:alert(1))",
    "[a](data:text/html;base64,PHNjcmlwdD4=)", "[a](vbscript:x)", "[a](file:///etc/passwd)", "[a](//evil)",
    "[a](blob:https://x)", "<javascript:alert(1)>", "[a][b]\n\n[b]: javascript:alert(1)",
    "![a](javascript:alert(1))", "![a](x\" onerror=\"alert(1))", "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>", "<a href='javascript:alert(1)'>a</a>", "<iframe src=javascript:alert(1)>",
    "`<img src=x onerror=alert(1)>`", "```\"><script>alert(1)</script>\n</code><script>1</script>\n```",
    "| <script>1</script> |\n|-|\n| <img src=x onerror=1> |", "- <details open ontoggle=alert(1)>",
    "# <style>*{display:none}</style>", "<!-- --><script>1</script>", "<br onclick=alert(1)>",
    "<form action=javascript:1><button>x", "[<img src=x onerror=1>](https://x)", "https://x/\"onmouseover=1",
    "[a](https://x \"t\" onclick=1)", "<math><mtext><script>1", "&lt;script&gt;1&lt;/script&gt;",
    "> " * 5_000 + "a", "[" * 3_000, "*" * 3_000 + "a",
]  # fmt: skip
TAGS = {
    "p", "em", "strong", "del", "code", "br", "hr", "h3", "h4", "h5", "h6", "ol", "ul", "li", "blockquote",
    "div", "span", "pre", "table", "tr", "th", "td", "a", "button",
}  # fmt: skip
ATTRIBUTES = {"className", "start", "href", "title", "target", "rel", "tabIndex", "type"}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    texts = [*SHOWN, *HOSTILE]
    script = f"const TEXTS = {json.dumps(texts)};\n{SCRIPT}"
    return dict(zip(texts, run(tmp_path_factory.mktemp("page"), script), strict=True))


def elements(tree: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(tree, list):
        yield tree[0], tree[1]
        for child in tree[2]:
            yield from elements(child)


def words(tree: Any) -> str:
    return tree if isinstance(tree, str) else "".join(map(words, tree[2]))


@pytest.mark.parametrize("text", SHOWN)
def test_markdown_is_shown(trees: dict[str, list[Any]], text: str) -> None:
    assert [each for each in trees[text] if each] == SHOWN[text]


def test_code_is_shown_with_its_language_and_a_button(tmp_path_factory: pytest.TempPathFactory) -> None:
    text = "```python\nif a < b:\n    c\n```"
    (block,) = run(
        tmp_path_factory.mktemp("page"),
        f"const TEXTS = {json.dumps([text])};\n{SCRIPT}",
    )[0]
    _, _, ((_, _, (language, copies)), pre) = block
    assert (words(language), copies[0], words(copies)) == ("python", "button", "Copy")
    assert pre == ["pre", {"tabIndex": 0}, [["code", {}, ["if a < b:\n    c"]]]]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:40])
def test_hostile_markdown_makes_no_other_element_attribute_or_scheme(
    trees: dict[str, list[Any]], text: str
) -> None:
    made = [each for tree in trees[text] for each in elements(tree)]
    assert {tag for tag, _ in made} <= TAGS
    assert {name for _, attributes in made for name in attributes} <= ATTRIBUTES
    links = [attributes["href"] for _, attributes in made if "href" in attributes]
    assert [href for href in links if not re.match(r"(https?://|mailto:)", href, re.IGNORECASE)] == []
    assert "".join(map(words, trees[text])).strip(), "the text is there"


def test_blocks_that_are_as_before_stay_the_same_elements(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a person has selected in an answer stays selected while the answer grows."""
    found = run(
        tmp_path_factory.mktemp("page"),
        """
        import { show } from "./markdown.js";
        const element = document.createElement("div");
        show(element, "one\\n\\n- two\\n\\nthr");
        const before = [...element.childNodes];
        show(element, "one\\n\\n- two\\n\\nthree");
        report([before.map((node, i) => node === element.childNodes[i]), element.tree[2].at(-1)]);
        """,
    )
    assert found == [[True, True, True, True, False], ["p", {}, ["three"]]]
