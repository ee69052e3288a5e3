"""The command line without a server: help, settings, requests that cannot be read, exit statuses."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import pytest
from support.executor.int4_folders import save_int4

from services.executor.checkpoint import loader as model_loader
from services.executor.cpu import autotune
from services.executor.cpu.autotune import Timing
from services.launcher import console, session, up
from services.launcher.cli import main
from services.launcher.commands import chat
from services.launcher.commands import doctor as doctor_module
from services.launcher.commands.chat import Conversation
from services.launcher.commands.doctor import Finding
from services.launcher.commands.submit import read_body
from shared.config import PREFIX, Loaded, Settings, metavar
from shared.errors import BadRequest


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("verb", [[], ["up"], ["chat"], ["status"], ["top"], ["pull"]])
def test_help_imports_nothing_heavy(verb: list[str]) -> None:
    code = (
        "import sys\nfrom services.launcher.cli import main\n"
        f"try: main({[*verb, '--help']!r})\n"
        "except SystemExit as e: print(e.code, {'torch', 'nats', 'rich', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: headrace")
    assert done.stdout.splitlines()[-1] == "0 set()"


def test_help_of_up_names_every_setting_and_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    words = set(re.split(r"[\s\[\]]+", capsys.readouterr().out))
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in words
        assert f"HEADRACE_{name.upper()}" in words


def test_help_shows_the_settings_that_a_command_uses(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for verb in ("doctor", "status", "top", "auth", "chat"):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        flags = set(re.findall(r"^  --([a-z-]+)", capsys.readouterr().out, re.MULTILINE))
        shown[verb] = {name for name in Settings.model_fields if name.replace("_", "-") in flags}
    fleet = {"nats_url", "fleet", "cache_dir"}
    assert shown == {
        "doctor": fleet | {"model", "backend"}, "status": fleet, "top": fleet, "auth": {"nats_url", "fleet"},
        "chat": fleet | {"model", "model_name", "request_timeout_s"},
    }  # fmt: skip


def test_other_settings_still_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SLOTS", "many")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err.startswith("error (setup): slots: Input should be a valid integer")


def test_metavars_have_a_meaning() -> None:
    found = {name: metavar(name) for name in Settings.model_fields}
    counts = {"gateways", "tokenizers", "executors", "detokenizers", "slots", "threads"}
    assert {name for name, word in found.items() if len(word) < 2} == counts
    few = (
        "nats_url",
        "port",
        "device",
        "model",
        "heartbeat_interval_ms",
        "backlog_limit_bytes",
        "cache_dir",
        "http",
        "l1",
    )
    assert [found[name] for name in few] == [
        "URL", "PORT", "DEVICE", "MODEL", "MS", "BYTES", "DIR", "HOST:PORT", "MIB",
    ]  # fmt: skip
    assert (found["backend"], found["dtype"]) == ("{auto,torch,dummy,sim}", "DTYPE")


def test_config_show_prints_the_source_of_each_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_SLOTS", "3")
    monkeypatch.setenv("HEADRACE_SLOT", "4")
    file = tmp_path / "h.toml"
    file.write_text("threads = 2\n")
    assert main(["config", "show", "--config", str(file), "--window", "4", "--no-log-json"]) == 0
    shown = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:3] for line in shown.out.splitlines()}
    assert set(rows) == set(Settings.model_fields)
    assert rows["slots"] == ["3", "env"]
    assert rows["threads"] == ["2", "file"]
    assert rows["window"] == ["4", "flag"]
    assert rows["log_json"] == ["False", "flag"]
    assert rows["backend"] == ["auto", "default"]
    assert shown.err == "HEADRACE_SLOT is not a setting: HEADRACE_… takes the names above\n"


def test_a_user_without_home_and_passwd_entry_is_given_one(tmp_path: Path) -> None:
    code = (
        "import pwd, runpy, sys\n"
        "def getpwuid(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = getpwuid\n"
        "sys.argv = ['headrace', 'config', 'show']\n"
        "runpy.run_module('services.launcher.cli', run_name='__main__')"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER")}
    shown = [sys.executable, "-c", code]

    def show() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            shown, env={**env, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False
        )

    done, home = show(), tmp_path / f"headrace-home-{os.getuid()}"
    assert done.returncode == 0, done.stderr
    assert str(home / ".cache" / "headrace") in done.stdout
    assert home.stat().st_mode & 0o777 == 0o700
    home.rename(tmp_path / "other")
    home.symlink_to("/nowhere")
    assert "this user has no home folder, and none can be made" in show().stderr


@pytest.mark.parametrize("command", [["status"], ["kv"], ["trace", "r1"], ["trace", "r1", "--overlap"]])
def test_no_server_is_an_error_with_its_mend(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--nats-url", "nats://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error (setup): no connection to the nats-server at nats://127.0.0.1:1 ")
    assert "headrace up" in error


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("bench run --url http://127.0.0.1:99999", "is no URL of a server: Port out of range"),
        ("bench run --url foo", "'foo' is no URL of a server"),
        ("bench run --url http://[::1", "'http://[::1' is no URL of a server"),
        ("status --nats-url nats://[::1", "the URL of a nats-server cannot be read"),
        ("config show --nats-url nats://[::1", "the URL of a nats-server cannot be read"),
        ("up --join nats://u:secret[@h", "the URL of a nats-server cannot be read"),
        ("up --leaf nats-leaf://[::1", "the URL of a nats-server cannot be read"),
        ("bench run --url unix:/x --fleet y", "--url names the server: leave out --nats-url and --fleet"),
        ("bench run --fleet nope", "no fleet nope runs here"),
        ("bench run --timeout -1", "--timeout is above 0"),
        ("bench run --output-len 0", "--input-len and --output-len are 1 or more"),
        ("chat -q hi --nats-url nats://127.0.0.1:99999", "no connection to the nats-server at"),
        ("top --count -1", "--count is 0 or more"),
        ("top --interval nan", "--interval is above 0"),
        ("pull --cache-dir /proc/x", "/proc/x/models cannot be made"),
        ("run smollm2-135m-instruct hi --cache-dir /proc/x", "/proc/x/models cannot be made"),
        ("run ./nothing.gguf hi", "there is no model at nothing.gguf"),
        ("logs --fleet nope", "no fleet of this name runs on this machine"),
        ("stop --fleet nope", "no fleet nope runs here"),
    ],
)
def test_wrong_input_is_answered_with_a_sentence(
    line: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(line.split()) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"error \((setup|invalid request)\): .+\n", shown.err)
    assert reason in shown.err


def test_an_unknown_service_or_model_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "gpu"]) == 1
    assert main(["up", "--model", str(tmp_path / "x.gguf")]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "there is no service 'gpu'" in first
    assert f"there is no model at {tmp_path}/x.gguf" in second


def test_a_request_from_argument_file_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "hé"}
    file = tmp_path / "r.json"
    file.write_text(json.dumps(body))
    assert read_body(json.dumps(body), None) == body
    assert read_body(None, file) == body
    for text, path in ((None, None), ("-", None), (None, Path("-"))):
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(body)))
        assert read_body(text, path) == body


@pytest.mark.parametrize(
    ("text", "file", "reason"),
    [
        ("{", None, "the request is not JSON"),
        ("[1]", None, "not a JSON object"),
        ("{}", Path("x"), "not both"),
        (None, Path("/none/x.json"), "/none/x.json cannot be read: No such file"),
    ],
)
def test_a_request_that_cannot_be_read(text: str | None, file: Path | None, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        read_body(text, file)


def test_text_that_is_not_utf_8_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"prompt": "caf\xe9"}')
    assert main(["request", "-f", str(tmp_path / "latin.json"), "--nats-url", "nats://127.0.0.1:1"]) == 1
    assert "error (invalid request): the text given is not UTF-8: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["chta"], "chat"),
        (["model", "lst"], "list"),
        (["chat", "-q", "Hi", "--temprature", "1"], "--temperature"),
        (["up", "--modle", "x"], "--model"),
        (["up", "--dtype", "pakced"], "packed"),
        (["doctor", "--backend", "troch"], "torch"),
        (["pull", "smolm2-135m-instruct"], "smollm2-135m-instruct"),
        (["xyzzy"], ""),
        (["status", "--xyzzy"], ""),
        (["up", "--dtype", "xyzzy"], ""),
        (["pull", "xyzzy"], ""),
    ],
)
def test_mistyped_word_is_an_error_with_the_nearest_one(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words)
    except SystemExit as left:
        status = int(left.code or 0)
    reason = capsys.readouterr().err.rstrip()
    assert status in (1, 2)
    assert reason.endswith(f"; did you mean `{meant}`?") if meant else "did you mean" not in reason


@pytest.mark.parametrize("verb", ["result", "attach"])
def test_an_empty_id_is_a_wrong_argument(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([verb, "", "--nats-url", "nats://127.0.0.1:1"])
    assert "argument id: invalid" in capsys.readouterr().err


@pytest.mark.parametrize(("closed", "shown"), [("<&-", "caf? "), (">&- 2>&-", "")])
def test_closed_streams_and_characters_that_a_locale_lacks(closed: str, shown: str) -> None:
    command = f"{sys.executable} -m services.launcher.cli config show {closed}"
    given = os.environ | {"PYTHONIOENCODING": "ascii", "HEADRACE_HOST_ID": "café"}
    done = subprocess.run(["sh", "-c", command], env=given, capture_output=True, text=True, check=True)
    assert shown in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "unbuffered"), [("completion bash", ""), ("completion bash", "1"), ("up --help", "1")]
)
def test_a_full_disk_is_an_error(words: str, unbuffered: str) -> None:
    command = f"{sys.executable} -m services.launcher.cli {words} > /dev/full"
    given = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["sh", "-c", command], env=given, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"error \(setup\): .* No space left on device\n", done.stderr)


def test_an_up_has_its_note_before_it_starts_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So `stop` finds it: its imports and its nats-server take half a second."""
    notes = []

    def start(settings: Settings, *given: object, **more: object) -> int:
        notes.extend(session.runs(session.path_for(settings)))
        return 0

    monkeypatch.setattr(up, "up", start)
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace/a.0.up").write_text("of one that was killed")
    assert main(["up", "--fleet", "a"]) == 0
    assert [(note.pid, note.fleet, note.ready) for note in notes] == [(os.getpid(), "a", False)]
    assert list(tmp_path.rglob("*.up")) == []


