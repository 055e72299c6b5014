"""Private steps for training loops of other frameworks, which iterate over step numbers in place of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dp_microadam.errors import PrivacyError
from dp_microadam.ledger.ledger import refuse_second_run
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.training.distributed import Ranks
from dp_microadam.training.evaluation import PerExample
from dp_microadam.training.method import Method
from dp_microadam.training.private_step import PrivateStep
from dp_microadam.training.progress import CHECKING, said_if_slow
from dp_microadam.training.same_examples import reads_examples, refuse_shared_users
from dp_microadam.training.settings import PerformanceSettings, PrivacySettings, settings_of
from dp_microadam.validation import public

STEP_OPTIONS = ("privacy", "performance", "prepare", "augment", "max_steps", "ranks", "users", "validation_users")
"""Arguments of :class:`PrivateSteps` that adapters pass on as they are."""


@public
class PrivateSteps:
    """Takes the place of a data loader in another framework's loop: plan, training data and options of the private steps.

    Iterating gives step numbers, an epoch being as many as take each example, or user, once on average. The loop calls
    :meth:`take` for each, which leaves the privatized mean gradient in the parameters' ``grad``. The
    :class:`~dp_microadam.PrivateStep` behind it is made by :meth:`begin`, when the model is known.

    Arguments:
        train: a map-style Dataset, or tensors with examples along the first dimension.
        users: the id of each training example's user, if the plan's unit is the user.
        validation_users: ids of the users of validation and test data, if known; a user who is in ``users`` too is refused.
        run_dir: where the ledger and the privacy statement are written.
        privacy, performance, prepare, augment, max_steps, ranks: those of :class:`~dp_microadam.PrivateStep`.

    Formal guarantees: those of :class:`~dp_microadam.PrivateStep`. The loop sees no batch, loss or batch size. It must not be
    given the training data in another way.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        train: Dataset[Any] | Tensor | tuple[Tensor, ...] | dict[str, Tensor],
        *,
        run_dir: str | Path,
        users: Any = None,
        validation_users: Any = None,
        privacy: PrivacySettings | None = None,
        performance: PerformanceSettings | None = None,
        prepare: Callable[[Any], Any] | None = None,
        augment: Callable[[Any], Any] | None = None,
        max_steps: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        refuse_shared_users(users, validation_users)
        self.plan = plan
        self.run_dir = Path(run_dir)
        self.step: PrivateStep | None = None
        """The private step, from :meth:`begin` on."""
        self._train, self._users = train, users
        self._settings, self._performance = settings_of(privacy, performance)
        self._options = {"prepare": prepare, "augment": augment, "max_steps": max_steps, "ranks": ranks}
        self._epsilon: tuple[int, float] = 0, 0.0
        self._hooks = ExitStack()
        self.looking = False
        """Whether examples, made-up ones of the check or those of a step, are being looked at now."""

    @property
    def begun(self) -> bool:
        """Whether steps can be taken now."""
        return self.step is not None and self.step.account.begun

    @property
    def position(self) -> int:
        """Steps spent so far, which is public; after :meth:`close`, those spent until then."""
        return 0 if self.step is None else self.step.position

    @property
    def remaining(self) -> int:
        """Steps that are left."""
        return self.plan.steps if self.step is None else self.step.account.remaining

    def epsilon(self) -> float:
        """ε of the steps spent so far, at the plan's δ."""
        if self._epsilon[0] != self.position:
            self._epsilon = self.position, self._step_begun().epsilon() or 0.0
        return self._epsilon[1]

    def __len__(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self.plan.dataset_size / self.plan.batch_size)

    def __iter__(self) -> Iterator[int]:
        """The step numbers of one epoch, or of what is left of the plan; call :meth:`take` for each."""
        for _ in range(len(self)):
            if not self.remaining:
                return
            yield self.position

    def begin(
        self,
        model: nn.Module,
        loss: PerExample,
        method: Method,
        state: Mapping[str, Any] | None = None,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Check the model and open the ledger: a new one, or that of the run whose checkpoint carries ``state``.

        Until :meth:`close`, every step of the method's optimizer is taken as the method says. ``state`` is what :meth:`state`
        gave. ``autocast`` is the precision the framework trains in, where that is mixed.

        Raises:
            InputError: for a model or data that cannot be used, or a run folder that has a ledger already.
            PrivacyError: if the checkpoint with this state does not belong to the run in ``run_dir``.
        """
        self.close()
        performance = self._performance if autocast is None else replace(self._performance, autocast=autocast)
        step = PrivateStep(
            model,
            method,
            self.plan,
            loss,
            run_dir=self.run_dir,
            privacy=self._settings,
            performance=performance,
            **self._options,  # type: ignore[arg-type]
        )
        self.looking = True
        try:
            if state is None:  # the ledger refuses it, too, but after the check
                step.ranks.from_main(lambda: refuse_second_run(self.run_dir))
            with said_if_slow(CHECKING, shown=step.ranks.main):
                step.attach(self._train, self._users)
            if state is None:
                step.account.begin()
            else:
                method.load_state_dict(state["method"])
                step.load_state_dict(state)
        except BaseException:
            step.close()
            raise
        finally:
            self.looking = False
        self._hooks.enter_context(method.hooked(model))
        self.step = step
        self.write_privacy()

    def take(self) -> int:
        """Spend the next step: its privatized mean gradient is in each parameter's ``grad`` when this returns.

        Returns the step's number. A step that fails is spent all the same.

        Raises:
            PrivacyError: if the plan's steps are spent, or something went wrong with training examples, whose text is private.
        """
        step = self._step_begun()
        self.looking = True
        try:
            means = step.take()
        finally:
            self.looking = False
        step.method.set_gradients(step.model, means)
        return step.position - 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint must carry, so that :meth:`begin` can tell that it belongs to this run, and what the method keeps
        beside its optimizer's state; called in all processes."""
        step = self._step_begun()
        return {**step.state_dict(), "method": step.method.state_dict(optimizer=False)}

    def holds(self, data: Any) -> bool:
        """Whether ``data``, or a loader of it, has training examples, as far as that can be seen without comparing values."""
        return reads_examples(data, self._train)

    def write_privacy(self, folder: str | Path | None = None) -> None:
        """Write ``privacy.json`` and the statement in words, as of the steps spent so far, into ``folder`` or the run's own."""
        self._step_begun().write_privacy(folder)

    def close(self) -> None:
        """Write what was spent; close the ledger and release the model. Closing twice is allowed."""
        self._hooks.close()
        if self.step is not None and self.step.account.begun:
            self.step.close()

    def _step_begun(self) -> PrivateStep:
        if self.step is None:
            raise PrivacyError("no ledger is open, so no step can be taken; call begin first")
        return self.step
