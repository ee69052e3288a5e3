"""How an executor introduces an incarnation of its device state."""

from __future__ import annotations

from services.executor.backend import BackendInfo
from shared.messages import ExecHello


def hello_of(info: BackendInfo, executor: str, exec_epoch: int, host_id: str) -> ExecHello:
    """The facts of an engine as the scheduler needs them."""
    return ExecHello(
        executor=executor,
        exec_epoch=exec_epoch,
        host_id=host_id,
        model=info.model,
        fingerprint=info.fingerprint,
        vocab_digest=info.vocab_digest,
        vocab=info.vocab,
        blocks=info.blocks,
        block_tokens=info.block_tokens,
        slots=info.slots,
        max_step_tokens=info.max_step_tokens,
        max_context=info.max_context,
        backend=info.backend,
        dtype=info.dtype,
        bytes_per_block=info.bytes_per_block,
        stages=info.stages,
        two_stream_tokens=info.two_stream_tokens,
    )
