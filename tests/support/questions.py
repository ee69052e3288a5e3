"""What a newcomer asks about the tree, and the files that answer, in the order of reading.

Each file has a definition that is the answer's part there. tests/rules holds the counts below LIMIT and the
definitions to the code; `scripts/measure_tree.py` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question: at most `limit` files, each as "path:definition"."""

    text: str
    limit: int
    answer: tuple[str, ...]


QUESTIONS = (
    Question(
        "what decides which sequence is preempted",
        5,
        (
            "services/scheduler/core.py:decide",
            "services/scheduler/admission.py:admit",
            "services/scheduler/step_planner.py:plan_next",
            "services/scheduler/preemption.py:make_room",
            "services/scheduler/state/policies.py:latest",
        ),
    ),
    Question(
        "where a token is sampled on a CPU",
        5,
        (
            "services/executor/cpu/engine.py:sample",
            "services/executor/sampling/grammar.py:HostRows",
            "services/executor/sampling/grammar_matchers.py:choose",
            "services/executor/sampling/sampler.py:Sampler",
            "kernels/sampling/ref.py:draw",
        ),
    ),
    Question(
        "where a token is sampled on a GPU",
        5,
        (
            "services/executor/cuda/engine.py:forward",
            "services/executor/cuda/graph_runner.py:sample",
            "kernels/sampling/gpu.py:choose",
            "services/executor/sampling/sampler.py:prepare",
        ),
    ),
    Question(
        "how a block reaches Redis",
        12,
        (
            "services/scheduler/kv_tiers/store.py:copy_dirty",
            "shared/messages.py:KvReserve",
            "services/kv_offload/core.py:handle",
            "services/kv_offload/jobs.py:on_reserve",
            "services/executor/actor.py:receive",
            "services/executor/kv_transfer/worker.py:queue_copy",
            "services/executor/kv_transfer/copiers.py:HostCopier",
            "services/kv_offload/state.py:use",
            "services/kv_offload/l2/dispatch.py:pump",
            "services/kv_offload/actor.py:_execute",
            "services/kv_offload/l2/worker.py:L2Job",
            "services/kv_offload/backends/lmcache.py:LmcacheRemote",
        ),
    ),
    Question(
        "what happens when an executor dies",
        5,
        (
            "shared/actor/membership.py:Peers",
            "shared/actor/runtime.py:upkeep",
            "services/scheduler/actor.py:on_peer_gone",
            "services/scheduler/recovery.py:drop_executor",
            "services/scheduler/preemption.py:requeue",
        ),
    ),
    Question(
        "add a sampling parameter",
        6,
        (
            "shared/api.py:GenerateRequest",
            "shared/messages.py:Sampling",
            "services/executor/sampling/sampler.py:open",
            "kernels/sampling/ref.py:keep_likely",
            "kernels/sampling/gpu.py:choose",
            "services/executor/checkpoint/config.py:check_hf",
        ),
    ),
    Question(
        "add a dense model family",
        3,
        (
            "services/executor/checkpoint/families.py:Family",
            "services/executor/checkpoint/config.py:check_hf",
            "services/executor/model/description.py:Shapes",
        ),
    ),
    Question(
        "add an operation of a model",
        4,
        (
            "services/executor/model/description.py:Shapes",
            "services/executor/checkpoint/config.py:from_hf",
            "services/executor/model/description.py:describe",
            "services/executor/model/program.py:_head_norm",
        ),
    ),
    Question(
        "add a tier backend",
        2,
        (
            "services/kv_offload/backends/interface.py:Remote",
            "services/kv_offload/backends/folder.py:build",
        ),
    ),
    Question("add a routing policy", 2, ("services/scheduler/state/policies.py:room",)),
    Question(
        "add an HTTP endpoint",
        2,
        ("services/gateway/dialects/anthropic.py:build", "services/gateway/app.py:_routes"),
    ),
)
