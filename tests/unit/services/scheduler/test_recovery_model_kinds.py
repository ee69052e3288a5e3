"""Executors that compute otherwise than the first stay out, and no sequence goes on with another's tokens."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler.world import World

from services.scheduler.reports import status
from services.scheduler.reports.event_log import restore, snapshot
from services.scheduler.state.requests import Arrived, PeerDraining, StreamLost
from services.scheduler.state.state import Limits
from shared.messages import ExecHello, SlotOpen, StepPlan, Tokenized, ints

PROMPT = [*range(5, 14)]


def of_kinds(*digests: str, **limits: object) -> World:
    """Executors e1, e2, ... with these model digests, that sent hello in this order."""
    world = World(Limits(**limits))  # type: ignore[arg-type]  # test shorthand
    for i, digest in enumerate(digests, 1):
        world.add_engine(f"e{i}", kind=f"kv-{digest}", digest=digest)
    return world


def serving(world: World) -> list[str]:
    return sorted(world.scheduler.state.executors)


def deliver(world: World, count: int) -> None:
    """Hand so many results of each engine to the scheduler."""
    for name in list(world.engines) * count:
        world.deliver(name)


def again(world: World, name: str) -> None:
    """An engine that is kept out sends hello once more, as it does each second."""
    world.handle(Arrived(f"executor.{name}", world.engines[name].hello))


def test_executor_of_another_kind_stays_out_and_gets_the_reason() -> None:
    world = of_kinds("aaa", "bbb", "aaa")
    again(world, "e2")
    assert serving(world) == ["e1", "e3"]
    assert list(world.refusals) == ["e2"]
    assert "its model digest is bbb, and e1, e3 of 'm' has aaa: start it with" in world.refusals["e2"]
    assert "--accept-mixed" in world.refusals["e2"]
    kept_out = status.status(world.scheduler.state)["kept_out"]
    assert kept_out == {
        "e2": {"model": "m", "dtype": "f32", "model_digest": "bbb", "why": world.refusals["e2"]}
    }
    for i in range(12):
        world.ask(f"r{i}", PROMPT, 6, seed=i)
    world.run()
    for i in range(12):
        world.assert_answers(f"r{i}")
    assert world.engines["e2"].step == 0
    world.assert_idle()


@pytest.mark.parametrize("wanted", ["", "aaa1"])
def test_a_refusal_names_the_flags_and_weights_that_differ(wanted: str) -> None:
    world = World(Limits(model_digest=wanted))
    world.add_engine("e1", kind="kv1", digest="aaa1", flags=("--dtype bf16", "--no-deterministic"))
    world.add_engine("e2", kind="kv2", digest="aaa2", flags=("--dtype f32", "--no-deterministic"))
    world.add_engine("e3", kind="kv3", digest="bbb3", flags=("--dtype bf16", "--no-deterministic"))
    world.add_engine("e4", kind="kv4", digest="bbb4", flags=("--dtype bf16", "--deterministic"))
    file = "the digest of its weights is bbb and theirs aaa: start it with the same file"
    mode = "it runs with --deterministic: start it with --no-deterministic"
    assert {name: why.split(": ", 1)[1].split("; or")[0] for name, why in world.refusals.items()} == {
        "e2": "it runs with --dtype f32: start it with --dtype bf16",
        "e3": file,
        "e4": f"{file}, and {mode}",
    }


def test_another_kind_takes_over_as_a_whole_when_none_of_the_first_is_left() -> None:
    world = of_kinds("aaa", "bbb", "ccc", "bbb", "aaa")
    world.crash("e1")
    assert serving(world) == ["e5"]
    world.crash("e5")
    assert serving(world) == ["e2", "e4"]
    assert list(world.refusals) == ["e3"]
    assert "e2, e4 of 'm' has bbb" in status.status(world.scheduler.state)["kept_out"]["e3"]["why"]
    world.add_engine("e1", epoch=2, digest="aaa")  # too late
    assert serving(world) == ["e2", "e4"]
    world.crash("e1")
    assert "e1" not in world.scheduler.state.excluded


def test_a_roll_to_new_weights() -> None:
    """The old one drains: the new one takes what comes, and what runs ends where it began."""
    world = of_kinds("aaa", "bbb")
    world.ask("old", PROMPT, 12)
    deliver(world, 1)
    world.handle(PeerDraining("executor", "e1"))
    assert serving(world) == ["e1", "e2"]
    world.ask("new", PROMPT, 6)
    assert {s.slot for s in world.scheduler.state.executors["e2"].running} == {0}
    world.run()
    world.assert_answers("old")
    world.assert_answers("new")
    world.crash("e1")
    assert serving(world) == ["e2"]


def test_a_restart_under_the_same_name_may_bring_other_weights() -> None:
    world = of_kinds("aaa")
    world.add_engine("e1", epoch=2, digest="bbb")
    assert serving(world) == ["e1"]
    world.add_engine("e2", digest="aaa")
    assert list(world.refusals) == ["e2"]


def test_a_reset_hands_nothing_over() -> None:
    """Its process lives, and sends hello at once."""
    world = of_kinds("aaa", "bbb")
    world.handle(StreamLost("executor.e1"))
    again(world, "e2")
    assert serving(world) == []
    world.add_engine("e1", epoch=2, digest="aaa")
    assert serving(world) == ["e1"]


def test_the_configured_kind_serves_and_no_other() -> None:
    world = of_kinds("aaa", "bbb", model_digest="bbb")
    assert serving(world) == ["e2"]
    assert "bbb is configured (model_digest)" in world.refusals["e1"]
    world.crash("e2")
    again(world, "e1")
    assert serving(world) == []


def test_mixed_kinds_serve_where_that_is_accepted() -> None:
    assert serving(of_kinds("aaa", "bbb", accept_mixed=True)) == ["e1", "e2"]


def test_each_model_has_a_kind_of_its_own() -> None:
    world = of_kinds("aaa")
    other = ExecHello(
        executor="x", exec_epoch=1, host_id="h", model="other", fingerprint="f", vocab_digest="v", vocab=9,
        blocks=8, block_tokens=4, slots=2, max_step_tokens=16, max_context=32, model_digest="bbb",
    )  # fmt: skip
    world.handle(Arrived("executor.x", other))
    assert serving(world) == ["e1", "x"]


def test_request_with_tokens_ends_with_an_error_and_one_without_starts_over() -> None:
    world = of_kinds("aaa", "bbb")
    world.ask("begun", PROMPT, 12)
    deliver(world, 3)
    assert world.readers_of("begun")[0].tokens
    world.ask("waits", [*PROMPT, 3], 5)  # its prompt has been planned, none of its tokens is back
    world.crash("e1")
    world.run()
    (reader,) = world.readers_of("begun")
    assert reader.closed is not None
    assert (reader.closed.reason, reader.closed.code) == ("error", 503)
    assert "(model digest aaa), and the others have another kind (bbb)" in reader.closed.message
    world.assert_answers("waits")
    world.assert_idle()


def test_a_kind_that_is_away_is_waited_for_while_no_other_is_there() -> None:
    world = of_kinds("aaa")
    world.ask("r", PROMPT, 12)
    deliver(world, 3)
    world.crash("e1")
    world.add_engine("e2", digest="aaa")
    world.run()
    world.assert_answers("r")


def resumed(digest: str, tokens: list[int]) -> Tokenized:
    return Tokenized(
        request="r", attempt=1, tenant="public", model="m", inbox="i", timeout_us=10**9, max_tokens=12,
        tokens=ints([*PROMPT, *tokens]), generated=ints([len(tokens)]), reasons=("",), model_digest=digest,
    )  # fmt: skip


def test_another_scheduler_goes_on_only_with_tokens_of_its_kind() -> None:
    for digest, tokens, reason in (("aaa", [7, 8], ""), ("bbb", [7, 8], "error"), ("bbb", [], "")):
        world = of_kinds("aaa")
        world.handle(Arrived("detokenizer.d1", resumed(digest, tokens)))
        (reader,) = world.readers_of("r")
        assert (reader.closed.reason if reader.closed else "") == reason


def test_one_with_savepoints_starts_over_with_tokens_of_its_kind() -> None:
    """It is opened as a new attempt without tokens, and its detokenizer gets the request again."""
    for digest, attempt, kept in (("aaa", 1, set[int]()), ("bbb", 2, {2})):
        world = of_kinds("aaa")
        listener = listening(world)
        asked = dataclasses.replace(resumed(digest, [7, 8]), savepoints="c")
        world.handle(Arrived("detokenizer.d1", asked))
        (reader,) = world.readers_of("r")
        assert (reader.opened.attempt, len(reader.opened.tokens)) == (attempt, 2 if digest == "aaa" else 0)
        assert {message.attempt for message in listener} == kept
        assert all(list(message.tokens) == PROMPT and not message.generated for message in listener)
        world.run()
        assert reader.closed is not None
        assert (reader.closed.reason, len(reader.tokens)) == ("length", 12)


def listening(world: World) -> list[Tokenized]:
    """The requests that detokenizers get from now on."""
    kept: list[Tokenized] = []
    carry_out = world._carry_out

    def listen(command: object) -> None:
        if isinstance(command.message, Tokenized):  # type: ignore[attr-defined]
            kept.append(command.message)  # type: ignore[attr-defined]
        carry_out(command)  # type: ignore[arg-type]

    world._carry_out = listen  # type: ignore[method-assign]
    return kept


def test_detokenizer_has_the_kind_that_computed_its_request() -> None:
    """Should this scheduler die, it names the kind to the next one."""
    world = of_kinds("aaa", "bbb")
    kept = listening(world)
    world.ask("r", PROMPT, 12)
    assert [asked.model_digest for asked in kept] == ["aaa"]
    world.crash("e1")  # before a token is back: e2 starts over
    assert [asked.model_digest for asked in kept] == ["aaa", "bbb"]
    assert kept[-1].age_us == 0
    world.run()
    world.assert_answers("r")


def test_the_state_with_its_kinds_can_be_frozen() -> None:
    world = of_kinds("aaa", "bbb")
    state = restore(snapshot(world.scheduler.state))
    assert state.model_kinds == world.scheduler.state.model_kinds
    assert state.excluded == world.scheduler.state.excluded


@given(st.data())
def test_no_sequence_ever_goes_on_with_tokens_of_another_kind(data: st.DataObject) -> None:
    """Executors of three kinds come, die and drain; small, so that sequences are paused as well."""
    world = World(Limits(accept_mixed=data.draw(st.booleans())))
    computed_by: dict[int, str] = {}  # sequence -> digest of the model that has generated tokens of it
    digests: dict[str, str] = {}
    carry_out = world._carry_out

    def watch(command: object) -> None:
        to, message = command.to, command.message  # type: ignore[attr-defined]
        if isinstance(message, SlotOpen):
            digest = digests[to.removeprefix("executor.")]
            if len(message.tokens) > message.prompt_tokens:
                assert computed_by[message.seq] == digest
            computed_by[message.seq] = digest
        if isinstance(message, StepPlan) and not world.scheduler.state.limits.accept_mixed:
            ready = [e for e in world.scheduler.state.executors.values() if not e.draining]
            assert len({e.hello.model_digest for e in ready}) <= 1
        carry_out(command)  # type: ignore[arg-type]

    world._carry_out = watch  # type: ignore[method-assign]

    def join(name: str, digest: str) -> None:
        digests[name] = digest
        world.add_engine(name, kind=digest, digest=digest, blocks=12, slots=2)

    join("x1", "a")
    join("x2", "b")
    for number in range(data.draw(st.integers(8, 24))):
        match data.draw(st.sampled_from(["join", "ask", "ask", "ask", "run", "run", "crash", "drain"])):
            case "join":
                join(f"e{number}", data.draw(st.sampled_from("abc")))
            case "ask":
                world.ask(f"r{number}", [*range(1, data.draw(st.integers(2, 12)))], 24)
            case "run":
                deliver(world, data.draw(st.integers(1, 12)))
            case "crash" if world.engines:
                world.crash(data.draw(st.sampled_from(sorted(world.engines))))
            case "drain" if world.engines:
                world.handle(PeerDraining("executor", data.draw(st.sampled_from(sorted(world.engines)))))
    join("last1", "a")
    join("last2", "a")
    world.run()
    for name in sorted(world.engines):
        if not name.startswith("last"):
            world.crash(name)
    world.run()
    for request in world.accepted:
        (reader,) = world.readers_of(request)
        assert reader.closed is not None
        assert reader.closed.code in (0, 503)
        if not reader.closed.code:
            world.assert_answers(request)
    world.assert_idle()
