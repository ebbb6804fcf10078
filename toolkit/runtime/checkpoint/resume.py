"""Find the checkpoint to resume from, verify it on all ranks, and load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit.checkpoints import store
from toolkit.checkpoints.format import MANIFEST, step_of
from toolkit.errors import BadInput, Problem
from toolkit.recipe.sections import Checkpoint, Recipe
from toolkit.run_dir.async_islands import BELOW, ROUND_SAMPLES, RUN_SAMPLES, CompletedRounds
from toolkit.runtime.checkpoint import reader as checkpoint_reader
from toolkit.runtime.checkpoint.fragments import Stateful
from toolkit.runtime.checkpoint.reader import Reader
from toolkit.runtime.data.sample_order import SampleOrder
from toolkit.runtime.distributed.process_group import World, broadcast_object

Say = Callable[[str], object]


def find(section: Checkpoint, own: Path, world: World, say: Say) -> Reader | None:
    """The checkpoint to resume from, verified on all ranks; None to start from scratch. Collective."""
    if section.resume == "none":
        return None
    reader = _newest_complete(own, world, say, set_aside=True)
    if reader is not None or section.resume == "auto":
        return reader
    given = Path(section.resume)
    if broadcast_object(_is_checkpoint(given)):
        problems = checkpoint_reader.verify_together(given, world.rank, world.size)
        if problems:
            raise BadInput(f"{given} is damaged", problems)
        return _opened(given, say)
    roots = [root for root in (given / "checkpoints", given) if root.is_dir()]
    reader = _newest_complete(roots[0], world, say, set_aside=False) if roots else None
    if reader is None:
        raise BadInput("checkpoint.resume", f"{given} holds no checkpoint; give auto, none, a checkpoint or a run")
    return reader


def _newest_complete(root: Path, world: World, say: Say, *, set_aside: bool) -> Reader | None:
    """The newest complete checkpoint; damaged ones are reported and skipped."""
    damaged: list[Problem] = []
    for step in broadcast_object(store.steps(root)):
        path = store.path_of(root, step)
        problems = checkpoint_reader.verify_together(path, world.rank, world.size)
        if not problems:
            return _opened(path, say)
        damaged.extend(Problem(f"{path.name}/{problem.where}", problem.what) for problem in problems)
        say(f"skipping damaged checkpoint {path}: {problems[0]}")
        if set_aside and world.rank == 0:
            aside = store.set_aside(path)
            say(f"it is kept as {aside}")
    if damaged:
        fix = Problem("checkpoint.resume", "set it to `none` in a new run directory to start again")
        raise BadInput(f"{root}: all checkpoints are damaged", [*damaged, fix])
    return None


def _opened(path: Path, say: Say) -> Reader:
    reader = Reader.open(path)
    say(f"resuming from {path} (step {reader.state['step']}), checksums verified")
    return reader


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or step_of(path.name) is not None


def resume(
    reader: Reader, state: Stateful, order: SampleOrder, recipe: Recipe, world: World
) -> tuple[int, SampleOrder]:
    """Load a checkpoint; return the number of steps done and the order that continues at the next sample."""
    saved = reader.state
    problems = []
    if saved["optimizer"] != recipe.train.optimizer:
        what = f"{recipe.train.optimizer} given; the checkpoint holds the states of {saved['optimizer']}"
        problems.append(Problem("train.optimizer", what))
    if saved["data"] != {"samples": order.samples, "seed": order.seed}:
        what = (
            f"{order.samples} samples with seed {order.seed}; the checkpoint was made on {saved['data']['samples']} "
            f"with seed {saved['data']['seed']}, so the next sample is not defined; restore data and train.seed"
        )
        problems.append(Problem("data", what))
    rounds, here = saved["counters"], state.counters()
    if BELOW in rounds and BELOW not in here and ROUND_SAMPLES not in rounds:
        what = "made by asynchronous islands of an earlier version, which did not note the samples of a round: "
        problems.append(Problem("checkpoint.resume", f"{what}resume with them, or export it and start from model.path"))
    if BELOW in rounds and BELOW in here and rounds.get(ROUND_SAMPLES, here[ROUND_SAMPLES]) != here[ROUND_SAMPLES]:
        what = f"rounds of {here[ROUND_SAMPLES]:g} samples; the checkpoint counts rounds of {rounds[ROUND_SAMPLES]:g}: "
        problems.append(Problem("strategy.local_steps", f"{what}restore local_steps, islands and train.global_batch"))
    if problems:
        raise BadInput(str(reader.path), problems)
    checkpoint_reader.load(reader, state, world.rank)
    step, position = int(saved["step"]), int(saved["samples"])
    if BELOW in rounds and BELOW not in here:
        position = _used_samples(rounds)
        step = order.batches.steps_for(position)
        step -= order.batches.before(step) > position
        state.set_counters({**state.counters(), "scheduler_steps": step})
    elif BELOW in here and BELOW not in rounds:
        done = position // int(here[ROUND_SAMPLES])
        state.set_counters({**state.counters(), BELOW: done})
    return step, order.moved(step, position)


def _used_samples(counters: Mapping[str, float]) -> int:
    """Samples of the rounds that asynchronous islands have completed without a gap."""
    done = CompletedRounds.of(counters)
    return min(done.below * int(counters[ROUND_SAMPLES]), int(counters[RUN_SAMPLES]))


def crossing_note(reader: Reader, state: Stateful) -> str:
    """What to know if a run between asynchronous islands and another strategy resumes; empty if nothing is repeated."""
    saved, here = reader.state["counters"], state.counters()
    if BELOW in saved and BELOW not in here and (beyond := CompletedRounds.of(saved).beyond):
        return (
            f"the checkpoint of asynchronous islands has a gap: {len(beyond)} rounds after round "
            f"{CompletedRounds.of(saved).below} are in its weights already, and their samples are used again"
        )
    if BELOW in here and BELOW not in saved and (rest := int(reader.state["samples"]) % int(here[ROUND_SAMPLES])):
        return f"asynchronous islands begin with a whole round: the checkpoint's last {rest} samples are used again"
    return ""
