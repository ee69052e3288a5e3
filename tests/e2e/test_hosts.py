"""Several hosts: network namespaces, 20 ms apart."""

from __future__ import annotations

import asyncio
import os
import time

from support.hosts.network import network

RTT_MS = 20


def test_hosts_are_apart_and_a_link_that_was_cut_loses_no_connection() -> None:
    with network("alpha", "beta", rtt_ms=RTT_MS) as net:
        alpha, beta = net.hosts
        assert alpha.run("hostname") == "alpha\n"
        (alone,) = beta.run("ls", "-A", "/dev/shm").split("\n")
        assert alone == ""

        async def echo() -> list[float]:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while data := await reader.read(100):
                    writer.write(data)

            server = await asyncio.start_server(serve, alpha.address, 7)
            seconds = await asyncio.to_thread(beta.inside, ask)
            server.close()
            return seconds

        async def ask() -> list[float]:
            reader, writer = await asyncio.open_connection(alpha.address, 7)
            seconds = []
            for cut in (False, True):
                if cut:
                    beta.cut()
                began_s = time.monotonic()
                writer.write(b"?")
                if cut:
                    await asyncio.sleep(3 * RTT_MS / 1000)
                    beta.mend()
                assert await reader.read(100) == b"?"
                seconds.append(time.monotonic() - began_s)
            writer.close()
            return seconds

        usual_s, cut_s = alpha.inside(echo)
        assert usual_s >= RTT_MS / 1000
        assert cut_s >= 3 * RTT_MS / 1000
        sleeper = beta.popen("sleep", "1000")
        assert os.getpid() not in beta.pids()
        assert sleeper.pid in beta.pids()
        beta.kill()
        assert sleeper.wait() == -9
        assert beta.run("hostname") == "beta\n"
