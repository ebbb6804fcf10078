"""What distillation learns from: a pass of the teacher over the data, before training, kept in the data cache; or a
teacher that predicts in every step.

Kept are the teacher's likeliest tokens at each position, in parts of a few rows. A part is named after the model, the
settings and its tokens, so an interrupted pass resumes, and other data or another order does not mix with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from safetensors import SafetensorError, safe_open

from toolkit.errors import BadInput
from toolkit.plans.plan import Plan
from toolkit.recipe.model_section import Model
from toolkit.recipe.objective_sections import Distill
from toolkit.recipe.sections import Recipe
from toolkit.runtime.build_engine import EngineSpec, tensor_group
from toolkit.runtime.corpus.tokenizer import Tokenizer, load_tokenizer
from toolkit.runtime.data.dataset import Dataset
from toolkit.runtime.data.samples import Samples
from toolkit.runtime.distributed import rng
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import World, all_max, all_sum, device, host_group
from toolkit.runtime.engine.protocol import Engine
from toolkit.runtime.models.attention import forward
from toolkit.runtime.models.build import DTYPES, build_in_place, can_start_in_place, fill, load_config, open_skeleton
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.models.zero3_start import sharded_model
from toolkit.runtime.objectives.distill_loss import outcomes
from toolkit.runtime.reference import (
    Inform,
    InformedEngine,
    digest_of_model,
    tensors_digest,
    with_live_reference,
    write_tensors,
)
from toolkit.runtime.sharding.shard_model import shard

PART_ROWS = 32
"""Rows of one file."""
SEED = 1
"""Of a teacher with random weights."""
IDS, LOGPS = "ids", "log_probabilities"


@dataclass(frozen=True)
class Taught:
    """Samples with what a teacher has predicted for them."""

    samples: Samples
    parts: tuple[Path, ...]
    """Files of `PART_ROWS` rows each."""
    _open: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> np.ndarray | None:
        """Tokens of each sample; None if all have the same length."""
        return self.samples.lengths

    @property
    def positions(self) -> int:
        """Token positions that an epoch computes."""
        return self.samples.positions

    @property
    def positions_used(self) -> int:
        """Token positions that are not padding."""
        return self.samples.positions_used

    def width(self, indices: np.ndarray) -> int:
        """Tokens per row."""
        return self.samples.width(indices)

    def batch(self, indices: np.ndarray, width: int | None = None) -> MicroBatch:
        found = self.samples.batch(indices, width)
        rows = [self._row(int(index)) for index in indices]
        tokens = found.shape[1]
        ids, logps = (torch.stack([_fitted(row[place], tokens) for row in rows]) for place in (0, 1))
        return replace(found, teacher_ids=ids, teacher_logps=logps)

    def _row(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        part, place = divmod(index, PART_ROWS)
        if part not in self._open:
            self._open[part] = safe_open(self.parts[part], "pt")
        file = self._open[part]
        return file.get_slice(IDS)[place], file.get_slice(LOGPS)[place]


def _fitted(row: torch.Tensor, tokens: int) -> torch.Tensor:
    """A row of kept values, cut or padded to the width of a batch: positions beyond a row's own are not counted."""
    return row[:tokens] if len(row) >= tokens else torch.cat([row, row[-1:].expand(tokens - len(row), -1)])


