"""`headrace eval`: windows, figures against numpy, logits of both paths against transformers, the command."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.default_model import model_path
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import VOCAB, reference_logprobs, save_tiny

from loadtest.eval.command import compare
from loadtest.eval.divergence import Seen, log_probs
from loadtest.eval.engines import Arm
from loadtest.eval.llama_cpp import LlamaCpp
from loadtest.eval.logits import decode, logits_by, path_for, prefill
from loadtest.eval.text import TEXT, scored, windows
from services.executor.cpu.engine import TorchBackend, TorchOptions, build
from services.executor.engine import Backend
from services.launcher.cli import main as headrace
from shared.errors import BadRequest, SetupError

CONTEXT = 32
TOKENS = torch.randint(0, VOCAB, (3 * CONTEXT + 5,), generator=torch.Generator().manual_seed(1)).tolist()
WINDOWS = windows(TOKENS, CONTEXT)


def tiny(kind: str, folder: Path, **options: Any) -> TorchBackend:
    save_tiny(kind, folder)
    return build(
        TorchOptions(
            model_path=folder, model_name=kind, device="cpu", slots=8, blocks=32, threads=1, **options
        )
    )


def test_windows_are_whole_and_the_second_half_is_scored() -> None:
    assert windows(range(11), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(range(11), 4, most=1) == [[0, 1, 2, 3]]
    assert windows(range(11), 4, prefix=[99]) == [[99, 1, 2, 3], [99, 5, 6, 7]]
    assert list(scored(512)) == list(range(256, 511))  # 255, as llama.cpp counts
    with pytest.raises(BadRequest, match="3 tokens, less than a window of 4"):
        windows([1, 2, 3], 4)


def test_eval_figures_equal_numpys_figures() -> None:
    rng = np.random.default_rng(3)
    base, found = rng.normal(size=(2, 9, 7))
    targets = rng.integers(0, 7, 9)
    seen = Seen()
    for rows in (slice(0, 4), slice(4, 9)):
        reference = log_probs(torch.from_numpy(base[rows]))
        seen.add(torch.from_numpy(found[rows]), torch.from_numpy(targets[rows]), reference)
    p, q = (np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in (base, found))
    kl = (p * np.log(p / q)).sum(1)
    nll, base_nll = (-np.log(each[np.arange(9), targets]) for each in (q, p))
    top = p.argmax(1) == q.argmax(1)
    root = math.sqrt(8)
    wanted = {
        "tokens": 9,
        "ppl": np.exp(nll.mean()), "ppl_error": np.exp(nll.mean()) * nll.std() / root,
        "ppl_ratio": np.exp(nll.mean()) / np.exp(base_nll.mean()),
        "ppl_ratio_error": np.exp((nll - base_nll).mean()) * (nll - base_nll).std() / root,
        "kl_mean": kl.mean(), "kl_error": kl.std() / root,
        "kl_median": np.median(kl), "kl_p99": np.percentile(kl, 99), "kl_max": kl.max(),
        "top1_pct": 100 * top.mean(), "top1_error": 100 * math.sqrt(top.mean() * (1 - top.mean()) / 8),
    }  # fmt: skip
    assert 0 < top.mean() < 1
    assert seen.figures() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kind", ["llama3-rope", "qwen3"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_both_paths_give_the_logits_of_transformers(kind: str, deterministic: bool, tmp_path: Path) -> None:
    engine = tiny(kind, tmp_path, dtype="f32", deterministic=deterministic)
    wanted = [reference_logprobs(kind, window)[CONTEXT // 2 : -1] for window in WINDOWS]
    followed = [window[CONTEXT // 2 + 1 :] for window in WINDOWS]
    at_once = list(prefill(engine, WINDOWS))
    by_token = list(decode(engine, WINDOWS))
    assert [targets.tolist() for _, targets in at_once] == followed
    assert [targets.tolist() for _, targets in by_token] == np.array(followed).T.tolist()
    assert len(by_token) == CONTEXT // 2 - 1
    for window, (logits, _) in enumerate(at_once):
        torch.testing.assert_close(log_probs(logits), wanted[window], rtol=0, atol=2e-4)
        stepped = torch.stack([logits[window] for logits, _ in by_token])
        torch.testing.assert_close(log_probs(stepped), wanted[window], rtol=0, atol=2e-4)


def test_more_windows_than_stand_side_by_side(tmp_path: Path) -> None:
    engine = tiny("llama", tmp_path, dtype="f32")
    many = [WINDOWS[i % 3] for i in range(11)]
    parts = [targets for _, targets in decode(engine, many)]
    assert [len(each) for each in parts] == [8] * 15 + [3] * 15


def test_an_engine_does_not_diverge_from_itself_and_bf16_hardly(tmp_path: Path) -> None:
    engines: list[Backend] = [tiny("llama", tmp_path, dtype=dtype) for dtype in ("f32", "f32", "bf16")]
    for path in ("prefill", "decode"):
        reference, same, narrow = (
            each.figures() for each in compare(engines, WINDOWS, path, with_reference=True)
        )
        assert "kl_mean" not in reference
        assert (same["kl_max"], same["top1_pct"], same["ppl_ratio"]) == (0.0, 100.0, 1.0)
        assert 0 < narrow["kl_mean"] < 0.02
        assert narrow["ppl"] == pytest.approx(reference["ppl"] * narrow["ppl_ratio"])
        nll = [
            -reference_logprobs("llama", window)[range(CONTEXT // 2, CONTEXT - 1), window[CONTEXT // 2 + 1 :]]
            for window in WINDOWS
        ]
        assert reference["ppl"] == pytest.approx(torch.cat(nll).mean().exp().item(), rel=1e-4)


def test_an_engine_without_an_eager_model_goes_by_decode(tmp_path: Path) -> None:
    class OnGpu:
        """Any other engine."""

    engine = tiny("llama", tmp_path, dtype="f32")
    other: Any = OnGpu()
    assert path_for("auto", [engine]) == "prefill"
    assert path_for("auto", [engine, other]) == "decode"
    with pytest.raises(BadRequest, match="--path decode"):
        path_for("prefill", [other])


def test_arms_are_parsed() -> None:
    assert Arm.read("bf16/fp8,device=cuda").changes == (("dtype", "bf16/fp8"), ("device", "cuda"))
    assert Arm.read("deterministic=true").changes == (("deterministic", "true"),)
    with pytest.raises(BadRequest, match="DTYPE,SETTING=VALUE"):
        Arm.read("bf16,deterministic")
    with pytest.raises(SetupError, match="no logits"):
        Arm.read("backend=sim").build("", CONTEXT)


def test_kl_of_random_weights_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a config alone: dummy weights, the same in both dtypes, and random ids."""
    save_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setenv("HEADRACE_BACKEND", "dummy")
    out = tmp_path / "kl.json"
    command = ["eval", "kl", "bf16", "f32,deterministic=true", "--model", str(tmp_path)]
    assert headrace([*command, "--context", "16", "--windows", "2", "--json", str(out)]) == 0
    head, heads, *rows = capsys.readouterr().out.splitlines()
    assert head == "alice.txt: 2 windows of 16 tokens, 14 scored, by prefill"
    assert [row.split()[0] for row in rows] == ["f32", "bf16", "f32,deterministic=true"]
    assert heads.split()[:4] == ["perplexity", "ratio", "mean", "KL"]
    result = json.loads(out.read_text())
    reference, narrow, exact = result["engines"]
    assert result["windows"] == 2
    assert reference["dtype"] == exact["dtype"] == "f32"
    assert 0 < narrow["kl_mean"] < 1e-4
    assert exact["kl_mean"] < 1e-9
    assert f"{narrow['kl_mean']:.6f}" in rows[1]


