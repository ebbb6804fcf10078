"""Puts a run together: data, engine, checkpoint, metrics, hooks. Everything that happens before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from toolkit.launching.stop_signals import StopRequest
from toolkit.plans.noise_scale import NoiseScale
from toolkit.plans.plan import Plan
from toolkit.recipe.objective_sections import Contrastive
from toolkit.recipe.schedules import make_schedule
from toolkit.recipe.sections import Recipe
from toolkit.run_dir.async_islands import Membership
from toolkit.run_dir.layout import RunDir, RunSpec
from toolkit.runtime.between_steps import (
    AfterStep,
    CheckpointHook,
    EvaluateHook,
    HeartbeatHook,
    NonFiniteHook,
    Progress,
    StopHook,
    WarningHook,
)
from toolkit.runtime.build_engine import EngineSpec, build_async_island, build_engine
from toolkit.runtime.checkpoint import resume
from toolkit.runtime.checkpoint.resume import Say
from toolkit.runtime.checkpoint.saver import Saver
from toolkit.runtime.data.dataset import Dataset
from toolkit.runtime.data.input_spec import input_spec_of
from toolkit.runtime.data.load import load_data
from toolkit.runtime.data.prefetch import Share
from toolkit.runtime.data.sample_order import SampleOrder, gather_sample_ids
from toolkit.runtime.data.streaming import Streamed
from toolkit.runtime.distributed.process_group import World, host_group
from toolkit.runtime.distributed.rank_zero_first import AllRanks
from toolkit.runtime.engine.protocol import Engine
from toolkit.runtime.engine.weight_average import evaluated_weights
from toolkit.runtime.evaluate import Evaluator, Measures
from toolkit.runtime.generate_text import make_sampler
from toolkit.runtime.islands.async_engine import AsyncIslandEngine
from toolkit.runtime.islands.engine import meeting_steps
from toolkit.runtime.loop import AsyncRounds, Loop, Position, RemainingSteps, StepSource
from toolkit.runtime.machine.counters import Counters, make_counters
from toolkit.runtime.metrics import comm_timer
from toolkit.runtime.metrics.comm_timer import CommTimer
from toolkit.runtime.metrics.memory import MemoryMeter
from toolkit.runtime.metrics.step_breakdown import StepMeter
from toolkit.runtime.metrics.step_clock import Clock, NoClock, make_clock
from toolkit.runtime.metrics.trace import Tracer
from toolkit.runtime.objectives.contrastive_loss import RetrievalMeasures
from toolkit.runtime.objectives.score_loss import RankMeasures
from toolkit.runtime.observer import Observer
from toolkit.runtime.reference import ReferencePass, with_reference
from toolkit.runtime.sinks.build import Recorder, load_own, make_sinks, sink_info
from toolkit.runtime.sinks.local_files import keep_until
from toolkit.runtime.spike_rewind import Rewind, SpikeHook
from toolkit.runtime.summary import Averages
from toolkit.runtime.teacher import informed, make_teacher


@dataclass(frozen=True)
class RankContext:
    """What ties a rank to the process that started it."""

    console: IO[str]
    """The terminal, for progress."""
    stop: StopRequest
    heartbeat: Progress
    membership: Membership | None = None
    """Set if this process belongs to an island of asynchronous local SGD."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run that is ready to train: the loop, and what its end needs."""

    spec: RunSpec
    run: RunDir
    world: World
    context: RankContext
    loop: Loop
    recorder: Recorder
    averages: Averages
    counters: Counters
    saver: Saver
    evaluator: Evaluator | None
    say: Say

    def begin(self) -> None:
        """Start sinks, counters and the watch for hangs."""
        recipe = self.spec.recipe
        self.recorder.start(sink_info(self.spec, self.run, self.world, self.loop.position.step))
        self.context.heartbeat.watch(recipe.train.hang_timeout_seconds)
        if recipe.metrics.detail_every:
            self.counters.start()
        self.loop.observer.meter.begin()


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What the pieces of a run are built from."""

    spec: RunSpec
    run: RunDir
    world: World
    context: RankContext
    dataset: Dataset
    last_step: int
    engine: Engine
    async_island: AsyncIslandEngine | None
    """The engine, if it is that of an asynchronous island."""
    clock: Clock
    comm: CommTimer
    position: Position
    share: Share
    say: Say

    @property
    def recipe(self) -> Recipe:
        return self.spec.recipe


def assemble(spec: RunSpec, run: RunDir, world: World, context: RankContext) -> Training:
    """Load the data, build the engine, resume from a checkpoint, and connect the parts of a run."""
    recipe = spec.recipe
    own_sinks = load_own(recipe.metrics, world)
    parts = _build(spec, run, world, context)
    saver = _saver(parts)
    averages = Averages(spec.predicted_parts, spec.link_bytes_per_second)
    sinks = make_sinks(spec, run, context.console, parts.last_step, own_sinks) if world.rank == 0 else []
    recorder = Recorder([averages, *sinks] if world.rank == 0 else [])
    if world.rank == 0:
        recorder.resume_at(keep_until(run.metrics, parts.position.step, parts.say))
    counters, missing = make_counters()
    if missing:
        parts.say(missing)
    evaluator = _evaluator(parts, recorder)
    loop = Loop(
        engine=parts.engine,
        samples=parts.dataset.train,
        share=parts.share,
        position=parts.position,
        source=_source(parts, saver),
        observer=_observer(parts, recorder, counters, saver),
        rewind=Rewind(parts.engine.state, saver, parts.say, partial(_forget, recorder, evaluator)),
        hooks=list(_hooks(parts, saver, evaluator)),
        say=_console_say(recipe, parts.say),
    )
    return Training(
        spec=spec,
        run=run,
        world=world,
        context=context,
        loop=loop,
        recorder=recorder,
        averages=averages,
        counters=counters,
        saver=saver,
        evaluator=evaluator,
        say=parts.say,
    )


def _build(spec: RunSpec, run: RunDir, world: World, context: RankContext) -> _Parts:
    """Data, engine and checkpoint."""
    recipe, plan = spec.recipe, spec.plan
    dataset = load_data(recipe, input_spec_of(recipe.model), AllRanks(world), context.console)
    order = dataset.order(recipe, plan.global_batch)
    say = _speaker(world, context.console)
    tell = _console_say(recipe, say) if world.rank == 0 else print
    teacher = make_teacher(recipe, world, partial(context.heartbeat.move, phase="asking the teacher"), tell)
    if teacher is not None and not teacher.is_live:
        dataset = teacher.over(dataset)
    last_step = num_steps(recipe, order)
    clock: Clock = make_clock() if recipe.metrics.detail_every else NoClock()
    comm = comm_timer.install(clock, plan.tp * plan.token_parts)
    engine_spec = EngineSpec(
        model=recipe.model,
        train=recipe.train,
        plan=plan,
        deepspeed=spec.deepspeed,
        schedule=make_schedule(recipe.train, last_step),
        noise=recipe.metrics.noise_scale,
        auto_steps=recipe.strategy.local_steps == "auto",
    )
    member = context.membership
    async_island = None if member is None else build_async_island(engine_spec, world, member)
    engine = async_island or informed(build_engine(engine_spec, world), engine_spec, world, dataset, teacher)
    share = _share(recipe, plan, engine)
    dataset = with_reference(
        dataset,
        recipe,
        lambda cache, model: ReferencePass(
            engine=engine,
            share=share,
            world=world,
            global_batch=plan.global_batch,
            cache=cache,
            model=model,
            tick=lambda: context.heartbeat.move(phase="computing the reference"),
            say=tell,
        ),
    )
    engine.watch(clock)
    for note in dataset.notes if world.rank == 0 else ():
        _console_say(recipe, say)(f"data: {note}")
    return _Parts(
        spec=spec,
        run=run,
        world=world,
        context=context,
        dataset=dataset,
        last_step=last_step,
        engine=engine,
        async_island=async_island,
        clock=clock,
        comm=comm,
        position=_position(spec, run, world, engine, dataset, order, say),
        share=share,
        say=say,
    )


def _share(recipe: Recipe, plan: Plan, engine: Engine) -> Share:
    """The part of every global batch that this rank computes."""
    seed = recipe.train.seed if recipe.train.neftune_alpha else None
    replicas = plan.dp * plan.islands
    return Share(replica=engine.replica, replicas=replicas, micro_batch=plan.micro_batch, noise_seed=seed)


def _position(
    spec: RunSpec, run: RunDir, world: World, engine: Engine, dataset: Dataset, order: SampleOrder, say: Say
) -> Position:
    """Where the run starts: at a checkpoint if there is one, else at the first sample."""
    reader = resume.find(spec.recipe.checkpoint, run.checkpoints, world, say)
    if reader is None:
        return Position(0, order)
    if note := resume.crossing_note(reader, engine.state):
        say(note)
    position = Position(*resume.resume(reader, engine.state, order, spec.recipe, world))
    if isinstance(dataset.train, Streamed):
        say(dataset.train.resume_at(reader.state.get("stream")))
    return position


def _saver(parts: _Parts) -> Saver:
    samples = parts.dataset.train
    return Saver(
        root=parts.run.checkpoints,
        state=parts.engine.state,
        recipe=parts.recipe,
        plan=parts.spec.plan,
        order=parts.position.order,
        world=parts.world,
        group=host_group(),
        last_step=parts.position.step,
        stream=samples.mark if isinstance(samples, Streamed) else None,
        tick=parts.context.heartbeat.move,
    )


def _observer(parts: _Parts, recorder: Recorder, counters: Counters, saver: Saver) -> Observer:
    spec, plan, metrics, group = parts.spec, parts.spec.plan, parts.recipe.metrics, host_group()
    # Islands meet every `local_steps` steps only, so their ranks are compared only then.
    detail_every = -(-metrics.detail_every // plan.local_steps) * plan.local_steps
    memory = MemoryMeter(parts.clock)
    gather_ids = partial(gather_sample_ids, replica=parts.engine.replica, group=group)
    return Observer(
        recorder=recorder,
        meter=StepMeter(plan, parts.clock, parts.comm, memory, counters, detail_every, group),
        memory=memory,
        model_flops=spec.model_flops,
        hardware_flops=spec.hardware_flops,
        devices=parts.world.size,
        peak_flops=spec.peak_flops * parts.world.size,
        saved=lambda: saver.written_step,
        tracer=Tracer(metrics.trace, parts.run.trace, parts.world.rank),
        micro_batch=plan.micro_batch,
        batches=parts.position.order.batches,
        noise=NoiseScale() if metrics.noise_scale else None,
        gather_ids=gather_ids if metrics.sample_ids else lambda own: None,
    )


def _evaluator(parts: _Parts, recorder: Recorder) -> Evaluator | None:
    """The evaluator, if samples are held out; the rank that has sinks records."""
    recipe, heartbeat = parts.recipe, parts.context.heartbeat
    if parts.dataset.held_out is None:
        return None
    evaluator = Evaluator(
        engine=parts.engine,
        samples=parts.dataset.held_out,
        share=parts.share,
        global_batch=recipe.train.global_batch,
        most=recipe.train.eval_samples,
        path=parts.run.evaluations,
        writes=bool(recorder.sinks),
        say=_console_say(recipe, parts.say),
        classes="classification" in recipe.data.format or recipe.train.objective not in (None, "distill"),
        tick=lambda: heartbeat.move(phase="evaluating"),
        log=recorder.evaluated,
        measures=_measures(parts),
        weights=evaluated_weights(recipe.train, parts.engine.state),
        sample=make_sampler(recipe, parts.engine, parts.dataset.tokenizer),
    )
    evaluator.resume_at(parts.position.step)
    return evaluator


def _measures(parts: _Parts) -> Measures | None:
    """What an evaluation measures besides loss and accuracy."""
    train = parts.recipe.train
    if train.objective == "rank":
        return RankMeasures(parts.engine.loss)
    if train.objective != "contrastive":
        return None
    return RetrievalMeasures(parts.engine.loss, train.contrastive or Contrastive())


def _hooks(parts: _Parts, saver: Saver, evaluator: Evaluator | None) -> Iterator[AfterStep]:
    """Hooks in the order in which they run after every step."""
    recipe, plan, heartbeat = parts.recipe, parts.spec.plan, parts.context.heartbeat
    yield NonFiniteHook(all_agree=plan.islands == 1, scales_loss=plan.precision == "fp16")
    yield WarningHook(_console_say(recipe, parts.say))
    if recipe.train.on_spike == "rewind":
        yield SpikeHook(recipe.train.spike_factor)
    if evaluator is not None:
        yield EvaluateHook(
            evaluator=evaluator,
            saver=saver,
            comm=parts.comm,
            every=recipe.train.eval_every,
            last_step=parts.last_step,
            saves=recipe.checkpoint.every > 0,
            patience=recipe.train.patience,
            keep_best=recipe.checkpoint.keep_best,
        )
    yield HeartbeatHook(heartbeat)
    shared: dict[str, Any] = {"saver": saver, "heartbeat": heartbeat, "comm": parts.comm, "last_step": parts.last_step}
    yield CheckpointHook(**shared, due=_due(parts))
    leave = parts.async_island.hand_back if parts.async_island else None
    asks_every = 1 if parts.async_island else meeting_steps(plan, recipe.train.outer)
    yield StopHook(**shared, leave=leave, stop=parts.context.stop, every=asks_every, group=host_group())


def _due(parts: _Parts) -> Callable[[int], bool]:
    """When checkpoints are saved; an asynchronous island counts its own steps, and saves between rounds."""
    every, last_step, island = parts.recipe.checkpoint.every, parts.last_step, parts.async_island
    if not every:
        return lambda step: False
    if island is None:
        return lambda step: step % every == 0 or step == last_step
    round_steps = parts.spec.plan.local_steps
    return lambda step: step < last_step and step % round_steps == 0 and island.own_steps % every == 0


def _source(parts: _Parts, saver: Saver) -> StepSource:
    if parts.async_island is None:
        return RemainingSteps(parts.position, parts.last_step)
    context = parts.context
    return AsyncRounds(parts.async_island, context.heartbeat, context.stop, saver, parts.position, parts.last_step)


def num_steps(recipe: Recipe, order: SampleOrder) -> int:
    """Steps of the run: given, or enough for the epochs."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    assert order.total is not None
    return order.batches.steps_for(order.total)


def _forget(recorder: Recorder, evaluator: Evaluator | None, step: int) -> None:
    recorder.rewind(step)
    if evaluator is not None:
        evaluator.resume_at(step)


def _console_say(recipe: Recipe, say: Say) -> Say:
    """To the terminal if the recipe wants progress there, else to the log alone."""
    return say if recipe.metrics.console else print


def _speaker(world: World, console: IO[str]) -> Say:
    """Rank 0 prints to the terminal and to its log; the other ranks to their logs."""

    def say(text: str) -> None:
        print(text, flush=True)
        if world.rank == 0:
            print(text, file=console, flush=True)

    return say
