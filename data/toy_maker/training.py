"""The loop that trains both models: AdamW, warm-up, a flat stretch, a fall to nothing; bf16 and torch.compile on a GPU.

The number of steps has to be known for the fall: it is measured in the first steps how many the time holds. Windows
begin where a document begins, so that position 0 is what it is in use. Step s draws the same windows whenever it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from toy_maker import documents
from toy_maker.files import atomically, read_json, write_json
from toy_maker.model import TARGET, Llama, export
from toy_maker.prompts import SEED
from toy_maker.settings import OutOfTime, Settings
from toy_maker.tokenizer import load as load_tokenizer

WARM_UP = 100  # steps
FALL = 0.4  # share of the steps in which the learning rate falls
TIMED = (10, 30)  # steps between which the speed is measured
LOOK = 10  # steps between two looks at the loss and the clock
WEIGHT_DECAY = 0.1
Loss = Callable[[Llama, int], Tensor]


class Windows:
    """Rows of tokens on the device, each from the start of a document."""

    def __init__(self, settings: Settings, name: str, context: int, batch: int):
        tokens, starts = documents.load_tokens(settings, name)
        short = context + 1 - len(tokens)
        if short > 0:  # a smoke run's
            tokens = np.concatenate((tokens, tokens[:1].repeat(short)))
        device = settings.device
        self.tokens = torch.from_numpy(tokens.astype(np.int16)).to(device)
        self.starts = torch.from_numpy(starts[starts <= len(tokens) - context - 1]).to(device)
        self._span = torch.arange(context + 1, device=device)
        self._batch = batch

    def draw(self, step: int) -> Tensor:
        """[batch, context + 1], the same for the same step."""
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
        chosen = torch.randint(len(self.starts), (self._batch,), generator=generator)
        return self.tokens[self.starts[chosen.to(self.starts.device)][:, None] + self._span].long()


def next_token_loss(model: Llama, ids: Tensor) -> Tensor:
    """Mean over all tokens but the first, in nats."""
    logits = model(ids[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Trainer:
    """One model's training: state on disk, so that another call goes on with it."""

    def __init__(self, settings: Settings, name: str, model: Llama, rate: float, seconds: float, steps: int | None):
        self.settings = settings
        self.model = model.to(settings.device)
        self.rate = rate
        self.seconds = seconds
        self.steps = steps
        self.step = 0
        self.spent = 0.0  # seconds of training, over all calls
        self.curve: list[dict[str, float]] = []  # step, loss, held_out
        self._path = settings.folder(name) / "checkpoint.pt"
        matrices = [weight for weight in model.parameters() if weight.dim() == 2]
        others = [weight for weight in model.parameters() if weight.dim() != 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        fused = settings.device == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)
        if self._path.exists():
            self._read()

    def run(self, loss: Loss, held_out: Callable[[Llama], float]) -> None:
        """Train to the end of the schedule.

        Raises:
            OutOfTime: after a checkpoint, when the call's time is over.
        """
        begun = saved = time.monotonic()
        timed_from = begun
        before = self.spent
        value = torch.tensor(float("nan"))
        bar = tqdm(total=self.steps, initial=self.step, unit=" steps", mininterval=2, dynamic_ncols=True)
        while self.steps is None or self.step < self.steps:
            value = self._step(loss)
            if self.step % LOOK == 0:
                bar.update(self.step - bar.n)
                bar.set_postfix_str(f"loss {value.item():.3f}")  # item() waits for the device, so the clock is right
                now = time.monotonic()
                self.spent = before + now - begun
                self._note(value.item(), held_out)
                if self.step == TIMED[0]:
                    timed_from = now
                if self.step == TIMED[1] and self.steps is None:
                    self._plan((now - timed_from) / (TIMED[1] - TIMED[0]))
                    bar.total = self.steps
                if self.settings.seconds_left() < 10:
                    self._write()
                    raise OutOfTime
                if now - saved > self.settings.checkpoint_seconds:
                    self._write()
                    saved = now
        self.spent = before + time.monotonic() - begun
        bar.update(self.step - bar.n)
        bar.close()
        self.curve.append({"step": self.step, "loss": value.item(), "held_out": held_out(self.model)})
        self._write()

    def _plan(self, seconds_a_step: float) -> None:
        self.steps = max(TIMED[1] + 1, TIMED[1] + int((self.seconds - self.spent) / seconds_a_step))
        print(f"{seconds_a_step * 1e3:.1f} ms a step: {self.steps} steps in {self.seconds:.0f} s")

    def _step(self, loss: Loss) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * self._share(self.step)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.settings.device == "cuda"):
            value = loss(self.model, self.step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return value.detach()

    def _share(self, step: int) -> float:
        """Of the learning rate: up in WARM_UP steps, flat, then straight down to 0."""
        warm_up = WARM_UP if self.steps is None else min(WARM_UP, self.steps // 4 + 1)
        up = min(1.0, (step + 1) / warm_up)
        left = 1.0 if self.steps is None else (self.steps - step) / (FALL * self.steps)
        return min(up, left, 1.0)

    def _note(self, loss: float, held_out: Callable[[Llama], float]) -> None:
        point = {"step": float(self.step), "loss": loss}
        if self.steps is not None and self.step % max(LOOK, self.steps // 20 // LOOK * LOOK) == 0:
            point["held_out"] = held_out(self.model)
        self.curve.append(point)

    def _write(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "facts": {"step": self.step, "steps": self.steps, "spent": self.spent, "curve": self.curve},
        }
        atomically(self._path, lambda part: torch.save(state, part))

    def _read(self) -> None:
        state = torch.load(self._path, map_location=self.settings.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, value in state["facts"].items():
            setattr(self, name, value)
        print(f"{self._path.parent.name}: going on at step {self.step}")


def compiled(function: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """torch.compile on a GPU; if it fails there, eager from then on, with one line that says so."""
    if settings.device != "cuda":
        return function
    fast: Callable[..., Any] | None = torch.compile(function)

    def call(*args: Any) -> Any:
        nonlocal fast
        if fast is not None:
            try:
                return fast(*args)
            except Exception as error:
                print(f"torch.compile failed, going on without: {type(error).__name__}: {str(error).splitlines()[0]}")
                fast = None
        return function(*args)

    return call


def held_out_loss(settings: Settings) -> Callable[[Llama], float]:
    """Mean loss in nats a token over chats that nobody trains on."""
    windows = Windows(settings, "held_out", min(settings.context, 512), settings.batch // 2)

    @torch.no_grad()
    def measure(model: Llama) -> float:
        with torch.autocast("cuda", torch.bfloat16, enabled=settings.device == "cuda"):
            return float(torch.stack([next_token_loss(model, windows.draw(i)) for i in range(4)]).mean())

    return measure


def finish(settings: Settings, name: str, trainer: Trainer, facts: dict[str, Any]) -> None:
    """The trained model as a folder, and what is to be told of its training."""
    folder = settings.folder(name)
    export(trainer.model, load_tokenizer(settings), folder / "model")
    told = {
        "parameters": trainer.model.num_parameters(),
        "steps": trainer.step,
        "seconds": round(trainer.spent, 1),
        "learning_rate": trainer.rate,
        "curve": trainer.curve,
    }
    write_json(folder / "facts.json", told | facts)
    print(f"{name}: {trainer.step} steps, loss on held-out chats {trainer.curve[-1]['held_out']:.4f} nats a token")


def load_model(settings: Settings, name: str, model: Llama) -> Llama:
    """A trained model's weights, from its checkpoint, on the device."""
    path: Path = settings.folder(name) / "checkpoint.pt"
    state = torch.load(path, map_location=settings.device, weights_only=True)
    model.load_state_dict(state["model"])
    return model.to(settings.device).eval()


def vocab_size(settings: Settings) -> int:
    return load_tokenizer(settings).get_vocab_size()


def train_target(settings: Settings) -> None:
    """The stage: target/model, a folder that labkit loads."""
    if (settings.folder("target") / "facts.json").exists():
        return
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    model = Llama(TARGET, vocab_size(settings))
    windows = Windows(settings, "train", settings.context, settings.batch)
    trainer = Trainer(settings, "target", model, 3e-3, settings.target_seconds, settings.target_steps)
    loss = compiled(next_token_loss, settings)
    trainer.run(lambda model, step: loss(model, windows.draw(step)), held_out_loss(settings))
    seen = trainer.step * settings.batch * settings.context
    finish(settings, "target", trainer, {"tokens_seen": seen, "corpus_tokens": len(windows.tokens)})


def facts_of(settings: Settings, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = read_json(settings.folder(name) / "facts.json")
    return facts
