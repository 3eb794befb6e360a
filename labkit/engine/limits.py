"""What can run at all: checked before a request disturbs any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.config import SamplingParams
from labkit.errors import RequestError, counted


@dataclass(frozen=True)
class RequestLimits:
    """The bounds that a model and its KV pool set to every request. They can be sent to another process.

    Attributes:
        max_model_len: tokens of prompt and output together.
        vocab_size: token ids go from 0 to vocab_size - 1.
        kv_tokens: tokens whose keys and values the whole KV pool holds.
    """

    max_model_len: int
    vocab_size: int
    kv_tokens: int

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        """The longest answer that fits. The last token's keys and values are never needed, hence the + 1."""
        return min(self.max_model_len - num_prompt_tokens, self.kv_tokens - num_prompt_tokens + 1)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError, with the field in `param`, if the request can never run here."""
        if not prompt_token_ids:
            raise RequestError("prompt is empty; it needs at least one token", "prompt")
        self._check_ids(prompt_token_ids, "prompt")
        self._check_ids(params.logit_bias or (), "logit_bias")
        self._check_ids(params.stop_token_ids or (), "stop_token_ids")
        self._check_length(len(prompt_token_ids), params.max_tokens)

    def _check_ids(self, ids: Sequence[int] | dict[int, float], param: str) -> None:
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size:
            return  # as nearly always, and a hundred times quicker than one by one
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                raise RequestError(f"{param} holds {token!r}; token ids are whole numbers", param)
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{param} holds the token id {token}; this model's ids go from 0 to {self.vocab_size - 1}", param
                )

    def _check_length(self, num_prompt: int, max_tokens: int | None) -> None:
        most = self.max_output_tokens(num_prompt)
        if most >= 1 and (max_tokens or 0) <= most:
            return
        advice = f"at most {most} can be asked for here" if most >= 1 else "shorten the prompt"
        if self.kv_tokens <= self.max_model_len:  # the model's length may have been cut to what the pool holds
            what = f"the whole KV pool holds {counted(self.kv_tokens, 'token')}"
            advice += ", or enlarge num_kv_blocks"
        else:
            what = f"this model's length is {counted(self.max_model_len, 'token')}"
        asked = "" if max_tokens is None else f" and asks for max_tokens={max_tokens}"
        raise RequestError(
            f"the prompt has {counted(num_prompt, 'token')}{asked}, but {what}, prompt and output together; {advice}",
            "max_tokens" if most >= 1 else "prompt",
            "context_length_exceeded",
        )
