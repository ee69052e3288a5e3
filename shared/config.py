"""`Settings` has every setting of every service; `load` reads them and records the origin of each value.

Order of precedence: flags of the command line, `HEADRACE_*` variables, the TOML file of `--config` (or
HEADRACE_CONFIG), defaults. Defaults are measured or derived; with `auto` the service decides at start.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar, get_args

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from shared.answer_formats import formats
from shared.errors import SetupError, did_you_mean
from shared.nats.access import DEFAULT_NATS_URL as DEFAULT_NATS_URL
from shared.nats.subjects import MAX_NAME_CHARS
from shared.processes import UNIX_PREFIX as UNIX
from shared.processes import memory_limit

PREFIX = "HEADRACE_"
CONFIG_VARIABLE = "HEADRACE_CONFIG"

T = TypeVar("T")


MOST_DRAFTS = 8  # of a row


class Settings(BaseSettings):
    """The settings of all services."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, protected_namespaces=())

    # transport and identity
    nats_url: str = Field("", description="nats-server; empty: `up` embeds one, other commands look for it")
    port: int = Field(0, ge=0, le=65535, description="port of the embedded server; 0: 4222, or any free one")
    leaf: str = Field(
        "",
        description="`up` is an edge of the nats-server with this leaf port: nats-leaf://user:password@host:7422",
    )
    fleet: str = Field(
        "default", pattern=r"^[A-Za-z0-9_-]+$", description="services of one fleet work together"
    )
    host_id: str = Field("", description="name of this machine for other services; empty: the host name")
    heartbeat_interval_ms: int = Field(
        1000, ge=10, description="time between the heartbeats of a service, ms"
    )
    drain_timeout_s: float = Field(
        30,
        ge=0,
        description="longest wait for what runs at a stop, s; an executor's sequences move after 1/10",
    )
    durable: bool = Field(
        True, description="`up` keeps durable requests on disk: a keeper, and JetStream in its server"
    )
    durable_replicas: int = Field(
        1, ge=1, le=5, description="servers of a cluster that store each durable request; 1, 3 or 5"
    )
    webhooks: str = Field(
        "", description="file of lines `host whsec_secret`: hosts that may get events of durable requests"
    )
    backlog_limit_bytes: int = Field(8_388_608, ge=65_536, description="unsent bytes that make a client slow")
    # gateway
    http: str = Field(
        "127.0.0.1:8000", description="host:port of the OpenAI API; port 0: any free one; or unix:/path; off"
    )
    http_keys: str = Field("", description="file of lines `tenant key`: the API keys; empty: no key needed")
    http_tls_cert: str = Field("", description="PEM file of the gateway's certificate: HTTPS; empty: HTTP")
    http_tls_key: str = Field("", description="PEM file of its key")
    http_cors: str = Field(
        "", description="origins, by comma, whose pages may use the API; *: any; empty: none"
    )
    http_ping_s: float = Field(
        10, ge=0.1, description="longest silence of a streamed answer, s: then a comment or a ping is sent"
    )
    access_log: str = Field("", description="a JSON line for each HTTP request: a file, or - for stdout")
    links: str = Field("", description="pages that `headrace status` names: NAME=URL,...")
    access_log_prompts: bool = Field(False, description="with the bodies of requests: prompts, messages, all")
    tenant_classes: str = Field(
        "", description="file of lines `tenant class,...`: the classes that each tenant may use"
    )
    tenant_quotas: str = Field(
        "", description="file of lines `tenant requests tokens`: most of each a minute; above: 429"
    )
    # model
    cache_dir: Path = Field(Path("~/.cache/headrace"), description="folder for models and run files")
    model: str = Field("smollm2-135m-instruct", description="model to serve: a name, a GGUF file or a folder")
    model_name: str = Field(
        "", description="name of the model for clients, then its aliases, by comma; empty: from the model"
    )
    awaited_models: str = Field(
        "", description="models of this fleet, by comma: after a start requests wait for them; set by `up`"
    )
    answer_format: str = Field(
        "auto",
        description="form of reasoning and calls: a family, off; auto: by the chat template",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="auto: a request without temperature, top_p, ... gets those of the model's files"
    )
    # logs
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level logged")
    log_json: bool = Field(False, description="log JSON lines instead of text")
    # executor
    backend: Literal["auto", "torch", "dummy", "sim"] = Field(
        "auto", description="engine; auto: torch; dummy: torch with random weights in the model's shapes"
    )
    device: str = Field(
        "auto", description="cpu, cuda; auto: cuda if present; /tp4: four, tensor-parallel; /pp4: four stages"
    )
    dtype: Literal[
        "auto",
        "bf16",
        "f32",
        "int8",
        "packed",
        "packed8",
        "fp8",
        "int4",
        "auto/fp8",
        "bf16/fp8",
        "f32/fp8",
        "int8/fp8",
        "packed/fp8",
        "packed8/fp8",
        "fp8/fp8",
        "int4/fp8",
    ] = Field(
        "auto",
        description="auto: packed or f32 on cpus, bf16 on cuda; int8, packed, fp8, int4: weights; /fp8: KV",
    )
    kv_blocks: int = Field(0, ge=0, description="KV blocks; 0: from the free memory")
    gpu_memory: str = Field(
        "", description="most memory of a GPU: a share like 0.6, or 40GiB; empty: 0.9 of the free"
    )
    block_tokens: int = Field(16, ge=8, le=256, description="tokens in a KV block")
    slots: int = Field(0, ge=0, le=1024, description="sequences that run at once; 0: 64, 256 on cuda and sim")
    max_context: int = Field(0, ge=0, description="longest prompt plus answer, tokens; 0: the model's")
    threads: int = Field(0, ge=0, description="CPU threads of torch; 0: the usable cores, fewer if faster")
    lora_places: int = Field(0, ge=0, le=256, description="adapters that a step may have; 0: no adapters")
    lora_rank: int = Field(64, ge=1, le=512, description="highest rank of an adapter")
    deterministic: bool = Field(False, description="answers do not depend on the batch, bit for bit; slower")
    sim: str = Field("step=5000,token=20", description="sim: us of a step and a token; or h200-8b, ...")
    # tiers below the device
    l1: str = Field("auto", description="DRAM for KV copies, MiB; auto: a quarter, on a cpu 2048 if shared")
    l2: str = Field("", description="remote KV: redis://host:port or file:///folder[?gib=most]; empty: none")
    # scheduler
    window: int = Field(2, ge=1, le=4, description="steps in flight; 2 hides the whole round trip")
    overlap: Literal[
        "auto", "single", "run_ahead", "two_batch",
        "auto/off", "single/off", "run_ahead/off", "two_batch/off",
        "auto/two_stream", "single/two_stream", "run_ahead/two_stream", "two_batch/two_stream",
    ] = Field(
        "auto",
        description="rows in flight together; auto: by cost, each step. With /off or /two_stream: whether "
        "collectives overlap compute, else as measured at start",
    )  # fmt: skip
    speculate: str = Field(
        "auto", description="drafts of tokens: auto: by price; off; or of each row, 1 to 8"
    )
    step_tokens: int = Field(1024, ge=1, description="most tokens in a step, prompt chunks and decodes")
    policy: str = Field(
        "", description="scheduling policies: order=,batching=,reservation=,victim=,routing=,tier=; see docs"
    )
    slo: str = Field("", description="classes: name=ttft/tbt/age in ms; interactive, standard, batch")
    model_digest: str = Field(
        "", description="only executors with this digest of weights and modes serve; empty: the first's"
    )
    accept_mixed: bool = Field(False, description="executors with other weights or modes serve, too")
    event_log: str = Field("", description="write every event and command: a file, or nats; see replay")
    logits_processors: str = Field("", description="name=module:class,... that requests may use")
    trust_request_chat_template: bool = Field(False, description="a request may bring its own chat template")
    max_waiting: int = Field(1024, ge=0, description="requests that may wait; above: 429")
    max_waiting_tokens: int = Field(1_048_576, ge=0, description="prompt tokens that may wait; above: 429")
    cold_start_wait_s: float = Field(
        0, ge=0, description="how long a request waits for its model's first executor, s; 0: 503 at once"
    )
    request_timeout_s: float = Field(300, gt=0, description="time limit of a request without `timeout_s`, s")
    keep_alive_s: float = Field(
        300, ge=1, description="a fleet of `headrace run` ends after so many seconds without a request"
    )
    # processes of `up`
    gateways: int = Field(1, ge=1, le=64, description="gateway processes of `up`, on one port")
    tokenizers: int = Field(2, ge=1, le=64, description="tokenizer processes of `up`; two: one may die")
    executors: int = Field(1, ge=1, le=64, description="executor processes of `up`")
    awake_gib: float = Field(
        0, ge=0, description="memory that awake models of `up` share, GiB; others sleep; 0: all stay awake"
    )
    detokenizers: int = Field(2, ge=1, le=64, description="detokenizer processes of `up`; two: one may die")

    @field_validator("answer_format")
    @classmethod
    def _known_format(cls, name: str) -> str:
        try:
            formats.named(name)
        except KeyError:
            raise ValueError(f"auto, off or one of {', '.join(formats.FORMATS)} is expected") from None
        return name

    @field_validator("model_name")
    @classmethod
    def _different_names(cls, text: str) -> str:
        names = [name.strip() for name in text.split(",")] if text else []
        if not all(0 < len(name) <= MAX_NAME_CHARS for name in names):
            raise ValueError(f"names of 1 to {MAX_NAME_CHARS} characters are expected, like a,b")
        if len({*names}) < len(names):
            raise ValueError("names that differ are expected")
        return ",".join(names)

    @field_validator("cache_dir")
    @classmethod
    def _expand(cls, path: Path) -> Path:
        return path.expanduser()

    @field_validator("host_id")
    @classmethod
    def _host(cls, host_id: str) -> str:
        return host_id or socket.gethostname()

    @field_validator("device")
    @classmethod
    def _kind_and_ranks(cls, device: str) -> str:
        if re.fullmatch(r"(auto|cpu|cuda)(/tp[1-9]\d?|/pp([1-9]|[1-5]\d|6[0-4]))?", device):
            return device
        if "/tp" in device and "/pp" in device:
            raise ValueError(
                "stages (/pp) with tensor-parallel ranks (/tp) are not supported: use one of them"
            )
        raise ValueError(
            "auto, cpu or cuda is expected, with /tp2 to /tp99 or /pp2 to /pp64 for several, like cuda/tp4"
        )

    @field_validator("gpu_memory")
    @classmethod
    def _share_or_size(cls, text: str) -> str:
        if text:
            memory_limit(text, 1)
        return text

    @field_validator("speculate")
    @classmethod
    def _drafts(cls, value: str) -> str:
        if value not in ("auto", "off", *map(str, range(1, MOST_DRAFTS + 1))):
            raise ValueError(f"auto, off or a number from 1 to {MOST_DRAFTS} is expected")
        return value

    @field_validator("http")
    @classmethod
    def _host_and_port(cls, http: str) -> str:
        host, _, port = http.rpartition(":")
        if http == "off" or http.startswith(f"{UNIX}/") or (host and port.isdecimal() and int(port) < 65536):
            return http
        raise ValueError("host:port, unix:/path or off is expected, like 127.0.0.1:8000 or unix:/run/h.sock")

    @field_validator("gateways")
    @classmethod
    def _one_on_a_socket(cls, gateways: int, info: ValidationInfo) -> int:
        if gateways > 1 and info.data.get("http", "").startswith(UNIX):
            raise ValueError("1 is expected, because gateways do not share a Unix socket")
        return gateways

    @model_validator(mode="after")
    def _certificate_with_key(self) -> Self:
        if bool(self.http_tls_cert) != bool(self.http_tls_key):
            raise ValueError("http_tls_cert and http_tls_key belong together: give both or none")
        return self

    @property
    def fleet_models(self) -> tuple[str, ...]:
        """The names in `awaited_models`."""
        return tuple(name.strip() for name in self.awaited_models.split(",") if name.strip())

    @property
    def model_names(self) -> tuple[str, ...]:
        """The name of the model and its aliases; empty: its name comes from the model."""
        return tuple(self.model_name.split(",")) if self.model_name else ()

    @property
    def http_address(self) -> tuple[str, int] | str | None:
        """The gateway's host and port, or the path of its Unix socket; None: off."""
        if self.http == "off":
            return None
        if self.http.startswith(UNIX):
            return self.http.removeprefix(UNIX)
        host, _, port = self.http.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def device_and_ranks(self) -> tuple[str, int]:
        """The kind of device, and the number of devices of an executor."""
        device, _, ranks = self.device.partition("/")
        return device, int(ranks[2:] or 1)

    @property
    def is_pipeline(self) -> bool:
        """Whether an executor's devices are pipeline stages."""
        return "/pp" in self.device

    @property
    def overlap_mode(self) -> str:
        """Rows in flight together: auto, single, run_ahead, two_batch."""
        return self.overlap.partition("/")[0]

    @property
    def overlap_comm(self) -> str:
        """Whether collectives overlap compute: auto, off, two_stream."""
        return self.overlap.partition("/")[2] or "auto"

    @property
    def most_drafts(self) -> int:
        """Drafts of each row; -1: by their price."""
        named = {"auto": -1, "off": 0}
        return named[self.speculate] if self.speculate in named else int(self.speculate)

    def to_env(self) -> dict[str, str]:
        """These settings as environment variables, for a child process."""
        return {PREFIX + name.upper(): _to_text(getattr(self, name)) for name in type(self).model_fields}


