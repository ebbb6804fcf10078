"""Islands that never wait for one another, in real processes: all steps are done once, whoever leaves or lags."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.conftest import Trainer
from toolkit.checkpoints import store
from toolkit.cli import main
from toolkit.errors import BadInput
from toolkit.launching.launchers import Command
from toolkit.recipe.file import make_recipe
from toolkit.run_dir import heartbeat
from toolkit.run_dir.async_islands import Membership, gather, parse_address
from toolkit.run_dir.layout import RunDir
from toolkit.run_dir.trajectory import largest_difference
from toolkit.runtime.checkpoint.fragments import WEIGHT
from toolkit.runtime.checkpoint.reader import Reader
from toolkit.runtime.engine.replica import ReplicaEngine
from toolkit.runtime.islands import async_transfer
from toolkit.runtime.islands.async_store import Piece, Update, UpdateStore
from toolkit.runtime.islands.signed_store import SignedStore
from toolkit.runtime.islands.store_access import StoreKey, new_key, read_key
from toolkit.runtime.islands.transports import open_transport
from toolkit.runtime.supervision.warm_pool import WarmProcess, enter_worker
from toolkit.sessions.islands import (
    IslandOptions,
    MeetingPlace,
    check_store,
    join_job,
    local_store,
    prepare_islands,
    watch_islands,
)
from toolkit.sessions.resolve import resolve

pytestmark = pytest.mark.slow

STEPS, ROUND = 24, 6
"""Steps of the recipe, each of two islands' shares, and steps of a round."""


@dataclass(frozen=True)
class Ended:
    """How a run of islands ended."""

    run: RunDir
    code: int
    said: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.metrics.read_text().splitlines()]

    def weights(self, island: int) -> dict[str, torch.Tensor]:
        """Of an island's last state."""
        root = self.run.island(island).checkpoints
        reader = Reader.open(store.path_of(root, store.steps(root)[0]))
        return {name: reader.full(name, WEIGHT) for name, found in reader.index.items() if WEIGHT in found.kinds()}

    def assert_whole(self) -> None:
        """Every step was done, and all that was learned is in the state of whoever has ended."""
        assert [record["step"] for record in self.records] == list(range(1, 2 * STEPS + 1))
        assert store.steps(self.run.checkpoints)[0] == 2 * STEPS

    def assert_agreed(self) -> None:
        """The islands have the same weights, up to the order in which changes were added."""
        first, second = self.weights(0), self.weights(1)
        assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


Together = Callable[..., Ended]


@pytest.fixture
def together(recipe_mapping: dict[str, Any], tmp_path: Path) -> Together:
    """`together(*overrides, disturb=…)`: a run of two islands; `disturb` gets the run in a thread."""

    def run(
        *overrides: str,
        nproc: int = 2,
        restarts: int = 0,
        disturb: Callable[[RunDir], None] | None = None,
        enter: Callable[[Command], Any] | None = None,
        only: int | None = None,
        meet: Callable[[MeetingPlace], None] = lambda place: None,
    ) -> Ended:
        base = (
            f"train.steps={STEPS}", "train.outer={mode: async}", "checkpoint.every=6",
            "strategy={name: local_sgd, islands: 2, local_steps: 6, zero_stage: 0}",
        )  # fmt: skip
        resolved = resolve(make_recipe(recipe_mapping, [*base, *overrides]), nproc)
        directory = resolved.write(tmp_path / "run", resuming=(tmp_path / "run").exists())
        text = io.StringIO()
        with local_store(directory) as place:
            parts = prepare_islands(resolved, directory, place, only)
            meet(place)
            if disturb:
                threading.Thread(target=disturb, args=(directory,), daemon=True).start()
            code = watch_islands(parts, Console(file=text, width=200), restarts, enter or WarmProcess.start)
        gather(directory, 2, "done")
        return Ended(directory, code, text.getvalue())

    return run


def after(island: int, step_count: int, act: Callable[[RunDir], None]) -> Callable[[RunDir], None]:
    """Act once an island has recorded so many steps."""

    def wait(run: RunDir) -> None:
        metrics = run.island(island).metrics
        while not metrics.is_file() or len(metrics.read_text().splitlines()) < step_count:
            time.sleep(0.02)
        act(run.island(island))

    return wait


