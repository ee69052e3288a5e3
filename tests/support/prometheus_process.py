"""A real Prometheus that reads the configuration of docker/, with addresses in place of names to look up."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from support.redis_process import free_port

DOCKER = Path(__file__).parents[2] / "docker"
INTERVAL = "500ms"


def program(name: str) -> str:
    """Where `prometheus` or `promtool` is; fails without it."""
    found = shutil.which(name)
    assert found, f"{name} is not installed: apt-get install prometheus"
    return found


class Prometheus:
    """Scrapes `addresses`, host:port by the name that a container would have. Ready when made, stopped at the
    end of `with`."""

    def __init__(self, folder: Path, addresses: Mapping[str, str]) -> None:
        shutil.copytree(DOCKER / "prometheus", folder, dirs_exist_ok=True)
        config = yaml.safe_load((folder / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
        (job,) = config["scrape_configs"]
        (names,) = job.pop("dns_sd_configs")
        assert {*names["names"]} == {*addresses, "keeper"}  # `--no-durable`
        job["static_configs"] = [
            {"targets": [address], "labels": {"__meta_dns_name": name}} for name, address in addresses.items()
        ]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self._http = httpx.Client(base_url=f"http://{address}/api/v1/", timeout=30)
        self._log = folder / "log"
        self._process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines = []
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if "Server is ready to receive web requests" in line:
                return
        raise AssertionError(f"prometheus ended before it was ready: {self._lines}")

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._process.terminate()
        self._process.communicate(timeout=30)

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        answer = self._http.get(path, params=query).json()
        assert answer["status"] == "success", (query, answer)
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """What an expression gives now, for each set of labels."""
        return [float(row["value"][1]) for row in self.get("query", query=expression)["result"]]
