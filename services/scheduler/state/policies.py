"""The policies: pure functions with a name, chosen in the configuration.

    policy = "order=vtc,batching=mixed,reservation=on_demand,victim=latest,routing=ttft,tier=tiered,roles=…"

order        which sequence group of a class is admitted next?            vtc, fcfs
batching     what does the next step of an executor consist of?           mixed, prefill_first, decode_first
reservation  how many blocks are reserved for a sequence at admission?    on_demand, foreseen, reserve
victim       which sequence is preempted first when blocks are short?     latest, cheapest
routing      which of the executors that can run a group gets it?         ttft, room
tier         is an unheld block without a copy below copied or dropped?   tiered
roles        how many executors only prefill, and leave decodes to others? colocated, adaptive
sessions     how likely does a session return that pauses?                learned, off

A name with a colon, `module:function`, is a policy of your own; the scheduler must be able to import it.
loadtest/policies.py has baselines for comparison. The signatures:

order        (arrival_us: int, number: int, served_tokens: int) -> tuple[int, ...]: arrival and number of a
             waiting group, and the VTC counter of its client. The least is admitted first. It must not fall
             while a group waits
batching     (view: BatchingView) -> StepShare
reservation  (tokens: int, max_length: int, block_tokens: int) -> int, blocks; `tokens` are known now,
             `max_length` is the most there may ever be
victim       (candidates: list[Sequence]) -> list[Sequence], the first victim first
routing      (options: list[RoutingOption]) -> RoutingOption, one of them; there are two or more
tier         (view: OffloadView) -> str: copy, drop or keep a block
roles        (view: RolesView) -> int
sessions     (view: PauseView) -> int, per mille

A policy changes the code around it through traits (`with_traits`, see Policy): no other code compares names
of policies.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

from services.scheduler.state.requests import Sequence
from shared.errors import SetupError
from shared.kv_blocks import blocks_for

KINDS = {  # names, arguments
    "order": (("vtc", "fcfs"), ("arrival_us", "number", "served_tokens")),
    "batching": (("mixed", "prefill_first", "decode_first"), ("view",)),
    "reservation": (("on_demand", "foreseen", "reserve"), ("tokens", "max_length", "block_tokens")),
    "victim": (("latest", "cheapest"), ("candidates",)),
    "routing": (("ttft", "room"), ("options",)),
    "tier": (("tiered",), ("view",)),
    "roles": (("colocated", "adaptive"), ("view",)),
    "sessions": (("learned", "off"), ("view",)),
}
OLD_KINDS = {"rank": "order", "fill": "batching", "kv": "reservation", "place": "routing"}  # accepted in 0.1
BASELINES = "loadtest.policies"
MOVED = {  # to BASELINES; accepted without the module in 0.1
    "batching": ("static",), "reservation": ("greedy", "by_chunk"), "tier": ("swap", "recompute", "forget"),
    "routing": ("prefix",),
}  # fmt: skip
STALL_US = 1_000_000  # how long decodes wait for prompts: see prefill_first
HARM_PM = 2_000  # what the delay of another's token counts: see ttft
HYSTERESIS_PM = 200  # of the costs of two splits: see adaptive
LONGER_PM = 100  # what half of a tail may cost: see adaptive
EAGER_COPY_PM = 250  # least chance of reuse for an eager copy: less likely ones would evict better blocks

log = logging.getLogger("headrace.scheduler")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_traits(*names: str) -> Callable[[_Function], _Function]:
    """Mark a policy with traits: attributes that Policy reads."""

    def mark(function: _Function) -> _Function:
        function.__dict__.update(dict.fromkeys(names, True))
        return function

    return mark


def _trait(kind: str, name: str) -> property:
    @cache  # each decision reads some
    def has_trait(policy: str) -> bool:
        return getattr(load(kind, policy), name, False)

    return property(lambda policy: has_trait(getattr(policy, kind)))


@dataclass(frozen=True, slots=True)
class Policy:
    """The names in force, and the traits of their functions. `policy.function("order")` is the function."""

    order: str = "vtc"
    batching: str = "mixed"
    reservation: str = "on_demand"
    victim: str = "latest"
    routing: str = "ttft"
    tier: str = "tiered"
    roles: str = "colocated"
    sessions: str = "learned"

    def function(self, kind: str) -> Callable[..., Any]:
        """The function of a kind."""
        return load(kind, getattr(self, kind))

    fair = _trait("order", "fair")  # clients take turns
    closed = _trait("batching", "closed")  # no sequence joins a batch that has started
    greedy = _trait("reservation", "greedy")  # no headroom for growth, and no sequence is spared or pinned
    looks_ahead = _trait("reservation", "looks_ahead")  # headroom for known growth: see ../preemption.py
    priced = _trait("victim", "priced")  # candidates have a price
    no_tiers = _trait("tier", "no_tiers")  # no copies to tiers and no lookups
    forecasts = _trait("routing", "forecasts")  # options have predictions: see ../admission.py
    forgets = _trait("tier", "forgets")  # no block of a preempted sequence stays cached
    leaves = _trait("tier", "leaves")  # a copied block leaves the device at once
    no_sessions = _trait("sessions", "no_sessions")  # every block has the chance of its tenant's prompts
    ahead = _trait("tier", "ahead")  # blocks of the next victim are copied before its preemption

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def parse(text: str, base: Policy | None = None) -> Policy:
    """A policy from `kind=name,...`; kinds that are not named stay as in `base`. Raises SetupError for a kind
    or a name that does not exist."""
    policy = base or Policy()
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, name = part.partition("=")
        if kind in OLD_KINDS:
            log.warning("policy %s=%s: write %s=%s", kind, name, OLD_KINDS[kind], name)
            kind = OLD_KINDS[kind]
        if kind not in KINDS:
            raise SetupError(f"setting policy: there is no {kind!r}, only {', '.join(KINDS)}")
        load(kind, name)
        if name in MOVED.get(kind, ()):
            log.warning("policy %s=%s: write %s=%s:%s", kind, name, kind, BASELINES, name)
        policy = replace(policy, **{kind: name})
    return policy


@cache
def load(kind: str, name: str) -> Callable[..., Any]:
    """The function of a kind by its name. Raises SetupError."""
    (names, arguments), module = KINDS[kind], __name__
    if name in MOVED.get(kind, ()):
        module = BASELINES
    elif ":" in name:
        module, _, name = name.partition(":")
    elif name not in names:
        raise SetupError(
            f"setting policy: {kind}={name!r} is none of {', '.join(names)}, nor module:function"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SetupError(f"setting policy: {kind}={module}:{name} cannot be loaded: {error}") from error
    if not callable(found) or not _can_take(found, len(arguments)):
        raise SetupError(
            f"setting policy: {kind}={module}:{name} is no function of ({', '.join(arguments)}): see "
            f"{__name__.replace('.', '/')}.py"
        )
    return found  # type: ignore[no-any-return]  # each kind has its own signature


def _can_take(function: Callable[..., Any], arguments: int) -> bool:
    """True unless its signature shows that it cannot be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:
        return True  # a builtin without a signature
    return True


