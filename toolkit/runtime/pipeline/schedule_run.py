"""Runs a schedule with several chunks per rank (`toolkit/plans/pipeline_orders.py`) on DeepSpeed's pipeline engine.

DeepSpeed 0.19.8 has 1F1B with one stage per rank. Here every rank follows its own list of actions. DeepSpeed still runs
each forward and backward pass, sums tied weights, reduces, clips and updates, so ZeRO 1, bf16 and fp16 work as in its
own schedule. Receives are started where the list has them and waited for where their values are needed. Shapes are sent
once per shape of a micro-batch, so the micro-batches of a step may differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule as instructions

from toolkit.plans.pipeline_orders import Kind, actions
from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import send_wait
from toolkit.runtime.metrics.step_clock import Clock, NoClock, part
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.pipeline import transfers
from toolkit.runtime.pipeline.stage import Chunks
from toolkit.runtime.pipeline.weight_gradients import WeightGradients

SENDS = 4
"""Sends that may be under way; the oldest is waited for before another one starts, so that memory is bounded."""
FINISH = (instructions.ReduceTiedGrads, instructions.ReduceGrads, instructions.OptimizerStep)
"""What DeepSpeed does after the backward passes of a step."""
Tensors = tuple[torch.Tensor, ...]
Place = tuple[int, int]
"""Stage and micro-batch."""


class Arriving:
    """Tensors that are being received; each tensor rank receives its share."""

    def __init__(self, whole: Sequence[torch.Tensor], works: Sequence[Any], mesh: Mesh) -> None:
        self._whole, self._works, self._mesh = tuple(whole), works, mesh

    def take(self) -> Tensors:
        """Wait for the tensors and complete them from the other tensor ranks."""
        for work in self._works:
            send_wait(work)
        for tensor in self._whole:
            transfers.gather_shares(tensor, self._mesh)
        return self._whole


class ScheduleRun:
    """Runs the plan's schedule in the place of DeepSpeed's."""

    def __init__(self, engine: Any, mesh: Mesh, chunks: Chunks) -> None:
        self._engine, self._mesh, self._chunks = engine, mesh, chunks
        self.clock: Clock = NoClock()
        self.in_batches = torch.distributed.get_backend() in transfers.BATCHES
        self._number = {stage.index: number for number, stage in enumerate(chunks)}
        self._last = chunks.split.stages - 1
        self._waiting = WeightGradients(chunks) if mesh.plan.schedule == "zero_bubble" else None
        self._specs: dict[tuple[int, Any], tuple[bool, list[transfers.Spec]]] = {}
        """(stage, shape of the micro-batch) → what the stage receives: whether as a tuple, shapes and types."""
        self._sent: set[tuple[int, Any]] = set()
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._nothing = torch.zeros(1, dtype=torch.long, device=engine.device)
        self._forget()
        self._actions: dict[Kind, Callable[[Place], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward_input,
            Kind.WEIGHT: self._backward_weight,
            Kind.SEND_FORWARD: self._send_outputs,
            Kind.SEND_BACKWARD: self._send_gradients,
            Kind.RECEIVE_FORWARD: self._receive_inputs,
            Kind.RECEIVE_BACKWARD: self._receive_gradients,
        }
        self._take_over()

    def _take_over(self) -> None:
        """Replace DeepSpeed 0.19.8's idea of one stage per rank.

        It takes the rank with the highest number for the one with the loss, and divides gradients of everything that
        this rank's forward passes return by the number of micro-batches, where only the loss's must be.
        """
        engine, source = self._engine, self._chunks.rank_of(self._last)
        engine._exec_schedule = self.run
        engine.is_last_stage = lambda: self._mesh.pipe == source
        engine._loss_stage_global_rank = lambda: engine.grid.stage_to_global(stage_id=source)
        engine._backward_prologue_per_tensor = lambda gradient: gradient

    def _forget(self) -> None:
        self._inputs: dict[Place, tuple[bool, Arriving | Tensors]] = {}
        """Arriving inputs: whether as a tuple, and the tensors."""
        self._live: dict[Place, tuple[Tensors, Any]] = {}
        """Inputs and output of a forward pass, until its backward pass."""
        self._gradients: dict[Place, Arriving | Tensors] = {}
        """Gradients of outputs."""
        self._outgoing: dict[Place, Sequence[torch.Tensor]] = {}
        """Gradients of inputs, to be sent."""

    def follow(self, batch: Sequence[MicroBatch]) -> None:
        """Nothing to prepare: shapes are found per micro-batch."""

    def run(self, schedule: Any) -> None:
        """All actions of this rank for one batch, then what DeepSpeed's own schedule says of the update."""
        plan, training = self._mesh.plan, isinstance(schedule, instructions.TrainSchedule)
        self._engine.fwd_outputs = []
        orders = actions(plan.schedule, plan.pp, plan.chunks, schedule.micro_batches, training=training)
        for kind, stage, micro in orders[self._mesh.pipe]:
            self._actions[kind]((stage, micro))
        while self._sending:
            self._finish_send()
        self._forget()
        for instruction in FINISH if training else ():
            self._engine._INSTRUCTION_MAP[instruction](self._engine)

    def _forward(self, place: Place) -> None:
        stage, micro = place
        is_tuple, received = self._inputs.pop(place, (False, (self._nothing,)))
        values = received.take() if isinstance(received, Arriving) else received
        inputs = tuple(value.requires_grad_(value.is_floating_point() and torch.is_grad_enabled()) for value in values)
        with part(self.clock, "forward"):
            self._chunks.running = self._number[stage]
            given = tuple(value.clone() for value in inputs)  # layers may change what they get in place
            output = DeepSpeedEngine.forward(self._engine, given if is_tuple else given[0])
        if stage == self._last:
            self._add_loss(output)
        elif self._chunks.rank_of(stage + 1) == self._mesh.pipe:
            onward = tuple(tensor.detach() for tensor in _tensors(output))
            self._inputs[stage + 1, micro] = (isinstance(output, tuple), onward)
        self._live[place] = (inputs, output)
        if not torch.is_grad_enabled() and not self._sends_output(stage):
            del self._live[place]

    def _sends_output(self, stage: int) -> bool:
        return stage < self._last and self._chunks.rank_of(stage + 1) != self._mesh.pipe

    def _add_loss(self, loss: torch.Tensor) -> None:
        engine = self._engine
        engine.fwd_outputs.append(loss.detach())
        engine.total_loss = loss.detach().clone() if engine.total_loss is None else engine.total_loss + loss.detach()

    def _backward(self, place: Place) -> None:
        """Gradients of a stage's inputs and weights."""
        stage, micro = place
        inputs, output = self._live.pop(place)
        gradients = self._gradients.pop(place, ())
        values = gradients.take() if isinstance(gradients, Arriving) else gradients
        with part(self.clock, "backward"):
            if stage == self._last:
                DeepSpeedEngine.backward(self._engine, output)
            else:
                floats = [tensor for tensor in _tensors(output) if tensor.is_floating_point()]
                transfers.backward_of_stage(self._engine, floats, values)
        if stage == 0:
            return
        found = [tensor.grad for tensor in inputs if tensor.is_floating_point()]
        assert None not in found, "`anchored` gives every input a gradient"
        if self._chunks.rank_of(stage - 1) == self._mesh.pipe:
            self._gradients[stage - 1, micro] = tuple(found)  # type: ignore[arg-type]
        else:
            self._outgoing[place] = found  # type: ignore[assignment]

    def _backward_input(self, place: Place) -> None:
        """Gradients of a stage's inputs; those of its large matrices wait until `_backward_weight`."""
        assert self._waiting is not None
        with self._waiting.collecting(place):
            self._backward(place)

    def _backward_weight(self, place: Place) -> None:
        assert self._waiting is not None
        engine = self._engine
        if engine.using_bf16_optimizer:
            engine.optimizer.clear_lp_grads()
        engine._running_engine_backward = True
        try:
            with part(self.clock, "backward"):
                self._waiting.compute(place)
        finally:
            engine._running_engine_backward = False
        if engine.using_bf16_optimizer:
            engine.optimizer.update_hp_grads(clear_lp_grads=False)

    def _send_outputs(self, place: Place) -> None:
        stage, micro = place
        output = self._live[place][1] if torch.is_grad_enabled() else self._live.pop(place)[1]
        receiver = self._chunks.rank_of(stage + 1)
        shape = (stage, self._chunks.shapes[micro])
        if shape not in self._sent:  # as numbers, once
            self._sent.add(shape)
            with part(self.clock, "pp_comm"):
                self._engine._send_tensor_meta(output, receiver)
        self._send(_tensors(output), receiver)

    def _send_gradients(self, place: Place) -> None:
        self._send(self._outgoing.pop(place), self._chunks.rank_of(place[0] - 1))

    def _receive_inputs(self, place: Place) -> None:
        stage, micro = place
        sender = self._chunks.rank_of(stage - 1)
        shape = (stage, self._chunks.shapes[micro])
        if shape not in self._specs:
            with part(self.clock, "pp_comm"):
                given = self._engine._recv_tensor_meta(sender)
            self._engine._grad_layer_buf = []
            specs = [(tuple(tensor.shape), tensor.dtype) for tensor in _tensors(given)]
            self._specs[shape] = (isinstance(given, tuple), specs)
        is_tuple, specs = self._specs[shape]
        self._inputs[place] = (is_tuple, self._receive(specs, sender))

    def _receive_gradients(self, place: Place) -> None:
        outputs = [tensor for tensor in _tensors(self._live[place][1]) if tensor.is_floating_point()]
        specs = [(tuple(tensor.shape), tensor.dtype) for tensor in outputs]
        self._gradients[place] = self._receive(specs, self._chunks.rank_of(place[0] + 1))

    def _send(self, tensors: Sequence[torch.Tensor], receiver: int) -> None:
        rank = self._engine.grid.stage_to_global(stage_id=receiver)
        with part(self.clock, "pp_comm"):
            for tensor in tensors:
                while len(self._sending) >= SENDS:
                    self._finish_send()
                own = transfers.share_of(tensor.detach().contiguous(), self._mesh)
                self._sending.append((self._start(torch.distributed.isend, dist.isend, own, rank), own))

    def _receive(self, specs: Sequence[transfers.Spec], sender: int) -> Arriving:
        rank = self._engine.grid.stage_to_global(stage_id=sender)
        whole = [torch.empty(shape, dtype=kind, device=self._engine.device) for shape, kind in specs]
        with part(self.clock, "pp_comm"):
            shares = [transfers.share_of(tensor, self._mesh) for tensor in whole]
            works = [self._start(torch.distributed.irecv, dist.irecv, share, rank) for share in shares]
        return Arriving(whole, works, self._mesh)

    def _start(self, batched: Callable[..., Any], single: Callable[..., Any], tensor: torch.Tensor, rank: int) -> Any:
        """Start a transfer; as a batch of one where the backend has batches, which share one communicator."""
        if not self.in_batches:
            return single(tensor, rank)
        (work,) = torch.distributed.batch_isend_irecv([torch.distributed.P2POp(batched, tensor, rank)])
        return work

    def _finish_send(self) -> None:
        work, _ = self._sending.popleft()
        send_wait(work)


def _tensors(output: Any) -> Tensors:
    return output if isinstance(output, tuple) else (output,)