@dataclass(frozen=True, kw_only=True)
class TeacherPass:
    """Computes the parts that are missing in the cache. Collective."""

    recipe: Recipe
    settings: Distill
    world: World
    tick: Callable[[], object]
    """Called after every part: a long pass is not a hang."""
    say: Callable[[str], object]
    group: Any = field(default_factory=host_group)

    @property
    def is_live(self) -> bool:
        """Whether it predicts in every step, instead of before training."""
        return self.settings.predictions == "live"

    def over(self, dataset: Dataset) -> Dataset:
        """The data with what the teacher predicts."""
        assert dataset.tokenizer is not None
        teacher = self._section()
        vocabulary = shared_vocabulary(self.recipe.model, teacher, dataset.tokenizer)
        settings = [digest_of_model(teacher, SEED), self.settings.temperature, self._kept(vocabulary), vocabulary]
        key = hashlib.blake2b(json.dumps(settings).encode(), digest_size=12).hexdigest()
        model: list[Any] = []

        def taught(samples: Samples) -> Taught:
            parts = [self._path(key, _rows_of(samples, part)) for part in range(-(-len(samples) // PART_ROWS))]
            whole = torch.tensor([_is_intact(path, self.say) for path in parts], dtype=torch.uint8)
            missing = all_max(1 - whole, self.group).nonzero()[:, 0].tolist() if parts else []
            if missing and not model:
                model.append(self._build(teacher))
            for number, part in enumerate(missing):
                if number == 0:
                    self.say(f"teacher: {len(missing):,} of {len(parts):,} parts to compute ({self._size(samples)})")
                self._compute(model[0], _rows_of(samples, part), parts[part], vocabulary)
                self.tick()
            if missing:
                all_max(torch.zeros(1), self.group)  # nobody reads before the first rank of a host has written
            return Taught(samples, tuple(parts))

        train = taught(dataset.train)
        held_out = None if dataset.held_out is None else taught(dataset.held_out)
        return replace(dataset, train=train, held_out=held_out)

    def _section(self) -> Model:
        """The teacher, in the precision of the run."""
        given: dict[str, Any] = {"path": self.settings.teacher, "init": "pretrained"}
        if self.settings.teacher is None:
            given = {"config": self.settings.teacher_config, "init": "scratch"}
        return Model(precision=self.recipe.model.precision, task="causal-lm", **given)

    def _kept(self, vocabulary: int) -> int:
        return min(self.settings.top_k, vocabulary)

    def _size(self, samples: Samples) -> str:
        return f"{8 * self.settings.top_k * samples.positions / 2**20:,.0f} MiB in data.cache"

    def _path(self, key: str, rows: MicroBatch) -> Path:
        digest = hashlib.blake2b(digest_size=12)
        for name, tensor in rows.tensors().items():
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return Path(self.recipe.data.cache).expanduser() / f"teacher-{key}-{digest.hexdigest()}.safetensors"

    def _build(self, section: Model) -> torch.nn.Module:
        dtype = DTYPES[section.precision]
        model: torch.nn.Module = build_in_place(section, SEED, dtype, str(device()))
        return model.eval()

    def live(self, tokenizer: Tokenizer, make: Callable[[Model, int], torch.nn.Module]) -> Inform:
        """Adds the teacher's predictions to micro-batches as they come. `make`: the teacher of a section and a seed."""
        teacher = self._section()
        vocabulary = shared_vocabulary(self.recipe.model, teacher, tokenizer)
        model = make(teacher, SEED)

        def inform(batch: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
            return [self._taught(model, micro, vocabulary) for micro in batch]

        return inform

    @torch.no_grad()
    def _taught(self, model: torch.nn.Module, micro: MicroBatch, vocabulary: int) -> MicroBatch:
        logits = forward(model, micro.located().to(device())).logits[..., :vocabulary]
        ids, logps = self._predictions(logits, vocabulary)
        return replace(micro, teacher_ids=ids, teacher_logps=logps)

    def _predictions(self, logits: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens at each position, and the log-probabilities of them and of all others together."""
        wide = logits.float() / self.settings.temperature
        top = wide.topk(self._kept(vocabulary), -1).indices
        return top.int(), outcomes(wide, top)

    def _compute(self, model: torch.nn.Module, rows: MicroBatch, path: Path, vocabulary: int) -> None:
        """One part: each rank computes some of its rows, and every host writes all of them."""
        kept, count = self._kept(vocabulary), len(rows.labels)
        others = int(kept < vocabulary)
        ids = torch.zeros(count, rows.shape[1], kept, dtype=torch.int32)
        logps = torch.zeros(count, rows.shape[1], kept + others)
        for row in range(self.world.rank, count, self.world.size):
            one = rows.map(lambda tensor, row=row: tensor[row : row + 1])  # type: ignore[misc]
            with torch.no_grad():
                logits = forward(model, replace(one, documents=None).located().to(device())).logits[0, :, :vocabulary]
            found = self._predictions(logits, vocabulary)
            ids[row], logps[row] = found[0].cpu(), found[1].cpu()
        ids, logps = all_sum(ids, self.group), all_sum(logps, self.group)
        if self.world.local_rank == 0:
            write_tensors(path, {IDS: ids.numpy(), LOGPS: logps.numpy()})


def _rows_of(samples: Samples, part: int) -> MicroBatch:
    return samples.batch(np.arange(part * PART_ROWS, min((part + 1) * PART_ROWS, len(samples))))


def _is_intact(path: Path, say: Callable[[str], object]) -> bool:
    """Whether a part has every byte that was written; a damaged one is reported, and computed again."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in (IDS, LOGPS)}
            if (file.metadata() or {}).get("digest") == tensors_digest(tensors):
                return True
    except (SafetensorError, OSError, ValueError, KeyError):
        pass
    say(f"teacher cache {path}: it is damaged, and is computed again")
    return False


def shared_vocabulary(student: Model, teacher: Model, tokenizer: Tokenizer) -> int:
    """Tokens that both models have; `BadInput` if their ids do not mean the same."""
    sizes = [int(load_config(section).get_text_config().vocab_size) for section in (student, teacher)]
    known = list(_tokenizer_of(teacher))
    if known and known[0].identity != tokenizer.identity:
        raise BadInput(
            "train.distill.teacher",
            f"{teacher.path} has another tokenizer than data.tokenizer, so its predictions are about other tokens; "
            "use a teacher of the student's family, or the teacher's tokenizer",
        )
    if not known and sizes[0] != sizes[1]:
        raise BadInput(
            "train.distill.teacher",
            f"{teacher.path or 'it'} has {sizes[1]} tokens, the student has {sizes[0]}; both must have one vocabulary",
        )
    return min(sizes)


def _tokenizer_of(section: Model) -> Iterator[Tokenizer]:
    """The tokenizer that comes with a model, if there is one."""
    if section.path is not None:
        with contextlib.suppress(BadInput):
            yield load_tokenizer(None, section.path)


def make_teacher(
    recipe: Recipe, world: World, tick: Callable[[], object], say: Callable[[str], object]
) -> TeacherPass | None:
    """The teacher of a recipe, if its objective has one."""
    settings = recipe.train.distill
    if recipe.train.objective != "distill" or settings is None:
        return None
    return TeacherPass(recipe=recipe, settings=settings, world=world, tick=tick, say=say)


def build_teacher(section: Model, seed: int, plan: Plan, config: Mapping[str, Any], world: World) -> torch.nn.Module:
    """A second model for forward passes beside the engine: in tensor shards, in ZeRO 3 shards, or complete, as the
    plan has the first; without pipeline stages. Random generators stay as they are. Collective."""
    assert plan.pp == 1, "a teacher has no stages"
    generators = rng.capture()
    dtype = DTYPES[plan.precision]
    model: Any
    if plan.tp > 1:
        model, weights = open_skeleton(section, seed)
        shard(model, tensor_group(Mesh(plan, world.rank, world.size, world.local_size)), sliced_logits=False)
        name = get_accelerator().current_device_name()
        fill(model, weights, place=lambda own: own.to(device=name, dtype=dtype))
        weights.fill_buffers(model)
    elif plan.zero_stage == 3 and plan.dp > 1 and can_start_in_place(section):
        model = sharded_model(section, seed, config, dtype)
        forward_only = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
        model, *_ = deepspeed.initialize(model=model, config=forward_only)
    else:
        model = build_in_place(section, seed, dtype, get_accelerator().current_device_name())
    rng.restore(generators)
    model.requires_grad_(False)
    model.eval()
    return model  # type: ignore[no-any-return]


def informed(engine: Engine, spec: EngineSpec, world: World, dataset: Dataset, teacher: TeacherPass | None) -> Engine:
    """The engine, with a reference or a teacher beside it if the recipe asks for a live one."""
    if spec.train.reference == "live":
        return with_live_reference(engine)
    if teacher is None or not teacher.is_live:
        return engine
    assert dataset.tokenizer is not None
    make = partial(build_teacher, plan=spec.plan, config=spec.deepspeed, world=world)
    return InformedEngine(engine, teacher.live(dataset.tokenizer, make))