@with_traits("fair")
def vtc(arrival_us: int, number: int, served_tokens: int) -> tuple[int, ...]:
    """The client that has been served least, then arrival: see VirtualTokenCounter in waiting_queue.py."""
    return served_tokens, arrival_us, number


def fcfs(arrival_us: int, number: int, served_tokens: int) -> tuple[int, ...]:
    """First come, first served."""
    return arrival_us, number


class BatchingView(NamedTuple):
    """The input of a batching policy. A tuple, since one is made for each step."""

    decodes: int  # rows that could decode now
    prompts: int  # sequences with prompt tokens to compute
    stalled_us: int  # since the last step that decoded, 0 when nothing decodes


class StepShare(NamedTuple):
    """The parts of a step. `prompts`: none; one block; the chunk budget; or as much as fits in a step."""

    decodes: bool
    prompts: Literal["none", "block", "budget", "whole"]


def mixed(view: BatchingView) -> StepShare:
    """Decodes, and prompt chunks that keep the strictest class's time between tokens: stall-free batching
    (Sarathi-Serve, Agrawal et al. 2024)."""
    return StepShare(True, "budget")


def prefill_first(view: BatchingView) -> StepShare:
    """Whole prompts alone, until decodes have waited for STALL_US: best time to first token, worst time
    between tokens."""
    if view.prompts and view.stalled_us < STALL_US:
        return StepShare(not view.prompts, "whole")
    return StepShare(True, "none" if view.decodes else "whole")


def decode_first(view: BatchingView) -> StepShare:
    """Decodes, and one block of prompt in each step with decodes: best time between tokens, worst time to
    first token."""
    return StepShare(True, "block" if view.decodes else "whole")


def on_demand(tokens: int, max_length: int, block_tokens: int) -> int:
    """Blocks up to the next token. The sequence takes more later, and may be preempted for lack of one."""
    return blocks_for(min(tokens + 1, max_length), block_tokens)


@with_traits("looks_ahead")
def foreseen(tokens: int, max_length: int, block_tokens: int) -> int:
    """As `on_demand`; for a sequence that only its length ends, admission also keeps headroom for its whole
    growth, so that no sequence is preempted for it: see ../preemption.py."""
    return on_demand(tokens, max_length, block_tokens)


def reserve(tokens: int, max_length: int, block_tokens: int) -> int:
    """All blocks that it may ever need: it is never preempted, and unused blocks lie idle."""
    return blocks_for(max_length, block_tokens)


def latest(candidates: list[Sequence]) -> list[Sequence]:
    """The latest arrival of the lowest class. In simulation, rules by cost gained no goodput over this one,
    and were worse in some scenarios (docs/design/victims.md); headroom at admission removed the stalls."""
    return sorted(candidates, key=lambda s: (-s.level, -s.request.arrival_us, -s.seq))


@with_traits("priced")
def cheapest(candidates: list[Sequence]) -> list[Sequence]:
    """The sequence of the lowest class whose preemption costs least for each block that it frees; if equal,
    the latest arrival: see `_price` in ../preemption.py."""
    return sorted(candidates, key=lambda s: (-s.level, s.turn.price, -s.request.arrival_us, -s.seq))


