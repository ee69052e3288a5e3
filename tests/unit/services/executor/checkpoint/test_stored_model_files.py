"""The files of a model change while they are loaded and served: an error by name, never another number."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from support.executor.plan_maker import PlanMaker
from support.executor.tiny_encoders import encoder_folder
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import reference_logprobs, save_tiny, tiny_model

from services.executor.checkpoint import loader
from services.executor.checkpoint.loader import TorchOptions, grammars_of, info_of
from services.executor.checkpoint.stored import states_of
from services.executor.checkpoint.weights import load_hf
from services.executor.cpu.engine import build
from services.executor.encoder.model import Encoder
from services.executor.engine import EngineGone
from services.executor.quantised.gguf import load_gguf
from shared.errors import EngineError, SetupError

CPU = torch.device("cpu")
IDS = torch.tensor([3, 130, 3])
PROMPT = list(range(20, 60))


def old_gguf(folder: Path, kind: str = "F32") -> Path:
    """A file that was written long ago: the clock of a file system may tick slowly."""
    types = {} if kind == "F32" else {"token_embd.weight": gguf.GGMLQuantizationType[kind]}
    path = write_gguf("llama", folder / "m.gguf", types=types)
    os.utime(path, (1, 1))
    return path


def options_of(path: Path, **more: object) -> TorchOptions:
    return TorchOptions(model_path=path, model_name="m", device="cpu", blocks=8, slots=1, **more)


def zeroed(path: Path) -> None:
    """Write zeros over all of it, in place."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def partly(path: Path) -> None:
    """Write zeros over the last tenth, in place."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - size // 10)
        file.write(bytes(size // 10))


def touched(path: Path) -> None:
    os.utime(path)


def cut_off(path: Path) -> None:
    os.truncate(path, 500)


def replaced(path: Path) -> None:
    shutil.copyfile(path, path.with_suffix(".new"))
    partly(path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def linked(path: Path) -> None:
    os.link(path, path.with_suffix(".second"))
    path.chmod(0o600)


def copied_over(path: Path) -> None:
    path.write_bytes(path.read_bytes())


def continued(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES = [(zeroed, "written to"), (cut_off, "cut off")]
UNHARMED = [touched, partly, copied_over, continued, replaced, linked, Path.unlink]


@pytest.mark.parametrize(("change", "how"), CHANGES)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_a_file_that_is_changed_are_refused_and_not_read(
    change: Callable[[Path], None], how: str, packed: bool, tmp_path: Path
) -> None:
    path = old_gguf(tmp_path, "Q8_0" if packed else "F32")
    _, weights = load_gguf(path, torch.float32, CPU, packed=packed)
    rows, wanted = weights.embedding.for_rows(), weights.embedding.values[IDS]
    assert torch.equal(rows.rows(IDS).values, wanted)
    change(path)
    with pytest.raises(EngineGone, match=rf"m\.gguf was {how} while it was served: give a new model a name"):
        rows.rows(IDS)


@pytest.mark.parametrize("change", UNHARMED)
def test_rows_in_the_file_are_read_after_any_change_of_the_folder(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    path = old_gguf(tmp_path)
    _, weights = load_gguf(path, torch.float32, CPU)
    wanted, rows = weights.embedding.values[IDS], weights.embedding.for_rows()
    change(path)
    for _ in range(2):
        assert torch.equal(rows.rows(IDS).values, wanted)


def test_rows_are_compared_again_after_each_change(tmp_path: Path) -> None:
    path = old_gguf(tmp_path)
    _, weights = load_gguf(path, torch.float32, CPU)
    rows = weights.embedding.for_rows()
    touched(path)
    rows.rows(IDS)
    zeroed(path)
    os.utime(path, (5, 5))
    for _ in range(2):
        with pytest.raises(EngineGone, match="was written to"):
            rows.rows(IDS)


def test_a_step_over_a_changed_file_ends_the_engine_and_not_the_request(tmp_path: Path) -> None:
    path = old_gguf(tmp_path)
    maker = PlanMaker(build(options_of(path)))
    maker.open(0, PROMPT)
    assert maker.prefill({0: 40}).ids[0] == int(reference_logprobs("llama", PROMPT)[-1].argmax())
    zeroed(path)
    maker.open(0, PROMPT)
    with pytest.raises(EngineGone, match="was written to while it was served"):
        maker.prefill({0: 40})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_of_a_folder_are_none_of_the_files_own_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, max_shard_size="10GB")
    if dtype == torch.bfloat16:
        copy.deepcopy(tiny_model("llama")).to(dtype).save_pretrained(
            folder
        )  # other tests have the same model
    _, weights = load_hf(folder, dtype, CPU)
    every = [weights.embedding, weights.head, *(each for layer in weights.layers for each in layer.values())]
    before = [weights.norm.clone(), *(each.values.clone() for each in every)]
    (file,) = folder.glob("*.safetensors")
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(bytes(file.stat().st_size - start))
    after = [weights.norm, *(each.values for each in every)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_encoder_keeps_its_weights_when_its_file_is_written_to(tmp_path: Path) -> None:
    folder = encoder_folder("bert", tmp_path)
    made = Encoder(folder, "pooling mean", torch.empty(0), kept_in="", deterministic=False)
    tensors = [each for each in vars(made).values() if isinstance(each, torch.Tensor)]
    before = [each.clone() for each in tensors]
    (file,) = folder.glob("*.safetensors")
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(bytes(file.stat().st_size - start))
    assert len(tensors) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize("change", [partly, touched, replaced])
def test_a_file_that_changes_while_it_is_loaded_fails_the_start(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    path = old_gguf(tmp_path)
    options = options_of(path)
    loaded = loader.load(options)
    change(path)
    with pytest.raises(SetupError, match=r"m\.gguf has changed while it was loaded; wait until it is whole"):
        info_of(options, loaded)


def test_a_file_of_a_folder_that_changes_while_it_is_loaded_is_named(tmp_path: Path) -> None:
    options = options_of(save_tiny("llama", tmp_path))
    loaded = loader.load(options)
    (tmp_path / "model.safetensors").unlink()
    os.symlink("nothing", tmp_path / "model.safetensors")
    with pytest.raises(SetupError, match=r"model\.safetensors has changed while it was loaded"):
        loader.check_unchanged(tmp_path, loaded.files)


def test_a_file_that_is_not_of_the_model_may_change_while_it_is_loaded(tmp_path: Path) -> None:
    """A log, for example, of a server that was started in the folder."""
    folder = save_tiny("llama", tmp_path)
    (folder / "server.log").write_text("one")
    before = states_of(folder)
    assert {each.name for each in before} >= {"config.json", "model.safetensors"}
    (folder / "server.log").write_text("one\ntwo")
    (folder / "runs").mkdir()
    loader.check_unchanged(folder, before)


def test_ranks_that_see_two_states_of_a_file_do_not_start(tmp_path: Path) -> None:
    path = old_gguf(tmp_path)

    class Two:
        size, rank = 2, 0

        def exchange(self, mine: object) -> list[object]:
            touched(path)
            return [mine, states_of(path)]

    with pytest.raises(SetupError, match="changes while its ranks load it"):
        loader.load(options_of(path), Two())  # type: ignore[arg-type]


def test_an_engine_does_not_wake_with_a_file_that_was_touched(tmp_path: Path) -> None:
    path = old_gguf(tmp_path)
    engine = build(options_of(path))
    engine.sleep()
    touched(path)
    with pytest.raises(EngineError, match="the weights of m have changed while it was asleep"):
        engine.wake()


def test_a_grammar_is_not_compiled_with_another_vocabulary(tmp_path: Path) -> None:
    path = old_gguf(tmp_path)
    options = options_of(path)
    info = info_of(options, loader.load(options))
    grammars = grammars_of(options, info)
    write_gguf("llama", path, more={"tokenizer.ggml.tokens": [f"u{i}" for i in range(131)]})
    with pytest.raises(EngineError, match=r"the vocabulary in .*m\.gguf has changed since this executor"):
        grammars._compiler._load_vocabulary()
