"""Imported once by the fork server of warm workers: the modules that take seconds to import."""

import gc

import deepspeed
import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - imported by ZeRO when an optimizer is built
import torch
import torch._inductor.compile_fx  # noqa: F401 - imported in turn by the Muon optimizer
import transformers.models.auto.modeling_auto  # noqa: F401

import toolkit.runtime.proofs.coverage
import toolkit.runtime.run
import toolkit.runtime.supervision.heartbeat_thread
import toolkit.worker  # noqa: F401

gc.freeze()  # keeps the garbage collector of each worker off these objects, so that fork copies no pages for it
