"""Imported once by the fork server of warm workers: the modules that take seconds to import."""

import json

import deepspeed.module_inject.auto_ep_layer
import numpy.ma  # noqa: F401 - imported by numpy when a set of numbers is made
import transformers.models.auto.modeling_auto  # noqa: F401
from deepspeed.runtime.config_utils import ScientificNotationEncoder

import toolkit.runtime.machine.network
import toolkit.runtime.proofs.coverage
import toolkit.runtime.run
import toolkit.runtime.supervision.heartbeat_thread
import toolkit.worker  # noqa: F401
from toolkit.checkpoints.format import versions
from toolkit.launching.environment import enter_processor_environment
from toolkit.recipe.file import load_recipe
from toolkit.resources import RECIPES
from toolkit.runtime.distributed.process_group import compile_on_first_call

enter_processor_environment()
compile_on_first_call()  # before the next one, which would import torch's compiler

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401 - imported by ZeRO when an optimizer is built

load_recipe(RECIPES / "demo.yaml")  # evaluates the types of all keys, which every worker would do again
versions()  # reads the metadata of packages
# DeepSpeed 0.19.8 prints the config of every engine, and asks of every value whether it is a mapping or a sequence. On
# first use Python asks thousands of classes about each type, for 0.1 s; afterwards it knows.
json.dumps([{"": [0, 0.0, True, None, ""]}], cls=ScientificNotationEncoder)
