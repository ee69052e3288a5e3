"""The policies: pure functions, each known by a name, each replaceable in the configuration. They are in
`policies/`, a file for each kind.

    policy = "rank=vtc,fill=mixed,kv=on_demand,victim=latest,place=prefix,tier=tiered"

rank    who is admitted next                    ranks.py        vtc, fcfs
fill    what a step is made of                  fills.py        mixed, prefill_first, decode_first, static
kv      how many blocks a sequence is promised  promises.py     on_demand, foreseen, greedy, by_chunk,
                                                                reserve
victim  who is paused when blocks are short     victims.py      latest, least_computed
place   which executor runs a unit              places.py       prefix, room
tier    what becomes of blocks without a copy   tiers.py        tiered, swap, recompute, forget
A name with a colon, `module:function`, is a policy of your own; it must be importable by the scheduler.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from services.scheduler.policies.promises import GREEDY
from shared.errors import SetupError

WHERE = {  # module, names, arguments
    "rank": ("services.scheduler.policies.ranks", ("vtc", "fcfs"), ("unit", "served_tokens")),
    "fill": (
        "services.scheduler.policies.fills",
        ("mixed", "prefill_first", "decode_first", "static"),
        ("view",),
    ),
    "kv": (
        "services.scheduler.policies.promises",
        ("on_demand", "foreseen", "greedy", "by_chunk", "reserve"),
        ("tokens", "max_length", "block_tokens"),
    ),
    "victim": ("services.scheduler.policies.victims", ("latest", "least_computed"), ("candidates",)),
    "place": ("services.scheduler.policies.places", ("prefix", "room"), ("options",)),
    "tier": ("services.scheduler.policies.tiers", ("tiered", "swap", "recompute", "forget"), ("view",)),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """The names in force. `policy.the("rank")` is the function."""

    rank: str = "vtc"
    fill: str = "mixed"
    kv: str = "on_demand"
    victim: str = "latest"
    place: str = "prefix"
    tier: str = "tiered"

    def the(self, kind: str) -> Callable[..., Any]:
        """The function of a kind."""
        return load(kind, getattr(self, kind))

    @property
    def greedy(self) -> bool:
        """Whether admission keeps nothing free for growth, and nobody is spared or pinned."""
        return self.kv in GREEDY

    @property
    def foresees(self) -> bool:
        """Whether admission looks ahead along the growth of sequences whose length is known."""
        return self.kv == "foreseen"

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def parse(text: str, base: Policy | None = None) -> Policy:
    """A policy from `kind=name,...`; kinds that are not named stay as in `base`. Raises SetupError for a kind
    or a name that does not exist."""
    policy = base or Policy()
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, name = part.partition("=")
        if kind not in WHERE:
            raise SetupError(f"setting policy: there is no {kind!r}, only {', '.join(WHERE)}")
        load(kind, name)
        policy = replace(policy, **{kind: name})
    return policy


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    """True when it can be called with so many arguments, as far as can be told."""
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:
        return True  # of a builtin that does not say
    return True


@cache
def load(kind: str, name: str) -> Callable[..., Any]:
    """The function of a kind by its name. Raises SetupError."""
    module, names, _ = WHERE[kind]
    if ":" in name:
        module, _, name = name.partition(":")
    elif name not in names:
        raise SetupError(
            f"setting policy: {kind}={name!r} is none of {', '.join(names)}, nor module:function"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SetupError(f"setting policy: {kind}={module}:{name} cannot be loaded: {error}") from error
    arguments = WHERE[kind][2]
    if not callable(found) or not _takes(found, len(arguments)):
        raise SetupError(
            f"setting policy: {kind}={module}:{name} is no function of ({', '.join(arguments)}): see "
            f"{WHERE[kind][0].replace('.', '/')}.py"
        )
    return found  # type: ignore[no-any-return]  # each kind has its own signature, see its file
