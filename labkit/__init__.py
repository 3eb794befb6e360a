"""labkit: an LLM inference engine to read, and the lessons that build it."""

from labkit.config import EngineConfig, SamplingParams

__version__ = "0.1.0"
__all__ = ["EngineConfig", "SamplingParams", "__version__"]
