"""The flags of `headrace bench`. A flag that `vllm bench serve` has, too, has its name."""

from __future__ import annotations

import argparse
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

from loadtest.bench.asked import Options
from loadtest.bench.over_http import DEFAULT_TIMEOUT_S
from loadtest.bench.prompts import FIRST_ID, LAST_ID
from loadtest.bench.replay import TRACES
from loadtest.bench.run import Asked, Point
from loadtest.bench.shape import Shape
from loadtest.bench.workloads import WORKLOADS
from shared.errors import BadRequest
from shared.nats import access

NATS = ("nats:", "tls:")
NO_CONFIGURATION = ("action", "url", "nats_url", "fleet", "counts", "json", "label", "key")  # where, not what


def parser() -> argparse.ArgumentParser:
    """`run`, `compare`, `plot`."""
    top = argparse.ArgumentParser(prog="headrace bench", description="Load on a server, and what came of it.")
    actions = top.add_subparsers(dest="action", required=True, metavar="ACTION")
    _run(actions.add_parser("run", help="send requests, print the figures"))
    compare = actions.add_parser("compare", help="two results side by side, with ratios")
    compare.add_argument("one", type=Path)
    compare.add_argument("other", type=Path)
    plot = actions.add_parser(
        "plot", help="pictures and a page of results (needs matplotlib: headrace[bench])"
    )
    plot.add_argument("results", type=Path, nargs="+")
    plot.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER")
    return top


def _run(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--url",
        default="",
        help="http://HOST:PORT, unix:/PATH or nats://…; default: the running `headrace up`",
    )
    run.add_argument("--nats-url", default="", metavar="URL", help="the same as --url nats://…")
    run.add_argument("--fleet", default="", metavar="NAME", help="the `headrace up` of this fleet")
    run.add_argument("--model", default="", help="default: the server's first, over NATS the setting")
    run.add_argument("--key", default="", help="of the API, over HTTP")
    run.add_argument("--counts", default="", metavar="NATS", help="over HTTP: where to ask the schedulers")
    run.add_argument("--workload", default="random", choices=[*WORKLOADS, *TRACES])
    run.add_argument("--num-prompts", type=int, default=100, help="requests; of a chat: conversations")
    run.add_argument(
        "--per-client", type=int, default=0, metavar="N", help="of these, N times the concurrency"
    )
    run.add_argument("--num-warmups", type=int, default=0, help="requests before, counted nowhere")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft:500 tpot:50 e2el:…")
    run.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="of a request, in s")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the result, every request in it")
    run.add_argument(
        "--label", default="", help="of the result, in tables and plots; default: the file's name"
    )
    _load(run.add_argument_group("load", "the first two take lists, 1,2,4: a sweep over all pairs"))
    _shape(run.add_argument_group("requests", "lengths in tokens"))
    _traces(run.add_argument_group("traces"))


def _load(group: Any) -> None:
    group.add_argument(
        "--request-rate", default="inf", help="open loop: so many a second, independent of answers"
    )
    group.add_argument(
        "--max-concurrency", default="", help="at most so many in flight; without a rate: a closed loop"
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="1: Poisson, less: burstier, inf: a fixed rate"
    )
    group.add_argument("--surge", type=float, default=1.0, help="overload: the middle third comes faster")


def _shape(group: Any) -> None:
    default = Shape()
    group.add_argument("--input-len", type=int, default=default.input_len)
    group.add_argument("--output-len", type=int, default=default.output_len)
    group.add_argument("--range-ratio", type=float, default=0.0, help="lengths are uniform in ± this share")
    group.add_argument(
        "--prefix-len", type=int, default=0, help="of what prompts share; a chat's system text"
    )
    group.add_argument("--prefixes", type=int, default=default.prefixes, help="of shared-prefix")
    group.add_argument("--long-len", type=int, default=default.long_len, help="of long-beside-chat")
    group.add_argument("--long-every", type=int, default=default.long_every, help="of long-beside-chat")
    group.add_argument("--turns", type=int, default=default.turns, help="of a chat")
    group.add_argument("--think", type=float, default=0.0, help="s between an answer and the next turn")
    group.add_argument("--chat", action="store_true", help="text in messages in the place of token ids")
    group.add_argument("--token-ids", default=f"{FIRST_ID}:{LAST_ID}", help="from which prompts are drawn")
    group.add_argument("--no-ignore-eos", action="store_true", help="answers end where the model ends them")
    group.add_argument("--extra-body", default="{}", metavar="JSON", help="more fields of every request")