def send(number: signal.Signals, rank: int = 0) -> Callable[[RunDir], None]:
    return lambda island: os.kill(heartbeat.read_all(island.heartbeats)[rank].pid, number)


@pytest.mark.parametrize(
    ("nproc", "overrides"),
    [(2, ()), (4, ("strategy.zero_stage=2", "train.outer.bits=8")), (4, ("train.outer.bits=4",))],
)
def test_all_steps_are_done_once_and_islands_agree(together: Together, nproc: int, overrides: tuple[str, ...]) -> None:
    done = together(*overrides, nproc=nproc)
    assert done.code == 0, done.said
    done.assert_whole()
    done.assert_agreed()
    assert done.records[-1]["loss"] < 0.7 * done.records[0]["loss"]


def test_an_island_that_is_killed_comes_back(together: Together) -> None:
    killed = after(1, 8, send(signal.SIGKILL))
    done = together("train.outer.bits=8", restarts=1, disturb=killed, enter=lagging(0.1))
    assert done.code == 0, done.said
    assert "island 1 is restarted" in done.said
    assert "SIGKILL" in done.said
    done.assert_whole()
    done.assert_agreed()


def test_an_island_that_joins_waits_for_no_round(together: Together) -> None:
    """The other one sends it the weights in the middle of a round, which takes 6 s."""

    def start(command: Command) -> WarmProcess:
        return WarmProcess.start(command, Lagging(0.25, island=0))

    overrides = ("strategy.local_steps=24", "checkpoint.every=24")
    done = together(*overrides, disturb=after(1, 2, send(signal.SIGKILL)), enter=start, restarts=1)
    assert done.code == 0, done.said
    done.assert_whole()
    slow, back = ([record["time"] for record in done.records if record["island"] == island] for island in (0, 1))
    assert max(back) < max(slow)


def lose_rounds(place: MeetingPlace) -> None:
    """What islands leave that are killed while they claim a round, and while they ask others to do one again."""
    store = UpdateStore(Membership(place.address, place.key_file, 1, 2), 0, 1)
    store.number("next", 1)
    store.number("redo/count", 1)


def test_what_an_island_leaves_behind_others_do(together: Together) -> None:
    done = together(disturb=after(1, 8, send(signal.SIGKILL)), meet=lose_rounds, enter=lagging(0.1))
    assert done.code == 0, done.said
    assert "island 1 has left; the other islands continue" in done.said
    done.assert_whole()


def test_a_run_that_is_stopped_goes_on(together: Together) -> None:
    def stop_all(island: RunDir) -> None:
        for run in (RunDir(island.path.with_name("0")), RunDir(island.path.with_name("1"))):
            send(signal.SIGTERM)(run)

    stopped = together(disturb=after(0, 2, stop_all))
    assert stopped.code == 75, stopped.said
    assert len(stopped.records) < 2 * STEPS
    done = together("checkpoint.resume=auto")
    assert done.code == 0, done.said
    done.assert_whole()


@dataclass(frozen=True)
class Lagging:
    """The steps of an island take longer."""

    seconds: float
    island: int = 1

    def __call__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        if env["TOOLKIT_ISLAND"].startswith(f"{self.island}/"):
            step = ReplicaEngine.step

            def slow(*args: Any) -> Any:
                time.sleep(self.seconds)
                return step(*args)

            ReplicaEngine.step = slow  # type: ignore[method-assign]
        enter_worker(argv, env)


def lagging(*seconds: float) -> Callable[[Command], WarmProcess]:
    """Starts islands that are all slow, in turn by so much: none has done everything before another one has begun."""

    def start(command: Command) -> WarmProcess:
        island = int(command.env["TOOLKIT_ISLAND"].partition("/")[0])
        return WarmProcess.start(command, Lagging(seconds[island % len(seconds)], island))

    return start


def stopped_until_the_others_are_done(island: RunDir) -> None:
    """Stop the second island in the middle of a round until the first one has done that round, too."""
    send(signal.SIGSTOP)(island)
    other = RunDir(island.path.with_name("0")).metrics
    while len({record["step"] for path in (other, island.metrics) for record in recorded(path)}) < 2 * STEPS:
        time.sleep(0.05)
    send(signal.SIGCONT)(island)


