"""Hugging Face transformers: `generate()` on a padded batch, with PyTorch's fused attention."""

from __future__ import annotations

import time
from importlib import metadata

import torch

from labkit.bench.peers import NotMeasuredError, Terms
from labkit.bench.workloads import Answer, Workload


class Transformers:
    """A transformers model in the given dtype, attention "sdpa".

    A GGUF file is dequantised by transformers itself, so its weights are the numbers that ours are.
    """

    name = "transformers"

    def __init__(self, terms: Terms):
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise NotMeasuredError(f"not measured: {error}; install the extra, pip install 'labkit[peers]'") from error
        path = terms.path
        is_gguf = path.suffix == ".gguf"
        where = (
            {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
            if is_gguf
            else {"pretrained_model_name_or_path": path}
        )
        try:
            self._model = AutoModelForCausalLM.from_pretrained(**where, dtype=terms.dtype, attn_implementation="sdpa")
        except (ImportError, OSError, ValueError) as error:  # ValueError: accelerate is missing
            raise NotMeasuredError(f"not measured: it could not load {path.name}: {error}") from error
        self._model = self._model.to(terms.device).eval()
        # Every request runs to its full length: no end-of-sequence token, and so nothing that looks for one.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self.how = f"{metadata.version('transformers')}, generate() with sdpa; prefill: one forward, last logits only"

    def run(self, workload: Workload) -> Answer:
        if workload.counts == "prompt" and len(workload.prompts) == 1:
            return self._prefill(workload.prompts[0])
        if len(set(workload.max_tokens)) > 1:
            raise NotMeasuredError("not measured: generate() gives every request of a batch the same length")
        return self._generate(workload)

    @torch.inference_mode()
    def _prefill(self, prompt: list[int]) -> Answer:
        """One forward that keeps the cache, logits of the last position only: no loop around it."""
        begin = time.perf_counter()
        ids = torch.tensor([prompt], device=self._model.device)
        logits = self._model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        token = int(logits[0, -1].argmax())
        seconds = time.perf_counter() - begin
        return Answer(seconds, [[token]], [seconds], [seconds])

    @torch.inference_mode()
    def _generate(self, workload: Workload) -> Answer:
        stamps: list[float] = []

        def note_time(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            stamps.append(time.perf_counter())  # called after each token as a stopping criterion; it never stops
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        begin = time.perf_counter()
        ids, mask = self._padded(workload.prompts)
        how = {"do_sample": True, "temperature": workload.temperature} if workload.temperature else {"do_sample": False}
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=workload.max_tokens[0],
            stopping_criteria=[note_time],
            **how,
        )
        tokens = out[:, ids.shape[1] :].tolist()
        seconds = time.perf_counter() - begin
        requests = len(workload.prompts)
        return Answer(seconds, tokens, [stamps[0] - begin] * requests, [seconds] * requests)

    def _padded(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask [S, T], padded on the left so that every prompt ends at the same place."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self._model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._model.device)
        return ids, mask

    def close(self) -> None:
        del self._model
