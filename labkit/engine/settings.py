"""What of the configuration may change while the engine runs, between any two steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from labkit.config import EngineConfig
from labkit.engine.policies import POLICIES
from labkit.errors import RequestError


@dataclass(frozen=True)
class Settings:
    """A wish for other settings; None leaves one as it is. The names are EngineConfig's."""

    policy: str | None = None
    enable_prefix_caching: bool | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> Settings:
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})

    def check(self, launched: EngineConfig) -> None:
        """Memory was planned when the engine was launched: its numbers can go down, and up again as far as that.

        Raises:
            RequestError: naming the field, what was given and what is allowed.
        """
        if self.policy is not None and self.policy not in POLICIES:
            raise RequestError(f"policy is {self.policy!r}; it can be one of {', '.join(POLICIES)}", "policy")
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            value, most = getattr(self, name), getattr(launched, name)
            if value is not None and not 1 <= value <= most:
                raise RequestError(f"{name} is {value}; the engine was launched for 1 to {most}", name)

    def changes(self, config: EngineConfig) -> dict[str, Any]:
        """Name and new value of those that are set, and are not so already."""
        wished = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {name: value for name, value in wished.items() if value != getattr(config, name)}
