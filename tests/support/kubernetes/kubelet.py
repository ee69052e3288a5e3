"""Runs the pods of rendered manifests as processes: their commands, variables, mounts and probes.

A pod has a loopback address of its own, in the place of `0.0.0.0`. Names of Services become addresses of
pods, volumes are folders, Secrets are the folders of `headrace auth`. Not emulated: images, users,
capabilities, limits, network policies.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from support.kubernetes.manifests import Body, containers, one
from support.running_up import INSTALLED

from services.launcher import nats_server
from shared.processes import with_import_path

GUARD_S = 60  # a hang is a failure; no measure
ENTRYPOINTS = {"headrace": list(INSTALLED), "nats-server": [str(nats_server.find_binary())]}


@dataclass
class Pod:
    """The processes of one pod, in the order in which they were started."""

    name: str
    address: str
    template: Body
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    env: dict[str, dict[str, str]] = field(default_factory=dict)


class Kubelet:
    """A node. `stop_all` ends what still runs."""

    def __init__(self, folder: Path, resources: list[Body], secrets: Path, cache: Path) -> None:
        """`secrets` is a folder of `headrace auth`; `cache` is what the claim `models` holds."""
        self.folder, self.resources, self.secrets, self.cache = folder, resources, secrets, cache
        self.pods: dict[str, Pod] = {}
        self._net = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        (self.settings,) = [r["data"] for r in resources if r["kind"] == "ConfigMap"]

    def template(self, kind: str, name: str) -> Body:
        """The pods of a workload."""
        template: Body = one(self.resources, kind, name)["spec"]["template"]
        return template

    def schedule(self, kind: str, name: str, number: int = 0) -> Pod:
        """A new pod of a workload, with an address, not started."""
        pod_name = f"{name}-{number}"
        pod = Pod(pod_name, f"{self._net}.{len(self.pods) + 1}", self.template(kind, name))
        self.pods[pod_name] = pod
        return pod

    def run_to_end(self, pod: Pod) -> int:
        """The exit status of a Job's pod."""
        (container,) = pod.template["spec"]["containers"]
        return self._start(pod, container).wait(GUARD_S)

    def start(self, pod: Pod) -> None:
        """Sidecars first, each when the one before has started; then the containers."""
        for container in containers(pod.template):
            self._start(pod, container)
            if container.get("restartPolicy") == "Always":
                self._await(pod, container, "startupProbe")

    def wait_ready(self, *pods: Pod) -> None:
        """Wait for the startup and the readiness probes of all containers."""
        for pod in pods:
            for container in containers(pod.template):
                self._await(pod, container, "startupProbe")
                if container["startupProbe"].get("exec") != container["readinessProbe"].get("exec", {}):
                    self._await(pod, container, "readinessProbe")  # else the same look once more

    def probe(self, pod: Pod, container: Body, kind: str) -> bool:
        """One look of a probe."""
        probe = container[kind]
        if "exec" in probe:
            command = self._command(pod, container, probe["exec"]["command"])
            env = pod.env[container["name"]]
            done = subprocess.run(command, env=env, capture_output=True, timeout=GUARD_S, check=False)
            return done.returncode == 0
        get = probe["httpGet"]
        (port,) = [p["containerPort"] for p in container["ports"] if p["name"] == get["port"]]
        try:
            status = httpx.get(f"http://{pod.address}:{port}{get['path']}", trust_env=False).status_code
        except httpx.TransportError:
            return False
        return 200 <= status < 400

    def signal(self, pod: Pod) -> None:
        """SIGTERM to the containers that are no sidecars: the pod begins to end."""
        for container in pod.template["spec"]["containers"]:
            pod.processes[container["name"]].send_signal(signal.SIGTERM)

    def wait_end(self, pod: Pod) -> list[int]:
        """The exit statuses within the grace period; sidecars end last."""
        grace_s = pod.template["spec"]["terminationGracePeriodSeconds"]
        statuses = []
        for container in reversed(containers(pod.template)):
            process = pod.processes[container["name"]]
            if container.get("restartPolicy") == "Always":
                process.send_signal(signal.SIGTERM)
            statuses.append(process.wait(min(grace_s, GUARD_S)))
        del self.pods[pod.name]
        return statuses

    def stop_all(self) -> None:
        """Kill what still runs."""
        for pod in self.pods.values():
            for process in pod.processes.values():
                process.kill()
                process.wait()

    def log(self, pod: Pod) -> str:
        """What its containers have written."""
        return "".join(path.read_text() for path in (self.folder / pod.name).glob("*.log"))

    # ---- a container -----------------------------------------------------------------------------

    def _start(self, pod: Pod, container: Body) -> subprocess.Popen[bytes]:
        env = with_import_path({k: os.environ[k] for k in ("PATH", "HOME", "PYTHONPATH") if k in os.environ})
        env |= self._local(pod, container, self._variables(pod, container))
        pod.env[container["name"]] = env
        words = [*container.get("command", ["headrace"]), *container["args"]]
        with (self.folder / pod.name / f"{container['name']}.log").open("ab") as log:
            process = subprocess.Popen(
                self._command(pod, container, words), env=env, stdout=log, stderr=log, cwd=self.folder
            )
        pod.processes[container["name"]] = process
        return process

    def _variables(self, pod: Pod, container: Body) -> dict[str, str]:
        found = {**self.settings} if "envFrom" in container else {}
        for entry in container.get("env", []):
            source = entry.get("valueFrom", {})
            if "configMapKeyRef" in source:
                found[entry["name"]] = self.settings[source["configMapKeyRef"]["key"]]
            elif source:
                assert source == {"fieldRef": {"fieldPath": "metadata.name"}}
                found[entry["name"]] = pod.name
            else:
                found[entry["name"]] = entry["value"]
        return found

    def _command(self, pod: Pod, container: Body, words: list[str]) -> list[str]:
        values = self._variables(pod, container)
        for name, value in values.items():
            words = [word.replace(f"$({name})", value) for word in words]
        local = self._local(pod, container, dict(enumerate(words[1:])))
        return [*ENTRYPOINTS[words[0]], *local.values()]

    def _local(self, pod: Pod, container: Body, values: dict) -> dict:  # type: ignore[type-arg]  # keys of any kind
        """Values with the paths and the addresses of this machine."""
        mounts = self._mounts(pod, container)
        changed = {}
        for key, value in values.items():
            for path, folder in mounts.items():
                if value == path or value.startswith(f"{path}/"):
                    value = f"{folder}{value.removeprefix(path)}"
                    break
            changed[key] = self._resolved(pod, value)
        return changed

    def _mounts(self, pod: Pod, container: Body) -> dict[str, Path]:
        volumes = {v["name"]: v for v in pod.template["spec"].get("volumes", [])}
        found = {}
        for mount in container.get("volumeMounts", []):
            volume = volumes.get(mount["name"], {})
            own = self.folder / pod.name / mount["name"]
            own.mkdir(parents=True, exist_ok=True)
            if "secret" in volume:
                self._put(pod, volume["secret"]["secretName"], own)
            if "persistentVolumeClaim" in volume:
                own = self.cache
            if mount["mountPath"] != "/dev/shm":
                found[mount["mountPath"]] = own
        return found

    def _put(self, pod: Pod, secret: str, folder: Path) -> None:
        """The files of a Secret. The server's name and its address come from the cluster's network."""
        for file in (self.secrets / secret.removeprefix("headrace-").replace("-", "_")).iterdir():
            text = self._resolved(pod, file.read_text())
            text = text.replace("port: 4222", f"listen: '{pod.address}:4222'")
            text = text.replace("http_port: 8222", f"http: '{pod.address}:8222'")
            data = self.folder / pod.name / "data"
            (folder / file.name).write_text(text.replace('"/data"', f'"{data}"'))

    def _resolved(self, pod: Pod, text: str) -> str:
        """Names of pods and of the Service `nats`, and the address to listen on."""
        for name, other in self.pods.items():
            text = text.replace(f"//{name}.nats:", f"//{other.address}:")
        if "nats-0" in self.pods:
            text = text.replace("@nats:", f"@{self.pods['nats-0'].address}:")
        return text.replace("0.0.0.0", pod.address)

    def _await(self, pod: Pod, container: Body, kind: str) -> None:
        """Until the probe succeeds, as often as it may fail and no more than GUARD_S."""
        if kind not in container:
            return
        period_s = min(container[kind]["periodSeconds"], 0.5)
        until_s = time.monotonic() + GUARD_S
        while not self.probe(pod, container, kind):
            ended = pod.processes[container["name"]].poll()
            assert ended is None, (
                f"{pod.name} {container['name']} ended with {ended}: {self.log(pod)[-3000:]}"
            )
            assert time.monotonic() < until_s, f"{pod.name} {container['name']}: {self.log(pod)[-3000:]}"
            time.sleep(period_s)
