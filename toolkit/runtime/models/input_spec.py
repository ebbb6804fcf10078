"""What a model takes: vocabulary, classes, image size. Read from a skeleton, without weights."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.modeling_layers import GenericForSequenceClassification

from toolkit.errors import BadInput
from toolkit.recipe.sections import Model
from toolkit.runtime.models.build import skeleton


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """What a model takes; None: it has no such thing."""

    vocab: int | None = None
    """Rows of its token table."""
    num_labels: int | None = None
    """Classes of its head."""
    start: int | None = None
    """Token that its decoder begins with."""
    image_size: int | None = None
    """Pixels of a side."""
    pad: int | None = None
    """Its padding id: decoders find a text's last token, which they read the class from, by it."""
    reads_last: bool = False
    """Whether it reads the class from the last token, as decoders do."""
    patches: int | None = None
    """Patches of an image, as the model sees them."""

    def need_vocab(self) -> int:
        """The vocabulary; `BadInput` without one."""
        if self.vocab is None:
            raise BadInput("model", "takes no tokens; use data.format image-classification")
        return self.vocab

    def need_labels(self) -> int:
        """The classes; `BadInput` without any."""
        if self.num_labels is None:
            raise BadInput("model.num_labels", "required: the number of classes")
        return self.num_labels

    def need_start(self) -> int:
        """The decoder's first token; `BadInput` without one."""
        if self.start is None:
            raise BadInput("model.config", "has no decoder_start_token_id, which seq2seq training begins with; give it")
        return self.start


def input_spec_of(section: Model) -> InputSpec:
    """Of the recipe's model."""
    model = skeleton(section)
    config = model.config
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    classes = "classification" in (section.task or "")
    return InputSpec(
        vocab=int(rows) if rows else None,
        num_labels=int(config.num_labels) if classes else None,
        start=getattr(config, "decoder_start_token_id", None),
        image_size=size,
        pad=getattr(config, "pad_token_id", None),
        reads_last=isinstance(model, GenericForSequenceClassification),
        patches=(size // patch) ** 2 + 1 if size and isinstance(patch, int) else None,
    )
