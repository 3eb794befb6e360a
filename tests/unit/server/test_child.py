"""What is heard of an engine's process."""

import asyncio

import msgspec
import zmq
import zmq.asyncio

from labkit.server.child import Child
from labkit.server.messages import Failed, encode


async def hear() -> tuple[list[str], list[str]]:
    """What a process says before and after its end, as far as it is handed on; and the ends that are told of."""
    said: list[str] = []
    ends: list[str] = []

    async def on_message(message: msgspec.Struct) -> None:
        said.append(message.message)  # type: ignore[attr-defined]

    async def on_end(reason: str) -> None:
        ends.append(reason)

    child = Child(on_message, on_end)
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(child.address)
        await socket.send(encode(Failed("before")))
        while not said:
            await asyncio.sleep(0.01)
        await child.died("it has ended")
        await child.died("once more")
        await socket.send(encode(Failed("after")))
        await asyncio.sleep(0.1)
    await child.close(orderly=False)
    return said, ends


def test_who_has_ended_says_nothing_more():
    assert asyncio.run(hear()) == (["before"], ["it has ended"])
