"""vLLM: `LLM.generate()` on token ids. Its engine is a process of its own, which holds its share of the GPU."""

from __future__ import annotations

import os
import time
from typing import Any

from labkit.bench.peers import NotMeasuredError, Terms
from labkit.bench.workloads import Answer, Workload

ENVIRONMENT = {
    # CUDA is in use in this process by now, so the engine's process cannot be forked. A spawned one imports the main
    # module again, which `python -m labkit` and the `labkit` script allow.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled on first use, and there may be no compiler
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # a measurement tells nobody that it runs
}
LENGTH_STEP = 256


class VLLM:
    """A vLLM engine with CUDA graphs, prefix cache off, everything that is not given as it chooses itself."""

    name = "vllm"

    def __init__(self, terms: Terms):
        if terms.device.type != "cuda":
            raise NotMeasuredError(f"not measured: it is compared on a CUDA GPU, not on {terms.device}")
        if terms.path.suffix == ".gguf":
            raise NotMeasuredError("not measured: it is compared on folders of safetensors, not on a GGUF file")
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        try:
            import vllm
        except (ImportError, OSError, RuntimeError) as error:  # also: its library does not load here
            raise NotMeasuredError(f"not measured: {error}; install it, pip install vllm") from error
        self.dtype = str(terms.dtype).removeprefix("torch.")
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "max_model_len": -(-terms.longest // LENGTH_STEP) * LENGTH_STEP,
            "max_num_seqs": terms.streams,
            "gpu_memory_utilization": terms.memory_share,
            "enable_prefix_caching": False,
        }
        try:
            self._llm = vllm.LLM(str(terms.path), **options)
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            raise NotMeasuredError(f"not measured: it could not load {terms.path.name}: {error}") from error
        self._params: Any = vllm.SamplingParams
        told = ", ".join(f"{key} {value}" for key, value in options.items())
        self.how = f"{vllm.__version__}, LLM.generate(), its engine in its own process, {told}"

    def run(self, workload: Workload) -> Answer:
        """No times of single requests: its `LLM` keeps none unless its statistics are on, which cost it speed."""
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        params = [
            self._params(temperature=workload.temperature, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in workload.max_tokens
        ]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        unknown: list[float | None] = [None] * len(outputs)
        return Answer(seconds, [list(output.outputs[0].token_ids) for output in outputs], unknown, unknown)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()  # ends its process, and the memory is free again
