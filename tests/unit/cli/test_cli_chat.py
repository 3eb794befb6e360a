"""`labkit chat`: turns, the history, a full context, and Ctrl-C."""

from __future__ import annotations

import io

import pytest
from fake_llm import CONTEXT, FakeLLM

from labkit.cli.chat import Conversation
from labkit.config import SamplingParams
from labkit.errors import EngineStepError, RequestError

ASKED = SamplingParams(max_tokens=None)


def prompts(llm: FakeLLM) -> list[str]:
    return ["".join(map(chr, prompt["prompt_token_ids"])) for prompt in llm.prompts]


@pytest.fixture
def typed(monkeypatch):
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_turns_reset_and_exit(labkit, llm, typed):
    typed("Hello\n\n  again \n/reset\nHello\n/nonsense\n/exit\nnever\n")
    status, out, err = labkit("chat", "toy")
    assert (status, out) == (0, "One two é\n" * 3)
    assert "forgotten" in err and "/nonsense" in err
    [made] = llm.made
    assert prompts(made) == [
        "user: Hello\n",
        "user: Hello\nassistant: One two é\nuser: again\n",
        "user: Hello\n",
    ]
    assert made.closed


def test_the_end_of_the_input_ends_it(labkit, llm, typed):
    typed("/usr/bin is a path, not a command")
    assert labkit("chat", "toy", "-q")[:2] == (0, "One two é\n")


def test_a_system_message_survives_a_reset(labkit, llm, typed):
    typed("/reset\nHi\n")
    labkit("chat", "--system", "Be kind.")
    assert prompts(llm.made[0]) == ["system: Be kind.\nuser: Hi\n"]


def test_an_answer_may_fill_the_context(llm):
    model = FakeLLM("toy")
    list(Conversation(model, ASKED).say("Hi"))
    list(Conversation(model, SamplingParams(max_tokens=5)).say("Hi"))
    list(Conversation(model, SamplingParams(max_tokens=10_000)).say("Hi"))
    room = CONTEXT - len("user: Hi\n")
    assert [params.max_tokens for params in model.params] == [room, 5, room]


def test_a_full_context_forgets_the_oldest_exchange(llm, capsys):
    talk = Conversation(FakeLLM("toy"), ASKED, system="S")
    for letter in "abc":
        list(talk.say(letter * 120))
    assert [m["content"][0] for m in talk.messages] == ["S", "b", "O", "c", "O"]
    assert "1 exchange is forgotten" in capsys.readouterr().err


def test_a_message_that_is_too_long_leaves_the_talk_as_it_was(llm):
    talk = Conversation(FakeLLM("toy"), ASKED)
    list(talk.say("a"))
    before = list(talk.messages)
    with pytest.raises(RequestError, match=f"holds {CONTEXT}"):
        list(talk.say("x" * CONTEXT))
    assert talk.messages == before


def test_a_failed_answer_ends_a_pipe(labkit, llm, typed, monkeypatch):
    monkeypatch.setattr(llm, "broken", EngineStepError("the step failed: out of luck"))
    typed("Hi\nagain\n")
    status, _, err = labkit("chat", "toy")
    assert status == 1 and err == "labkit: error: the step failed: out of luck\n" and len(llm.made[0].prompts) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_failed_answer_leaves_a_terminal_going(labkit, llm, monkeypatch):
    monkeypatch.setattr(llm, "broken", EngineStepError("the step failed: out of luck"))
    monkeypatch.setattr("sys.stdin", Terminal("Hi\nagain\n"))
    status, _, err = labkit("chat", "toy")
    assert status == 0 and err.count("labkit: error: the step failed: out of luck\n") == 2
    assert prompts(llm.made[0]) == ["user: Hi\n", "user: again\n"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(labkit, llm, typed, monkeypatch):
    whole = llm.stream

    def interrupted(self, prompt, params):
        for output in whole(self, prompt, params):
            yield output
            if len(self.prompts) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(llm, "stream", interrupted)
    typed("Hello\nagain\n")
    status, out, err = labkit("chat", "toy")
    assert (status, out) == (0, "One\nOne two é\n") and "(stopped)" in err
    assert prompts(llm.made[0])[1] == "user: Hello\nassistant: One\nuser: again\n"
