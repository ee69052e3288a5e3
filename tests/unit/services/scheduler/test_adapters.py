"""Requests with adapters among engines whose tokens and KV depend on the adapter."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.world import World, any_limits

from services.scheduler.adapters import PATIENCE_US
from services.scheduler.admission import MOST_DEATHS
from services.scheduler.state.requests import PeerDraining
from services.scheduler.state.state import Limits
from shared.messages import AdapterLoad, Sampling
from shared.telemetry.traces import request_spans

SLOW = Limits(window=1, speculate=0)


def adapter(name: str, version: int = 1) -> dict[str, str]:
    return {"adapter": f"digest-{name}-{version}", "adapter_name": name, "adapter_path": f"/adapters/{name}"}


def ask(world: World, request: str, name: str, max_tokens: int = 4, version: int = 1, **more: object) -> None:
    world.ask(request, [5, 6, 7, 8, 9], max_tokens, **(adapter(name, version) if name else {}), **more)


def held(world: World, executor: str = "e1") -> dict[int, str]:
    places = world.scheduler.state.executors[executor].adapters
    return {place: placed.name for place, placed in places.items() if placed.loaded}


def test_a_request_waits_for_its_adapter_while_others_run() -> None:
    world = World(SLOW)
    world.add_engine(adapter_places=2)
    ask(world, "a", "x")
    ask(world, "b", "")
    assert [*world.adapter_loads["e1"]] == [AdapterLoad(place=1, digest="digest-x-1", path="/adapters/x")]
    while world.deliver():
        pass
    world.assert_answers("b")  # it came later, and did not wait
    assert not world.readers_of("a")[0].tokens
    world.deliver_adapter()
    world.finish()
    assert world.scheduler.state.counters.adapter_loads == 1
    decisions = world.readers_of("a")[0].closed.decisions  # type: ignore[union-attr]
    assert [d.why for d in decisions if d.what == "load adapter"] == ["x is in place 1 of executor.e1"]


def test_requests_share_the_place_of_their_adapter_and_a_name_with_new_weights_has_another() -> None:
    world = World(SLOW)
    world.add_engine(adapter_places=2, slots=6)
    for i in range(3):
        ask(world, f"a{i}", "x")
    world.deliver_adapter()
    ask(world, "new", "x", version=2)  # replaced under load: sequences keep the weights they began with
    assert [load.place for load in world.adapter_loads["e1"]] == [2]
    world.finish()
    assert world.scheduler.state.counters.adapter_loads == 2


def test_a_prompt_never_hits_the_blocks_of_another_adapter_or_of_other_weights() -> None:
    world = World(SLOW)
    world.add_engine(adapter_places=3, blocks=64)
    cached = []
    for request, name, version in (
        ("base", "", 1), ("x", "x", 1), ("x again", "x", 1),
        ("new x", "x", 2), ("y", "y", 1), ("base again", "", 1),
    ):  # fmt: skip
        world.ask(request, [*range(3, 20)], 2, **(adapter(name, version) if name else {}))
        world.finish()
        cached.append(world.readers_of(request)[0].closed.usage.cached_tokens)  # type: ignore[union-attr]
    assert cached == [0, 0, 16, 0, 0, 16]


def test_a_place_that_is_used_is_kept_and_the_least_useful_other_one_goes() -> None:
    world = World(SLOW)
    world.add_engine(adapter_places=2, slots=6)
    for name in ("x", "y"):
        ask(world, name, name, max_tokens=30 if name == "x" else 1)
    world.deliver_adapter()
    world.deliver_adapter()
    for _ in range(3):
        world.deliver()
    assert held(world) == {1: "x", 2: "y"}
    ask(world, "z", "z")  # y is done, x runs
    assert [(load.place, load.digest) for load in world.adapter_loads["e1"]] == [(2, "digest-z-1")]
    world.finish()
    assert held(world) == {1: "x", 2: "z"}


def test_a_waiting_request_gets_a_place_although_others_keep_coming() -> None:
    world = World(SLOW)
    world.add_engine(adapter_places=1, slots=4, max_context=400, blocks=400)
    ask(world, "first", "x", max_tokens=6)
    world.deliver_adapter()
    ask(world, "z", "z")
    assert not world.adapter_loads["e1"]
    for i in range(12):  # without patience each of these would keep the place
        ask(world, f"x{i}", "x", max_tokens=6)
        world.tick(PATIENCE_US // 3)
        world.deliver()
        world.deliver()
        world.deliver_adapter()
    world.deliver_adapter()
    assert world.readers_of("z")[0].closed is not None or held(world) == {1: "z"}
    world.finish()


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone_with_the_reason() -> None:
    world = World(SLOW)
    world.add_engine(adapter_places=1)
    world.broken_adapters.add("digest-x-1")
    ask(world, "a", "x")
    ask(world, "b", "")
    world.run()
    closed = world.readers_of("a")[0].closed
    assert closed is not None
    assert (closed.code, closed.message) == (503, "the adapter 'x' is not loaded: it is gone")
    world.assert_answers("b")
    world.broken_adapters.clear()  # the folder is back
    ask(world, "c", "x")
    world.run()
    world.assert_answers("c")


def test_a_fleet_without_places_refuses_adapters_by_name() -> None:
    world = World(SLOW)
    world.add_engine()
    ask(world, "a", "x")
    (refused,) = world.rejected
    assert refused.code == 400
    assert refused.message == (
        "`model`: the executors of 'm' have no place for the adapter 'x': start them with --lora-places"
    )


def test_only_executors_with_places_get_requests_with_adapters() -> None:
    world = World(SLOW)
    world.add_engine("e1")
    world.add_engine("e2", adapter_places=1)
    for i in range(4):
        ask(world, f"a{i}", "x")
    world.finish()
    assert not world.adapter_loads.get("e1")
    assert held(world, "e2") == {1: "x"}


def test_a_second_executor_loads_an_adapter_when_the_first_one_is_full() -> None:
    world = World(SLOW)
    for name in ("e1", "e2"):
        world.add_engine(name, adapter_places=1, slots=1)
    ask(world, "a", "x", max_tokens=20)
    world.deliver_adapter("e1")
    ask(world, "b", "x")
    assert len(world.adapter_loads["e2"]) == 1
    world.deliver_adapter("e2")
    assert world.readers_of("b")[0].opened.seq in {
        s.seq for s in world.scheduler.state.executors["e2"].running
    }
    world.finish()


def test_sequences_of_a_dead_executor_go_on_elsewhere_with_the_same_tokens() -> None:
    world = World(SLOW)
    for name in ("e1", "e2"):
        world.add_engine(name, adapter_places=2)
    for name in ("x", "y", "x"):
        ask(world, f"{name}{len(world.asked)}", name, max_tokens=20, n=2, sampling=Sampling())
    for name in ("e1", "e2"):
        while world.deliver_adapter(name):
            pass
        for _ in range(4):
            world.deliver(name)
    running = next(e.hello.executor for e in world.scheduler.state.executors.values() if e.running)
    world.crash(running)
    world.finish()


def test_a_draining_executor_moves_its_sequences_to_one_that_loads_their_adapter() -> None:
    world = World(Limits(window=1, speculate=0, move_after_us=0))
    world.add_engine("e1", adapter_places=1)
    ask(world, "a", "x", max_tokens=40)
    world.deliver_adapter("e1")
    world.add_engine("e2", adapter_places=1)
    world.deliver("e1")
    world.handle(PeerDraining("executor", "e1"))
    world.deliver("e1")
    assert len(world.adapter_loads["e2"]) == 1
    world.deliver_adapter("e2")
    for _ in range(3):
        world.deliver("e1")
    assert [s.executor for s in world.scheduler.state.sequences.values()] == ["e2"]
    world.finish()


def test_a_cancelled_request_leaves_no_trace_at_the_places() -> None:
    from services.scheduler.state.requests import Arrived
    from shared.messages import Cancel

    world = World(SLOW)
    world.add_engine(adapter_places=1)
    ask(world, "a", "x")
    world.asked.pop("a")
    world.handle(Arrived("client", Cancel(tenant="public", request="a")))
    world.deliver_adapter()
    ask(world, "b", "y")
    world.finish()
    assert held(world) == {1: "y"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_events_gives_each_request_the_tokens_of_its_adapter(data: st.DataObject) -> None:
    world = World(any_limits(data))
    places = data.draw(st.integers(1, 3))
    engines = ["e1", "e2"][: data.draw(st.integers(1, 2))]
    for name in engines:
        world.add_engine(name, adapter_places=places, max_drafts=data.draw(st.sampled_from([0, 3])))
    epochs = dict.fromkeys(engines, 1)
    for number in range(data.draw(st.integers(5, 40))):
        what = data.draw(st.sampled_from(["ask", "ask", "deliver", "load", "tick", "crash"]))
        name = data.draw(st.sampled_from(engines))
        if what == "ask":
            chosen = data.draw(st.sampled_from(["", "x", "y", "z", "w"]))
            prompt = [3 + i for i in range(data.draw(st.integers(1, 20)))]
            version = data.draw(st.integers(1, 2))
            more: dict[str, object] = {**adapter(chosen, version)} if chosen else {}
            world.ask(
                f"r{number}", prompt, data.draw(st.integers(1, 20)), n=data.draw(st.integers(1, 2)),
                stops=data.draw(st.booleans()), seed=number, tenant=data.draw(st.sampled_from("ab")), **more,
            )  # fmt: skip
        elif what == "deliver":
            world.deliver(name)
        elif what == "load":
            world.deliver_adapter(name)
        elif what == "tick":
            world.tick(data.draw(st.sampled_from([1_000, PATIENCE_US])))
        elif sum(epochs.values()) < len(epochs) + MOST_DEATHS - 1:  # more would end a request
            world.crash(name)
            epochs[name] += 1
            world.add_engine(name, epoch=epochs[name], adapter_places=places)
    world.finish()
    assert not world.rejected


def test_preempted_sequences_come_back_to_their_adapter() -> None:
    world = World(SLOW)
    world.add_engine(adapter_places=2, blocks=14, slots=4)
    for i in range(4):
        ask(world, f"r{i}", "xyxz"[i], max_tokens=30, slo_class="batch" if i < 2 else "interactive")
        world.deliver_adapter()
        world.deliver()
    world.finish()
    assert world.scheduler.state.counters.preemptions > 0


def test_the_load_of_an_adapter_is_a_span_within_the_queue() -> None:
    world = World(SLOW)
    world.add_engine(adapter_places=1)
    ask(world, "a", "x")
    world.tick(50)
    world.deliver_adapter()
    world.finish()
    spans = request_spans(world.scheduler.state.ended.by_key["public", "a"].facts)
    (load,) = [span for span in spans if span.name == "load adapter"]
    assert load.parent is not None
    assert spans[load.parent].name == "queue"
    assert load.attributes["took_us"] == load.end_us - load.start_us == 7
