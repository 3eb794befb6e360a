"""labkit: an LLM inference engine to read, and the lessons that build it."""

from typing import TYPE_CHECKING, Any

from labkit.config import EngineConfig, SamplingParams
from labkit.outputs import CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from labkit.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "Logprob", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """`labkit.LLM` brings torch, which takes seconds: only on first use, so that `labkit --help` answers at once."""
    if name == "LLM":
        from labkit.llm import LLM

        return LLM
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")
