"""`labkit chat`: a conversation in the terminal, or in a pipe: one message a line."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.errors import describe, note
from labkit.cli.field_help import SAMPLING_HELP
from labkit.cli.groups import ENGINE_OF_ONE_REQUEST, MODEL, Quiet, open_llm
from labkit.cli.options import FieldOptions, options
from labkit.config import EngineConfig, SamplingParams
from labkit.errors import LabkitError, RequestError

if TYPE_CHECKING:
    from labkit.llm import LLM

SAMPLING_OF_CHAT = FieldOptions(
    SamplingParams,
    SAMPLING_HELP,
    "Sampling",
    omit=("n", "logprobs", "prompt_logprobs", "detokenize", "priority", "deadline_ms"),
    # A small model wanders off at temperature 1; these are what SmolLM2's authors chat with.
    defaults={"max_tokens": None, "temperature": 0.2, "top_p": 0.9},
)
ROOM = 256  # tokens kept free for an answer, as long as that is no more than a quarter of the context
COMMANDS = "/reset forgets the conversation, /exit ends it; Ctrl-C stops an answer"


@options(sampling=SAMPLING_OF_CHAT, engine=ENGINE_OF_ONE_REQUEST)
def chat(
    model: Annotated[str, MODEL] = "toy",
    system: Annotated[str | None, typer.Option("--system", help="What the model is told first.")] = None,
    quiet: Quiet = False,
    *,
    sampling: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Chat with a model. /reset forgets the conversation, /exit ends it, Ctrl-C stops an answer.

    labkit chat smollm2-135m --temperature 0.7      or      echo 'What is a token?' | labkit chat
    """
    with open_llm(model, engine, quiet) as llm:
        talk = Conversation(llm, sampling, system)
        if not quiet and sys.stdin.isatty():
            note(f"{model}: {COMMANDS}")
        for line in read_lines():
            if line == "/exit":
                break
            if line == "/reset":
                talk.reset()
                note("(forgotten)")
            elif re.fullmatch(r"/[a-z]*", line):
                note(f"(there is no {line}: {COMMANDS})")
            elif line:
                answer(talk, line)


def answer(talk: Conversation, message: str) -> None:
    """Print the answer as it is written. What goes wrong ends the answer; in a pipe it ends the command."""
    try:
        with contextlib.closing(talk.say(message)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
        print(flush=True)
        if talk.finish_reason == "length":
            note("(cut: the answer has reached the limit of tokens)")
    except KeyboardInterrupt:  # the LLM lets the step end first, and drops the request
        print(flush=True)
        note("(stopped)")
    except (LabkitError, RequestError) as error:
        if not sys.stdin.isatty():
            raise
        note(f"labkit: error: {describe(error)}")


class Conversation:
    """The messages so far, and the model that goes on with them.

    Earlier turns cost nothing again: their blocks are found in the prefix cache.
    """

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None = None):
        self.llm = llm
        self.sampling = sampling
        self.finish_reason: str | None = None
        limits = llm.engine.limits
        self.context = min(limits.max_model_len, limits.kv_tokens)
        self._start = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._start)

    def say(self, text: str) -> Generator[str, None, None]:
        """Pieces of the answer. An answer that is stopped half-way counts as said so far, a failed one not at all.

        Raises:
            RequestError: the message alone is longer than the context.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        said = ""
        self.finish_reason = None
        try:
            prompt = self._fit()
            sampling = self._sampling(len(prompt))
            for output in self.llm.stream({"prompt_token_ids": prompt}, sampling):
                piece = output.outputs[0].text[len(said) :]
                said += piece
                self.finish_reason = output.outputs[0].finish_reason
                yield piece
        except Exception:
            self.messages = before
            raise
        finally:
            if self.messages is not before:
                self.messages.append({"role": "assistant", "content": said})

    def _sampling(self, num_prompt: int) -> SamplingParams:
        """As asked for, with max_tokens cut to what the context has left beside the prompt."""
        left = self.llm.engine.limits.max_output_tokens(num_prompt)
        asked = self.sampling.max_tokens
        return dataclasses.replace(self.sampling, max_tokens=left if asked is None else min(left, asked))

    def _fit(self) -> list[int]:
        """The prompt, without the oldest exchanges if it would leave no room for an answer."""
        room = min(ROOM, self.context // 4)
        first = len(self._start)
        dropped = 0
        prompt = self.llm.tokenizer.apply_chat_template(self.messages)
        while len(prompt) + room > self.context and len(self.messages) > first + 1:
            del self.messages[first : first + 2]
            dropped += 1
            prompt = self.llm.tokenizer.apply_chat_template(self.messages)
        if len(prompt) >= self.context:
            raise RequestError(
                f"the message makes a prompt of {len(prompt)} tokens and the context holds {self.context}: "
                "say it shorter, or raise --max-model-len",
                "messages",
                "context_length_exceeded",
            )
        if dropped:
            what = "1 exchange is" if dropped == 1 else f"{dropped} exchanges are"
            note(f"(the context of {self.context} tokens is full: the oldest {what} forgotten)")
        return prompt


def read_lines() -> Iterator[str]:
    """What the user types, stripped, until the end of the input."""
    prompting = sys.stdin.isatty()
    if prompting:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() edits lines and keeps a history once it is imported
    while True:
        try:
            line = input("> " if prompting and sys.stdout.isatty() else "")
        except EOFError:
            if prompting:
                note("")
            return
        yield line.strip()
