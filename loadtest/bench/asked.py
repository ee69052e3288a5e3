"""The requests of a workload: conversations of one or more turns, independent of the transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Prompt = list[int] | str  # token ids of a completion, or the user's text in a chat


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `prompt` may be a callable, so that the prompts of an hour do not all exist at once."""

    prompt: Prompt | Callable[[], Prompt]
    output_tokens: int
    kind: str = ""  # which part of the workload
    slo_class: str = ""
    repeated_tokens: int | None = None  # of its prompt, that an earlier one begins with; None: not known


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other: each is sent `think_us` after the answer before it has ended. A chat
    repeats the turns before, the answers as they came; turns by token ids stand alone."""

    turns: tuple[Turn, ...]
    system: str = ""  # how a chat begins
    at_us: int | None = None  # when a trace has it begin
    think_us: int = 0


@dataclass(frozen=True, slots=True)
class Options:
    """What every request asks for besides its prompt."""

    ignore_eos: bool = True
    extra: tuple[tuple[str, object], ...] = ()


def body_of(turn: Turn, messages: list[dict[str, str]], options: Options) -> dict[str, object]:
    """The fields of one request, OpenAI's. `messages` precede this turn; a chat adds its own."""
    prompt = turn.prompt() if callable(turn.prompt) else turn.prompt
    body: dict[str, object] = {"max_tokens": turn.output_tokens, "temperature": 0}
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
        body["messages"] = list(messages)
    else:
        body["prompt"] = prompt
    if options.ignore_eos:
        body["ignore_eos"] = True
    if turn.slo_class:
        body["slo_class"] = turn.slo_class
    return body | dict(options.extra)
