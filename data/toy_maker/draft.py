"""The draft: a tenth of the target's size, trained to say what the target would say next.

What counts is how often the two agree where the target is led by its own words. So besides the corpus it sees the
target's own stories, greedy and drawn, written through the engine from training requests.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from labkit import LLM, SamplingParams
from toy_maker.files import atomically
from toy_maker.filtering import training_stories
from toy_maker.model import DRAFT, TARGET, Llama
from toy_maker.prompts import SEED
from toy_maker.settings import Settings
from toy_maker.training import Trainer, Windows, compiled, finish, held_out_loss, load_model, vocab_size

HARD = 0.5  # weight of the target's most likely token beside the divergence from all its probabilities
CONTEXT = 512


def engine(settings: Settings, folder: Path) -> LLM:
    """labkit over a folder of work/."""
    fields: dict[str, Any] = {} if settings.device == "cpu" else {"max_num_seqs": 512}
    dtype = settings.dtype
    return LLM(str(folder), device=settings.device, dtype=dtype, num_kv_blocks=24_000, quiet=True, **fields)


def write_continuations(settings: Settings) -> None:
    """tokens/continuations.npz: the target's stories for training requests, half of them greedy."""
    path = settings.folder("tokens") / "continuations.npz"
    if path.exists():
        return
    asks = [one["ask"] for one in itertools.islice(training_stories(settings), settings.draft_prompts)]
    asks += asks[: max(0, 8 - len(asks))]
    with engine(settings, settings.folder("target") / "model") as llm:
        prompts = [llm.tokenizer.apply_chat_template([{"role": "user", "content": ask}]) for ask in asks]
        longest = min(settings.longest, settings.context - max(map(len, prompts)))
        params = [
            SamplingParams(temperature=0.8 * (i % 2), max_tokens=longest, seed=SEED + i, detokenize=False)
            for i in range(len(prompts))
        ]
        outputs = llm.generate(prompts, params)
    rows = [np.array(one.prompt_token_ids + one.outputs[0].token_ids, dtype=np.uint16) for one in outputs]
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows])[:-1])).astype(np.int64)

    def write(part: Path) -> None:
        with open(part, "wb") as file:
            np.savez(file, tokens=np.concatenate(rows), starts=starts)

    atomically(path, write)


def distillation_loss(draft: Llama, target: Llama, ids: Tensor) -> Tensor:
    """Forward divergence from the target at every token, and the target's most likely token as a label."""
    with torch.no_grad():
        wanted = target(ids[:, :-1]).float()
    said = F.log_softmax(draft(ids[:, :-1]).float(), dim=-1)
    soft = F.kl_div(
        said.flatten(0, 1), F.log_softmax(wanted, dim=-1).flatten(0, 1), reduction="batchmean", log_target=True
    )
    return soft + HARD * F.nll_loss(said.flatten(0, 1), wanted.argmax(dim=-1).flatten())


def train_draft(settings: Settings) -> None:
    """The stage: draft/model."""
    if (settings.folder("draft") / "facts.json").exists():
        return
    write_continuations(settings)
    torch.manual_seed(SEED + 1)
    torch.set_float32_matmul_precision("high")
    size = vocab_size(settings)
    target = load_model(settings, "target", Llama(TARGET, size))
    draft = Llama(DRAFT, size)
    context = min(CONTEXT, settings.context)
    corpus = Windows(settings, "train", context, settings.batch // 2)
    own = Windows(settings, "continuations", context, settings.batch - settings.batch // 2)
    trainer = Trainer(settings, "draft", draft, 5e-3, settings.draft_seconds, settings.draft_steps)
    loss = compiled(distillation_loss, settings)
    trainer.run(
        lambda model, step: loss(model, target, torch.cat((corpus.draw(step), own.draw(step)))),
        held_out_loss(settings),
    )
    seen = trainer.step * settings.batch * context
    finish(settings, "draft", trainer, {"tokens_seen": seen, "continuation_tokens": len(own.tokens)})
