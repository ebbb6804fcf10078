"""Traffic between the stages of a pipeline: into buffers that are reused, in batches, without work on the host.

DeepSpeed 0.19.8 sends and receives one tensor after another, waits for each send, copies what it has received into a
new tensor, moves a batch from the host to the device for every micro-batch, and lets every tensor rank send complete
hidden states (its `pipe_partitioned` does not accept several tensors). Here the instructions of one turn that exchange
with other stages are started together. Sends are waited for one turn later. Each tensor rank sends its share, and the
receivers gather the shares among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime.pipe import schedule as instructions

from toolkit.runtime.distributed.mesh import Mesh
from toolkit.runtime.distributed.process_group import send_wait
from toolkit.runtime.metrics.step_clock import RECEIVE, Clock, NoClock, part
from toolkit.runtime.models.micro_batch import MicroBatch
from toolkit.runtime.pipeline.stage import Chunks

BATCHES: tuple[str, ...] = ("nccl", "xccl", "hccl")
"""Backends that start a batch of sends and receives as one."""
EXCHANGES = (instructions.SendActivation, instructions.RecvActivation, instructions.SendGrad, instructions.RecvGrad)
Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""
Sent = tuple[torch.Tensor, int]
"""A tensor and the rank that it comes from or goes to."""


class Transfers:
    """Runs the schedule of a DeepSpeed pipeline engine, with exchanges of its own."""

    def __init__(self, engine: Any, mesh: Mesh, chunks: Chunks) -> None:
        self._engine, self._mesh, self._chunks = engine, mesh, chunks
        self._shape: Any = None
        self.in_batches = torch.distributed.get_backend() in BATCHES
        self.clock: Clock = NoClock()
        self._previous = engine.grid.stage_to_global(stage_id=engine.prev_stage) if mesh.pipe else -1
        last = mesh.pipe == mesh.plan.pp - 1
        self._next = -1 if last else engine.grid.stage_to_global(stage_id=engine.next_stage)
        self._sending: list[tuple[Any, list[torch.Tensor]]] = []
        """What is being sent, and the tensors, which must live until then."""
        self._nothing = torch.zeros(1, dtype=torch.long, device=engine.device)
        self.reset()
        engine._exec_schedule = self.run

    def follow(self, batch: Sequence[MicroBatch]) -> None:
        """Reset the receive buffers if the shape of the batch has changed.

        DeepSpeed 0.19.8 sends shapes only once and keeps its receive buffers; a batch of another length would be cut or
        hang. Its `dynamic_shape` sends shapes for every micro-batch instead, which costs a message each.
        """
        assert len({micro.shape for micro in batch}) == 1, "micro-batches of one step have one shape"
        if self._shape not in (None, batch[0].shape):
            self._engine.reset_activation_shape()
            self.reset()
        self._shape = batch[0].shape

    def reset(self) -> None:
        """The shape of hidden states changes: forget all buffers."""
        self._received: list[Spec] | None = None
        self._is_tuple = False
        self._slots: dict[int, list[torch.Tensor]] = {}
        self._gradients: list[torch.Tensor] = []

    def run(self, schedule: Any) -> None:
        """Every turn of a schedule: exchanges first, then the stage's own work."""
        engine = self._engine
        engine._reserve_pipe_buffers(schedule.num_pipe_buffers())
        engine.fwd_outputs = []
        for turn in schedule:
            self._exchange([one for one in turn if isinstance(one, EXCHANGES)])
            for one in turn:
                if isinstance(one, instructions.LoadMicroBatch):
                    self._load(one.buffer_id)
                elif isinstance(one, instructions.BackwardPass) and self._sends_several(one.buffer_id):
                    self._backward(one.buffer_id)
                elif not isinstance(one, EXCHANGES):
                    engine._INSTRUCTION_MAP[type(one)](engine, **one.kwargs)
        self._wait_for_sends()

    def _load(self, buffer: int) -> None:
        """A stage holds its micro-batches itself: what DeepSpeed calls the input of the first one is not read."""
        if self._mesh.pipe == 0:
            self._engine.pipe_buffers["inputs"][buffer] = self._nothing

    def _sends_several(self, buffer: int) -> bool:
        return self._next >= 0 and isinstance(self._engine.pipe_buffers["outputs"][buffer], tuple)

    def _backward(self, buffer: int) -> None:
        """The backward pass of a stage that sends several tensors."""
        outputs, self._engine.pipe_buffers["outputs"][buffer] = self._engine.pipe_buffers["outputs"][buffer], None
        with part(self.clock, "backward"):
            backward_of_stage(self._engine, _floats(outputs), self._engine.grad_layer)

    def _exchange(self, turn: Sequence[Any]) -> None:
        """Start all exchanges of a turn, and wait for what is received."""
        if not turn:
            return
        self._wait_for_sends()
        sent: list[Sent] = []
        received: list[Sent] = []
        for one in turn:
            if isinstance(one, instructions.SendActivation):
                sent += self._outgoing(self._outputs(one.buffer_id), self._next)
            elif isinstance(one, instructions.SendGrad):
                sent += self._outgoing(self._input_gradients(one.buffer_id), self._previous)
            elif isinstance(one, instructions.RecvActivation):
                received += [(tensor, self._previous) for tensor in self._open_slot(one.buffer_id)]
            else:
                received += [(tensor, self._next) for tensor in self._open_gradients(one.buffer_id)]
        self._transfer(sent, received)
        with part(self.clock, "pp_comm"):
            for whole, _ in received:
                self._gather(whole)

    def _transfer(self, sent: list[Sent], received: list[Sent]) -> None:
        shares = [(self._share(whole), rank) for whole, rank in received]
        if not self.in_batches:
            with part(self.clock, "pp_comm"):
                self._sending = [(dist.isend(tensor, rank), [tensor]) for tensor, rank in sent]
                for tensor, rank in shares:
                    dist.recv(tensor, rank)
            return
        point = torch.distributed.P2POp
        operations = [point(torch.distributed.isend, tensor, rank) for tensor, rank in sent]
        operations += [point(torch.distributed.irecv, tensor, rank) for tensor, rank in shares]
        with part(self.clock, RECEIVE if received else "pp_comm"):
            works = torch.distributed.batch_isend_irecv(operations)
            if received:  # on a device this orders streams; the host continues
                for work in works:
                    send_wait(work)
        if not received:
            self._sending = [(work, [tensor for tensor, _ in sent]) for work in works]

    def _wait_for_sends(self) -> None:
        for work, _ in self._sending:
            send_wait(work)
        self._sending = []

    def _outputs(self, buffer: int) -> list[torch.Tensor]:
        engine, outputs = self._engine, self._engine.pipe_buffers["outputs"][buffer]
        if engine.first_output_send:  # shapes are sent once, as numbers
            engine.first_output_send = False
            engine._send_tensor_meta(outputs, engine.next_stage)
        return list(_tensors(outputs))

    def _input_gradients(self, buffer: int) -> list[torch.Tensor]:
        inputs = self._engine.pipe_buffers["inputs"][buffer]
        self._engine.pipe_buffers["inputs"][buffer] = None
        gradients = [tensor.grad for tensor in _floats(inputs)]
        assert None not in gradients, "`anchored` gives every input a gradient"
        return gradients  # type: ignore[return-value]

    def _open_slot(self, buffer: int) -> list[torch.Tensor]:
        """Tensors of a buffer to receive into; the stage's inputs share their memory."""
        engine = self._engine
        if self._received is None:
            given = engine._recv_tensor_meta(engine.prev_stage)
            self._is_tuple = isinstance(given, tuple)
            self._received = [(tuple(tensor.shape), tensor.dtype) for tensor in _tensors(given)]
            engine._grad_layer_buf = []
        if buffer not in self._slots:
            self._slots[buffer] = [_empty(spec, engine.device) for spec in self._received]
        slot = self._slots[buffer]
        inputs = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in slot)
        engine.pipe_buffers["inputs"][buffer] = inputs if self._is_tuple else inputs[0]
        return slot

    def _open_gradients(self, buffer: int) -> list[torch.Tensor]:
        """Tensors to receive the gradients of a stage's outputs into; the backward pass follows in the same turn."""
        outputs = self._engine.pipe_buffers["outputs"][buffer]
        if not self._gradients:
            self._gradients = [_empty((tuple(t.shape), t.dtype), t.device) for t in _floats(outputs)]
        self._engine.grad_layer = self._gradients if isinstance(outputs, tuple) else self._gradients[0]
        return self._gradients

    def _outgoing(self, tensors: Iterable[torch.Tensor], rank: int) -> list[Sent]:
        return [(self._share(tensor.detach().contiguous()), rank) for tensor in tensors]

    def _share(self, whole: torch.Tensor) -> torch.Tensor:
        return share_of(whole, self._mesh)

    def _gather(self, whole: torch.Tensor) -> None:
        gather_shares(whole, self._mesh)


