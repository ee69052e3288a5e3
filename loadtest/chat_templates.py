"""The chat templates in a folder, beside what is expected of each: which format reads its calls, where tools
go, and that no word of a long conversation is lost.

    python -m loadtest.chat_templates FOLDER            compares; exit status 1 if anything differs
    python -m loadtest.chat_templates FOLDER --write    writes loadtest/results/chat_templates.tsv

The templates stay where they are: the table has their names and SHA-256. Those without `hf-` are those of
llama.cpp's models/templates (they are also in the source archive of llama-cpp-python), the others those of
the tests of @huggingface/jinja. No model runs.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from services.tokenizer.chat_template import VARIABLE, Render, template_environment
from services.tokenizer.template_probe import PROBE_TOOLS, fitted, probe

TABLE = Path(__file__).parent / "results" / "chat_templates.tsv"
COLUMNS = ("sha256", "name", "format", "calls", "tools", "lost")
TOOLS: list[Any] = copy.deepcopy(PROBE_TOOLS)


def _call(city: str, number: int) -> dict[str, Any]:
    function = {"name": TOOLS[0]["function"]["name"], "arguments": {"city": city}}
    return {"id": f"call_{number:09}", "type": "function", "function": function}


def _turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CONVERSATION = [
    _turn("system", "qaa"), _turn("developer", "qbb"), _turn("user", "qcc"), _turn("user", "qdd"),
    _turn("assistant", "qee", tool_calls=[_call("qff", 1), _call("qgg", 2)]),
    _turn("tool", "qhh", tool_call_id="call_000000001"), _turn("tool", "qii", tool_call_id="call_000000002"),
    _turn("user", "qjj"), _turn("assistant", "qkk"), _turn("system", "qll"), _turn("user", "qmm"),
    _turn("assistant", "", tool_calls=[_call("qnn", 3)]), _turn("tool", "qoo", tool_call_id="call_000000003"),
]  # fmt: skip
WORDS = [f"q{letter * 2}" for letter in "abcdefghijklmno"]


def renderer(source: str) -> Render:
    """Renders the template. Raises TemplateError if it is not jinja."""
    template = template_environment().from_string(source)

    def render(messages: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str | None:
        given = copy.deepcopy({"messages": [*messages], "tools": tools})
        try:
            return template.render(
                **given,
                bos_token="<s>",
                eos_token="</s>",
                add_generation_prompt=add_generation_prompt,
                strftime_now=lambda form: "1 January 2030",
                documents=None,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError):
            return None

    return render


def outcome(source: str) -> tuple[str, str, str, str]:
    """The format, how calls are shown, where tools go, and the words that are lost; "all" if it renders
    nothing."""
    try:
        render = renderer(source)
    except TemplateError:
        return "", "not jinja", "", ""
    skills = probe(render, source, None, with_tools=True)
    given = TOOLS if skills.tools == VARIABLE else [] if skills.empty_tools else None
    text = render(fitted(copy.deepcopy(CONVERSATION), TOOLS, skills), given, True)
    lost = ["all"] if text is None else [word for word in WORDS if word not in text]
    return skills.form.name, skills.calls_are, skills.tools, " ".join(lost) or "none"


def table(folder: Path) -> list[str]:
    """A line for each template."""
    lines = []
    for path in sorted(folder.glob("*.jinja")):
        text = path.read_text()
        digest = hashlib.sha256(text.encode()).hexdigest()
        lines.append("\t".join((digest, path.stem, *outcome(text))))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.chat_templates")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    found = table(options.folder)
    if options.write:
        TABLE.write_text("\n".join(["\t".join(COLUMNS), *found, ""]))
        return 0
    known = {line.partition("\t")[0]: line.partition("\t")[2] for line in TABLE.read_text().splitlines()[1:]}
    differ = 0
    for line in found:
        digest, _, rest = line.partition("\t")
        expected = known.get(digest, "not in the table")
        if expected.partition("\t")[2] != rest.partition("\t")[2]:
            differ += 1
            print(f"{rest}\n    expected: {expected}")
    print(f"{len(found)} templates, {differ} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