def test_a_chat_has_what_is_left_of_the_context_unless_a_limit_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A default of its own would not fit near the end of the context."""
    limits = []

    async def ask_once(target: object, question: str, conversation: Conversation, timeout_s: float) -> None:
        limits.append(conversation.options.get("max_tokens"))

    monkeypatch.setattr(chat, "ask_once", ask_once)
    monkeypatch.setattr(session, "find_target", lambda loaded, **more: None)
    for more in ([], ["--max-tokens", "5"]):
        main(["chat", "-q", "Hi", *more])
    assert limits == [None, 5]


def test_doctor_passes_here_and_fails_when_something_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SLOT", "4")
    monkeypatch.setenv("HEADRACE_THREADS", "1")  # nothing to time
    assert main(["doctor", "--nats-url", "nats://127.0.0.1:1"]) in (0, 1)  # the model may not be here
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in ("ok", "warn", "fail") for line in lines)
    assert any(line.startswith("ok    nats-server: v") for line in lines)
    assert "warn  HEADRACE_SLOT is not a setting: `headrace config show` lists them" in lines
    assert any(line.startswith("ok    structured output: llguidance ") for line in lines)
    monkeypatch.setattr(doctor_module, "examine", lambda loaded, begins: iter([Finding("fail", "x", "do y")]))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == "fail  x: do y\n"


def test_doctor_shows_on_a_terminal_what_it_checks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some checks take seconds."""
    examine = doctor_module.examine
    monkeypatch.setattr(console, "is_terminal", lambda stream: True)
    monkeypatch.setattr(doctor_module, "examine", lambda loaded, begins: islice(examine(loaded, begins), 1))
    assert main(["doctor"]) == 0
    assert "python …" in capsys.readouterr().out


