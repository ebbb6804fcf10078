"""Log-probabilities of preference data under the reference, under the run's own strategy.

The reference is the model before training; fresh adapters change nothing, so with LoRA it is the model without them.
`cached`: one pass before training; the result is kept in the data cache, under a digest of model and documents, and an
interrupted pass resumes there. So the reference needs no second model while training. `live`: a forward pass before
every step, in which the engine computes with a copy of the first weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from toolkit.errors import BadInput
from toolkit.recipe.model_section import Model
from toolkit.recipe.objective_sections import COMPARED
from toolkit.recipe.sections import Recipe
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.data.dataset import Dataset
from toolkit.runtime.data.pairs import PairRows
from toolkit.runtime.data.prefetch import Share, global_batch
from toolkit.runtime.data.sample_order import PAST_END, own_share
from toolkit.runtime.distributed.process_group import World, all_max, all_sum, device, host_group
from toolkit.runtime.engine.protocol import Engine, EvaluationSums, Predicts, StepResult
from toolkit.runtime.engine.training_state import DeepSpeedState
from toolkit.runtime.engine.weight_average import FirstWeights
from toolkit.runtime.metrics.step_clock import Clock
from toolkit.runtime.models.build import load_config
from toolkit.runtime.models.first_weights import checkpoint_files
from toolkit.runtime.models.loss import Loss
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.objectives.preference_loss import PreferenceLoss, UnpairedLoss

SAVE_SECONDS = 20.0
"""Time between two writes of an unfinished pass."""
TENSOR = "log_probabilities"


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """Computes what is missing in the cache. Collective."""

    engine: Engine
    share: Share
    world: World
    global_batch: int
    cache: Path
    model: str
    """Digest of the model."""
    tick: Callable[[], object]
    """Called after every batch: a long pass is not a hang."""
    say: Callable[[str], object]
    group: Any = field(default_factory=host_group)

    def over(self, dataset: Dataset) -> Dataset:
        """The data with the log-probabilities of all documents."""
        train, held_out = dataset.train, dataset.held_out
        assert isinstance(train, PairRows)
        assert held_out is None or isinstance(held_out, PairRows)
        return replace(dataset, train=self._known(train), held_out=held_out and self._known(held_out))

    def _known(self, samples: PairRows) -> PairRows:
        file = ReferenceFile(self.cache / f"reference-{self.model}-{_digest_of(samples)}.safetensors", self.say)
        values = file.read(samples.num_documents)
        # Hosts may have different parts of it; what any of them lacks is computed by all.
        missing = all_max(torch.from_numpy(np.isnan(values).astype(np.uint8)), self.group).bool().numpy()
        if missing.any():
            self._compute(samples, values, missing, file)
        return replace(samples, reference=values.astype(np.float32))

    def _compute(self, samples: PairRows, values: np.ndarray, missing: np.ndarray, file: ReferenceFile) -> None:
        loss = self.engine.loss
        assert isinstance(loss, PreferenceLoss | UnpairedLoss)
        self.say(f"reference: {int(missing.sum()):,} of {len(missing):,} documents to compute")
        saved = time.monotonic()
        for start in range(0, len(samples), self.global_batch):
            rows = np.arange(start, min(start + self.global_batch, len(samples)))
            places = samples.places(rows)
            if not missing[places].any():
                continue
            values[places] = self._batch(samples, rows, loss)[places - places[0]]
            self.tick()
            if self.world.local_rank == 0 and time.monotonic() - saved > SAVE_SECONDS:
                file.write(values)
                saved = time.monotonic()
        if self.world.local_rank == 0:
            file.write(values)

    def _batch(self, samples: PairRows, rows: np.ndarray, loss: PreferenceLoss | UnpairedLoss) -> np.ndarray:
        """Log-probabilities of the documents of one global batch, on every rank."""
        ids = np.full(self.global_batch, PAST_END)
        ids[: len(rows)] = rows
        own = own_share(ids, replica=self.share.replica, replicas=self.share.replicas)
        loss.recorded = []
        self.engine.look(global_batch(samples, ids, self.share))
        found, loss.recorded = loss.recorded, None
        first, count = samples.places(rows)[0], len(samples.places(rows))
        sums = torch.zeros(2, count, dtype=torch.float64)
        if found:  # tensor ranks have the same values, earlier pipeline stages none: divided by how many have them
            present = own[own != PAST_END]
            logps, spots = torch.cat(found).double().cpu(), torch.from_numpy(samples.places(present) - first)
            sums[0, spots], sums[1, spots] = logps[: len(spots)], 1.0  # rows past the end come last
        values, ranks = all_sum(sums.to(device())).cpu()
        result: np.ndarray = (values / ranks).numpy()
        return result


Inform = Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]]
"""Adds to a replica's micro-batches what their loss compares the model with. Collective."""


