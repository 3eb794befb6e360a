"""`labkit models` and `labkit doctor`: what they print of what the modules below tell them."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from labkit.cli.models import _in_words
from labkit.config import EngineConfig, ModelConfig, RopeConfig
from labkit.errors import ModelError

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    tie_word_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
    sliding_windows=(None, None, None),
    dtype="float32",
    bos_token_id=None,
    eos_token_ids=(2, 5),
)


@pytest.fixture
def module(monkeypatch):
    """Put a stand-in where a module is, for a command that imports it when it runs."""

    def put(name: str, **contents: object) -> None:
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**contents))

    return put


@dataclasses.dataclass
class Known:
    name: str
    description: str
    source: str
    path: str | None


def test_list(labkit, module):
    known = [
        Known("toy", "small", "comes along", f"/data/{'toy' * 60}"),
        Known("smollm2-135m", "larger", "the hub", None),
    ]
    module("labkit.models.sources", known_models=lambda: known)
    status, out, err = labkit("models", "list")
    assert (status, err) == (0, "")
    heading, rule, *rows = [line.rstrip() for line in out.splitlines() if line.strip()]
    assert heading.split("  ")[0] == "Model" and set(rule) <= {"─", " "}
    starts = [heading.index(name) for name in ("Model", "What it is", "Where it lies")]
    cells = [[row[i:j].strip() for i, j in zip(starts, [*starts[1:], None])] for row in rows]
    assert cells == [
        ["toy", "small", f"/data/{'toy' * 60}"],
        ["", "", "(comes along)"],
        ["smollm2-135m", "larger", "not here yet"],
        ["", "", "(the hub)"],
    ]


def test_pull_prints_where_it_lies(labkit, module):
    module("labkit.models.sources", pull=lambda name, progress: f"/cache/{name} {progress}")
    assert labkit("models", "pull", "smollm2-135m") == (0, "/cache/smollm2-135m True\n", "")
    assert labkit("models", "pull", "smollm2-135m", "--quiet") == (0, "/cache/smollm2-135m False\n", "")


def test_a_failed_pull(labkit, module):
    def fail(name: str, progress: bool) -> None:
        raise ModelError(f"{name}: no space left")

    module("labkit.models.sources", pull=fail)
    assert labkit("models", "pull", "x") == (1, "", "labkit: error: x: no space left\n")


def test_inspect(labkit, module):
    checkpoint = types.SimpleNamespace(name="tiny", path="/data/tiny", config=CONFIG, num_parameters=1234567)
    asked = []

    def plan(config: ModelConfig, engine: EngineConfig, device: str, dtype: str) -> str:
        if engine.max_model_len == 65:
            raise ValueError("max_model_len is 65; this model has 64")
        asked.append((config, engine, device, dtype))
        return "the plan"

    module("labkit.models.checkpoint", open_checkpoint=lambda name: checkpoint)
    module("labkit.models.memory", plan_memory=plan)
    module("labkit.kernels.backend", resolve_device=lambda name: name, resolve_dtype=lambda name, device: name)
    args = ["models", "inspect", "tiny", "--device", "cpu", "--dtype", "float16"]
    status, out, err = labkit(*args)
    assert (status, err) == (0, "")
    lines = [line.split(maxsplit=1) for line in out.splitlines() if line]
    assert ["family", "qwen3"] in lines and ["eos_token_ids", "2, 5"] in lines
    assert ["sliding_windows", "none"] in lines and ["rope", "default, theta 10000"] in lines
    assert "\n1,234,567 parameters\n" in out and out.endswith("the plan\n")
    assert asked == [(CONFIG, EngineConfig(device="cpu", dtype="float16"), "cpu", "float16")]
    assert labkit(*args, "--max-model-len", "65")[0] == 2


def test_rope_and_windows_in_words():
    llama3 = RopeConfig("llama3", 500000.0, 8.0, 8192, high_freq_factor=4.0)
    assert _in_words("rope", llama3) == "llama3, theta 500000, factor 8, original_max_position_embeddings 8192"
    assert _in_words("sliding_windows", (20, 20)) == "20 tokens"
    windows = (None, None, 4096, None)
    assert _in_words("sliding_windows", windows) == "layers 0 to 1: none; layer 2: 4,096 tokens; layer 3: none"


def test_doctor_prints_every_fact(labkit, module):
    module("labkit.doctor", examine=lambda: [("Machine", [("CPU", "a fast one")]), ("GPU", [("GPU", "none")])])
    assert labkit("doctor") == (
        0,
        "Machine\n  CPU               a fast one\nGPU\n  GPU               none\n",
        "",
    )