def _traces(group: Any) -> None:
    group.add_argument("--trace", type=Path, help="a whole trace; a sample of it comes with the source")
    group.add_argument("--minutes", type=float, default=1e9, help="of the trace")
    group.add_argument("--speed", type=float, default=1.0, help="so many times as fast as recorded")
    group.add_argument("--length-scale", type=float, default=1.0, help="of recorded lengths and of sharegpt")
    group.add_argument(
        "--block-tokens", type=int, default=Shape().block_tokens, help="of the server's prefix cache"
    )


def points(given: argparse.Namespace) -> list[Point]:
    """The points of the sweep. Raises BadRequest."""
    rates = _numbers(given.request_rate, "--request-rate")
    most = [int(each) for each in _numbers(given.max_concurrency or "0", "--max-concurrency")]
    if min(rates) <= 0 or min(most) < 0 or given.burstiness <= 0 or given.surge <= 0:
        raise BadRequest("--request-rate, --max-concurrency, --burstiness and --surge are above 0")
    return [
        Point(rate, clients, given.burstiness, given.surge, given.per_client * clients)
        for rate, clients in product(rates, most)
    ]


def asked(given: argparse.Namespace) -> Asked:
    """What every point asks for. Raises BadRequest."""
    first, _, last = given.token_ids.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise BadRequest(f"--token-ids takes FIRST:LAST, like 300:40000, not {given.token_ids!r}")
    if given.per_client < 0:
        raise BadRequest("--per-client is 1 or more; 0: all prompts at every concurrency")
    if min(given.input_len, given.output_len) < 1 or not 0 <= given.range_ratio <= 1:
        raise BadRequest("--input-len and --output-len are 1 or more, --range-ratio is from 0 to 1")
    if not given.timeout > 0:
        raise BadRequest("--timeout is above 0")
    if given.num_prompts < 1 or given.block_tokens < 1:
        raise BadRequest("--num-prompts and --block-tokens are 1 or more")
    if given.counts and not given.counts.startswith(NATS):
        raise BadRequest("--counts takes the nats-server of a Headrace gateway, like nats://HOST:4222")
    shape = Shape(
        prompts=given.num_prompts,
        input_len=given.input_len,
        output_len=given.output_len,
        range_ratio=given.range_ratio,
        prefix_len=given.prefix_len,
        prefixes=given.prefixes,
        long_len=given.long_len,
        long_every=given.long_every,
        turns=given.turns,
        think_s=given.think,
        length_scale=given.length_scale,
        block_tokens=given.block_tokens,
    )
    ids = (int(first), int(last))
    return Asked(given.workload, shape, given.seed, given.chat, ids, given.trace, given.minutes, given.speed)


def options(given: argparse.Namespace) -> Options:
    """What every request has besides its prompt. Raises BadRequest."""
    try:
        extra = json.loads(given.extra_body)
    except ValueError as error:
        raise BadRequest(f"--extra-body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise BadRequest('--extra-body takes a JSON object, like {"top_p": 0.9}')
    return Options(not given.no_ignore_eos, tuple(extra.items()))


def configuration(given: argparse.Namespace) -> dict[str, Any]:
    """The flags that make a load what it is: equal ones make equal requests."""
    kept = {name: value for name, value in vars(given).items() if name not in NO_CONFIGURATION}
    return {name: value.name if isinstance(value, Path) else value for name, value in kept.items()}


def shown_url(url: str) -> str:
    """A URL without its password."""
    return access.shown(url) if url.startswith(NATS) else url


def _numbers(text: str, flag: str) -> list[float]:
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        raise BadRequest(f"{flag} takes a number, or several with commas, not {text!r}") from None
    if any(math.isnan(number) for number in numbers):
        raise BadRequest(f"{flag} takes numbers, not {text!r}")
    return numbers
