"""A model cut before its trained head: what the head gets from a batch, and the model's output from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from dp_microadam.clipping.no_side_effects import no_side_effects, python_random_state, torch_random_state
from dp_microadam.errors import InputError
from dp_microadam.training.evaluation import PerExample

_CLOSE = 1e-3
"""Largest difference of a loss of features from that of examples, on synthetic ones."""


class ModelSplit:
    """Runs the part of ``model`` before its head, and the head alone, as ``per_example_loss`` would run both.

    ``head`` is the name of the head's module; by default the smallest that holds all trainable parameters.
    """

    def __init__(self, model: nn.Module, per_example_loss: PerExample, head: str | None) -> None:
        self.model = model
        self.head = _head_of(model, head)
        self._loss = per_example_loss
        self._form: _Form | None = None

    @property
    def structure(self) -> TreeSpec:
        """Of batches."""
        return self._known_form().batch

    def is_frozen(self, name: str) -> bool:
        """Whether a module or tensor of the model with this name is no part of the head."""
        return not f"{name}.".startswith(f"{self.head}.")

    def learn(self, examples: Any) -> None:
        """See on synthetic ``examples`` how the loss calls the model, and what the model makes of the output of its head.

        Raises:
            InputError: if random numbers are drawn before the head, or the loss cannot be computed from features.
        """
        with no_side_effects(self.model), torch.no_grad():
            self._refuse_random(examples)
            self._form = self._form_on(examples)
            self._refuse_other_losses(examples)

    def with_features(self, batch: Any) -> Any:
        """The batch with features in place of the model's first input, and empty tensors in place of the others."""
        form = self._known_form()
        leaves = tree_leaves(batch)
        features = self._head_input(batch)
        for place in form.inputs[1:]:
            leaves[place] = features.new_empty(len(features), 0)
        leaves[form.inputs[0]] = features
        return tree_unflatten(leaves, form.batch)

    def on(self, measure: PerExample) -> PerExample:
        """``measure``, a function like ``per_example_loss``, for batches of features."""

        def measured(model: nn.Module, batch: Any) -> Tensor:
            return measure(_HeadAlone(model, self.head, self._known_form()), batch)  # type: ignore[arg-type]

        return measured

    def _head_input(self, batch: Any) -> Tensor:
        """What the head gets; nothing after that is computed."""
        found: list[Any] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            found.extend((*args, *kwargs.values()))
            raise _HeadReached

        handle = self.model.get_submodule(self.head).register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad():
                self._loss(self.model, batch)
        except _HeadReached:
            pass
        finally:
            handle.remove()
        rows = len(tree_leaves(batch)[0])
        if len(found) != 1 or not isinstance(found[0], Tensor) or not found[0].dim() or len(found[0]) != rows:
            raise InputError(
                f"the head {self.head!r} does not get one tensor with one row for each example, so that features cannot be "
                "computed once; let it take one such tensor"
            )
        return found[0].detach()

    def _refuse_random(self, examples: Any) -> None:
        before = torch_random_state(self.model), python_random_state()
        self._head_input(examples)
        if (torch_random_state(self.model), python_random_state()) == before:
            return
        active = [name for name, module in self.model.named_modules() if self.is_frozen(name) and _drops(module)]
        what = f"module {active[0]!r} is dropout" if active else "the model draws random numbers"
        raise InputError(
            f"{what} before the head {self.head!r}, so that features differ from step to step and cannot be computed once; put "
            "the frozen part into eval mode, or do not keep features"
        )

    def _form_on(self, examples: Any) -> _Form:
        outputs: list[Any] = []
        head = self.model.get_submodule(self.head)
        handle = head.register_forward_hook(lambda module, args, output: outputs.append(output))
        spy = _Spy(self.model)
        try:
            self._loss(spy, examples)  # type: ignore[arg-type]
        finally:
            handle.remove()
        if len(outputs) != 1 or len(spy.calls) != 1:
            raise InputError(
                f"per_example_loss calls the model {len(spy.calls)} times and its head {self.head!r} {len(outputs)} times; to "
                "compute features once, each must be called once"
            )
        given, result = spy.calls[0]
        leaves, structure = tree_flatten(examples)
        inputs = [place for place, leaf in enumerate(leaves) if any(leaf is each for each in given)]
        if not inputs:
            raise InputError(
                "per_example_loss gives the model other tensors than those of the batch; let prepare compute them, so that "
                "features can take their place"
            )
        argument = next(place for place, each in enumerate(given) if each is leaves[inputs[0]])
        returned, output_structure = tree_flatten(result)
        places = [place for place, leaf in enumerate(returned) if leaf is outputs[0]]
        if len(places) != 1 or sum(isinstance(leaf, Tensor) for leaf in returned) != 1:
            raise InputError(
                f"the model returns something else than its head {self.head!r} does; make what follows the head a part of it, "
                "so that features can be computed once"
            )
        return _Form(structure, inputs, argument, returned, output_structure, places[0])

    def _refuse_other_losses(self, examples: Any) -> None:
        """What the loss does with a batch besides calling the model must not need what features replace."""
        whole = self._loss(self.model, examples)
        try:
            found = self.on(self._loss)(self.model, self.with_features(examples))
        except Exception:
            found = None
        if any(map(_drops, self.model.get_submodule(self.head).modules())) and found is not None:
            return  # two passes differ by their random numbers
        if found is None or found.shape != whole.shape or not torch.allclose(whole, found, rtol=_CLOSE, atol=_CLOSE):
            raise InputError(
                "per_example_loss does not give for features what it gives for examples; it must use inputs only to call the "
                "model, and the model only by calling it"
            )

    def _known_form(self) -> _Form:
        if self._form is None:
            raise InputError("no features are computed yet; call of(train) first")
        return self._form


