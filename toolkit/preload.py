"""Imported once by the fork server: what every worker would spend seconds on importing."""

import gc

import deepspeed
import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - ZeRO imports it when an optimizer is made
import torch
import torch._inductor.compile_fx  # noqa: F401 - and it imports the compiler
import transformers.models.auto.modeling_auto  # noqa: F401

import toolkit.runtime.proofs.coverage
import toolkit.runtime.run
import toolkit.runtime.supervision.heartbeat_thread
import toolkit.worker  # noqa: F401

gc.freeze()  # the collector of no worker walks over what was imported, nor does fork copy it for that
