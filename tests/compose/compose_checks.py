"""`docker compose up` on a real engine, as a user sees it. Run by scripts/compose_check, not by a bare pytest
since it needs root, an engine and minutes. The tests build on each other, in this order."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import nats
import pytest
from compose.stack import KINDS, MODEL, ROOT, Stack, docker, healthy, inspect

CANNOT_BE_HAD = os.environ.get("CANNOT_BE_HAD", "").split()  # images.sh sets it
SERVED = Counter(KINDS) + Counter(("tokenizer", "detokenizer"))  # how many of each there are
WANTED = ("nats", "redis", *KINDS, "jaeger", "prometheus")
WAIT_S = 300  # a guard against hanging


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    assert set(CANNOT_BE_HAD) <= {"jaeger", "grafana"}
    stack = Stack([name for name in WANTED if name not in CANNOT_BE_HAD])
    try:
        stack.up()
        yield stack
    except BaseException:
        print(stack.compose("logs", "--tail", "40", check=False)[-12000:])
        raise
    finally:
        stack.down()


def ask_http(stack: Stack, key: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{stack.env['HTTP_PORT']}/v1/chat/completions",
        json.dumps({"model": MODEL, "max_tokens": 12, "temperature": 0, **body}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


async def answered(stack: Stack, requests: int = 1, model: str = MODEL) -> None:
    """So many requests over NATS are answered; what is not there yet is asked again, for WAIT_S."""
    nc = await nats.connect(stack.nats_url(), inbox_prefix="_INBOX.public", max_reconnect_attempts=-1)

    async def one(number: int) -> None:
        body = json.dumps({"prompt": f"{number} ships", "max_tokens": 4, "ignore_eos": True}).encode()
        while True:
            try:
                reply = await nc.request(f"headrace.v1.generate.public.{model}", body, timeout=20)
            except nats.errors.Error:
                continue
            answer = json.loads(reply.data)
            if "error" not in answer:
                assert answer["usage"]["completion_tokens"] == 4
                return
            assert answer["error"]["retryable"], answer

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(one(number) for number in range(requests)))
    await nc.close()


def test_every_service_is_healthy_and_unprivileged(stack: Stack) -> None:
    for service in stack.services:
        for container in stack.containers(service):
            facts = json.loads(docker("inspect", container))[0]
            assert facts["State"].get("Health", {"Status": "healthy"})["Status"] == "healthy", service
            assert facts["Config"]["User"] == "10001:10001", service
            assert facts["HostConfig"]["ReadonlyRootfs"], service
            assert facts["HostConfig"]["CapDrop"] == ["ALL"], service
            ports = facts["HostConfig"]["PortBindings"] or {}
            assert {b["HostIp"] for bound in ports.values() for b in bound} <= {"127.0.0.1"}, service
    assert Counter(s["kind"] for s in stack.status()) == SERVED


def test_the_readme_script_streams_on_this_machine(stack: Stack) -> None:
    readme = (ROOT / "README.md").read_text()
    (script,) = [s for s in re.findall(r"```python\n(.*?)```", readme, re.S) if "NATS_URL" in s]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NATS_URL": stack.nats_url()},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert len(done.stdout.split()) > 5


def test_a_chat_over_nats_from_another_container(stack: Stack) -> None:
    config = ("--config", "/auth/tenants/public/headrace.toml")
    output = stack.cli("chat", "-q", "What is the capital of France?", *config)
    assert "Paris" in output
    links = stack.cli("status").splitlines()[-3:]
    assert [link.split(": http://127.0.0.1:")[0] for link in links] == [
        "The page", "Jaeger (--profile traces)", "Grafana (--profile metrics)",
    ]  # fmt: skip


def test_chat_over_http_is_answered(stack: Stack) -> None:
    key = stack.api_key()
    answer = ask_http(stack, key, messages=[{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in answer["choices"][0]["message"]["content"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask_http(stack, "hr-wrong", messages=[{"role": "user", "content": "Hello"}])
    assert refused.value.code == 401


def test_json_follows_its_schema(stack: Stack) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Lima"]}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = ask_http(
        stack,
        stack.api_key(),
        messages=[{"role": "user", "content": "Name a city."}],
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    (choice,) = answer["choices"]
    output = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert output.keys() == {"city", "big"}
    assert output["city"] in ("Oslo", "Lima")


def test_no_service_was_refused_anything(stack: Stack) -> None:
    logs = stack.compose("logs", *KINDS)
    assert [line for line in logs.splitlines() if "ermission" in line or "refused" in line] == []


SEVERAL = ("tokenizer", "scheduler", "executor", "detokenizer")
TWO_OF_EACH = tuple(word for kind in SEVERAL for word in ("--scale", f"{kind}=2"))


# What an actor of each kind counts when it works.
WORK = {"tokenizer": "requests", "executor": "steps", "detokenizer": "frames"}


async def test_more_of_each_share_the_work(stack: Stack) -> None:
    """A new executor takes part once it has joined a scheduler: until then it is asked again, for WAIT_S."""
    stack.up("--no-recreate", *TWO_OF_EACH)
    async with asyncio.timeout(WAIT_S):
        while True:
            await answered(stack, 24)
            services = stack.status()
            if all(s[WORK[s["kind"]]] for s in services if s["kind"] in WORK):
                break
    assert all(Counter(s["kind"] for s in services)[kind] == 2 for kind in SEVERAL)


async def texts(stack: Stack, models: Sequence[str], victim: str = "") -> list[str]:
    """The greedy answers to 24 prompts, of the models in turn, all at once over NATS. Each is asked once;
    after the first answer one container of `victim` is killed."""
    nc = await nats.connect(stack.nats_url(), inbox_prefix="_INBOX.public", max_reconnect_attempts=-1)
    announced = False

    async def one(number: int) -> str:
        nonlocal announced
        body = {
            "prompt": f"{number} ships and the sea",
            "max_tokens": 48,
            "temperature": 0,
            "ignore_eos": True,
        }
        subject = f"headrace.v1.generate.public.{models[number % len(models)]}"
        reply = await nc.request(subject, json.dumps(body).encode(), timeout=WAIT_S)
        answer = json.loads(reply.data)
        if not announced:
            announced = True
            if victim:
                stack.kill(victim, 1)
        assert "error" not in answer, answer
        return str(answer["choices"][0]["text"])

    found = await asyncio.gather(*(one(number) for number in range(24)))
    await nc.close()
    return found


SECOND = ("second-tokenizer", "second-scheduler", "second-executor", "second-detokenizer")
WRITE_SMALL = "from pathlib import Path; from support.small_llama import write_small_llama as write; \
write(Path('/cache/small'), hidden=64, layers=2)"


async def test_two_models_and_one_of_each_kind_dies(stack: Stack) -> None:
    """A random Llama beside the first model, each with two schedulers and two executors in float32: no
    request is refused when one of them dies, and each text is that of an undisturbed run."""
    volumes = ("-v", f"{stack.project}_models:/cache", "-v", f"{ROOT}/tests:/tests:ro")
    image = (
        "-e",
        "PYTHONPATH=/tests",
        "--entrypoint",
        "python",
        "headrace/kv:0.1.0",
    )  # it has transformers, which LMCache needs
    docker("run", "--rm", *volumes, *image, "-c", WRITE_SMALL)
    one_model = stack.env["COMPOSE_FILE"]
    stack.env |= {"COMPOSE_FILE": f"{one_model}:docker/second_model.yaml", "SECOND_MODEL": "/cache/small"}
    two_of_each = ("--scale", "second-scheduler=2", "--scale", "second-executor=2")
    stack.up("--no-recreate", *TWO_OF_EACH, *two_of_each, *SECOND)
    both = (MODEL, "small")
    for model in both:
        await answered(stack, 4, model)
    right = await texts(stack, both)
    for victim in ("scheduler", "second-executor", "executor", "second-scheduler"):
        assert await texts(stack, both, victim) == right, victim
    stack.compose("rm", "--force", "--stop", "second-model", *SECOND)
    stack.env["COMPOSE_FILE"] = one_model


async def test_prometheus_scrapes_every_container(stack: Stack) -> None:
    """Those that came by scaling, too: the names of compose resolve to all of them."""
    url = f"http://127.0.0.1:{stack.env['PROMETHEUS_PORT']}/api/v1/targets?state=active"
    expected = Counter((kind, "up") for kind in KINDS for _ in stack.containers(kind))
    seen: Counter[tuple[str, str]] = Counter()
    async with asyncio.timeout(WAIT_S):
        while seen != expected:
            await asyncio.sleep(1)  # Prometheus asks every few seconds
            with urllib.request.urlopen(url, timeout=10) as answer:
                targets = json.load(answer)["data"]["activeTargets"]
            seen = Counter((target["labels"]["job"], target["health"]) for target in targets)


@pytest.mark.parametrize("victim", [*KINDS, "redis", "nats"])
async def test_service_is_restarted_by_docker_when_its_process_dies(stack: Stack, victim: str) -> None:
    """What takes long is the start of two executors at once: see what is printed. Their kernels are compiled
    once, in the volume `kernels`."""
    before = {c: inspect(c, "{{.State.StartedAt}}") for c in stack.containers(victim)}
    deaths = _deaths(stack, victim)
    killed_s = time.monotonic()
    stack.kill(victim)
    async with asyncio.timeout(WAIT_S):
        while not all(_came_back(c, started) for c, started in before.items()):
            await asyncio.sleep(0.5)  # the engine sends no message
    healthy_s = time.monotonic()
    await answered(stack, 4)
    load, _, _ = os.getloadavg()
    took = f"healthy after {healthy_s - killed_s:.1f} s, answers after {time.monotonic() - killed_s:.1f} s"
    print(f"{victim}: {took}, load {load:.1f}")
    assert _deaths(stack, victim) == [count + 1 for count in deaths], "it died again by itself"
    seconds = f"{time.monotonic() - killed_s:.0f}s"
    assert "compiling kernels" not in stack.compose("logs", "--since", seconds, victim)


async def test_service_is_replaced_when_it_hangs(stack: Stack) -> None:
    """All at once: their checks kill each, and the engine starts it again."""
    hung = (*KINDS, "nats")
    before = {c: inspect(c, "{{.State.StartedAt}}") for kind in hung for c in stack.containers(kind)}
    for kind in hung:
        stack.hang(kind)
    async with asyncio.timeout(WAIT_S):
        while not all(_came_back(c, started) for c, started in before.items()):
            await asyncio.sleep(0.5)
    await answered(stack, 4)


def _deaths(stack: Stack, service: str) -> list[int]:
    """How often the engine has started each container of a service again."""
    return [int(inspect(container, "{{.RestartCount}}")) for container in stack.containers(service)]


def _came_back(container: str, started: str) -> bool:
    return inspect(container, "{{.State.StartedAt}}") != started and healthy(container)


def test_executors_see_the_arena_of_the_kv_offload_that_came_back(stack: Stack) -> None:
    services = stack.status()
    (tier,) = [s for s in services if s["kind"] == "kv_offload"]
    generation = tier["tiers"]["l1"]["generation"]
    assert {s["arena_generation"] for s in services if s["kind"] == "executor"} == {generation}


async def test_a_stop_drains(stack: Stack) -> None:
    """What runs when every service gets SIGTERM is finished and sent, and none has to be killed."""
    stopped = {kind: stack.containers(kind) for kind in KINDS}
    nc = await nats.connect(stack.nats_url(), inbox_prefix="_INBOX.public")
    frames = await nc.subscribe(inbox := nc.new_inbox())
    body = {"prompt": "The sea is", "max_tokens": 128, "ignore_eos": True, "stream": True}
    await nc.publish(f"headrace.v1.generate.public.{MODEL}", json.dumps(body).encode(), reply=inbox)
    sent = [await frames.next_msg(timeout=WAIT_S)]
    stop = ("stop", "--timeout", str(WAIT_S), *KINDS)  # longer than they give themselves
    stopping = asyncio.create_task(asyncio.to_thread(stack.compose, *stop))
    while "Headrace-End" not in (sent[-1].headers or {}):
        sent.append(await frames.next_msg(timeout=WAIT_S))
    await stopping
    await nc.close()
    assert [f for f in sent if "error" in json.loads(f.data)] == []
    reasons = [c["finish_reason"] for f in sent for c in json.loads(f.data).get("choices", [])]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    codes = {kind: {inspect(c, "{{.State.ExitCode}}") for c in ids} for kind, ids in stopped.items()}
    assert codes == {kind: {"0"} for kind in KINDS}


def test_down_leaves_nothing(stack: Stack) -> None:
    assert stack.left()
    stack.down()
    assert stack.left() == ""