@dataclass(frozen=True)
class InformedEngine:
    """`Engine` whose micro-batches get, before every step and evaluation, what their loss compares the model with."""

    inner: Engine
    inform: Inform

    @property
    def replica(self) -> int:
        return self.inner.replica

    @property
    def loss(self) -> Loss:
        return self.inner.loss

    @property
    def state(self) -> Stateful:
        return self.inner.state

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        return self.inner.step(self.inform(batch))

    def look(self, batch: Sequence[MicroBatch]) -> None:
        self.inner.look(batch)

    def evaluate(self, batch: Sequence[MicroBatch]) -> EvaluationSums:
        return self.inner.evaluate(self.inform(batch))

    def watch(self, clock: Clock) -> None:
        self.inner.watch(clock)

    def predict(self, micro: MicroBatch) -> torch.Tensor:
        """The likeliest token after each token of a micro-batch. Collective."""
        assert isinstance(self.inner, Predicts), "this engine predicts no tokens"
        return self.inner.predict(micro)


def with_live_reference(engine: Engine) -> InformedEngine:
    """An engine that computes the reference in every step; call it before a checkpoint changes the weights."""
    state = engine.state
    assert isinstance(state, DeepSpeedState), "islands have no reference"
    first = FirstWeights(state)

    def inform(batch: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        loss = engine.loss
        assert isinstance(loss, PreferenceLoss | UnpairedLoss)
        loss.recorded = []
        with first.in_use():
            engine.look(batch)
        found, loss.recorded = loss.recorded, None
        if not found:  # an earlier stage of a pipeline: the last one has the loss
            return batch
        return [replace(micro, reference=logps) for micro, logps in zip(batch, found, strict=True)]

    return InformedEngine(engine, inform)


def with_reference(dataset: Dataset, recipe: Recipe, make: Callable[[Path, str], ReferencePass]) -> Dataset:
    """The data with what its objective compares the model with, if it does and the reference is not live."""
    if recipe.train.objective not in COMPARED or recipe.train.reference == "live":
        return dataset
    return make(Path(recipe.data.cache).expanduser(), digest_of_model(recipe.model, recipe.train.seed)).over(dataset)


@dataclass(frozen=True)
class ReferenceFile:
    """Log-probabilities by document; NaN where they are not known yet. It is written completely or not at all."""

    path: Path
    say: Callable[[str], object]

    def read(self, count: int) -> np.ndarray:
        """What is known; a damaged file counts as missing, and is reported."""
        unknown = np.full(count, np.nan)
        if not self.path.is_file():
            return unknown
        try:
            with safe_open(self.path, "numpy") as file:
                values: np.ndarray = file.get_tensor(TENSOR)
                intact = (file.metadata() or {}).get("digest") == tensors_digest({TENSOR: values})
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            self.say(f"reference cache {self.path}: can't be read ({error}); it is computed again")
            return unknown
        if not intact or values.shape != (count,) or values.dtype != np.float64 or bool((values > 0).any()):
            self.say(f"reference cache {self.path}: it is damaged, and is computed again")
            return unknown
        return values.copy()

    def write(self, values: np.ndarray) -> None:
        """Replace the file."""
        write_tensors(self.path, {TENSOR: values})


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a file of the data cache with a digest of its content. It is replaced completely or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".writing-reference-", dir=path.parent)
    except OSError as error:
        raise BadInput("data.cache", f"{path.parent} can't be written: {error.strerror}") from None
    os.close(handle)
    try:
        save_file(tensors, name, {"digest": tensors_digest(tensors)})
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def tensors_digest(tensors: dict[str, np.ndarray]) -> str:
    """Digest of the content of a file."""
    return _digest(*(np.ascontiguousarray(tensors[name]).tobytes() for name in sorted(tensors)))


def digest_of_model(section: Model, seed: int) -> str:
    """Digest of everything that the reference's weights follow from."""
    config = load_config(section).to_dict()
    known: list[Any] = [config, section.init, section.precision, section.task]
    if section.init == "scratch":
        known.append(seed)
    else:
        assert section.path is not None
        files = sorted({Path(name).resolve() for name in checkpoint_files(section.path).values()})
        known.append([[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files])
    return _digest(json.dumps(known, sort_keys=True, default=str).encode())


def _digest_of(samples: PairRows) -> str:
    """Digest of the rows: which tokens are where, and which of them count."""
    rows = samples.rows
    assert rows.documents.counted is not None
    parts = (rows.pieces.starts, rows.pieces.lengths, rows.firsts, rows.documents.tokens, rows.documents.counted)
    return _digest(
        *(np.ascontiguousarray(part).tobytes() for part in parts), f"{rows.seq_len} {samples.shares}".encode()
    )


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