class RoutingOption(NamedTuple):
    """An executor that can start a group. A tuple, since one is made at each admission."""

    source: str
    hit_tokens: int  # tokens of the prompt in this executor's prefix cache
    room_blocks: int  # free and unreserved, now or soon
    running: int
    empty_blocks: int = 0  # free blocks without content
    ttft_us: int = 0  # predicted, 0 while unknown: only for a policy with the trait `forecasts`
    harm_us: int = 0  # likewise: see ../admission.py
    tbt_pm: int = 0  # likewise


@with_traits("forecasts")
def ttft(options: list[RoutingOption]) -> RoutingOption:
    """The least predicted time to the first token and part of the delay of the rows that decode there. Rows
    that are far faster than they must be can wait: their delay counts HARM_PM times the square of `tbt_pm`.
    If equal, the most blocks without content: cached prefixes of others stay. While an executor has no
    prediction, the fewest running sequences, then the most cached tokens."""
    if not all(option.ttft_us for option in options):
        return min(options, key=lambda o: (o.running, -o.hit_tokens, -o.room_blocks, o.source))
    return min(options, key=lambda o: (_cost_us(o), -o.empty_blocks, o.running, o.source))


def _cost_us(option: RoutingOption) -> int:
    return option.ttft_us + option.harm_us * HARM_PM * option.tbt_pm**2 // 1_000_000_000


def room(options: list[RoutingOption]) -> RoutingOption:
    """The most room."""
    return max(options, key=lambda o: (o.room_blocks, -o.running, o.source))


@dataclass(frozen=True, slots=True)
class OffloadView:
    """The input of a tier policy: a dirty or stable block, and the state of its executor."""

    preempted: bool  # its sequence will resume; else it has ended
    pressed: bool  # free blocks are needed
    idle: bool  # no copy is in flight
    chance_pm: int  # chance that a sequence will use its content, per mille
    copy_us: int  # predicted, with half of the wait
    recompute_us: int  # predicted; 0: not known yet


@with_traits("ahead")
def tiered(view: OffloadView) -> str:
    """By cost: keep a block until free blocks are needed; then copy it down if that is cheaper than computing
    it again, else drop it. A block that is likely to be used again is copied earlier, on an idle link."""
    known = view.recompute_us > 0
    worth_copying = view.recompute_us * view.chance_pm > 1000 * view.copy_us
    if view.pressed:
        return "copy" if worth_copying or (view.preempted and not known) else "drop"
    eager = view.idle and not view.preempted and view.chance_pm >= EAGER_COPY_PM
    return "copy" if eager and (worth_copying or not known) else "keep"


class RolesOption(NamedTuple):
    """What a number of executors that only prefill is predicted to cost, us."""

    prefills: int
    itl_us: int  # mean time between two tokens
    tail_us: int  # a high percentile of that
    ttft_us: int  # of a prompt of the usual length; very high if the demand does not fit


class RolesView(NamedTuple):
    """The input of a roles policy: each number of prefilling executors, from 0 on. No options while nothing
    decodes or too little is known."""

    executors: int
    prefills: int  # now
    options: tuple[RolesOption, ...]


def colocated(view: RolesView) -> int:
    """Each executor prefills and decodes."""
    return 0


def adaptive(view: RolesView) -> int:
    """Apart where that makes the tail of the time between tokens shorter by HYSTERESIS_PM, and neither its
    mean nor the time to the first token longer; where the tail is halved, both may be longer by LONGER_PM.
    Few prefill, so that many decode. A split that is in force stays until it is worse by HYSTERESIS_PM."""
    if not view.options:
        return 0
    together, slack = view.options[0], 1_000 + HYSTERESIS_PM

    def is_worthwhile(o: RolesOption) -> bool:
        kept = o.prefills == view.prefills
        most, gain = (slack, 1_000) if kept else (1_000, slack)
        if not kept and 2 * o.tail_us <= together.tail_us:
            most += LONGER_PM
        return (
            o.tail_us * gain <= together.tail_us * 1_000
            and o.itl_us * 1_000 <= together.itl_us * most
            and o.ttft_us * 1_000 <= together.ttft_us * most
        )

    able = [option.prefills for option in view.options[1:] if is_worthwhile(option)]
    return view.prefills if view.prefills in able else min(able, default=0)


class PauseView(NamedTuple):
    """The input of a sessions policy: a session whose last answer has ended. A tuple, since one is made for
    each group of blocks that is judged."""

    idle_us: int
    returns_pm: int  # the share of such pauses that end with a request
    lasts_pm: int  # of those, the share that is longer than `idle_us`


def learned(view: PauseView) -> int:
    """By Bayes: the longer it has been idle, compared with such pauses, the less likely it returns."""
    comes = view.returns_pm * view.lasts_pm
    return comes * 1_000 // max(comes + (1_000 - view.returns_pm) * 1_000, 1)


@with_traits("no_sessions")
def off(view: PauseView) -> int:
    """Nothing is learned of sessions."""
    return 0
