"""The exchange between islands: how often, in how many parts and bits, so that the link is busy and nobody waits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolkit.recipe.batch_sections import Outer

BLOCK = 256
"""Numbers that share the scales of an encoding below 32 bits."""
BITS = (32, 8, 4, 2)
"""Encodings, the most exact first."""
FIRST_STEPS = 4
"""Steps between exchanges under `local_steps: auto` until the link was measured."""
LINK_SHARE = 0.8
"""Share of the time in which `auto` fills the link. The rest is a margin: a link that falls behind is waited for."""
MOST_STEPS = 128
"""Longest interval that `auto` chooses: islands that meet less often hardly train one model."""
MOST_FRAGMENTS = 16
"""Most parts that `auto` cuts the weights into: each costs a start-up on the link."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the recipe asks for; None: chosen from the speed of steps and link, again and again."""

    local_steps: int | None = 1
    fragments: int | None = 1
    bits: int | None = 32
    density: float = 1.0
    """Share of the numbers that are sent."""
    hidden: bool = False
    """Whether islands train on during an exchange."""
    delay_steps: int | None = None
    """Steps that an exchange may overlap with; None: until the next one."""
    states: int = 1
    """fp32 copies of the weights that the exchange keeps, sharded over the ranks of an island."""

    @property
    def adapts(self) -> bool:
        """Whether anything is chosen during the run."""
        return None in (self.local_steps, self.fragments, self.bits)

    def first(self) -> Rhythm:
        """What a run begins with, before anything was measured: few bits, because the link may be slow."""
        return self._rhythm(self.local_steps or FIRST_STEPS, self.bits or BITS[-1])

    def chosen(self, fp32_seconds: float, step_seconds: float) -> Rhythm:
        """The rhythm for a link that moves all weights in fp32 in so many seconds, beside steps of so many seconds.

        Drift between islands costs more than rounding, so bits are saved first: the most exact encoding that the link
        carries at the shortest interval, else the fewest bits and the shortest interval that these allow.
        """
        least, budget = self.local_steps or 1, LINK_SHARE * step_seconds
        for bits in self._encodings():
            steps = max(least, math.ceil(fp32_seconds * bytes_per_number(bits, self.density) / 4 / budget))
            if steps == least:
                break
        return self._rhythm(self.local_steps or min(steps, MOST_STEPS), bits)

    def _encodings(self) -> Iterator[int]:
        yield from BITS if self.bits is None else (self.bits,)

    def _rhythm(self, steps: int, bits: int) -> Rhythm:
        fragments = self.fragments or min(steps, MOST_FRAGMENTS)
        if self.local_steps is None:
            steps = -(-steps // fragments) * fragments
        elif self.fragments is None:
            fragments = max(n for n in range(1, fragments + 1) if steps % n == 0)
        delay = min(self.delay_steps or steps // fragments, steps) if self.hidden else 0
        return Rhythm(steps, fragments, bits, delay)


@dataclass(frozen=True)
class Rhythm:
    """How islands exchange until it is chosen again."""

    local_steps: int
    """Steps between two exchanges of the same numbers."""
    fragments: int
    """Parts of the weights, exchanged in turn: one every `local_steps` / `fragments` steps."""
    bits: int
    delay_steps: int
    """Steps after which the mean is applied; 0: islands wait for it."""

    def due(self, step: int) -> list[int]:
        """Fragments whose exchange begins after a step."""
        gap = self.local_steps // self.fragments
        return [] if step % gap else [step // gap % self.fragments]


def exchange_of(outer: Outer, auto_steps: bool, local_steps: int = 1) -> Exchange:
    """The exchange of a recipe whose plan has so many local steps; `auto_steps`: they are only the first choice."""
    bits = None if outer.bits == "auto" else outer.bits
    states = [True, outer.optimizer == "nesterov", outer.mode == "overlap", bits != 32]
    return Exchange(
        local_steps=None if auto_steps else local_steps,
        fragments=None if outer.fragments == "auto" else outer.fragments,
        bits=bits,
        density=outer.density,
        hidden=outer.mode != "wait",
        delay_steps=outer.delay_steps,
        states=sum(states),
    )


def with_steps(exchange: Exchange, local_steps: int) -> Exchange:
    """The exchange under a plan with so many local steps."""
    return exchange if exchange.local_steps is None else replace(exchange, local_steps=local_steps)


def bytes_per_number(bits: int, density: float = 1.0) -> float:
    """Bytes on the link per number, scales and places included."""
    if bits == 32:
        return 4.0
    places = density if density < 1 else 0.0
    return density * bits / 8 + places + 4 / BLOCK