_METAVARS = {  # for names with an unclear last word
    "port": "PORT",
    "leaf": "URL",
    "http": "HOST:PORT",
    "http_keys": "FILE",
    "http_tls_cert": "FILE",
    "http_tls_key": "FILE",
    "http_cors": "ORIGINS",
    "http_ping_s": "SECONDS",
    "access_log": "FILE",
    "links": "NAME=URL,...",
    "tenant_classes": "FILE",
    "tenant_quotas": "FILE",
    "webhooks": "FILE",
    "drain_timeout_s": "SECONDS",
    "cold_start_wait_s": "SECONDS",
    "request_timeout_s": "SECONDS",
    "answer_format": "NAME",
    "keep_alive_s": "SECONDS",
    "max_context": "TOKENS",
    "sim": "TIMES",
    "l1": "MIB",
    "l2": "URL",
    "window": "STEPS",
    "policy": "KIND=NAME,...",
    "slo": "CLASS=MS/MS/MS,...",
    "speculate": "auto|off|DRAFTS",
    "event_log": "FILE",
    "logits_processors": "NAME=MODULE:CLASS,...",
    "max_waiting": "REQUESTS",
}


def metavar(name: str) -> str:
    """The metavar of a setting in `--help`: its alternatives if they are few, else a word."""
    kind = Settings.model_fields[name].annotation
    if 0 < len(alternatives := get_args(kind)) <= 4:
        return f"{{{','.join(alternatives)}}}"
    word = name.rpartition("_")[2]
    return _METAVARS.get(name) or ("N" if kind is int and word == name else word.upper())


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, the origin of each value, and unknown HEADRACE_* variables."""

    settings: Settings
    origins: Mapping[str, str] = field(default_factory=dict)  # name -> default, env, file, flag
    unknown_env: tuple[str, ...] = ()


def load(config_file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Loaded:
    """Read every source; flags with value None are not set. Raises SetupError with the setting, its source
    and the error."""
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    path = config_file or (Path(p) if (p := os.environ.get(CONFIG_VARIABLE)) else None)
    in_file = _read_toml(path) if path is not None else {}
    origins = {name: _origin(name, given, in_file) for name in Settings.model_fields}
    try:
        settings = _with_file(in_file)(**given)
    except ValidationError as error:
        raise SetupError(_explain(error, origins, path)) from None
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {CONFIG_VARIABLE}
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    return Loaded(settings, origins, tuple(unknown))


def _with_file(in_file: Mapping[str, Any]) -> type[Settings]:
    class FileSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            """Flags, environment, file: no dotenv files, no secrets folder."""
            return init_settings, env_settings, InitSettingsSource(settings_cls, dict(in_file))

    return FileSettings


def _read_toml(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SetupError(
            f"no configuration file {path}: name another with --config, or leave it out"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SetupError(f"the configuration file {path} cannot be read: {error}") from None


def _origin(name: str, flags: Mapping[str, Any], in_file: Mapping[str, Any]) -> str:
    if name in flags:
        return "flag"
    if any(key.upper() == PREFIX + name.upper() for key in os.environ):
        return "env"
    return "file" if name in in_file else "default"


def _explain(error: ValidationError, origins: Mapping[str, str], path: Path | None) -> str:
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else "settings"
        source = {
            "flag": f"flag --{name.replace('_', '-')}",
            "env": f"variable {PREFIX}{name.upper()}",
            "file": f"file {path}",
        }.get(origins.get(name, ""), f"file {path}")
        if problem["type"] == "extra_forbidden":
            near = did_you_mean(name, Settings.model_fields)
            lines.append(f"{name}: no such setting ({source}); `headrace config show` lists them{near}")
        else:
            why, given = problem["msg"].removeprefix("Value error, "), problem["input"]
            known = get_args(Settings.model_fields[name].annotation) if problem["loc"] else ()
            near = did_you_mean(str(given), known) if problem["type"] == "literal_error" else ""
            lines.append(f"{name}: {why}, not {given!r} ({source}){near}")
    return "; ".join(lines)


def _to_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class WatchedFile(Generic[T]):
    """A file of a setting; `value` is the result of `parse`, which raises ValueError for an invalid text."""

    def __init__(self, setting: str, path: str, parse: Callable[[str], T], log: logging.Logger) -> None:
        """Raises SetupError if the file is invalid."""
        self._setting, self._path, self._parse, self._log = setting, Path(path).expanduser(), parse, log
        self._stamp: tuple[int, ...] = ()
        self._reported = ""  # why the file cannot be used
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise SetupError(f"{setting}: {path} cannot be used: {error}") from None

    def refresh(self) -> None:
        """Read the file again if it has changed. An invalid file is logged once and ignored."""
        try:
            self._read()
            self._reported = ""
        except (OSError, ValueError) as error:
            if str(error) != self._reported:
                self._log.error(
                    "%s: %s cannot be used, those before remain: %s", self._setting, self._path, error
                )
            self._reported = str(error)

    def _read(self) -> None:
        facts = self._path.stat()
        stamp = (facts.st_ino, facts.st_ctime_ns, facts.st_mtime_ns, facts.st_size)
        if stamp != self._stamp:
            text = self._path.read_text()  # a failed read is tried again
            value = self._parse(text)
            self._stamp, self.value = stamp, value
