"""The account of a run: how many steps it has spent, in its ledger and statement before anything of them is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.ledger.ledger import LEDGER_NAME, PrivacyLedger, RunSettings, read_ledger
from dp_microadam.ledger.statement import round_up, statement_in_words, write_privacy_report
from dp_microadam.plan.plan import PrivacyPlan, UnprotectedPlan
from dp_microadam.training.distributed import Ranks
from dp_microadam.training.run_folder import note_private_metrics, privacy_of

Plan = PrivacyPlan | UnprotectedPlan


class NoAccount:
    """The account of a run without privacy: it counts steps, and its statement says that nothing is guaranteed."""

    stamp = "not private: trained without clipping and noise"
    """``"private"`` or ``"not private"``, with the reason."""

    privacy: PrivacyPlan | None = None
    """The plan whose ε the run reports; None for a run without a guarantee."""

    head: str | None = None
    """The hash of the ledger's last line, which is stored in checkpoints; None without a ledger, and on other ranks."""

    begun = True
    """Whether the run was begun or resumed, so that steps can be taken."""

    def __init__(self, plan: Plan, run_dir: Path, ranks: Ranks, last_step: int) -> None:
        self.plan, self.run_dir, self.ranks = plan, run_dir, ranks
        self.last_step = last_step
        self.position = 0
        """The number of steps spent, those lost in a crash among them."""
        self.updates = 0
        """The number of steps whose gradients were returned; phases and schedules follow it."""
        self.resumed_at: tuple[int, ...] = ()
        """The steps before which the run was resumed, or given its data anew; with bands ε counts each session by itself."""

    @property
    def remaining(self) -> int:
        return max(0, self.last_step - self.position)

    def begin(self) -> None:
        """Start a new run."""

    def resume(self, position: int, updates: int, ledger_head: str | None = None) -> None:
        """Continue a run from a checkpoint with ``updates`` updates, written when ``position`` steps were spent."""
        self.position, self.updates = position, updates

    def peek(self, position: int, updates: int) -> None:
        """As :meth:`resume`, without opening the ledger, so that another process can keep training."""
        self.position, self.updates = position, updates

    def begin_session(self) -> bool:
        """The data may come in another order from here on; returns whether a session ended before."""
        return False

    def record(self, phase: str | None) -> int:
        """Spend the next step before anything of it is drawn; returns its number."""
        self.position += 1
        return self.position - 1

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Whatever leaves the block, an error too, waits until the ledger is on disk; it syncs while gradients are computed."""
        yield

    def epsilon(self) -> float | None:
        """ε of the steps spent so far, at the plan's δ; None without a guarantee."""
        return None

    def describe_spent(self, steps: int) -> str:
        """The privacy spent by ``steps`` steps, in a few words for a progress bar."""
        return "not private"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint carries, with which :meth:`load_state_dict` verifies that it belongs to this run."""
        return {"run": None, "ledger_head": None, "steps_spent": self.position, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of the checkpoint that this state was saved in."""
        self.resume(int(state["steps_spent"]), int(state["updates"]), state["ledger_head"])

    def write_statement(self, folder: Path, group_size: int, *, shows_training: bool) -> None:
        """Write ``privacy.json`` and ``privacy.txt`` for the steps spent so far into ``folder``; rank 0 only."""
        report = {
            **dict.fromkeys(("epsilon", "delta", "accountant")),
            "private": False,
            "steps_planned": self.plan.steps,
            "steps_done": self.position,
            "reason": self.stamp,
        }
        words = f"NOT PRIVATE: {self.stamp}. No guarantee of any kind holds for this model.\n"
        write_privacy_report(folder, report, words)

    def close(self) -> None:
        """Close the ledger. Closing twice is allowed."""


