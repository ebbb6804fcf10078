"""Imported once by the fork server: what every worker would spend seconds on importing."""

import deepspeed  # noqa: F401
import torch  # noqa: F401
import transformers.models.auto.modeling_auto  # noqa: F401

import toolkit.runtime.run
import toolkit.worker  # noqa: F401
