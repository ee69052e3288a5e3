"""A request drawn as lines of text: one bar for each span, then the decisions and their reasons. Pure."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from services.launcher.console import bold, dim, paint

Span = dict[str, Any]

MIN_BAR, MAX_BAR = 20, 100
_COLOURS = {"received": 33, "tokenize": 33, "transit": 2, "queue": 35, "prefill wait": 2, "decode": 32}
_CYAN, _RED = 36, 31
_SHOWN = (("tokens", "tokens"), ("step", "step"), ("tokens_per_second", "tokens/s"))


def draw(body: dict[str, Any], width: int) -> list[str]:
    """The lines for a terminal of `width` columns."""
    spans: list[Span] = body["spans"]
    rows = [(depth, span) for depth, span in _tree(spans) if span["parent"] is not None]
    labels = [f"{'  ' * (depth - 1)}{span['name']}" for depth, span in rows]
    widest = max((len(label) for label in labels), default=0)
    bar = min(max(width - widest - 40, MIN_BAR), MAX_BAR)
    start, total = spans[0]["start_us"], max(spans[0]["end_us"] - spans[0]["start_us"], 1)
    lines = [*_head(body, total), ""]
    for label, (_, span) in zip(labels, rows, strict=True):
        took = span["end_us"] - span["start_us"]
        drawn = paint(_bar(span, start, total, bar), _colour(span), sys.stdout)
        lines.append(f"{label:<{widest}} {drawn} {_ms(took):>10}  {dim(_facts(span))}".rstrip())
    return [*lines, *_decisions(spans, start)]


def _head(body: dict[str, Any], total_us: int) -> list[str]:
    root, choices = body["spans"][0], body["choices"]
    tokens = sum(choice["tokens"] for choice in choices)
    reasons = ", ".join(choice["reason"] for choice in choices)
    where = [f"executor {choices[0]['executor'] or 'none yet'}", body["detokenizer"].replace(".", " ")]
    trace = [f"trace {body['trace_id']}"] if body["trace_id"] else []
    prompt = f"prompt {choices[0]['prompt_tokens']} tokens ({choices[0]['cached_tokens']} cached)"
    counts = [prompt, f"answer {tokens} tokens"]
    if len(choices) > 1:
        counts.append(f"{len(choices)} choices")
    if (first := root["attributes"].get("gen_ai.response.time_to_first_chunk")) is not None:
        counts.append(f"first text after {_ms(first * 1e6)}")
    counts.append(f"{_ms(total_us)} in all" if body["state"] == "ended" else f"{_ms(total_us)} so far")
    lines = [
        f"{bold(body['request_id'])}  {root['name']}  tenant {body['tenant']}  {body['state']}: {reasons}",
        f"  {', '.join([*where, *trace])}",
        f"  {', '.join(counts)}",
    ]
    if root["error"]:
        lines.append(f"  {paint(root['error'], _RED, sys.stdout)}")
    return lines


def _tree(spans: list[Span]) -> list[tuple[int, Span]]:
    """(depth, span), children below their parent in order of time."""
    children: dict[int | None, list[int]] = defaultdict(list)
    for i, span in enumerate(spans):
        children[span["parent"]].append(i)

    def below(parent: int | None, depth: int) -> list[tuple[int, Span]]:
        found: list[tuple[int, Span]] = []
        for i in sorted(children[parent], key=lambda i: spans[i]["start_us"]):
            found += [(depth, spans[i]), *below(i, depth + 1)]
        return found

    return below(None, 0)


def _bar(span: Span, start_us: int, total_us: int, width: int) -> str:
    """The span's place in `width` columns; what is shorter than a column is a thin line."""
    begin = min((span["start_us"] - start_us) * width // total_us, width - 1)
    end = min(-(-(span["end_us"] - start_us) * width // total_us), width)
    thin = (span["end_us"] - span["start_us"]) * width < total_us
    mark = "▏" if thin else "█" * max(end - begin, 1)
    return f"{' ' * max(begin, 0)}{mark}".ljust(width)


def _colour(span: Span) -> int:
    return _COLOURS.get(span["name"], _CYAN)


def _facts(span: Span) -> str:
    attributes = span["attributes"]
    return ", ".join(
        f"{text} {attributes[name]}" if name == "step" else f"{attributes[name]} {text}"
        for name, text in _SHOWN
        if name in attributes
    )


def _decisions(spans: list[Span], start_us: int) -> list[str]:
    events = sorted((event for span in spans for event in span["events"]), key=lambda event: event["at_us"])
    lines = ["", "decisions"] if events else []
    for event in events:
        numbers = dict(event["attributes"])
        why, choice = numbers.pop("why", ""), numbers.pop("choice", 0)
        facts = ", ".join(f"{name} {value}" for name, value in numbers.items())
        who = f"choice {choice}: " if choice else ""
        lines.append(
            f"  {_ms(event['at_us'] - start_us):>10}  {who}{event['name']}: {why} {dim(f'({facts})')}"
        )
    return lines


def _ms(us: float) -> str:
    return f"{us / 1000:.1f} ms"