def test_perplexity_of_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text in its own language is likelier than the same words shuffled."""
    model_path()
    text, shuffled = TEXT.read_text()[2000:3200], tmp_path / "shuffled.txt"
    words = text.split()
    shuffled.write_text(" ".join(words[::2] + words[1::2]))
    (tmp_path / "text.txt").write_text(text)
    found = []
    for file in ("text.txt", "shuffled.txt"):
        out = tmp_path / "ppl.json"
        command = ["eval", "perplexity", str(tmp_path / file), "f32,threads=1", "--context", "128"]
        assert headrace([*command, "--windows", "1", "--json", str(out)]) == 0
        (engine,) = json.loads(out.read_text())["engines"]
        found.append(engine["ppl"])
        assert f"{engine['ppl']:.3f} ±" in capsys.readouterr().out
    assert found[0] < 60 < found[1]


def test_impossible_eval_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace(["eval", "perplexity", str(tmp_path / "none.txt")]) == 1
    assert "cannot be read as text" in capsys.readouterr().err
    assert headrace(["eval", "kl", "--context", "3"]) == 1
    assert "--context is 4 or more" in capsys.readouterr().err


class OfOnes:
    """llama.cpp's binding, of a model whose logits count the tokens so far."""

    def __init__(self, path: str, *, n_ctx: int, logits_all: bool, **_: Any) -> None:
        if not Path(path).is_file():
            raise ValueError(f"Model path does not exist: {path}")
        assert logits_all
        self.scores, self.closed, self.done = np.zeros((n_ctx, VOCAB), np.float32), False, 0

    def reset(self) -> None:
        self.done = 0

    def eval(self, tokens: list[int]) -> None:
        for token in tokens:
            self.scores[self.done] = self.scores[self.done - 1] if self.done else 0
            self.scores[self.done, token] += 1
            self.done += 1

    def close(self) -> None:
        self.closed = True


def test_llama_cpp_has_the_same_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=OfOnes))
    path = write_gguf("llama", tmp_path / "m.gguf")
    engine = Arm.read(f"llama.cpp,model={path}").open("", CONTEXT)
    assert isinstance(engine, LlamaCpp)
    assert engine.info.model == path.name
    for window, (logits, targets) in zip(WINDOWS, logits_by("prefill", engine, WINDOWS), strict=True):
        assert targets.tolist() == window[CONTEXT // 2 + 1 :]
        wanted = [np.bincount(window[: i + 1], minlength=VOCAB) for i in scored(CONTEXT)]
        assert np.array_equal(logits.numpy(), np.stack(wanted))
    with pytest.raises(BadRequest, match=r"llama\.cpp gives logits by prefill alone"):
        path_for("decode", [engine])
    engine.close()
    assert engine._model.closed


def test_llama_cpp_names_its_package_when_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf("llama", tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(SetupError, match="needs the package llama-cpp-python"):
        LlamaCpp(path, CONTEXT)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=OfOnes))
    with pytest.raises(SetupError, match=r"does not load .*none\.gguf: Model path does not exist"):
        LlamaCpp(tmp_path / "none.gguf", CONTEXT)
