"""What tests run over two GPUs, each in a process of its own: a process can be in one group, ever."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from support.executor.groups import Watched, go_down_and_come_back, life, options
from support.executor.plan_maker import PlanMaker, Row
from support.executor.row_by_row import assert_rows_do_not_see_each_other
from support.executor.stage_plugins import PLUGINS
from support.executor.tiny_models import VOCAB, full_logprobs, random_tokens

from services.executor.cpu.engine import build as build_cpu
from services.executor.cuda.engine import build
from services.executor.engine import Backend
from services.executor.sampling.logits_processors import load_processors

WITHIN_S = 240.0
TESTS = str(Path(__file__).parents[2])
CHUNK, TOKENS = 40, 60


def apart(run: Callable[..., Any], *given: Any) -> Any:
    """What `run` returns in another process, which is killed then: ranks that wait for each other end with
    it. Raises RuntimeError with the traceback of what it raises."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there, run, given))
    process.start()
    try:
        if not here.poll(WITHIN_S):
            raise RuntimeError(f"no answer in {WITHIN_S:.0f} s")
        found, flaw = here.recv()
    finally:
        process.kill()
        process.join()
    if flaw:
        raise RuntimeError(flaw)
    return found


def _answer(there: Connection, run: Callable[..., Any], given: tuple[Any, ...]) -> None:
    try:
        there.send((run(*given), ""))
    except BaseException:  # noqa: BLE001 - the test shows it
        there.send((None, traceback.format_exc()))


def _group(folder: Path, **more: Any) -> Watched:
    path = os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", "")))
    wanted = options(folder, device="cuda", processors=load_processors(PLUGINS), **more)
    made = Watched(wanted, 2, HEADRACE_LOGITS_PROCESSORS=PLUGINS, PYTHONPATH=path)
    made.group.warm_up()
    return made


def lives(folder: Path, pipeline: bool, deterministic: bool) -> tuple[Any, Any]:
    """`groups.life` on two GPUs and on one, in float32; blocks go down and come back."""
    made = _group(folder, pipeline=pipeline, deterministic=deterministic)
    several = life(PlanMaker(made.group))
    made.group.reset()
    go_down_and_come_back(made.group)
    processors = load_processors(PLUGINS)
    alone = build(options(folder, device="cuda", processors=processors, deterministic=deterministic))
    alone.warm_up()
    return several, life(PlanMaker(alone))


def divergence(folder: Path, more: dict[str, Any]) -> tuple[str, float]:
    """The dtype of an engine on two GPUs, and the mean KL divergence of a CPU in float32 from it."""
    made = _group(folder, deterministic=False, max_step_tokens=64, **more)
    wanted = _logprobs(build_cpu(options(folder, max_step_tokens=64)))
    found = _logprobs(made.group)
    made.group.close()
    return made.group.info.dtype, (wanted.exp() * (wanted - found)).sum(-1).mean().item()


def _logprobs(backend: Backend) -> torch.Tensor:
    """After a chunk and after each of some decode steps."""
    maker = PlanMaker(backend)
    maker.open(0, random_tokens(TOKENS, 3), logprobs=VOCAB + 1)
    found = [full_logprobs(maker.run([Row(0, 0, CHUNK, feeds=(0,))]))]
    found += [full_logprobs(maker.run([Row(0, at, 1, feeds=(0,))])) for at in range(CHUNK, TOKENS - 1)]
    return torch.cat(found)


def rows_by_themselves(folder: Path, dtype: str) -> None:
    """Deterministic mode of two GPUs."""
    made = _group(folder, dtype=dtype, blocks=200, slots=16, max_step_tokens=512)  # ten prompts in one
    assert_rows_do_not_see_each_other(PlanMaker(made.group), (1, 2, 10), 20, 30)
    made.group.close()


def refusal(folder: Path, more: dict[str, Any]) -> str:
    """Why two GPUs cannot serve so."""
    from shared.errors import SetupError

    try:
        _group(folder, **more)
    except SetupError as error:
        return str(error)
    return ""
