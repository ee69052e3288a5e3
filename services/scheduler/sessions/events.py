"""The events of requests, as sessions see them: what `SessionEvents` in ../state/state.py does nothing for.

    request ──▶ on_request: which session it continues, and the keys that it shares with it
            ──▶ on_admitted: what a new prompt of a session has left out is dead
            ──▶ on_closed: the keys and tips of the session are those of the answer now
            ──▶ on_ended: the session is idle; which tool runs

Dead blocks are forgotten on the device and in L1, some at each event. Pauses teach only what the scheduler
has seen whole: none that began before peers or messages were lost.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from services.scheduler import prefix_cache
from services.scheduler.kv_tiers.lookups import MAX_KEYS
from services.scheduler.sessions import report, rise, verbs
from services.scheduler.sessions.match import Prefixes
from services.scheduler.sessions.pauses import USER, LearnedPauses
from services.scheduler.sessions.table import Outcomes, Session, Table
from services.scheduler.state.block_pool import end_kept
from services.scheduler.state.policies import PauseView
from services.scheduler.state.requests import Request, Sequence
from services.scheduler.state.state import Executor, SessionEvents, State
from shared.kv_blocks import KEY_BYTES
from shared.messages import KvForget, KvTouch, SessionAnswer, SessionVerb

LATE_US = 30_000_000  # a session that is idle for so long counts as one that does not return, until it does
TOOL_LATE_US = 120_000_000  # likewise while a tool runs
OVER_PM = 10  # a session that returns less likely than this has ended
OVER_SEEN = 16  # outcomes of such pauses, before one of them ends a session
MOST_OLD_TIPS = 2  # of the turn before the last one
DROPPED_AT_ONCE = 512  # dead blocks that are forgotten at each event
LOOK_US, LOOKED_AT = 50_000, 8  # how often late sessions are looked at, and how many
TOUCH_US = 10_000_000  # between two moves of a session's blocks to the warm end of L1
BESIDE = 4  # a prompt of which less than 1 / BESIDE is the session's, as a title is. The chain may go on
TOUCH_PM = 500  # for a session that is so likely to return
BRANCH_TURNS, LEFT_SHARE = 2, 10  # after so many turns of a branch the old one has this part of its chance
LEFT_PAUSES, LEFT_US = 10, 1_000_000  # a sub-agent idle for so many of its pauses, and so long, may be over


@dataclass(slots=True)
class Sessions(SessionEvents):
    """See the top of this file."""

    learns: bool = True
    table: Table = field(default_factory=Table)
    pauses: LearnedPauses = field(default_factory=LearnedPauses)
    of_request: dict[tuple[str, str], Session] = field(default_factory=dict)
    # The chain that a request leaves, and the turns of that chain by then.
    parents: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    young: OrderedDict[str, None] = field(default_factory=OrderedDict)  # idle and not late, oldest first
    working: OrderedDict[str, None] = field(default_factory=OrderedDict)  # likewise, while a tool runs
    late: OrderedDict[str, None] = field(default_factory=OrderedDict)  # the others, the next to look at first
    answered: OrderedDict[str, None] = field(default_factory=OrderedDict)  # idle sub-agents, likewise
    dead: deque[bytes] = field(default_factory=deque)  # keys to forget
    look_us: int = 0  # when late ones are looked at next
    cut_us: int = 0  # pauses that began before teach nothing
    pressed_us: int = 0  # when L1 last evicted something
    outcomes: Outcomes = field(default_factory=Outcomes)

    def on_request(self, state: State, request: Request) -> None:
        tokenized, head = request.tokenized, request.sequences[0]
        served = state.by_model.get(tokenized.model)
        if served is None:
            return
        keyed, found, blocks = prefix_cache.keyed_of(served.executors[0], head), "", 0
        if keyed in self.table.tips:
            prefixes = Prefixes(keyed, head.tokens, (len(head.tokens) - 1) // keyed[1])
            found, blocks = prefixes.find(self.table)
        before = self.table.by_name.get(found)
        if before is not None:
            head.keyed = keyed
            head.keys = before.first_keys(blocks)
        session = before if not tokenized.session else self.table.by_name.get(tokenized.session)
        goes_on = (
            before is not None and not before.running and blocks >= min(t.blocks for t in before.tips[-2:])
        )
        if tokenized.session and (session is None or session.keyed != keyed):
            if session is not None:
                self._end(session)
            if before is not None and goes_on and not before.has_id:
                session = self._name(before, request)
            else:
                session = self._begin(
                    Session(tokenized.session, tokenized.tenant, keyed, tokenized.parent, True, True)
                )
        elif session is None:
            return
        elif not session.has_id and not goes_on:  # a second sample, or a branch of an earlier turn
            self.parents[request.key] = session.name, session.turns
            return
        self._continue(state, request, session, blocks)

    def _continue(self, state: State, request: Request, session: Session, blocks: int) -> None:
        """A request of a session has come: its pause is over."""
        paused_us = state.now_us - session.idle_since_us if session.turns else 0
        self._is_not_idle(session)
        session.came_us, session.is_left = state.now_us, False
        session.paused_us += paused_us
        self._count_rise(state, session)
        if session.turns and not session.running and session.idle_since_us > self.cut_us:
            self.pauses.add(session.tenant, session.tool, paused_us, was_lost=session.is_late)
        self.table.wake(session)
        session.is_proven, session.is_late = True, False
        session.is_final |= request.tokenized.session_final
        session.running += 1
        self.of_request[request.key] = session
        known_by = "id" if session.has_id else "tip"
        request.sequences[0].record_decision(
            state.now_us,
            "session",
            f"{session.name} by its {known_by}, after {session.tool or 'an answer'}",
            turn=session.turns + 1,
            paused_us=paused_us,
            known_blocks=blocks,
        )

    def _count_rise(self, state: State, session: Session) -> None:
        """Blocks that came up for a session are used if it returns soon."""
        if session.risen_blocks and state.now_us - session.risen_us > rise.UNUSED_US:
            self.outcomes.wasted += session.risen_blocks
        session.risen_blocks = 0

    def _name(self, session: Session, request: Request) -> Session:
        """A request names the session that its prompt continues: a chain of responses has a name from its
        second on."""
        self._is_not_idle(session)
        self.table.rename(session, request.tokenized.session)
        session.has_id, session.parent = True, request.tokenized.parent or session.parent
        return session

    def _begin(self, session: Session) -> Session:
        for over in self.table.add(session):
            self._drop(over)
        return session

    def on_admitted(self, state: State, executor: Executor, sequence: Sequence) -> None:
        session = self.of_request.get(sequence.request.key)
        if session is None:
            return
        session.had_blocks = sequence.computed // executor.hello.block_tokens
        if not session.has_id or session.running > 1:
            return
        if session.keyed != sequence.keyed:
            return  # another kind of executor
        common = session.common_blocks(sequence.keys)
        if BESIDE * common < len(sequence.keys):
            return
        if common < session.blocks and (count := self._bury(session, common)):
            self.outcomes.superseded += 1
            why = "the new prompt has left out the end of the one before"
            sequence.record_decision(state.now_us, "superseded", why, blocks=count)

    def on_closed(self, state: State, executor: Executor, sequence: Sequence) -> None:
        request = sequence.request
        if sequence is not request.sequences[0] or sequence.vector:
            return
        prefix_cache.extend_keys(executor, sequence)
        size = executor.hello.block_tokens
        full = min(min(sequence.computed, len(sequence.tokens) - 1) // size, len(sequence.keys))
        session = self.of_request.get(request.key)
        if session is None:
            parent, parent_turns = self.parents.pop(request.key, ("", -1))
            if not full or (request.tokenized.slo_class == "batch" and not parent):
                return
            digest = Prefixes(sequence.keyed, sequence.tokens, full).tip(full).digest
            name = f"{digest.hex()[:24]}{sequence.seq:08x}"
            session = self._begin(
                Session(name, sequence.tenant, sequence.keyed, parent, is_proven=bool(parent), running=1)
            )
            session.parent_turns = parent_turns
            self.of_request[request.key] = session
        if session.keyed != sequence.keyed:
            return  # another kind of executor has computed it
        seqs = [each.seq for each in request.sequences]
        if session.common_blocks(sequence.keys[:full]) == full < session.blocks:
            self.table.set_seqs(session, [*session.seqs[-1:], *seqs])  # it ended before the end of its prompt
            return
        self.table.set_seqs(session, seqs)
        self._set_keys(session, sequence, full)

    def _set_keys(self, session: Session, sequence: Sequence, full: int) -> None:
        """The keys and tips of the session are those of this prompt with its answer."""
        size = sequence.keyed[1]
        prefixes = Prefixes(sequence.keyed, sequence.tokens, full)
        ends = dict.fromkeys(min(tokens // size, full) for tokens in (sequence.prompt_tokens, full * size))
        common = session.common_blocks(sequence.keys[:full])  # a tip must be on the chain of the keys
        kept = [t for t in session.tips[-MOST_OLD_TIPS:] if t.blocks <= common and t.blocks not in ends]
        self.table.set_tips(session, [*kept, *(prefixes.tip(blocks) for blocks in ends if blocks)])
        self.table.set_keys(session, b"".join(sequence.keys[:full]))
        for over in self.table.over_all():
            self._drop(over)

    def on_ended(self, state: State, request: Request) -> None:
        self.parents.pop(request.key, None)
        session = self.of_request.pop(request.key, None)
        if session is None:
            return
        session.running -= 1
        session.turns += 1
        if session.turns > 1:
            self._count_return(session, request.sequences[0])
        if session.turns == BRANCH_TURNS:
            self._leave(session)
        if session.running:
            return
        if session.is_final:
            self.end(session)
            return
        calls = request.calls
        session.is_proven |= bool(calls)
        session.tool = self.pauses.slowest(session.tenant, calls)
        session.idle_since_us = session.touched_us = state.now_us
        self.table.rest(session)
        (self.working if session.tool else self.young)[session.name] = None
        if request.tokenized.parent and not session.tool:
            self.answered[session.name] = None
        if session.kept_until_us:
            verbs.fit(state, self.table, session)  # it has grown
            verbs.rank(state, session)
        if request.tokenized.keep_us:
            verbs.keep(state, self.table, session, request.tokenized.keep_us)

    def _leave(self, branch: Session) -> None:
        """The chain that the branch has left is unlikely to go on if it has had no turn since."""
        parent = self.table.by_name.get(branch.parent)
        if parent is not None and not parent.running and parent.turns == branch.parent_turns:
            parent.is_left = True

    def _count_return(self, session: Session, head: Sequence) -> None:
        """Count where most of a prompt came from."""
        if 2 * session.had_blocks * session.keyed[1] >= head.prompt_tokens:
            self.outcomes.device += 1
        elif 2 * head.cached_tokens >= head.prompt_tokens:
            self.outcomes.below += 1
        else:
            self.outcomes.computed += 1

    def end(self, session: Session) -> int:
        """No request of the session follows: its own blocks are dead. Returns how many. One that runs ends
        with its request."""
        if session.running:
            session.is_final = True
            return 0
        count = self._bury(session, 0)
        self._end(session)
        return count

    def _end(self, session: Session) -> None:
        self.table.remove(session)
        self._drop(session)

    def _drop(self, session: Session) -> None:
        """The table has it no longer."""
        self._is_not_idle(session)
        if session.running:
            self.of_request = {key: of for key, of in self.of_request.items() if of is not session}

    def _is_not_idle(self, session: Session) -> None:
        self.young.pop(session.name, None)
        self.working.pop(session.name, None)
        self.late.pop(session.name, None)
        self.answered.pop(session.name, None)

    def _bury(self, session: Session, common: int) -> int:
        """Its blocks from `common` on that are in no other session are dead. Returns how many."""
        first = max(common, self.table.own_from(session))
        dead = session.keys[first * KEY_BYTES :]
        if dead:
            self.dead.append(dead)
        self.table.set_tips(session, [tip for tip in session.tips if tip.blocks <= common])
        self.table.set_keys(session, session.keys[: common * KEY_BYTES])
        self.outcomes.dead_blocks += len(dead) // KEY_BYTES
        return len(dead) // KEY_BYTES

    def on_event(self, state: State) -> None:
        if self.dead:
            self._forget(state)
        for idle, late_us in (self.young, LATE_US), (self.working, TOOL_LATE_US):
            while idle:
                session = self.table.by_name[next(iter(idle))]
                if state.now_us - session.idle_since_us < late_us:
                    break
                del idle[session.name]
                self._lose(session)
        if state.now_us >= self.look_us:
            self.look_us = state.now_us + LOOK_US
            for executor in state.executors.values():
                end_kept(executor.pool, state.now_us)
            for _ in range(min(LOOKED_AT, len(self.late))):
                self._look_at(state, self.table.by_name[self.late.popitem(last=False)[0]])
            for name in list(islice(self.answered, LOOKED_AT)):
                self.answered.move_to_end(name)
                if self._is_used_up(state, self.table.by_name[name]):
                    self.outcomes.over += 1
                    self.end(self.table.by_name[name])

    def _lose(self, session: Session) -> None:
        """It has not returned so far."""
        self.late[session.name] = None
        session.is_late = True
        if session.idle_since_us > self.cut_us:
            self.pauses.lose(session.tenant, session.tool)

    def _is_used_up(self, state: State, session: Session) -> bool:
        """The parent came back with the answer of a sub-agent, which has been idle for long by its own pauses
        before. One that runs a tool may go on beside its parent."""
        parent = self.table.by_name.get(session.parent)
        if parent is None or parent.tenant != session.tenant or parent.came_us <= session.idle_since_us:
            return False
        pauses = session.turns - 1
        usual_us = (
            session.paused_us // pauses if pauses else self.pauses.quantile_us(session.tenant, USER, 500)
        )
        long_us = max(LEFT_PAUSES * usual_us, LEFT_US)
        return state.now_us - session.idle_since_us >= long_us and session.kept_until_us <= state.now_us

    def _look_at(self, state: State, session: Session) -> None:
        """End a late session that hardly ever returns; keep the blocks of one that does warm in L1."""
        again_pm, kept = self.again_pm(state, session), session.kept_until_us > state.now_us
        seen = self.pauses.seen(session.tenant, session.tool)
        if again_pm < OVER_PM and session.is_proven and not kept and seen >= OVER_SEEN:
            self.outcomes.over += 1
            self.end(session)
            return
        self.late[session.name] = None
        if kept and state.now_us - session.ranked_us >= verbs.RANKED_US // 3:
            verbs.rank(state, session)
        warm = kept or (session.is_proven and again_pm >= TOUCH_PM)
        if warm and state.now_us - max(session.touched_us, 0) >= TOUCH_US > state.now_us - self.pressed_us:
            session.touched_us = state.now_us
            if kept:
                verbs.fit(state, self.table, session)  # other tenants may have come
            for first in range((session.blocks - 1) // MAX_KEYS * MAX_KEYS, -1, -MAX_KEYS):  # the head last
                keys = session.keys[first * KEY_BYTES : (first + MAX_KEYS) * KEY_BYTES]
                _send_below(state, KvTouch(keys=keys))

    def _forget(self, state: State) -> None:
        """Forget some dead blocks, the last of a session first, on the device and below."""
        joined = self.dead.popleft()
        first = max(len(joined) - DROPPED_AT_ONCE * KEY_BYTES, 0)
        if first:
            self.dead.appendleft(joined[:first])
        _send_below(state, KvForget(keys=joined[first:]))
        keys = [joined[at : at + KEY_BYTES] for at in range(first, len(joined), KEY_BYTES)]
        for executor in state.executors.values():
            pool = executor.pool
            for key in reversed(keys):
                block = pool.block_of.get(key)
                if block is not None and not pool.refs[block]:
                    pool.forget(block)

    def chance_pm(self, state: State, seq: int, at: int, tenant: str) -> int:
        session = self.table.by_seq.get(seq)
        if session is None or not session.is_proven:
            return state.reuse.chance_pm(tenant)
        chance_pm = 1_000 if session.running else self.again_pm(state, session)
        if at < self.table.own_from(session):  # another session may return, too
            return max(chance_pm, state.reuse.chance_pm(tenant))
        return chance_pm

    def again_pm(self, state: State, session: Session) -> int:
        """The chance that an idle session returns."""
        if session.kept_until_us > state.now_us:
            return 1_000
        idle_us = state.now_us - session.idle_since_us
        of = session.tenant, session.tool
        view = PauseView(idle_us, self.pauses.returns_pm(*of), self.pauses.lasts_pm(*of, idle_us))
        again_pm = int(state.limits.policy.function("sessions")(view))
        return again_pm // LEFT_SHARE if session.is_left else again_pm

    def on_cut(self, state: State) -> None:
        self.cut_us = state.now_us

    def on_evicted(self, state: State) -> None:
        self.pressed_us = state.now_us

    def on_verb(self, state: State, verb: SessionVerb) -> SessionAnswer:
        session = self.table.by_name.get(verb.session)
        if session is None or session.tenant != verb.tenant:
            return SessionAnswer(state="unknown")
        answer = report.row(state, self.pauses, session)
        if verb.verb == "keep":
            kept = verbs.keep(state, self.table, session, verb.keep_us)
            will, why = ("keep", "") if kept else ("nothing", verbs.OVER_SHARE)
            return replace(answer, will=will, why=why, kept_us=max(session.kept_until_us - state.now_us, 0))
        if verb.verb == "prefetch":
            blocks, why = rise.prefetch(state, report.places(state, session)[0], session)
            self.outcomes.prefetched += blocks
            if blocks:
                session.risen_blocks, session.risen_us = blocks, state.now_us
            return replace(answer, will="nothing" if why else "prefetch", why=why)
        if verb.verb == "release":
            for each in verbs.tree(self.table, session) if verb.tree else [session]:
                self.outcomes.released += 1
                self.end(each)
            return replace(answer, will="release")
        return answer

    def rows(self, state: State, tenant: str, most: int) -> list[SessionAnswer]:
        found = report.proven(self.table, tenant)[:most]
        return [report.row(state, self.pauses, session) for session in found]

    def count(self, tenant: str) -> int:
        return len(report.proven(self.table, tenant))

    def counted(self, state: State) -> dict[str, Any]:
        return report.counted(state, self.table, self.pauses, self.outcomes)

    def needs_ticks(self) -> bool:
        return bool(self.dead)


def _send_below(state: State, message: KvForget | KvTouch) -> None:
    """Send keys to all tiers, for each layout of KV there."""
    for tier in state.tiers.by_host.values():
        here = (e.hello.fingerprint for e in state.executors.values() if e.hello.host_id == tier.host_id)
        for fingerprint in sorted(dict.fromkeys(here)):
            state.send(tier.source, replace(message, fingerprint=fingerprint))
