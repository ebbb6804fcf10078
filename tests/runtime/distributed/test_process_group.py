"""What a worker's start must not import, and a compiler that is used when it is first needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from toolkit.runtime.distributed.process_group import _compiled_on_first_call

IMPORTS = """
import sys
import toolkit.runtime.run
from toolkit.runtime.distributed.process_group import compile_on_first_call
compile_on_first_call()
import deepspeed.runtime.zero.stage3, deepspeed.runtime.zero.stage_1_and_2, deepspeed.runtime.zero.muon.muon_optimizer
print(*sorted({"torch._inductor.compile_fx", "peft", "bitsandbytes", "datasets"} & set(sys.modules)))
"""


THREADS = """
import os
import sys
import torch
from toolkit.runtime.distributed.process_group import World, adopt
os.sched_setaffinity(0, map(int, sys.argv[1:]))
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
adopt(World.from_env({}))
print("threads", torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.parametrize("confined", [False, True])
def test_a_worker_has_as_many_threads_as_it_may_use_cores(confined: bool) -> None:
    """More would spin while they wait for one another, for ten times the time of a step."""
    cores = sorted(os.sched_getaffinity(0))
    given = cores[:1] if confined else cores
    argv = [sys.executable, "-c", THREADS, *map(str, given)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    assert f"threads {len(given)}" in done.stdout


@pytest.mark.slow
def test_a_worker_imports_no_compiler_and_no_extra() -> None:
    """Each costs every rank of every run seconds of CPU."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []


def test_a_function_is_compiled_when_it_is_first_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def note(function: object) -> object:
        compiled.append(getattr(function, "__name__", ""))
        return function

    monkeypatch.setattr(torch, "compile", note)

    @_compiled_on_first_call
    def double(number: int) -> int:
        return 2 * number

    assert compiled == []
    assert [double(1), double(2)] == [2, 4]
    assert compiled == ["double"]