def backward_of_stage(engine: Any, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """As `PipelineEngine._exec_backward_pass` of DeepSpeed 0.19.8 for all stages but the last, in one pass.

    DeepSpeed goes backward once per output, and so several times through the layers that made all of them (an encoder).
    """
    if engine.using_bf16_optimizer:
        engine.optimizer.clear_lp_grads()
    engine._running_engine_backward = True
    try:
        torch.autograd.backward(outputs, gradients)
    finally:
        engine._running_engine_backward = False
    if engine.using_bf16_optimizer:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)


def share_of(whole: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """This tensor rank's part of a tensor that all tensor ranks have; all of it, if it can't be divided."""
    ranks = _same(mesh)
    if ranks == 1 or whole.numel() % ranks:
        return whole
    return whole.view(-1).chunk(ranks)[mesh.tensor]


def gather_shares(whole: torch.Tensor, mesh: Mesh) -> None:
    """Complete what this tensor rank has received a share of."""
    ranks = _same(mesh)
    if ranks > 1 and whole.numel() % ranks == 0:
        dist.all_gather_into_tensor(whole.view(-1), share_of(whole, mesh).clone(), group=mesh.inner_group)


def _same(mesh: Mesh) -> int:
    """Tensor ranks that send the same values; with token shares each rank has its own."""
    return 1 if mesh.plan.sequence_sharded else mesh.plan.tp


def _tensors(given: Any) -> Sequence[torch.Tensor]:
    return given if isinstance(given, tuple | list) else (given,)


def _floats(given: Any) -> list[torch.Tensor]:
    return [tensor for tensor in _tensors(given) if tensor.is_floating_point()]


def _empty(spec: Spec, device: torch.device) -> torch.Tensor:
    return torch.empty(spec[0], dtype=spec[1], device=device)
