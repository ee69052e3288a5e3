"""What the page makes of a gateway's answer: chunks, a sentence for each fault, and no key that leaves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.page_modules import run

LOST = "The connection to the gateway was lost: the answer ends here."
AWAY = "The gateway does not answer. Check that it runs (`headrace status`), then send again."
SCRIPT = """
import { call, chat, useKey } from "./api.js";
const sent = [];
const answers = [];
const body = (parts, fault) => new ReadableStream({
  async start(control) {
    for (const part of parts) control.enqueue(new TextEncoder().encode(part));
    await new Promise((resolve) => setTimeout(resolve));
    fault ? control.error(fault) : control.close();
  },
});
const stream = (parts, fault) => answers.push(new Response(body(parts, fault)));
const refuse = (status, error) =>
  answers.push(new Response(JSON.stringify(error), { status, statusText: "No" }));
globalThis.fetch = async (path, options) => {
  sent.push([path, options.headers, options.body && JSON.parse(options.body)]);
  const answer = answers.shift();
  if (!answer) throw new TypeError("Failed to fetch");
  return answer;
};
async function read(fields = {}) {
  const texts = [];
  try {
    for await (const chunk of chat(fields)) texts.push(chunk.choices[0].delta.content);
  } catch (error) {
    return [texts.join(""), error.message, error.lost ?? false];
  }
  return [texts.join(""), "", false];
}
const data = (text) => `data: ${JSON.stringify({ choices: [{ delta: { content: text } }] })}\\n\\n`;
"""


def found(folder: Path, script: str) -> Any:
    return run(folder, SCRIPT + script)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ('stream([data("a"), ": ping\\n", data("b"), "data: [DONE]\\n\\n"])', ["ab", "", False]),
        ('stream((data("wörter") + "data: [DONE]\\n").split(/(?<=.)/))', ["wörter", "", False]),
        ('stream([data("a")])', ["a", LOST, True]),
        ('stream([data("a")], new TypeError("network error"))', ["a", LOST, True]),
        ("0", ["", AWAY, True]),
        ('stream([data("a"), `data: {"error": {"message": "Why."}}\\n\\n`])', ["a", "Why.", False]),
        ('refuse(429, { error: { message: "Full." } })', ["", "Full.", False]),
        ('refuse(502, "<html>")', ["", "502 No", False]),
    ],
)
def test_an_answer_or_a_sentence_for_its_fault(tmp_path: Path, events: str, expected: list[Any]) -> None:
    assert found(tmp_path, f"{events};\nreport(await read());") == expected


@pytest.mark.parametrize(
    ("code", "param", "limits"),
    [
        ("context_length_exceeded", "max_tokens", [2048, None]),
        ("context_length_exceeded", "messages", [2048]),
        (None, "max_tokens", [2048]),
    ],
)
def test_an_answer_gets_the_context_that_is_left(
    tmp_path: Path, code: str | None, param: str, limits: list[int | None]
) -> None:
    """Without `max_tokens` an answer may fill the context, which is less than what was refused."""
    error = json.dumps({"message": "Too long.", "code": code, "param": param})
    script = f"""
    refuse(400, {{ error: {error} }});
    stream([data("a"), "data: [DONE]\\n\\n"]);
    await read({{ max_tokens: 2048 }});
    report(sent.map(([, , fields]) => fields.max_tokens ?? null));
    """
    assert found(tmp_path, script) == limits


def test_the_key_is_sent_once_it_is_known(tmp_path: Path) -> None:
    script = """
    refuse(401, { error: { message: "no API key" } });
    refuse(404, {});
    const statuses = [];
    for (const path of ["/a", "/b"]) {
      await call(path).catch((error) => statuses.push(error.status));
      useKey(" hr-1 ");
    }
    report([statuses, sent.map(([, headers]) => headers)]);
    """
    assert found(tmp_path, script) == [[401, 404], [{}, {"Authorization": "Bearer hr-1"}]]
