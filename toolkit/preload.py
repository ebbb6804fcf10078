"""Imported once by the fork server of warm workers: the modules that take seconds to import."""

import gc

import deepspeed.module_inject.auto_ep_layer
import transformers.models.auto.modeling_auto  # noqa: F401

import toolkit.runtime.proofs.coverage
import toolkit.runtime.run
import toolkit.runtime.supervision.heartbeat_thread
import toolkit.worker  # noqa: F401
from toolkit.launching.environment import enter_processor_environment
from toolkit.runtime.distributed.process_group import compile_on_first_call

enter_processor_environment()
compile_on_first_call()  # before the next one, which would import torch's compiler

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401 - imported by ZeRO when an optimizer is built

gc.freeze()  # keeps the garbage collector of each worker off these objects, so that fork copies no pages for it
