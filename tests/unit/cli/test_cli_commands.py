"""Exit statuses, the error line, `generate`, and options that come from the environment."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import pytest

import labkit as package
from labkit.cli.field_help import ENGINE_HELP, SAMPLING_HELP, SERVER_HELP
from labkit.cli.options import option_type
from labkit.config import EngineConfig, SamplingParams
from labkit.errors import ModelError
from labkit.server.config import ServerConfig


def one_error(err: str) -> str:
    """The error line; nothing else may be on stderr."""
    assert err.startswith("labkit: error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("", "Commands: generate"),
        ("frobnicate", "frobnicate"),
        ("models", "Commands: list, pull, inspect"),
        ("generate toy", "--prompt"),
        ("generate toy --prompt x --max-tokns 3", "--max-tokens"),
        ("generate toy --prompt x --max-tokens many", "--max-tokens"),
        ("generate toy --prompt x --max-tokens 0", "max_tokens is 0"),
        ("generate toy --prompt x --scheduler magic", "continuous, static, none"),
        ("generate toy --prompt x --logit-bias nonsense", "not JSON"),
        ("generate toy --prompt x --logit-bias [1]", "JSON object"),
        ("chat toy --n 2", "--n"),
    ],
)
def test_wrong_arguments(labkit, llm, args, says):
    status, out, err = labkit(*args.split())
    assert (status, out) == (2, "") and says in one_error(err)
    assert not llm.made


def test_failed_work(labkit, llm):
    status, out, err = labkit("generate", "/no/model", "--prompt", "x")
    assert (status, out) == (1, "") and "/no/model" in one_error(err)
    for args in (
        ["--debug", "generate", "/no/model", "--prompt", "x"],
        ["generate", "/no/model", "--prompt", "x", "--debug"],
    ):
        status, out, err = labkit(*args)
        assert status == 1 and "Traceback" in err and err.count("labkit: error: ") == 1


def test_a_value_that_this_model_does_not_have(labkit, llm):
    status, _, err = labkit("generate", "toy", "--prompt", "x", "--max-model-len", "100000")
    assert status == 2 and "max_model_len is 100000" in one_error(err)


def test_an_error_of_many_lines_is_one_line(labkit, llm, monkeypatch):
    monkeypatch.setattr(llm, "broken", ModelError("one\n  two\nthree"))
    status, _, err = labkit("generate", "toy", "--prompt", "x", "--quiet")
    assert status == 1 and one_error(err) == "labkit: error: one two three\n"


def test_an_unexpected_error_is_named(labkit, llm, monkeypatch):
    monkeypatch.setattr(llm, "broken", KeyError("lost"))
    status, _, err = labkit("generate", "toy", "--prompt", "x", "--quiet")
    assert status == 1 and "KeyError" in one_error(err)


def test_ctrl_c_is_130_without_a_word(labkit, llm, monkeypatch):
    monkeypatch.setattr(llm, "broken", KeyboardInterrupt())
    assert labkit("generate", "toy", "--prompt", "x") == (130, "", "")
    assert llm.made[0].closed


def test_version_and_help(labkit):
    assert labkit("--version") == (0, f"labkit {package.__version__}\n", "")
    status, out, _ = labkit("--help")
    assert status == 0 and all(name in out for name in ("serve", "chat", "generate", "bench", "models", "doctor"))


def test_generate_streams_the_text(labkit, llm):
    status, out, err = labkit("generate", "toy", "--prompt", "x")
    assert (status, out) == (0, "One two é\n") and "3 tokens" in err
    assert labkit("generate", "toy", "--prompt", "x", "--quiet") == (0, "One two é\n", "")
    assert [made.quiet for made in llm.made] == [False, True] and all(made.closed for made in llm.made)


def test_generate_hands_the_options_over(labkit, llm):
    args = "--temperature 0 --max-tokens 5 --seed 9 --stop a --stop b --stop-token-ids 3 --ignore-eos --top-k 4"
    engine = "--block-size 8 --no-enable-prefix-caching --dtype float32"
    status, _, _ = labkit(
        "generate", "toy", "--prompt", "x", *args.split(), *engine.split(), "--logit-bias", '{"42": -100}'
    )
    assert status == 0
    [made] = llm.made
    assert made.config == EngineConfig(block_size=8, enable_prefix_caching=False, dtype="float32")
    assert made.params == [
        SamplingParams(
            temperature=0,
            max_tokens=5,
            seed=9,
            stop=("a", "b"),
            stop_token_ids=(3,),
            ignore_eos=True,
            top_k=4,
            logit_bias={42: -100},
        )
    ]


def test_generate_json(labkit, llm):
    status, out, _ = labkit("generate", "toy", "--prompt", "Hey", "--json", "--logprobs", "1")
    data = json.loads(out)
    assert status == 0 and data["prompt"] == "Hey" and data["finished"] is True
    [answer] = data["outputs"]
    assert answer["text"] == "One two é" and answer["finish_reason"] == "stop"
    # JSON has no -inf and no keys but strings.
    assert answer["logprobs"] == [{"7": {"logprob": None, "rank": 1, "decoded_token": "One"}}]


def test_generate_several_answers(labkit, llm):
    assert labkit("generate", "toy", "--prompt", "x", "--n", "2", "-q")[1] == "[0] One two é\n[1] One two é\n"


def test_the_environment_sets_engine_options(labkit, llm, monkeypatch):
    monkeypatch.setenv("LABKIT_DEVICE", "cpu")
    monkeypatch.setenv("LABKIT_CUDA_GRAPHS", "0")
    monkeypatch.setenv("LABKIT_BLOCK_SIZE", "4")
    labkit("generate", "toy", "--prompt", "x", "--block-size", "32")
    assert llm.made[0].config == EngineConfig(device="cpu", cuda_graphs=False, block_size=32)
    monkeypatch.setenv("LABKIT_BLOCK_SIZE", "four")
    status, _, err = labkit("generate", "toy", "--prompt", "x")
    assert status == 2 and "LABKIT_BLOCK_SIZE" in one_error(err)


@pytest.mark.parametrize(
    ("config", "texts"), [(EngineConfig, ENGINE_HELP), (SamplingParams, SAMPLING_HELP), (ServerConfig, SERVER_HELP)]
)
def test_every_field_has_its_help_and_nothing_else_has(config, texts):
    assert [field.name for field in dataclasses.fields(config)] == list(texts)


def test_serve_hands_the_options_over(labkit, monkeypatch):
    served = []
    module = types.SimpleNamespace(run=lambda *given: served.append(given) or len(served) - 1)
    monkeypatch.setitem(sys.modules, "labkit.server.serve", module)
    monkeypatch.setenv("LABKIT_API_KEY", "one, two")
    monkeypatch.setenv("LABKIT_CORS_ORIGIN", "http://a http://b")
    monkeypatch.setenv("LABKIT_MAX_NUM_SEQS", "4")
    assert labkit("serve", "--port", "0", "--rate-limit", "1.5", "--seed", "3", "--api-key", "own")[0] == 0
    assert labkit("serve", "smollm2-135m")[0] == 1  # the server's own exit status
    monkeypatch.delenv("LABKIT_API_KEY")
    monkeypatch.delenv("LABKIT_CORS_ORIGIN")
    assert labkit("serve")[0] == 2
    origins = ("http://a", "http://b")
    engine = EngineConfig(max_num_seqs=4)
    assert served == [
        (
            "toy",
            engine.replace(seed=3),
            ServerConfig(port=0, rate_limit=1.5, api_keys=("own",), cors_origins=origins),
        ),
        ("smollm2-135m", engine, ServerConfig(api_keys=("one", "two"), cors_origins=origins)),
        ("toy", engine, ServerConfig()),
    ]


def test_a_key_on_the_command_line_is_one_key(labkit, monkeypatch):
    served = []
    module = types.SimpleNamespace(run=lambda *given: served.append(given[2].api_keys) or 0)
    monkeypatch.setitem(sys.modules, "labkit.server.serve", module)
    assert labkit("serve", "--api-key", "a,b", "--api-key", "c")[0] == 0
    assert served == [("a,b", "c")]
    for wrong in ("", "two words"):  # --api-key "$KEY" without a KEY, say
        status, _, err = labkit("serve", "--api-key", wrong)
        assert status == 2 and "holds a key that is empty" in one_error(err)
    assert len(served) == 1


def test_help_shows_brackets(labkit):
    assert "labkit[otel]" in "".join(labkit("serve", "--help")[1].split())


def test_serve_refuses_a_wrong_option(labkit):
    status, _, err = labkit("serve", "--port", "70000")
    assert status == 2 and "70000" in one_error(err)


def test_types_of_options():
    assert option_type(int | None) == int | None and option_type(bool) is bool
    assert option_type(tuple[int, ...] | None) == list[int] | None
    assert option_type(dict[int, float] | None) == str | None
