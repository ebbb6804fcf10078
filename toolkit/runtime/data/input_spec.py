"""Input specification of a model: vocabulary size, number of labels, image size. Read from a skeleton."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.modeling_layers import GenericForSequenceClassification

from toolkit.errors import BadInput
from toolkit.recipe.model_section import Model
from toolkit.runtime.models.build import skeleton


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """What a model accepts; None where the model has no such input."""

    vocab: int | None = None
    """Number of rows of the token table."""
    num_labels: int | None = None
    """Number of classes of the head."""
    start: int | None = None
    """Token id that the decoder starts with."""
    image_size: int | None = None
    """Width and height of an image in pixels."""
    pad: int | None = None
    """Padding id. Decoders use it to find a text's last token, from which they read the class."""
    reads_last: bool = False
    """Whether the class is read from the last token, as in decoders."""
    patches: int | None = None
    """Number of patches of an image, plus the class token."""

    def need_vocab(self) -> int:
        """Vocabulary size; `BadInput` if there is none."""
        if self.vocab is None:
            raise BadInput("model", "takes no tokens; use data.format image-classification")
        return self.vocab

    def need_labels(self) -> int:
        """Number of classes; `BadInput` if there is none."""
        if self.num_labels is None:
            raise BadInput("model.num_labels", "required: the number of classes")
        return self.num_labels

    def need_start(self) -> int:
        """First token of the decoder; `BadInput` if there is none."""
        if self.start is None:
            raise BadInput("model.config", "has no decoder_start_token_id, which seq2seq training begins with; give it")
        return self.start


def input_spec_of(section: Model) -> InputSpec:
    """Input specification of the recipe's model."""
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