@dataclass(frozen=True)
class _Form:
    """How a loss calls the model, and how the model wraps the output of its head.

    Attributes:
        batch: structure of batches.
        inputs: which leaves of a batch the model gets.
        argument: which leaf of the model's arguments is the first of these.
        returned: leaves of the model's output, the ``output``-th of which is the head's.
        output_structure: of the model's output.
    """

    batch: TreeSpec
    inputs: list[int]
    argument: int
    returned: list[Any]
    output_structure: TreeSpec
    output: int


class _Stand:
    """Stands in for a model in a loss; has its attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Spy(_Stand):
    """Remembers with what it was called, and what the model returned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: list[tuple[list[Any], Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._model(*args, **kwargs)
        self.calls.append((tree_leaves((args, kwargs)), result))
        return result


class _HeadAlone(_Stand):
    """Called like the whole model, with features as its first input, returns what the model would."""

    def __init__(self, model: nn.Module, head: str, form: _Form) -> None:
        super().__init__(model)
        self._head = head
        self._form = form

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        features = tree_leaves((args, kwargs))[self._form.argument]
        leaves = list(self._form.returned)
        leaves[self._form.output] = self._model.get_submodule(self._head)(features)
        return tree_unflatten(leaves, self._form.output_structure)


class _HeadReached(BaseException):
    """Ends a forward pass before the head. Not an Exception, so that no code of a model or loss catches it."""


def _head_of(model: nn.Module, head: str | None) -> str:
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise InputError("model has no trainable parameter; its head must train")
    if head is None:
        found = _common([name.split(".")[:-1] for name in trainable])
        if not found:
            raise InputError(
                f"parameters {trainable[0]!r} and {trainable[-1]!r} train, which have no module in common but the model "
                "itself; features are computed once if all that trains is one module, so freeze the rest"
            )
        return found
    if not head or head not in dict(model.named_modules()):
        raise InputError(f"head is {head!r}; it must be the name of a module of the model, such as 'classifier'")
    outside = [name for name in trainable if not name.startswith(f"{head}.")]
    if outside:
        raise InputError(
            f"parameter {outside[0]!r} trains, but is not part of the head {head!r}; freeze it with requires_grad_(False)"
        )
    return head


def _common(paths: Sequence[Sequence[str]]) -> str:
    """The name of the smallest module that all these lie in."""
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False)))


def _drops(module: nn.Module) -> bool:
    return module.training and "Drop" in type(module).__name__ and bool(getattr(module, "p", 1))
