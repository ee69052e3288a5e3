"""A remote store in memory."""

from __future__ import annotations

from services.kv_offload.backends.interface import DamagedValue


class MemoryRemote:
    """See `interface.Remote`."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def put(self, name: str, value: memoryview) -> None:
        self._values[name] = bytes(value)

    def get(self, name: str, into: memoryview) -> int:
        if into.readonly:
            raise ValueError("a value cannot be read into a read-only buffer")
        value = self._values.get(name)
        if value is None:
            return 0
        if len(value) != len(into):
            raise DamagedValue(f"the value of {name} has {len(value)} bytes, not {len(into)}: delete it")
        into[:] = value
        return len(value)

    def delete(self, name: str) -> None:
        self._values.pop(name, None)

    def has(self, names: list[str]) -> list[bool]:
        return [name in self._values for name in names]

    def close(self) -> None:
        self._values.clear()
