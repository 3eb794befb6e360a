"""What the HTTP process and the engine process say to each other, as msgpack over one ZeroMQ socket.

HTTP process ── Launch, Add, Cancel, Stop, Look, Change, Shutdown ─→ engine process
             ←─ Ready | Failed, then Steps after each step, Looked for each Look and Change ──
"""

from __future__ import annotations

import msgspec

from labkit.config import EngineConfig
from labkit.engine.limits import RequestLimits
from labkit.engine.picture import Picture
from labkit.engine.request import EngineRequest, StepReport
from labkit.engine.settings import Settings
from labkit.engine.stats import EngineStats


class Launch(msgspec.Struct, tag=True):
    """The first message: what to load, and where the trace goes."""

    model: str
    config: EngineConfig
    trace: str | None
    quiet: bool = False  # print nothing that is no error


class Add(msgspec.Struct, tag=True):
    request: EngineRequest


class Cancel(msgspec.Struct, tag=True):
    request_id: str


class Stop(msgspec.Struct, tag=True):
    """The text of an answer has reached a stop string."""

    request_id: str
    index: int
    stop: str


class Look(msgspec.Struct, tag=True):
    """Somebody watches: what is it like between these two steps?"""


class Change(msgspec.Struct, tag=True):
    """Other settings from the next step on; they were checked. The answer is `Looked`."""

    settings: Settings


class Shutdown(msgspec.Struct, tag=True):
    pass


class Ready(msgspec.Struct, tag=True):
    """The model is loaded. `config` has every "auto" and None decided; `gpu_uuid` is None on a CPU."""

    limits: RequestLimits
    config: EngineConfig
    stats: EngineStats
    gpu_uuid: str | None = None


class Failed(msgspec.Struct, tag=True):
    """The model cannot be loaded: why, in one line."""

    message: str


class Steps(msgspec.Struct, tag=True):
    """What a step gave. `received` counts the messages that the engine had read before it."""

    report: StepReport
    stats: EngineStats
    received: int


class Looked(msgspec.Struct, tag=True):
    """The answer to one Look or Change, in the order in which they were sent."""

    picture: Picture
    settings: Settings
    stats: EngineStats


ToEngine = Launch | Add | Cancel | Stop | Look | Change | Shutdown
FromEngine = Ready | Failed | Steps | Looked

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
