"""The pods of the manifests as processes of this machine, with their probes and grace periods."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from support.default_model import model_path
from support.kubernetes.kubelet import Kubelet, Pod
from support.kubernetes.manifests import FOLDER, rendered

from services.launcher import credentials
from services.launcher.commands import auth
from services.launcher.commands.auth import Plan
from shared.nats.bus import NatsBus
from shared.nats.jetstream import JetStream
from shared.nats.subjects import WORK_ALL, WORK_STREAM

QUICK = {
    "HEADRACE_BACKEND": "sim",
    "HEADRACE_SIM": "step=10000,token=0",
    "HEADRACE_HEARTBEAT_INTERVAL_MS": "400",
    "HEADRACE_L1": "32",
}
TOKENS = 100  # of an answer; a roll begins after the first
StartKubelet = Callable[[str], Kubelet]


@pytest.fixture
def start_kubelet(tmp_path: Path) -> Iterator[StartKubelet]:
    """A node for an overlay, changed as a user changes it: by a kustomization on top."""
    made: list[Kubelet] = []

    def start(overlay: str) -> Kubelet:
        own = tmp_path / "own"
        own.mkdir()
        settings = {"name": "headrace-settings", "behavior": "merge"}
        literals = [f"{name}={value}" for name, value in QUICK.items()]
        top = {
            "namespace": "headrace",
            "resources": [os.path.relpath(FOLDER / "overlays" / overlay, own)],
            "configMapGenerator": [{**settings, "literals": literals}],
        }
        (own / "kustomization.yaml").write_text(yaml.safe_dump(top))
        auth.generate(tmp_path / "auth", Plan("nats://nats:4222", "default", ("acme",)), print)
        cache = model_path().parent.parent
        node = Kubelet(tmp_path / "node", [*yaml.safe_load_all(rendered(own))], tmp_path / "auth", cache)
        made.append(node)
        return node

    yield start
    for node in made:
        node.stop_all()


def streamed(client: httpx.Client, during: Callable[[], None]) -> str:
    """The text of a stream; `during` is called after its first piece."""
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": "a",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": 7,
    }
    text, pieces = "", 0
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choices = json.loads(line.removeprefix("data: "))["choices"]
            text += choices[0]["text"] if choices else ""
            pieces += 1
            if pieces == 1:
                during()
    return text


def test_the_pods_serve_and_a_roll_of_the_executor_loses_nothing(start_kubelet: StartKubelet) -> None:
    node = start_kubelet("cpu")
    assert node.run_to_end(node.schedule("Job", "model")) == 0
    nats = node.schedule("StatefulSet", "nats")
    node.start(nats)
    kinds = ("tokenizer", "scheduler", "detokenizer", "gateway", "keeper", "executor")
    pods = {kind: node.schedule("Deployment", kind) for kind in kinds}
    for pod in pods.values():
        node.start(pod)
    (executor,) = pods["executor"].template["spec"]["containers"]
    node.wait_ready(nats, *pods.values())
    key = (node.secrets / "tenants" / "acme" / "api_key").read_text().strip()
    url, bearer = f"http://{pods['gateway'].address}:8000", {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=bearer, trust_env=False, timeout=60) as client:
        whole = streamed(client, lambda: None)

        def drain() -> None:
            node.signal(pods["executor"])
            while node.probe(pods["executor"], executor, "readinessProbe"):
                pass

        assert len(whole) > TOKENS
        assert streamed(client, drain) == whole
        assert node.wait_end(pods["executor"]) == [0, 0]
        operator = (node.secrets / "operator" / "api_key").read_text().strip()
        page = client.get("/metrics", headers={"Authorization": f"Bearer {operator}"}).text
    for name in ("headrace_scale_wanted{", 'term="prompt_tokens"', "headrace_keeper_queued{"):
        assert name in page, "KEDA's queries name it"
    rest = [pods[kind] for kind in kinds[:-1]]
    for pod in rest:
        node.signal(pod)
    assert [node.wait_end(pod) for pod in rest] == [[0]] * len(rest)


async def test_three_nats_servers_find_each_other(start_kubelet: StartKubelet) -> None:
    node = start_kubelet("ha")
    servers: list[Pod] = [node.schedule("StatefulSet", "nats", number) for number in range(3)]
    for server in servers:
        node.start(server)
    node.wait_ready(*servers)
    assert node.settings["HEADRACE_DURABLE_REPLICAS"] == "3"
    url = credentials.url_of(node.secrets, "keeper").replace("@nats:", f"@{servers[0].address}:")
    bus = await NatsBus.connect(url, timeout_s=10)
    streams = JetStream(bus, replicated=True)
    config = {"subjects": [WORK_ALL], "storage": "file", "num_replicas": 3, "max_bytes": 1 << 20}
    await streams.make_stream(WORK_STREAM, config)
    info = await bus.request(f"$JS.API.STREAM.INFO.{WORK_STREAM}", b"", timeout_us=5_000_000)
    cluster = json.loads(info.data)["cluster"]
    assert {cluster["leader"], *(r["name"] for r in cluster["replicas"])} == {"nats-0", "nats-1", "nats-2"}
    await bus.drain()
