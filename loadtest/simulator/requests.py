"""The requests of clients in a virtual world, and their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.messages import Ints, Tokenized, ints

STOP_ID, TEXT_ID = 2, 7
MODEL = "sim"
PROCESSORS = ('{"name": "virtual", "args": {}}',)  # of a host-fed request
HOUR_US = 3_600_000_000
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. `prompt` may be a callable, so that the prompts of an hour do not all exist at once."""

    request: str
    arrival_us: int
    prompt: Ints | Callable[[], Ints]
    output_tokens: int  # it ends itself with a stop id after these, unless max_tokens ends it before
    max_tokens: int
    slo_class: str = "standard"
    tenant: str = "public"
    host_fed: bool = False
    n: int = 1
    timeout_us: int = HOUR_US
    session: Mapping[str, Any] = field(default_factory=dict)  # fields of Tokenized: its session and hints
    calls: tuple[str, ...] = ()  # the functions that its answer calls


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. With `clients`, a closed loop: so many clients at once, each of which
    sends the next request when its last has ended, independent of `arrival_us`."""

    requests: tuple[SimRequest, ...]
    clients: int = 0


def plain_prompt(number: int, tokens: int) -> Callable[[], Ints]:
    """A prompt of `tokens` ids that shares no prefix with one of another number."""

    def make() -> Ints:
        prompt = ints([TEXT_ID]) * tokens
        prompt[0] = number % MAX_TOKEN_ID
        return prompt

    return make


def tokenized(asked: SimRequest, wall_us: int) -> Tokenized:
    """The message of a tokenizer that has validated the request."""
    prompt = asked.prompt() if callable(asked.prompt) else asked.prompt
    return Tokenized(
        request=asked.request,
        attempt=1,
        tenant=asked.tenant,
        model=MODEL,
        inbox=f"inbox.{asked.request}",
        slo_class=asked.slo_class,
        timeout_us=asked.timeout_us,
        received_wall_us=wall_us,
        n=asked.n,
        max_tokens=asked.max_tokens,
        stop_ids=ints([STOP_ID]),
        tokens=prompt,
        processors=PROCESSORS if asked.host_fed else (),
        **asked.session,
    )
