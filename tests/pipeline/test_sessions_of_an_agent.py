"""An agent by Anthropic's client with a real tool: its chain is a session, that of its sub-agent another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from support.memory_bus import MemoryBroker
from support.pipeline.five_actors import Pipeline
from support.pipeline.gateway_side import MODEL, add_gateway, healthy, remove_gateway

from shared.session_hints import name_of

COMMANDS = ("wc -l notes.txt", "head -n 1 notes.txt", "sort notes.txt")
SHELL: Any = {
    "name": "shell",
    "description": "Run a command in the folder of the project",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"enum": [*COMMANDS]}},
        "required": ["command"],
    },
}
RULES = "\n".join(f"{n}. Look before you change a file, and name each file by its path." for n in range(110))
PROGRAM = "4c2b6f0e-5d1a-4a8e-9d57-0d8f3c1b2a90"


class Agent:
    """A loop of requests and calls of one tool, as its client's library has them."""

    def __init__(self, client: Any, folder: Path, task: str, **headers: str) -> None:
        self._client, self._folder = client, folder
        self._headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self._messages: list[Any] = [{"role": "user", "content": task}]
        self.prompts: list[tuple[int, int]] = []  # tokens of each prompt, and how many were cached
        self.results: list[str] = []

    async def turn(self) -> None:
        """One request, and the call that its answer asks for."""
        answer = await self._client.messages.create(
            model=MODEL,
            max_tokens=60,
            system=RULES,
            messages=self._messages,
            tools=[SHELL],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            extra_headers=self._headers,
            extra_body={"temperature": 0},
        )
        cached = answer.usage.cache_read_input_tokens or 0
        self.prompts.append((cached + answer.usage.input_tokens, cached))
        (used,) = answer.content
        process = await asyncio.create_subprocess_shell(
            used.input["command"], cwd=self._folder, stdout=asyncio.subprocess.PIPE
        )
        self.results.append((await process.communicate())[0].decode())
        result = {"type": "tool_result", "tool_use_id": used.id, "content": self.results[-1]}
        self._messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]


async def test_an_agent_and_its_sub_agent_are_two_sessions_whose_prompts_are_cached(
    fleet: str, tmp_path: Path
) -> None:
    from anthropic import AsyncAnthropic

    (tmp_path / "notes.txt").write_text("buy milk\nsell the cow\n")
    broker = MemoryBroker()

    async def connect() -> Any:
        return broker.connect()

    settings = {"backend": "torch", "dtype": "f32", "max_context": 4_096, "kv_blocks": 400}
    pipeline = await Pipeline.start(connect, fleet, **settings)
    url = await add_gateway(pipeline)
    await healthy(pipeline)
    async with AsyncAnthropic(base_url=url, api_key="any", max_retries=0, timeout=200) as client:
        main = Agent(client, tmp_path, "Count my notes.", X_Claude_Code_Session_Id=PROGRAM)
        child = Agent(
            client, tmp_path, "Read a note.", X_Claude_Code_Session_Id=PROGRAM, X_Claude_Code_Agent_Id="a7"
        )
        for agent in (main, child, child, main, main):
            await agent.turn()
    continued = [*main.prompts[1:], *child.prompts[1:]]
    assert sum(cached for _, cached in continued) >= 0.95 * sum(tokens for tokens, _ in continued), continued
    assert {*main.results, *child.results} <= {"2 notes.txt\n", "buy milk\n", "buy milk\nsell the cow\n"}
    async with httpx.AsyncClient(base_url=url) as http:
        rows = (await http.get("/v1/sessions")).json()["data"]
        assert {row["session"] for row in rows} == {
            name_of("public", PROGRAM),
            name_of("public", f"{PROGRAM}/a7"),
        }
        assert {(row["state"], row["tool"]) for row in rows} == {("idle", "shell")}
        assert all(row["tokens"] == row["device"] >= 1_500 for row in rows)
        own = (await http.get(f"/v1/sessions/{PROGRAM}/a7")).json()
        assert (own["id"], own["session"]) == (f"{PROGRAM}/a7", name_of("public", f"{PROGRAM}/a7"))
    await remove_gateway(pipeline)
    await pipeline.assert_idle()
    await pipeline.stop()