def test_doctor_prints_dtype_and_threads_and_the_faster_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    (tmp_path / "config.json").write_text("{}")
    of_f32 = {1: [2.0, 8.0, 20.0], 2: [1.0, 4.0, 10.0]}

    def found(bf16: list[float], **fields: object) -> list[tuple[str, str]]:
        timing = Timing("f32", 2, {"f32": of_f32, "bf16": {2: bf16}})
        monkeypatch.setattr(autotune, "timing_for", lambda *given, again: timing)
        settings = Settings.model_validate({"model": str(tmp_path), "device": "cpu", **fields})
        findings = doctor_module._dtype_and_threads(Loaded(settings, {}, ()))
        return [(each.level, f"{each.what}: {each.mend}") for each in findings]

    rule, threads = found([1.0, 4.0, 10.0])
    assert rule == ("ok", "dtype f32: no GGUF file: int8 and bf16 are faster, with other near ties: ")
    assert threads[0] == "ok"
    assert threads[1].startswith("threads: 2 of 2 threads to begin with; ms for products")
    *_, advice = found([0.5, 2.0, 5.0])
    assert advice == (
        "warn",
        "products in bf16 take 0.50 of the time of those in f32: --dtype bf16, if other near ties do no harm",
    )
    assert [level for level, _ in found([0.5, 2.0, 5.0], dtype="f32")] == ["ok", "warn"]
    assert found([0.5, 2.0, 5.0], backend="dummy") == []


def test_doctor_names_the_extra_for_weights_in_4_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, _ = save_int4("awq", "llama", tmp_path)
    loaded = Loaded(Settings.model_validate({"model": str(folder)}), {}, ())
    monkeypatch.setattr(model_loader, "best_dtype", lambda *_: ("auto", "on a GPU"))
    find = importlib.util.find_spec
    mend = "pip install 'headrace[int4]', or use --dtype fp8 or bf16"
    for humming, finding in (
        (object(), Finding("ok", "dtype auto: on a GPU")),
        (None, Finding("fail", "a GPU cannot keep the model's weights in 4 bits", mend)),
    ):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, found=humming: found if name == "humming" else find(name),
        )
        assert next(doctor_module._dtype_and_threads(loaded)) == finding


def test_version_is_printed_without_imports() -> None:
    code = (
        "import sys\nfrom services.launcher.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit as e: print(e.code, {'torch', 'asyncio'} & {*sys.modules})\n"
        "main(['version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    versions, ended, again = done.stdout.splitlines()
    python = ".".join(map(str, sys.version_info[:3]))
    assert versions == f"headrace {version('headrace')}, Python {python}, torch {version('torch')}"
    assert (ended, again) == ("0 set()", versions)
