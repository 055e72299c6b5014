"""What the model of a recipe takes when it is deployed, and a check that a deployed model gives what evaluation gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dp_microadam.errors import DPMicroAdamError, InputError
from dp_microadam.training.export import Deployment, normalization_in_words
from dp_microadam.training.program import for_deployment
from dp_microadam.workbench.data import Preparation
from dp_microadam.workbench.data.dataset import LabelledData, size_of
from dp_microadam.workbench.data.images import ImageFolder
from dp_microadam.workbench.recipes.experiment import Experiment

_CHECKED = 32
_TOLERANCE = 1e-3


def deployment_of(experiment: Experiment) -> Deployment:
    """Raw inputs as the data source reads them, prepared as for evaluation.

    Raises:
        InputError: if the data source does not say how files are read.
    """
    data = experiment.data
    if data.raw is None:
        raise InputError(
            f"data is {data.name!r}, of which there are no files to predict from; use the exported weights in Python"
        )
    prepare = Preparation(data)
    return Deployment(
        data.raw,
        lambda inputs: prepare((inputs, inputs))[0],
        data.classes,
        normalization_in_words(data.mean, data.std, pixels=data.images),
    )


def largest_difference(experiment: Experiment, program: Callable[[Tensor], Tensor], count: int = _CHECKED) -> tuple[int, float]:
    """Compare a program with evaluation on the first test examples: how many, and the largest difference of a probability.

    The program gets what is in a file; evaluation goes its own way from the file to the probabilities.

    Raises:
        DPMicroAdamError: if the two do not agree.
    """
    model = for_deployment(experiment.best_model())
    checked, largest = 0, 0.0
    for raw, prepared in _pairs(experiment.data, count):
        with torch.no_grad():
            difference = (program(raw) - _probabilities(model, prepared)).abs().max()
        checked, largest = checked + 1, max(largest, float(difference))
    if not largest <= _TOLERANCE:
        raise DPMicroAdamError(
            f"the program's probabilities differ by {largest:.2g} from those of evaluation; nothing is exported, so "
            "use the weights alone, and report this"
        )
    return checked, largest


def _probabilities(model: nn.Module, inputs: Tensor) -> Tensor:
    found: Tensor = model(inputs).softmax(dim=1)
    return found


def _pairs(data: LabelledData, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Raw test examples, as a program takes them, and the same as evaluation prepares them."""
    prepare = Preparation(data)
    test: Any = data.test
    assert data.raw is not None
    for index in range(min(count, size_of(test))):
        example = test[0][index] if isinstance(test, tuple) else test[index][0]
        if isinstance(test, ImageFolder):
            ((_, raw),) = data.raw.read(test.path(index))
        else:
            raw = example[None]
        yield raw, prepare((example[None], example[None]))[0]


def loading_code(
    model: str,
    options: Mapping[str, Any],
    num_classes: int,
    shape: Sequence[int],
    weights: str,
    normalization: tuple[Sequence[float], Sequence[float]],
) -> str:
    """Python code that builds the model of a recipe, loads its exported weights and documents its inputs.

    Pretrained weights are not loaded again: the exported ones replace them.

    >>> print(loading_code("mlp", {"hidden": 32}, 10, (1, 28, 28), "model.safetensors", ((0.13,), (0.31,))))
    from safetensors.torch import load_file
    from dp_microadam.workbench import models
    <BLANKLINE>
    model = models.build("mlp", 10, (1, 28, 28), hidden=32)
    model.load_state_dict(load_file("model.safetensors"))
    model.eval()
    # inputs: floats of shape [B, 1, 28, 28], as (value - mean) / std with mean (0.13,) and std (0.31,), pixels from 0 to 1
    """
    keywords = "".join(f", {key}={value!r}" for key, value in options.items() if key != "pretrained")
    mean, std = (tuple(constants) for constants in normalization)
    scaled = f", as (value - mean) / std with mean {mean} and std {std}" if mean and std else ""
    pixels = ", pixels from 0 to 1" if len(shape) == 3 else ""
    needed = "  # adapters need pip install peft" if options.get("lora_rank") else ""
    # The model takes the rows of a table as images of one row.
    built_for = tuple(shape) if len(shape) == 3 else (1, 1, *shape)
    return (
        "from safetensors.torch import load_file\n"
        "from dp_microadam.workbench import models\n\n"
        f'model = models.build("{model}", {num_classes}, {built_for}{keywords}){needed}\n'
        f'model.load_state_dict(load_file("{weights}"))\n'
        "model.eval()\n"
        f"# inputs: floats of shape [B, {', '.join(map(str, shape))}]{scaled}{pixels}"
    )
