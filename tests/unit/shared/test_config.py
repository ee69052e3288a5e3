"""Settings: which source wins, what a mistake reads like, and that a child gets the same values."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import PREFIX, Settings, load
from shared.errors import SetupError
from shared.processes import memory_limit


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


def test_flag_beats_env_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('window = 4\nstep_tokens = 512\nslots = 7\nfleet = "blue"\n')
    monkeypatch.setenv("HEADRACE_STEP_TOKENS", "128")
    monkeypatch.setenv("HEADRACE_SLOTS", "9")
    loaded = load(file, {"slots": "11", "threads": None})
    s = loaded.settings
    assert (s.window, s.step_tokens, s.slots, s.fleet, s.threads) == (4, 128, 11, "blue", 0)
    named = ("window", "step_tokens", "slots", "fleet", "threads")
    assert [loaded.origins[n] for n in named] == ["file", "env", "flag", "file", "default"]


def test_the_file_may_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "h.toml"
    file.write_text("window = 3\n")
    monkeypatch.setenv("HEADRACE_CONFIG", str(file))
    loaded = load()
    assert (loaded.settings.window, loaded.origins["window"], loaded.unknown_env) == (3, "file", ())


def test_settings_are_few_and_explained() -> None:
    assert len(Settings.model_fields) <= 66
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("window = 9", "window: Input should be less than or equal to 4, not 9 (file "),
        ("windows = 2", "windows: no such setting (file "),
        ("window = ", "cannot be read"),
    ],
)
def test_a_mistake_in_the_file_names_it(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "h.toml"
    file.write_text(text)
    with pytest.raises(SetupError) as caught:
        load(file)
    assert reason in caught.value.message
    assert str(file) in caught.value.message


def test_a_mistake_in_a_variable_or_flag_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KV_BLOCKS", "many")
    with pytest.raises(SetupError, match=r"kv_blocks: .*not 'many' \(variable HEADRACE_KV_BLOCKS\)"):
        load()
    monkeypatch.delenv("HEADRACE_KV_BLOCKS")
    with pytest.raises(SetupError, match=r"fleet: .*not 'a b' \(flag --fleet\)"):
        load(flags={"fleet": "a b"})


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no configuration file"):
        load(tmp_path / "none.toml")


def test_misspelt_variables_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_WINDOWS", "2")
    assert load().unknown_env == ("HEADRACE_WINDOWS",)


def test_a_child_gets_the_same_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {"deterministic": True, "cache_dir": tmp_path, "request_timeout_s": 1.5, "backend": "sim"}
    settings = load(flags=given).settings
    for name, value in settings.to_env().items():
        monkeypatch.setenv(name, value)
    assert load().settings.model_dump() == settings.model_dump()


def test_the_home_folder_is_expanded() -> None:
    assert load().settings.cache_dir == Path.home() / ".cache/headrace"


@pytest.mark.parametrize(
    ("given", "names"),
    [("", ()), ("a", ("a",)), ("a, b/c d,e", ("a", "b/c d", "e")), ("a" * 128, ("a" * 128,))],
)
def test_a_model_may_have_several_names(given: str, names: tuple[str, ...]) -> None:
    assert load(flags={"model_name": given}).settings.model_names == names


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("a,,b", "1 to 128"),
        ("a,", "1 to 128"),
        (",", "1 to 128"),
        ("a" * 129, "1 to 128"),
        ("a,b, a", "differ"),
    ],
)
def test_names_that_are_empty_long_or_equal_are_refused(given: str, reason: str) -> None:
    with pytest.raises(SetupError, match=f"model_name: names .*{reason}"):
        load(flags={"model_name": given})


@pytest.mark.parametrize(
    ("http", "address"),
    [("off", None), ("[::1]:0", ("::1", 0)), ("unix:/run/h.sock", "/run/h.sock"), ("unix:/a:80", "/a:80")],
)
def test_the_gateway_has_a_port_or_a_socket(http: str, address: object) -> None:
    assert load(flags={"http": http}).settings.http_address == address


@pytest.mark.parametrize("http", ["unix:", "unix:here.sock", "/run/h.sock", "8000"])
def test_other_addresses_are_refused(http: str) -> None:
    with pytest.raises(SetupError, match="http: host:port, unix:/path or off is expected"):
        load(flags={"http": http})


def test_gateways_do_not_share_a_socket() -> None:
    with pytest.raises(SetupError, match="gateways: 1 is expected, because gateways do not share a Unix"):
        load(flags={"http": "unix:/run/h.sock", "gateways": "2"})


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ("auto", ("auto", 1)),
        ("cuda/tp4", ("cuda", 4)),
        ("cpu/tp16", ("cpu", 16)),
        ("cpu/pp2", ("cpu", 2)),
        ("cuda/pp64", ("cuda", 64)),
    ],
)
def test_a_device_may_be_several(device: str, wanted: tuple[str, int]) -> None:
    settings = load(flags={"device": device}).settings
    assert settings.device_and_ranks == wanted
    assert settings.is_pipeline == ("pp" in device)


@pytest.mark.parametrize(
    ("text", "of_80_gib"),
    [
        ("0.6", 48 << 30), ("1", 80 << 30), ("1.0", 80 << 30), ("40GiB", 40 << 30), ("0.5GiB", 1 << 29),
        ("40GB", 40 * 10**9), ("512MiB", 512 << 20), ("512MB", 512 * 10**6),
    ],
)  # fmt: skip
def test_memory_of_a_gpu_is_a_share_or_a_size(text: str, of_80_gib: int) -> None:
    assert memory_limit(load(flags={"gpu_memory": text}).settings.gpu_memory, 80 << 30) == of_80_gib


@pytest.mark.parametrize(
    "text", ["0", "0.0", "1.5", "60%", "40", "-0.5", "0GiB", "40 GiB", "40gib", "much", "nan"]
)
def test_memory_of_a_gpu_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(
        SetupError, match=r"gpu_memory: .*a share up to 1, like 0.6, or a size in .*, like 40GiB"
    ):
        load(flags={"gpu_memory": text})


def test_stages_are_whole_ranks() -> None:
    with pytest.raises(SetupError, match=r"stages \(/pp\) with tensor-parallel ranks \(/tp\)"):
        load(flags={"device": "cuda/tp2/pp2"})


@pytest.mark.parametrize(
    "device", ["gpu", "cuda/tp0", "cuda/2", "/tp2", "cpu/tp100", "cuda/pp0", "cuda/pp65"]
)
def test_a_device_that_there_is_not_is_refused(device: str) -> None:
    with pytest.raises(SetupError, match="device: auto, cpu or cuda is expected"):
        load(flags={"device": device})


@pytest.mark.parametrize(
    ("overlap", "mode", "comm"),
    [("auto", "auto", "auto"), ("run_ahead", "run_ahead", "auto"), ("single/off", "single", "off"),
     ("auto/two_stream", "auto", "two_stream")],
)  # fmt: skip
def test_overlap_is_of_rows_and_of_ranks(overlap: str, mode: str, comm: str) -> None:
    settings = load(flags={"overlap": overlap}).settings
    assert (settings.overlap_mode, settings.overlap_comm) == (mode, comm)


@pytest.mark.parametrize("overlap", ["twice", "auto/", "auto/on", "/off", "off"])
def test_an_overlap_that_there_is_not_is_refused(overlap: str) -> None:
    with pytest.raises(SetupError, match="overlap: Input should be 'auto', 'single'"):
        load(flags={"overlap": overlap})