class Account(NoAccount):
    """Records the steps of a private run in the ledger of its folder. Rank 0 has the ledger, and the others ask it.

    Formal guarantees: :meth:`record` counts a step before it returns; the line is on disk when the block of :meth:`synced`
    ends, however it ends.
    """

    begun = False
    plan: PrivacyPlan

    def __init__(
        self,
        plan: PrivacyPlan,
        run_dir: Path,
        ranks: Ranks,
        last_step: int,
        settings: Callable[[], RunSettings],
        *,
        unpredictable: bool,
    ) -> None:
        super().__init__(plan, run_dir, ranks, last_step)
        self.privacy = plan
        self.stamp = "private" if unpredictable else "not private: all randomness comes from a fixed seed"
        self._settings = settings
        self._ledger: PrivacyLedger | None = None

    @property
    def head(self) -> str | None:  # type: ignore[override]
        return None if self._ledger is None else self._ledger.head

    def begin(self) -> None:
        """Create the ledger. Raises InputError if the folder has one."""

        def create() -> None:
            self._ledger = PrivacyLedger.create(self.run_dir, self.plan, self._settings())

        self.ranks.from_main(create)
        self.begun = True

    def resume(self, position: int, updates: int, ledger_head: str | None = None) -> None:
        """Steps recorded after the checkpoint are lost and stay spent. ``ledger_head`` is the one stored in it.

        Raises:
            PrivacyError: if the ledger does not belong to the checkpoint, is shorter, is open in another process, or has
                another plan or other settings.
        """

        def open_ledger() -> tuple[int, tuple[int, ...]]:
            settings = self._settings()
            self._ledger = PrivacyLedger.resume(self.run_dir, self.plan, settings, position=position, head=ledger_head)
            return self._ledger.steps, self._ledger.resumed_at

        self._continue(*self.ranks.from_main(open_ledger), updates)
        self.begun = True

    def peek(self, position: int, updates: int) -> None:
        record = read_ledger(self.run_dir)
        self._continue(record.steps, record.resumed_at, updates)

    def begin_session(self) -> bool:
        ended = self.begun and self.position > max(self.resumed_at, default=0)
        if ended:
            self._continue(self.position, (*self.resumed_at, self.position), self.updates)
        if self._ledger is not None:
            self._ledger.begin_session()
        return ended

    def record(self, phase: str | None) -> int:
        index = self.ranks.from_main(lambda: self._record(phase))
        self.position = index + 1  # counts as taken from here on, even if it fails
        return index

    @contextmanager
    def synced(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._ledger is not None:
                self._ledger.sync()

    def epsilon(self) -> float:
        return self.plan.epsilon_after(self.position, self.resumed_at) if self.position else 0.0

    def describe_spent(self, steps: int) -> str:
        spent = round_up(self.plan.epsilon_after(max(1, steps), self.resumed_at))
        return f"ε {spent}" + ("" if self.stamp == "private" else " (not private)")

    def state_dict(self) -> dict[str, Any]:
        run, head = self.ranks.from_main(lambda: (read_ledger(self.run_dir).run, self.head))
        return {**super().state_dict(), "run": run, "ledger_head": head}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ranks.from_main(lambda: self._refuse_foreign(state))
        super().load_state_dict(state)

    def write_statement(self, folder: Path, group_size: int, *, shows_training: bool) -> None:
        if shows_training:
            note_private_metrics(self.run_dir)
        report = privacy_of(self.run_dir, group_size)
        write_privacy_report(folder, report, statement_in_words(report))

    def close(self) -> None:
        self.begun = False
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _continue(self, position: int, resumed_at: tuple[int, ...], updates: int) -> None:
        self.position, self.updates, self.resumed_at = position, updates, resumed_at
        self.last_step = min(self.last_step, self.plan.last_step(resumed_at))

    def _record(self, phase: str | None) -> int:
        if self._ledger is None:
            raise PrivacyError("no ledger is open, so no step can be taken; call begin or resume first")
        if self._ledger.remaining and not self.remaining:
            raise InputError(f"max_steps is {self.last_step}, and that many steps are taken; make a step with a larger one")
        index = self._ledger.record_step(phase, processes=self.ranks.world_size, wait=False)
        if index != self.position:
            raise PrivacyError(f"the ledger is at step {index}, but the run is at step {self.position}; they must agree")
        return index

    def _refuse_foreign(self, state: Mapping[str, Any]) -> None:
        if not (self.run_dir / LEDGER_NAME).is_file():
            raise InputError(f"run_dir is {str(self.run_dir)!r}, which has no run to go on with; pass the folder it began in")
        if state.get("run") != read_ledger(self.run_dir).run:
            raise PrivacyError(
                f"the checkpoint is from another run than the ledger in {self.run_dir}, so what its weights have spent is "
                "unknown; resume from a checkpoint of this run, or start a new run in a new folder"
            )
