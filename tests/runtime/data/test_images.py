"""Images: directories of classes, tables, and what does not decode."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from toolkit.errors import BadInput
from toolkit.recipe.file import make_recipe
from toolkit.recipe.sections import Data
from toolkit.runtime.data.images import read_images
from toolkit.runtime.data.input_spec import InputSpec
from toolkit.runtime.data.load import load_data

TAKES = InputSpec(num_labels=2, image_size=8, patches=5)
SECTION = Data(format="image-classification")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Two classes with two images each, in two formats and modes."""
    for name, colour in (("bright", 250), ("dark", 5)):
        (tmp_path / name).mkdir()
        for number, mode in enumerate(("L", "RGB")):
            Image.new(mode, (20, 10), colour if mode == "L" else (colour,) * 3).save(
                tmp_path / name / f"{number}.{'png' if number else 'jpg'}"
            )
    return tmp_path


def test_a_directory_a_class(folders: Path) -> None:
    images = read_images(SECTION, str(folders), TAKES, None)
    batch = images.batch(np.arange(4))
    assert batch.labels.tolist() == [0, 0, 1, 1]
    pixels = batch.inputs()["pixel_values"]
    assert pixels.shape == (4, 3, 8, 8)
    assert (pixels[:2] > 0.9).all()
    assert (pixels[2:] < -0.9).all()


def test_a_table_names_files_beside_it(folders: Path) -> None:
    rows = [{"image": f"{name}/1.png", "label": name} for name in ("dark", "bright")]
    (folders / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    images = read_images(SECTION, str(folders / "table.jsonl"), TAKES, None)
    assert images.labels.tolist() == [1, 0], "names in the order of the alphabet"
    assert images.batch(np.array([0])).inputs()["pixel_values"].max() < 0


def test_what_does_not_decode_is_named(folders: Path) -> None:
    (folders / "dark" / "2.png").write_bytes(b"no image")
    cut = (folders / "bright" / "1.png").read_bytes()
    (folders / "bright" / "3.png").write_bytes(cut[: len(cut) // 2])
    with pytest.raises(BadInput, match="2 of 6 images can't be decoded") as error:
        read_images(SECTION, str(folders), TAKES, None)
    assert "dark/2.png: is not an image of a known format" in str(error.value)
    assert "bright/3.png: " in str(error.value)


def test_more_classes_than_the_model_has(folders: Path) -> None:
    (folders / "grey").mkdir()
    Image.new("L", (9, 9), 100).save(folders / "grey" / "0.png")
    mapping = {
        "model": {"config": {"model_type": "vit"}, "num_labels": 2},
        "data": {"path": str(folders), "format": "image-classification"},
        "train": {"steps": 1},
    }
    with pytest.raises(BadInput, match="label 2 found; the model has 2 classes"):
        load_data(make_recipe(mapping), TAKES)
