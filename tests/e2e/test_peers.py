"""`python -m loadtest.peers`: known servers in turn; the export of a GGUF file."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from support.bench.known import Latency
from support.default_model import greedy_cases, model_path
from support.running_up import wait_until_gone

from loadtest.peers.__main__ import main
from loadtest.peers.export import export
from loadtest.peers.server import Peer, read_peers, running
from loadtest.peers.turns import order
from loadtest.processes import TICKS_A_SECOND, cpu_s, tree
from services.executor.checkpoint.weights import load_hf
from services.executor.quantised.gguf import load_gguf
from shared.errors import BadRequest, SetupError
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import load_vocabulary

FAST, SLOW = (Latency(first_us=first, gap_us=gap) for first, gap in ((10_000, 5_000), (40_000, 30_000)))
ROOT = Path(__file__).parents[2]


def known(name: str, latency: Latency, folder: Path) -> dict[str, str]:
    """A known server as a peer."""
    url = f"unix:{folder}/{name}.sock"
    flags = f"--http {url} --latency '{json.dumps(asdict(latency))}' --out {folder}/{name}.stamps"
    python = f"env PYTHONPATH={ROOT}:{ROOT}/tests {sys.executable}"
    return {"url": url, "command": f"{python} -m support.bench.known {flags}"}


def toml(peers: dict[str, dict[str, str]]) -> str:
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in each.items())
        + 'env = { KNOWN = "1" }\n'
        for name, each in peers.items()
    )  # fmt: skip


def test_two_servers_are_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "peers.toml", tmp_path / "out"
    path.write_text(toml({"fast": known("fast", FAST, tmp_path), "slow": known("slow", SLOW, tmp_path)}))
    load = ["--num-prompts", "6", "--input-len", "4", "--output-len", "5", "--max-concurrency", "1,3"]
    long = ["--num-prompts", "2", "--input-len", "9", "--output-len", "3", "--max-concurrency", "1"]
    assert main([str(path), "--rounds", "2", "--out", str(out), "--", *load, "--", *long]) == 0
    printed = capsys.readouterr().out
    starts = [line.split(":")[0] for line in printed.splitlines() if "answers after" in line]
    assert starts == ["fast, round 1", "slow, round 1", "slow, round 2", "fast, round 2"]
    result = json.loads((out / "peers.json").read_text())
    found = {(row["point"], row["peer"], row["figure"]): row for row in result["rows"]}
    points = [f"4 in, 5 out, concurrency {number}" for number in (1, 3)] + ["9 in, 3 out, concurrency 1"]
    assert [*dict.fromkeys(point for point, _, _ in found)] == points
    assert result["loads"] == [load, long]
    for point in points:
        ours, theirs = (found[point, peer, "output_throughput"] for peer in ("fast", "slow"))
        assert ours["value_least"] <= ours["value"] <= ours["value_most"]
        assert (ours["ratio_least"], ours["ratio_most"]) == (1.0, 1.0)
        assert 1 < theirs["ratio_least"] <= theirs["ratio"] <= theirs["ratio_most"]
    assert all(row["memory_mib"] > 5 and row["ready_s"] > 0 for row in result["starts"])
    assert all(0 <= row["cores_least"] <= row["cores"] < 1 for row in result["starts"])
    assert "| 4 in, 5 out, concurrency 1 | output_throughput | slow |" in printed
    for peer in result["peers"]:
        assert f"| {peer['name']} | `{peer['command']}` | `KNOWN=1` |" in printed
    seeds = [
        json.loads((out / f"fast-{name}.json").read_text())["configuration"]["seed"]
        for name in ("1", "1-1", "2", "2-1")
    ]
    assert seeds == [0, 1, 2, 3]


def test_servers_side_by_side_start_once_and_change_places(tmp_path: Path) -> None:
    path, out = tmp_path / "peers.toml", tmp_path / "out"
    path.write_text(toml({"fast": known("fast", FAST, tmp_path), "slow": known("slow", SLOW, tmp_path)}))
    load = ["--num-prompts", "2", "--input-len", "4", "--output-len", "3", "--max-concurrency", "1"]
    assert main([str(path), "--side-by-side", "--rounds", "2", "--out", str(out), "--", *load]) == 0
    result = json.loads((out / "peers.json").read_text())
    slow = next(r for r in result["rows"] if (r["peer"], r["figure"]) == ("slow", "output_throughput"))
    assert 1 < slow["ratio_least"] <= slow["ratio_most"]
    assert all(row["ready_s_least"] == row["ready_s_most"] for row in result["starts"])
    made = sorted(
        (out / f"{name}-{n}.json" for name in ("fast", "slow") for n in (1, 2)), key=os.path.getmtime
    )
    assert [each.stem for each in made] == ["fast-1", "slow-1", "slow-2", "fast-2"]


def test_turns_change_places() -> None:
    peers = [Peer(name, "", "") for name in "abc"]
    rounds = ["".join(peer.name for peer in order(peers, number)) for number in range(4)]
    assert rounds == ["abc", "bca", "cab", "abc"]


def test_stopped_server_leaves_no_process(tmp_path: Path) -> None:
    described = known("one", FAST, tmp_path)
    wrapped = Peer(
        "one", described["url"], f'sh -c "{described["command"].replace(chr(34), chr(92) + chr(34))}; :"'
    )
    with running(wrapped, tmp_path / "log") as server:
        pids = tree(server.process.pid)
        assert len(pids) == 2
    wait_until_gone(pids)


def test_the_time_of_cores_that_a_server_has_used() -> None:
    def ticks() -> int:  # sums of floats differ in their last digit
        return round(sum(os.times()[:4]) * TICKS_A_SECOND)

    least = ticks()
    while ticks() < least + 10:
        pass
    assert least < round(cpu_s(os.getpid()) * TICKS_A_SECOND) <= ticks()


def test_a_preload_that_is_not_there(tmp_path: Path) -> None:
    """The loader would only warn, and the server run slower than its documentation promises."""
    there = tmp_path / "libthere.so"
    there.touch()
    peer = Peer("a", "unix:/none", "true", {"LD_PRELOAD": f"{there}:~/none/libtcmalloc.so"})
    with (
        pytest.raises(SetupError, match=r"a preloads /.*/none/libtcmalloc.so, which does not exist"),
        running(peer, tmp_path / "log"),
    ):
        pass
    assert Peer("a", "", "", {"LD_PRELOAD": str(there), "DIRS": "~/x:/y"}).environment() == {
        "LD_PRELOAD": str(there),
        "DIRS": f"{Path.home()}/x:/y",
    }


def test_servers_that_do_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"unix:{tmp_path}/none.sock"
    with (
        pytest.raises(SetupError, match="cannot be started"),
        running(Peer("a", url, "/none"), tmp_path / "log"),
    ):
        pass
    with (
        pytest.raises(SetupError, match="does not answer"),
        running(Peer("b", url, "true"), tmp_path / "log"),
    ):
        pass
    with pytest.raises(BadRequest, match="describes no servers"):
        read_peers(tmp_path / "none.toml")
    assert main([str(ROOT / "loadtest/peers/smollm2.toml"), "--only", "x", "--out", str(tmp_path / "o")]) == 1
    assert "describes no x: it has headrace, vllm-cpu, llama-server" in capsys.readouterr().err


def test_the_export_is_the_same_model(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    files = ModelFiles("smollm2-135m-instruct", model_path())
    export(files, tmp_path)
    cpu = torch.device("cpu")
    ours, weights = load_gguf(files.path, torch.bfloat16, cpu)
    theirs, exported = load_hf(tmp_path, torch.bfloat16, cpu)
    assert ours == theirs
    assert torch.equal(weights.embedding.values, exported.embedding.values)
    for one, other in zip(weights.layers, exported.layers, strict=True):
        for name in ("attention_norm", "qkv", "out", "mlp_norm", "gate_up", "down"):
            assert torch.equal(one[name].values, other[name].values)
    tokenizer, vocabulary = AutoTokenizer.from_pretrained(tmp_path), load_vocabulary(files)
    text = vocabulary.decode(greedy_cases()[0].output) + " ½ and 1234 häuser\n"
    assert tokenizer.encode(text) == vocabulary.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == vocabulary.eos_ids[0]
