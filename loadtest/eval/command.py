"""`headrace eval kl|perplexity`, also `python -m loadtest.eval`."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.eval.engines import Arm
from loadtest.eval.text import TEXT, read_windows
from services.launcher.console import fail
from shared.config import load
from shared.errors import BadRequest, HeadraceError
from shared.vocab.files import resolve

if TYPE_CHECKING:
    from loadtest.eval.divergence import Seen
    from loadtest.eval.logits import Engine


CONTEXT = 512  # llama.cpp's


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit status."""
    given = parser().parse_args(argv)
    try:
        _evaluate(given)
    except HeadraceError as error:
        return fail(error)
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="headrace eval", description="What an engine's arithmetic costs.")
    actions = top.add_subparsers(required=True, metavar="WHAT")
    kl = actions.add_parser("kl", help="KL divergence and agreement of logits with a reference's")
    kl.add_argument("--reference", default="f32", metavar="ENGINE", help="default: f32")
    kl.add_argument("--text", type=Path, default=TEXT, help="default: three chapters of Alice")
    perplexity = actions.add_parser("perplexity", help="of a text file")
    perplexity.add_argument("text", type=Path, metavar="FILE")
    perplexity.set_defaults(reference="")
    for action, usual in ((kl, "bf16"), (perplexity, "auto")):
        action.add_argument(
            "engines", nargs="*", default=[usual], metavar="ENGINE",
            help=f"DTYPE,SETTING=VALUE,... like bf16/fp8,device=cuda; default: {usual}",
        )  # fmt: skip
        action.add_argument(
            "--model", default="", help="a name, a GGUF file or a folder; default: the setting"
        )
        action.add_argument("--context", type=int, default=CONTEXT, help=f"of a window; default: {CONTEXT}")
        action.add_argument("--windows", type=int, default=0, help="at most so many; default: the whole text")
        action.add_argument("--path", choices=("auto", "prefill", "decode"), default="auto")
        action.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    return top


def _evaluate(given: argparse.Namespace) -> None:
    if given.context < 4:
        raise BadRequest("--context is 4 or more")
    arms = [Arm.read(each) for each in ([given.reference] if given.reference else []) + given.engines]
    settings = load(flags={"model": given.model or None}).settings
    files = resolve(settings.model, settings.cache_dir)
    windows = read_windows(given.text, files, given.context, given.windows)

    from loadtest.eval import logits, report

    with ExitStack() as stack:
        engines = [stack.enter_context(closing(arm.open(given.model, given.context))) for arm in arms]
        path = logits.path_for(given.path, engines)
        seen = compare(engines, windows, path, with_reference=bool(given.reference))
        about = [report.about_engine(engine.info) for engine in engines]
    digest = hashlib.sha256(repr(windows).encode()).hexdigest()[:16]
    question = {"text": given.text.name, "tokens_digest": digest, "windows": len(windows)}
    question |= {"context": given.context, "path": path, "reference": given.reference or None}
    found = [
        report.Evaluated(arm.name, facts, each.figures())
        for arm, facts, each in zip(arms, about, seen, strict=True)
    ]
    print(report.table(question, found))
    if given.json:
        report.write(report.document(question, found), given.json)


def compare(
    engines: Sequence[Engine], windows: list[list[int]], path: str, *, with_reference: bool
) -> list[Seen]:
    """What was seen of each engine; with a reference, the first is it."""
    from loadtest.eval.divergence import Seen, log_probs
    from loadtest.eval.logits import logits_by

    seen = [Seen() for _ in engines]
    for parts in zip(*(logits_by(path, engine, windows) for engine in engines), strict=True):
        reference = log_probs(parts[0][0]) if with_reference else None
        for i, (found, (logits, targets)) in enumerate(zip(seen, parts, strict=True)):
            found.add(logits, targets, reference if i else None)
    return seen