def recorded(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]


@dataclass(frozen=True)
class Forgetful(Lagging):
    """An island that keeps no updates for those who have left."""

    def __call__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        async_transfer.KEEP_SECONDS = async_transfer.DEAD_SECONDS
        super().__call__(argv, env)


def test_an_island_that_was_away_loses_its_round_only(together: Together) -> None:
    """Others redid its round, and have kept all of their updates for it: it need not start again."""

    done = together(disturb=after(1, 2, stopped_until_the_others_are_done), enter=lagging(0.2))
    assert done.code == 0, done.said
    assert "has left" not in done.said
    assert "is lost: another island did it" in done.run.island(1).log(0).read_text()
    done.assert_whole()
    done.assert_agreed()


def test_an_island_that_misses_removed_updates_starts_again(together: Together) -> None:
    """The others keep few updates for those who have left: without all of them its weights would not be the run's."""

    def start(command: Command) -> WarmProcess:
        return WarmProcess.start(command, Forgetful(0.2, island=int(command.env["TOOLKIT_ISLAND"].partition("/")[0])))

    overrides = ("strategy.local_steps=4", "checkpoint.every=4")
    done = together(*overrides, disturb=after(1, 2, stopped_until_the_others_are_done), enter=start, restarts=1)
    assert done.code == 0, done.said
    assert "updates which it misses were removed or replaced; start it again" in done.said
    done.assert_whole()


def test_who_lags_does_less(together: Together) -> None:
    done = together(enter=lagging(0.1, 0.5))
    assert done.code == 0, done.said
    done.assert_whole()
    done.assert_agreed()
    steps = [sum(record["island"] == island for record in done.records) for island in (0, 1)]
    assert steps[0] >= 2 * steps[1] > 0


@contextlib.contextmanager
def meeting_place(transport: str, directory: Path) -> Iterator[MeetingPlace]:
    """A server of its own, or a folder that every island reaches."""
    if transport == "file":
        new_key().write(directory / "key")
        yield MeetingPlace((directory / "store").as_uri(), str(directory / "key"))
        return
    argv = [sys.executable, "-m", "toolkit", "mailbox", "--port", "0", "--keys", str(directory / "keys")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as mailbox:
        assert mailbox.stdout is not None
        address, key = mailbox.stdout.readline().split("--rendezvous ")[1].strip().split(" --mailbox-key ")
        yield MeetingPlace(parse_address(address), key)
        mailbox.terminate()
        assert mailbox.wait() == 0


def test_sites_meet_in_a_mailbox_of_its_own(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    """`toolkit mailbox`, and one island from each of two directories, as on two hosts."""
    with meeting_place("https", tmp_path) as place:
        axes = ("strategy={name: local_sgd, islands: 2, local_steps: 3}", "train.outer={mode: async}", "train.steps=6")
        resolved = resolve(make_recipe(recipe_mapping, [*axes, "checkpoint.every=3"]), 2)
        runs = [resolved.write(tmp_path / name) for name in ("a", "b")]
        sites = [prepare_islands(resolved, run, place, number)[0] for number, run in enumerate(runs)]
        assert watch_islands(sites, Console(file=io.StringIO()), 0, WarmProcess.start) == 0
    done = [line for n, run in enumerate(runs) for line in run.island(n).metrics.read_text().splitlines()]
    assert sorted(json.loads(line)["step"] for line in done) == list(range(1, 13))


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--island", "0"], "--island and --rendezvous go together"),
        (["--island", "0", "--mailbox", "here"], "--rendezvous and --mailbox-key go together"),
        (["--island", "0", "--mailbox", "here", "--mailbox-key", "k"], "https://HOST:PORT is required"),
        (["--island", "0", "--mailbox", "ftp://a/b", "--mailbox-key", "k"], "https://HOST:PORT is required"),
    ],
)
def test_bad_arguments(
    recipe_mapping: dict[str, Any], tmp_path: Path, argv: list[str], reason: str, capsys: Any
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe_mapping))
    assert main(["train", str(path), *argv]) == 2
    assert reason in capsys.readouterr().err


