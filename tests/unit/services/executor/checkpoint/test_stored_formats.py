"""A model in a format that no table names is refused by name; plain safetensors need no table."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.executor.int4_folders import save_int4
from support.executor.tiny_gguf import write_gguf
from support.executor.tiny_models import save_tiny

from services.executor.checkpoint import loader, stored
from services.executor.checkpoint.loader import TorchOptions, best_dtype, load
from services.executor.checkpoint.weights import format_of
from shared.errors import SetupError


def options(path: Path, dtype: str = "f32") -> TorchOptions:
    return TorchOptions(model_path=path, model_name="m", device="cpu", dtype=dtype, blocks=2, slots=1)


@pytest.fixture
def plain_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables as they are without services/executor/quantised/."""
    for table in (stored.FILES, stored.SCHEMES, stored.KEPT):
        for key in [*table]:
            monkeypatch.delitem(table, key)
    monkeypatch.setattr(loader, "DTYPES", ("bf16", "f32", "int8"))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_plain_folder_has_the_same_weights_without_other_formats(
    dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = save_tiny("llama", tmp_path)
    with_all = load(options(folder, dtype)).fingerprint
    request.getfixturevalue("plain_alone")
    assert load(options(folder, dtype)).fingerprint == with_all
    assert best_dtype(folder, "cpu", 1)[0] == "f32"
    assert loader.kept_on_gpu(folder) == "bf16"


@pytest.mark.usefixtures("plain_alone")
def test_a_quantised_model_is_refused_by_name_without_its_format(tmp_path: Path) -> None:
    file = write_gguf("llama", tmp_path / "m.gguf")
    folder = save_int4("awq", "llama", tmp_path / "awq")[0]
    wanted = r"has no reader of quantised weights \(services/executor/quantised/\): install headrace with it"
    for path, what in ((file, str(file)), (folder, f"{folder}: quantization_config in config.json")):
        with pytest.raises(SetupError, match=rf"^{what}: this installation {wanted}"):
            load(options(path))
    with pytest.raises(SetupError, match=rf"^{file}: this installation {wanted}"):
        format_of(file)
    with pytest.raises(SetupError, match=r"^dtype 'packed' is not supported; use one of bf16, f32, int8$"):
        load(options(save_tiny("llama", tmp_path / "plain"), "packed"))
