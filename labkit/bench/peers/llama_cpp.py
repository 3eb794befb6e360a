"""llama.cpp, through the C functions that llama-cpp-python binds: several sequences in one batch, greedy.

The package's own `Llama` class runs one sequence at a time, so the batch is built here, as llama.cpp's server does.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from labkit.bench.peers import NotMeasuredError, Terms
from labkit.bench.workloads import Answer, Workload
from labkit.paths import cache_folder


class LlamaCpp:
    """The model as an F32 GGUF file, on as many CPU threads as torch has."""

    name = "llama.cpp"
    dtype = "float32"

    def __init__(self, terms: Terms):
        try:
            import llama_cpp
        except (ImportError, OSError, RuntimeError) as error:  # also: its library does not load here
            raise NotMeasuredError(f"not measured: {error}; install the extra, pip install 'labkit[peers]'") from error
        if terms.path.suffix != ".gguf":
            raise NotMeasuredError("not measured: it reads GGUF files only")
        if terms.dtype != torch.float32 or terms.device.type != "cpu":
            kind = f"{terms.dtype} on {terms.device}"
            raise NotMeasuredError(f"not measured: it is compared in float32 on the CPU, not in {kind}")
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # it tells hundreds of lines while it loads
        self._c: Any = llama_cpp
        self._threads = torch.get_num_threads()
        self._model, self._context = self._load(float32_file(terms.path), terms.longest, terms.streams)
        self._sampler = self._c.llama_sampler_init_greedy()
        self.how = f"llama-cpp-python {metadata.version('llama-cpp-python')}, F32, {self._threads} threads, one batch"

    def _load(self, path: Path, longest: int, streams: int) -> tuple[Any, Any]:
        self._c.llama_backend_init()
        model = self._c.llama_model_load_from_file(str(path).encode(), self._c.llama_model_default_params())
        if not model:
            raise NotMeasuredError(f"not measured: llama.cpp could not load {path}")
        params = self._c.llama_context_default_params()
        # A sequence gets n_ctx / n_seq_max cells; llama.cpp wants that in steps of 256.
        params.n_ctx = -(-longest // 256) * 256 * streams
        params.n_seq_max = streams
        params.n_batch = params.n_ubatch = self._batch_size = 512
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = 0  # GGML_TYPE_F32, as ours and transformers' cache are
        context = self._c.llama_init_from_model(model, params)
        if not context:
            raise NotMeasuredError("not measured: llama.cpp could not make its context")
        return model, context

    def run(self, workload: Workload) -> Answer:
        if workload.temperature:
            raise NotMeasuredError("not measured: this loop draws greedily")
        requests = len(workload.prompts)
        tokens: list[list[int]] = [[] for _ in range(requests)]
        first: list[float | None] = [None] * requests
        finished: list[float | None] = [None] * requests
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        with self._batch() as batch:
            begin = time.perf_counter()
            todo = [(seq, prompt) for seq, prompt in enumerate(workload.prompts)]
            while todo:
                drawn = self._decode(batch, todo, workload, tokens)
                now = time.perf_counter() - begin
                todo = []
                for seq, token in drawn:
                    tokens[seq].append(token)
                    first[seq] = now if first[seq] is None else first[seq]
                    if len(tokens[seq]) == workload.max_tokens[seq]:
                        finished[seq] = now
                    else:
                        todo.append((seq, [token]))
        return Answer(time.perf_counter() - begin, tokens, first, finished)

    @contextlib.contextmanager
    def _batch(self) -> Iterator[Any]:
        batch = self._c.llama_batch_init(self._batch_size, 0, 1)
        try:
            yield batch
        finally:
            self._c.llama_batch_free(batch)

    def _decode(
        self, batch: Any, todo: list[tuple[int, list[int]]], workload: Workload, tokens: list[list[int]]
    ) -> list[tuple[int, int]]:
        """Compute the given tokens of each sequence, packed into batches, and draw a token after each one's last."""
        drawn: list[tuple[int, int]] = []
        last: list[tuple[int, int]] = []  # (row in the batch, sequence) where logits are wanted
        rows = 0

        def flush() -> None:
            nonlocal rows
            batch.n_tokens = rows
            if rows and self._c.llama_decode(self._context, batch) != 0:
                raise NotMeasuredError("not measured: llama_decode failed")
            drawn.extend((s, self._c.llama_sampler_sample(self._sampler, self._context, row)) for row, s in last)
            last.clear()
            rows = 0

        for seq, ids in todo:
            start = len(workload.prompts[seq]) + len(tokens[seq]) - len(ids)
            for offset, token in enumerate(ids):
                wanted = offset == len(ids) - 1
                batch.token[rows] = token
                batch.pos[rows] = start + offset
                batch.n_seq_id[rows] = 1
                batch.seq_id[rows][0] = seq
                batch.logits[rows] = wanted
                if wanted:
                    last.append((rows, seq))
                rows += 1
                if rows == self._batch_size:
                    flush()
        flush()
        return drawn

    def close(self) -> None:
        self._c.llama_sampler_free(self._sampler)
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)


def float32_file(path: Path) -> Path:
    """The same model with every tensor in F32, made once and kept in the cache folder.

    Dequantised by the `gguf` package, the reference; names, shapes and metadata stay.
    """
    target = cache_folder() / "peers" / f"{path.stem}.F32.gguf"
    if target.exists() and target.stat().st_mtime >= path.stat().st_mtime:
        return target
    import gguf

    reader = gguf.GGUFReader(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue  # the writer puts these itself
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = int(gguf.LlamaFileType.ALL_F32) if field.name == "general.file_type" else field.contents()
        writer.add_key_value(field.name, value, kind, element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(target)
    return target
