"""What a worker's start must not import, and a compiler that is used when it is first needed."""

from __future__ import annotations

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