def test_refusals(recipe_mapping: dict[str, Any]) -> None:
    axes = ["train.steps=4", "strategy={name: local_sgd, islands: 2, local_steps: 2}"]
    recipe = make_recipe(recipe_mapping, [*axes, "train.outer={mode: async, optimizer: nesterov}"])
    refused = resolve(recipe, 2).decision
    assert refused.chosen is None
    assert "stale" in refused.refused[0].reason
    fine = replace(recipe, train=replace(recipe.train, outer=replace(recipe.train.outer, optimizer="average")))
    assert resolve(fine, 2).decision.chosen is not None


BAD_UPDATES = int(os.environ.get("BAD_UPDATES", "48"))
"""How many bad updates an island gets while it trains; `BAD_UPDATES=500 pytest -k bad_updates` takes a minute."""


def attack(place: MeetingPlace, count: int, sent: list[int]) -> None:
    """Bad updates in the name of the second island: without the secret, with another one, and with the run's own."""
    key = read_key(place.key_file)
    stranger, other = open_transport(place.address, key), StoreKey(b"o" * 32)
    foreign = SignedStore(stranger, other)
    insider = UpdateStore(Membership(place.address, place.key_file, 1, 2), 0, 1)
    insider.write("layout/1/1/0", insider.read("layout/0/1/0"))

    def update(serial: int, number: int, content: torch.Tensor) -> Update:
        return Update(1, serial, number, 0.5, (Piece(content.numel(), content),))

    kinds: list[Callable[[int], object]] = [
        lambda n: insider.publish(update(n // 8, n, torch.full((7,), 255, dtype=torch.uint8)), 1),
        lambda n: insider.publish(update(n // 8, 10**9, torch.zeros(4, dtype=torch.uint8)), 1),
        lambda n: insider.write(f"update/1/{n // 8}/head", [0, float("inf"), 1]),
        lambda n: insider.write(f"update/1/{n // 8}/head", "nonsense"),
        lambda n: stranger.put(f"update/1/{n}/head", b"[0, 1.0, 1]"),
        lambda n: stranger.put(f"updates/1/{n + 1}", b""),
        lambda n: foreign.write("open/1" if n % 16 < 8 else f"update/1/{n}/head", [0, 1.0, 1]),
        lambda n: stranger.put(f"update/1/{n}/1/0/0", bytes(9 << 20)),
    ]
    with contextlib.suppress(BadInput):  # the store is gone with the run
        for number in range(count):
            kinds[number % len(kinds)](number)
            sent.append(number)


def test_bad_updates_change_nothing(together: Together, tmp_path: Path) -> None:
    """An island alone in a run of two, left in peace and attacked: the same losses, bit for bit."""
    losses = []
    steps = 9 if BAD_UPDATES <= 48 else BAD_UPDATES // 2
    for count in (0, BAD_UPDATES):
        places: list[MeetingPlace] = []
        sent: list[int] = []
        attacked = after(0, 1, lambda island, count=count, places=places, sent=sent: attack(places[0], count, sent))  # type: ignore[misc]
        done = together(f"train.steps={steps}", "strategy.local_steps=3", only=0, meet=places.append, disturb=attacked)
        assert done.code == 0, done.said
        losses.append([record["loss"] for record in done.records])
        log = done.run.island(0).log(0).read_text()
        assert ("is dropped" in log) == bool(count), log
        [island, _] = json.loads(done.run.summary.read_text())["islands"]
        assert (island.get("dropped_updates_of_1", 0) > 0) == bool(count), island
        assert (island.get("rejected_values_of_1", 0) > 0) == bool(count), island
        assert len(sent) == count or BAD_UPDATES <= 48, "all of them came while the island trained"
        done.run.path.rename(tmp_path / f"attacked {count} times")
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2 * steps


def test_an_island_that_is_asked_to_leave_hands_its_round_back(together: Together) -> None:
    done = together(disturb=after(1, 8, send(signal.SIGTERM)), enter=lagging(0.1))
    assert done.code == 0, done.said
    assert "is handed back" in done.run.island(1).log(0).read_text()
    done.assert_whole()
    assert json.loads(done.run.island(1).summary.read_text())["status"] == "preempted"


def test_a_provider_joins_with_an_address(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    """`toolkit train --join ADDRESS`: an island that the run has never seen reads the recipe and does its share."""
    place = MeetingPlace((tmp_path / "store").as_uri(), str(tmp_path / "islands.key"))
    new_key().write(Path(place.key_file))
    axes = ("strategy={name: local_sgd, islands: 2, local_steps: 4}", "train.outer={mode: async, bits: 2}")
    resolved = resolve(make_recipe(recipe_mapping, [*axes, "train.steps=16", "checkpoint.every=4"]), 2)
    check_store(place, resolved)
    runs = [resolved.write(tmp_path / "first")]
    islands = prepare_islands(resolved, runs[0], place, 0)
    enter = Lagging(0.3, island=0)
    first = threading.Thread(
        target=watch_islands, args=(islands, Console(file=io.StringIO()), 0, lambda c: WarmProcess.start(c, enter))
    )
    first.start()
    metrics = runs[0].island(0).metrics
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 4:
        time.sleep(0.02)
    options = IslandOptions(place.address, Path(place.key_file))
    for number in (2, 3):  # two providers, one after the other
        recipe, nproc, chosen = join_job(options, ["name=provider"])
        assert (recipe.name, recipe.train.outer, nproc, chosen.island) == (
            "provider",
            resolved.recipe.train.outer,
            2,
            number,
        )
    own = resolve(recipe, nproc)
    check_store(place, own)
    runs.append(own.write(tmp_path / "provider"))
    late = prepare_islands(own, runs[1], place, chosen.island)
    assert watch_islands(late, Console(file=io.StringIO()), 0, WarmProcess.start) == 0
    first.join(120)
    records = [
        json.loads(line)
        for n, run in ((0, runs[0]), (3, runs[1]))
        for line in run.island(n).metrics.read_text().splitlines()
    ]
    assert sorted(record["step"] for record in records) == list(range(1, 33))
    assert sum(record["exchange"]["island"] == 3 for record in records) >= 4
    assert any(record["exchange"]["staleness"] for record in records)
    runs.append(own.write(tmp_path / "late"))
    assert (
        watch_islands(prepare_islands(own, runs[2], place, 2), Console(file=io.StringIO()), 0, WarmProcess.start) == 0
    )
    assert not store.steps(runs[2].island(2).checkpoints), "its weights are not those of the run"


def test_code_of_another_host_runs_here_only_if_it_is_typed_here(
    recipe_mapping: dict[str, Any], tmp_path: Path
) -> None:
    place = MeetingPlace((tmp_path / "store").as_uri(), str(tmp_path / "islands.key"))
    new_key().write(Path(place.key_file))
    axes = ("strategy={name: local_sgd, islands: 2}", "train.outer={mode: async}", "metrics.sinks=[json.decoder]")
    resolved = resolve(make_recipe(recipe_mapping, [*axes, "model.trust_remote_code=true"]), 2)
    check_store(place, resolved)
    options = IslandOptions(place.address, Path(place.key_file))
    with pytest.raises(BadInput, match="Python code of the model would run here"):
        join_job(options, [])
    assert join_job(options, ["model.trust_remote_code=true"]).recipe.metrics.sinks == ()


def test_islands_of_unequal_size_train_one_model(recipe_mapping: dict[str, Any], tmp_path: Path) -> None:
    """One rank with full weights, and two ranks that shard theirs: each finds its elements in the other's updates."""
    place = MeetingPlace((tmp_path / "store").as_uri(), str(tmp_path / "islands.key"))
    new_key().write(Path(place.key_file))
    axes = ("train.outer={mode: async, bits: 8}", "train.steps=12", "checkpoint.every=3")
    strategy = "strategy={{name: local_sgd, islands: 2, local_steps: 3, zero_stage: {}}}"
    sites = []
    for number, (stage, ranks) in enumerate([(0, 1), (2, 2)]):
        resolved = resolve(make_recipe(recipe_mapping, [*axes, strategy.format(stage)]), 2 * ranks)
        check_store(place, resolved)
        sites += prepare_islands(resolved, resolved.write(tmp_path / str(number)), place, number)
    assert watch_islands(sites, Console(file=io.StringIO()), 0, lagging(0.1)) == 0
    done = [Ended(RunDir(tmp_path / str(number)), 0, "") for number in (0, 1)]
    steps = [json.loads(line)["step"] for site in sites for line in site.run.metrics.read_text().splitlines()]
    assert sorted(steps) == list(range(1, 25))
    assert all(len(site.run.metrics.read_text().splitlines()) >= 3 for site in sites)
    first, second = done[0].weights(0), done[1].weights(1)
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "required with --join"),
        (["--island", "0", "--mailbox-key", "k"], "can't be combined with --join"),
        (["--tiny", "--mailbox-key", "k"], "can't be combined with --join"),
        (["--mailbox-key", "KEY"], "holds no job"),
    ],
)
def test_joins_that_are_refused(tmp_path: Path, argv: list[str], reason: str, capsys: Any) -> None:
    new_key().write(tmp_path / "islands.key")
    given = [str(tmp_path / "islands.key") if word == "KEY" else word for word in argv]
    assert main(["train", "--join", (tmp_path / "store").as_uri(), *given]) == 2
    assert reason in capsys.readouterr().err


def test_every_strategy_reads_their_checkpoints(together: Together, train: Trainer, tmp_path: Path) -> None:
    """Synchronous training continues at the next sample, and asynchronous islands continue from there."""
    done = together("train.steps=6", "strategy.local_steps=3")
    saved = store.path_of(done.run.checkpoints, 12)
    more = ("train.steps=10", "checkpoint.every=10", f"checkpoint.resume={saved}", "metrics.sample_ids=true")
    synchronous = train(*more, "strategy={name: zero, zero_stage: 2}", nproc=2, into=tmp_path / "zero")
    assert [record["step"] for record in synchronous.records] == [7, 8, 9, 10]
    whole = train("train.steps=10", "metrics.sample_ids=true", nproc=1)
    assert [r["sample_ids"] for r in synchronous.records] == [r["sample_ids"] for r in whole.records[6:]]
    assert synchronous.losses[0] < 0.9 * whole.losses[0]
    islands = train(*more, "strategy={name: local_sgd, islands: 2, local_steps: 2}", nproc=2)
    assert len(islands.losses) == 4
    done.run.path.rename(tmp_path / "before")
    back = store.path_of(synchronous.run.checkpoints, 10)
    again = together("train.steps=16", "strategy.local_steps=2", "checkpoint.every=2", f"checkpoint.resume={back}")
    assert again.code == 0, again.said
    assert [record["step"] for record in again.records] == list(range(21, 33))


@pytest.mark.parametrize("transport", ["https", "file"])
def test_one_local_step_in_turns_is_data_parallel(
    recipe_mapping: dict[str, Any], train: Trainer, tmp_path: Path, transport: str
) -> None:
    """Plain averaging after every step of SGD, through a store: each turn has the loss of a synchronous step.

    Rows without padding: islands have equal weights, and a synchronous step weighs by tokens.
    """
    steps = 6
    plain = ("train.optimizer=sgd", "train.lr=0.1", "train.schedule=constant", "train.warmup=0", "train.grad_clip=0",
             "data.packing_method=stream")  # fmt: skip
    outer = "train.outer={mode: async, max_staleness: 0}"
    axes = ("strategy={name: local_sgd, islands: 2, local_steps: 1, zero_stage: 0}", outer)
    given = [*plain, *axes, f"train.steps={steps}", "checkpoint.every=0"]
    resolved = resolve(make_recipe(recipe_mapping, given), 2)
    run = resolved.write(tmp_path / "islands")
    with meeting_place(transport, tmp_path) as place:
        islands = prepare_islands(resolved, run, place, None)
        assert watch_islands(islands, Console(file=io.StringIO()), 0, WarmProcess.start) == 0
    gather(run, 2, "done")
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 2 * steps + 1))
    turns = [records[at : at + 2] for at in range(0, 2 * steps, 2)]
    assert all({record["island"] for record in turn} == {0, 1} for turn in turns), "each island does a round per turn"
    together = [sum(r["loss"] * r["tokens"] for r in turn) / sum(r["tokens"] for r in turn) for turn in turns]
    synchronous = train(*plain, f"train.steps={steps}", "strategy.name=data_parallel", nproc=2)
    assert largest_difference(synchronous.losses, together) <= 1e-6
