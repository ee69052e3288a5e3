"""What KEDA and the pod autoscaler do with a ScaledObject, by their documentation; time is an argument.

KEDA looks every `pollingInterval`: it starts the first replica when any trigger is above 0, and stops all
replicas `cooldownPeriod` after all triggers are 0. Between, the autoscaler follows the largest every 15 s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any

SYNC_S = 15  # of the controller manager
TOLERANCE = 0.1  # likewise: a ratio so near to 1 changes nothing


@dataclass
class Autoscaler:
    """One ScaledObject; `tick` returns the number of replicas that should run."""

    spec: dict[str, Any]
    replicas: int = 0
    changes: list[tuple[float, int, int]] = field(default_factory=list)  # when, from, to
    _active_s: float = 0.0
    _synced_s: float = 0.0
    _recommended: list[tuple[float, int]] = field(default_factory=list)

    def tick(self, now_s: float, values: list[float]) -> int:
        """Look at the values of the triggers, every `pollingInterval`."""
        least, cooldown_s = self.spec["minReplicaCount"], self.spec["cooldownPeriod"]
        if any(values):
            self._active_s = now_s
        if not self.replicas:
            self._set(now_s, max(least, 1) if any(values) else least)
        elif not any(values) and now_s - self._active_s >= cooldown_s:
            self._set(now_s, least)
            self._recommended.clear()
        elif now_s - self._synced_s >= SYNC_S:
            self._synced_s = now_s
            self._set(now_s, self._next(now_s, values))
        return self.replicas

    def _next(self, now_s: float, values: list[float]) -> int:
        now, behavior = self.replicas, self.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        wanted = 1
        for trigger, value in zip(self.spec["triggers"], values, strict=True):
            target = float(trigger["metadata"]["threshold"])
            near = abs(value / (target * now) - 1) <= TOLERANCE
            wanted = max(wanted, now if near else ceil(value / target))
        wanted = min(wanted, self.spec["maxReplicaCount"])
        window_s = behavior["scaleDown"]["stabilizationWindowSeconds"]
        self._recommended = [(at, n) for at, n in self._recommended if at > now_s - window_s] + [
            (now_s, wanted)
        ]
        if wanted > now:
            steps = [self._room(now_s, policy, 1) for policy in behavior["scaleUp"]["policies"]]
            return min(wanted, now + max(steps))
        wanted = min(now, max(n for _, n in self._recommended))
        steps = [self._room(now_s, policy, -1) for policy in behavior["scaleDown"]["policies"]]
        return max(wanted, now - max(steps), 1)

    def _room(self, now_s: float, policy: dict[str, Any], way: int) -> int:
        """By how many replicas a policy lets the number change now."""
        since_s = now_s - policy["periodSeconds"]
        moved = sum(max(way * (to - of), 0) for at, of, to in self.changes if at > since_s)
        began = self.replicas - way * moved
        most = policy["value"] if policy["type"] == "Pods" else ceil(began * policy["value"] / 100)
        return max(most - moved, 0)

    def _set(self, now_s: float, replicas: int) -> None:
        if replicas != self.replicas:
            self.changes.append((now_s, self.replicas, replicas))
            self.replicas = replicas
