"""The private half of a training loop that belongs to another framework."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, default_collate

from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.privacy.ledger import LEDGER_NAME, PrivacyLedger, RunSettings, read_ledger
from dp_microadam.privacy.mechanism import GaussianMechanism
from dp_microadam.privacy.plan import PrivacyPlan
from dp_microadam.privacy.randomness import Randomness
from dp_microadam.privacy.sampling import LogicalStep, PoissonSampler
from dp_microadam.privacy.statement import write_privacy_files
from dp_microadam.training.evaluation import PerExample, batches
from dp_microadam.training.gradients import set_gradients
from dp_microadam.training.held_out import share_examples
from dp_microadam.training.torch_randomness import forked_torch, seeded_torch, unpredictable_torch, unpredictable_worker
from dp_microadam.training.withheld import withheld
from dp_microadam.validation import require_integer

_RUN_NAME = "run_id.txt"
_ADVICE = "try the model on made-up examples"


class PrivateSteps:
    """Training data behind a wall: a host's loop asks for the gradients of the next step and gets privatized ones.

    The host iterates over this in place of its own loader. What it is given are step numbers, an epoch being as many steps as
    take each example once on average. It calls :meth:`take` for each, which records the step in the ledger, draws
    a Poisson sample, clips, sums, adds noise and leaves the result in the parameters' ``grad``; then it may do with them what
    it likes. No batch, loss or batch size ever reaches the host.

    Arguments:
        train: a map-style Dataset, or tensors with examples along the first dimension.
        run_dir: where the ledger and the privacy statement are written.
        physical_batch_size: examples that go through the model at once; changes memory and speed only.
        public: what else the run declares public, in words; it stands in the statement and cannot change on resume.
        secure: draw noise and samples from a cryptographic generator.
        seed: for tests only: makes all randomness repeatable, and the run not private.

    Formal guarantees: whatever a host computes from the gradients of the steps taken, and from data that is not the training
    data, is (ε, δ)-differentially private in the training data under adding or removing one example, with ε as the ledger
    says; excepted are timing, and whether a training batch could be processed at all. Assumes what
    :class:`~dp_microadam.training.trainer.PrivateTrainer` assumes of loss and Dataset, and that the host has no other way to
    the training data: it must not be given it.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        train: Dataset[Any] | Tensor | tuple[Tensor, ...] | dict[str, Tensor],
        *,
        run_dir: str | Path,
        max_grad_norm: float = 1.0,
        clipping: str = "flat",
        physical_batch_size: int = 256,
        num_workers: int = 0,
        public: Iterable[str] = ("normalization constants of the input",),
        secure: bool = False,
        seed: int | None = None,
    ) -> None:
        self.plan = plan
        self.run_dir = Path(run_dir)
        self._train = train
        self._max_grad_norm = max_grad_norm
        self._clipping = clipping
        self._physical_batch_size = require_integer("physical_batch_size", physical_batch_size, 1)
        self._num_workers = require_integer("num_workers", num_workers, 0)
        self._public = ("clipping norm", *public)
        self._seed = seed
        self._randomness = Randomness.from_entropy(secure=secure) if seed is None else Randomness.seeded(seed, secure=secure)
        self._ledger: PrivacyLedger | None = None
        self._spent = 0
        self._steps = self._sampled_from(0)  # refuses data that is not as the plan says
        self._last: tuple[int, float] = (0, 0.0)

    @property
    def private(self) -> bool:
        """Whether randomness is unpredictable; a fixed seed is not."""
        return self._randomness.private

    @property
    def begun(self) -> bool:
        """Whether steps can be taken now."""
        return self._ledger is not None

    @property
    def begun_before(self) -> bool:
        """Whether the run's folder has a ledger, be it open or not."""
        return (self.run_dir / LEDGER_NAME).is_file()

    @property
    def position(self) -> int:
        """Steps spent so far, which is public; after :meth:`close`, those spent until then."""
        return self._ledger.steps if self._ledger is not None else self._spent

    @property
    def remaining(self) -> int:
        """Steps the plan still allows."""
        return self.plan.steps - self.position

    def epsilon(self) -> float:
        """ε of the steps spent so far, at the plan's δ."""
        if self._last[0] != self.position:
            self._last = self.position, self.plan.epsilon_after(self.position)
        return self._last[1]

    def __len__(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self.plan.dataset_size / self.plan.batch_size)

    def __iter__(self) -> Iterator[int]:
        """The step numbers of one epoch, or what is left of the plan. The host calls :meth:`take` for each."""
        for _ in range(len(self)):
            if not self.remaining:
                return
            yield self.position

    def begin(self, model: nn.Module, per_example_loss: PerExample, stamp: Mapping[str, Any] | None = None) -> None:
        """Check that examples are independent, then open the ledger: a new one, or that of the run ``stamp`` is from.

        Raises:
            InputError: for a model or data that cannot be used, or a run folder that has a ledger already.
            PrivacyError: if the checkpoint with this stamp does not belong to the run in ``run_dir``.
        """
        self.close()
        self._model = model
        self._gradients = ClippedGradients(model, per_example_loss, max_grad_norm=self._max_grad_norm, clipping=self._clipping)
        self._mechanism = GaussianMechanism.from_plan(self.plan, self._gradients.sensitivity, randomness=self._randomness)
        self._prove()
        if stamp is None:
            self._ledger = PrivacyLedger.create(self.run_dir, self.plan, self._settings())
            (self.run_dir / _RUN_NAME).write_text(secrets.token_hex(16) + "\n", encoding="utf-8")
        else:
            self._refuse_foreign(stamp)
            at: Any = {"position": int(stamp["steps_spent"]), "head": stamp.get("ledger_head")}
            self._ledger = PrivacyLedger.resume(self.run_dir, self.plan, self._settings(), **at)
        self._steps = self._sampled_from(self.position)
        self.write_privacy()

    def take(self) -> int:
        """Spend the next step: its privatized mean gradient is in each parameter's ``grad`` when this returns.

        Returns the step's number. A step that fails is spent all the same.

        Raises:
            PrivacyError: if the plan's steps are spent, or something went wrong with training examples, whose text is private.
        """
        if self._ledger is None:
            raise PrivacyError("no ledger is open, so no step can be taken; call begin first")
        index = self._ledger.record_step()
        with withheld(_ADVICE):
            with self._torch_stream(index):
                step = next(self._steps)
            if step.index != index:
                raise PrivacyError(f"the sampler is at step {step.index} and the ledger at {index}; begin a new run")
            with self._torch_stream(index):
                for chunk in step.chunks:
                    self._gradients.accumulate(self._moved(chunk))
        means = self._mechanism.privatize(self._gradients.sums, step=index)
        self._gradients.reset()
        set_gradients(self._model, means)
        return index

    def stamp(self) -> dict[str, Any]:
        """What a checkpoint of the host must carry, so that :meth:`begin` can tell that it belongs to this run."""
        head = None if self._ledger is None else self._ledger.head
        return {"run": self._run_name(), "steps_spent": self.position, "ledger_head": head}

    def holds(self, data: Any) -> bool:
        """Whether ``data`` shares examples with the training data, as far as that can be seen without comparing values."""
        return share_examples(self._train, data)

    def write_privacy(self, folder: str | Path | None = None) -> None:
        """Write ``privacy.json`` and the statement in words, as of the steps spent so far, into ``folder`` or the run's own."""
        write_privacy_files(self.run_dir if folder is None else folder, read_ledger(self.run_dir))

    def close(self) -> None:
        """Write what was spent and let go of ledger and model. Closing twice is allowed."""
        if self._ledger is not None:
            self.write_privacy()
            self._spent = self._ledger.steps
            self._ledger.close()
            self._ledger = None
            self._gradients.close()

    def _sampled_from(self, first_step: int) -> Iterator[LogicalStep]:
        seed_workers = unpredictable_worker if self._seed is None and self._num_workers else None
        sampler = PoissonSampler.from_plan(
            self.plan,
            physical_batch_size=self._physical_batch_size,
            first_step=first_step,
            randomness=self._randomness,
        )
        return sampler.load(self._train, num_workers=self._num_workers, worker_init_fn=seed_workers)

    def _prove(self) -> None:
        """Refuse a model in which examples interact before anything is written. Only the shapes of examples are used."""
        count = min(self._physical_batch_size, self.plan.dataset_size)
        with withheld(_ADVICE), forked_torch(self._model):
            if isinstance(self._train, Dataset):
                sample = default_collate([self._train[index] for index in range(count)])
            else:
                sample = next(batches(self._train, count))
        with forked_torch(self._model):
            self._gradients.check_independence(self._moved(sample))

    def _torch_stream(self, step: int) -> AbstractContextManager[None]:
        return unpredictable_torch(self._model) if self._seed is None else seeded_torch(self._model, self._seed, step)

    def _moved(self, batch: Any) -> Any:
        device = next(self._model.parameters()).device
        return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)

    def _settings(self) -> RunSettings:
        return RunSettings.of_run(
            self._randomness, self._mechanism.sensitivity, "the gradient of each example", self._clipping, self._public
        )

    def _run_name(self) -> str:
        return (self.run_dir / _RUN_NAME).read_text(encoding="utf-8").strip()

    def _refuse_foreign(self, stamp: Mapping[str, Any]) -> None:
        if not (self.run_dir / _RUN_NAME).is_file():
            raise InputError(f"run_dir is {str(self.run_dir)!r}, which has no run to go on with; name the folder it began in")
        if stamp.get("run") != self._run_name():
            raise PrivacyError(
                f"the checkpoint is from another run than the ledger in {self.run_dir}, so what its weights have spent is "
                "unknown; resume from a checkpoint of this run, or begin a new run in a new folder"
            )


def refuse_procedures(optimizer: Any) -> None:
    """Raise an InputError for the optimizer of a method that does more than step."""
    if hasattr(optimizer, "procedure"):
        raise InputError(
            f"optimizer is a {type(optimizer).__name__} of a method that does more than step; train it with "
            "dp_microadam.PrivateTrainer and procedure=method.procedure"
        )
