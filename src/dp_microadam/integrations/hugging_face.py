"""Hugging Face ``Trainer`` with a privacy plan: its callbacks, evaluation, schedules and checkpoints around private steps."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dp_microadam.errors import InputError, PrivacyError, UnreadableExample
from dp_microadam.integrations.isolated_loss import IsolatedLoss
from dp_microadam.integrations.private_steps import STEP_OPTIONS, PrivateSteps
from dp_microadam.ledger.ledger import RUN_INSIDE
from dp_microadam.methods.defaults import default
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.training.checkpoint import load_plain
from dp_microadam.training.evaluation import PerExample
from dp_microadam.training.method import Method
from dp_microadam.training.progress import tell
from dp_microadam.training.same_examples import reads_examples
from dp_microadam.training.settings import PerformanceSettings
from dp_microadam.validation import explicit, public

try:
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import SchedulerType, TrainOutput, get_last_checkpoint
except ImportError as error:
    raise ImportError(
        "PrivateHFTrainer needs transformers and accelerate; run pip install 'dp-microadam[hugging-face]'"
    ) from error

STATE_NAME = "dp_microadam.pt"
"""What checkpoints have beside the host's own files: of which run and step they are, and the state of the method."""

# What a private run honours, or what does not touch training. Everything else must be left at its default: a setting that is
# silently not used would mislead, and one that a later release adds may look at training data.
_HONOURED_SETTINGS = """
output_dir per_device_train_batch_size per_device_eval_batch_size max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon
logging_strategy logging_steps logging_first_step logging_dir log_level log_level_replica log_on_each_node disable_tqdm
report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
eval_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
prediction_loss_only include_for_metrics batch_eval_metrics
save_strategy save_steps save_total_limit save_only_model save_on_each_node save_safetensors
load_best_model_at_end metric_for_best_model greater_is_better restore_callback_states_from_checkpoint
push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
seed use_cpu dataloader_num_workers dataloader_pin_memory remove_unused_columns label_names
do_train do_eval do_predict resume_from_checkpoint use_cache
bf16 gradient_checkpointing gradient_checkpointing_kwargs ddp_backend ddp_timeout local_rank
"""
_HONOURED = frozenset(_HONOURED_SETTINGS.split())

_WHY_NOT = {
    "fp16": "it scales losses and gradients against underflow, which is not done for gradients of single examples; use bf16",
    "gradient_accumulation_steps": "a batch that does not fit in memory is cut into chunks of per_device_train_batch_size "
    "here, and noise is added once; leave it at 1",
    "max_grad_norm": "it clips the mean gradient, and the noise with it; give privacy=PrivacySettings(max_grad_norm=…), which "
    "bounds each example's gradient",
    "num_train_epochs": "the plan says how many steps there are; solve it for other steps, or stop early by max_steps",
    "train_sampling_strategy": "batches are Poisson samples, which is what is accounted for; leave it at 'random'",
    "group_by_length": "batches are Poisson samples, which is what is accounted for; leave it False",
    "dataloader_drop_last": "a Poisson sample of any size is a batch, an empty one too; leave it False",
    "data_seed": "samples are drawn from the operating system's entropy and must not be repeatable; leave it None",
    "label_smoothing_factor": "the loss is per_example_loss here; smooth it there",
    "auto_find_batch_size": "a batch that is tried again is spent twice; choose per_device_train_batch_size yourself",
    "include_num_input_tokens_seen": "how many tokens a step saw is private; leave it at 'no'",
    "skip_memory_metrics": "memory in use tells how large batches were, which is private; leave it True",
    "torch_compile": "layers are observed one by one, so that nothing could be fused; leave it False",
    "optim": "the method is that of methods.default; give another by method, or an optimizer by optimizers=(optimizer, None)",
}

_NOT_OF_METHODS = {
    "learning_rate": "a method has its own rate or distance; leave it out, or give optimizers=(MicroAdam(model.parameters(), "
    "lr=…), None)",
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
        "a method has options of its own; leave it out, or give optimizers=(optimizer, None)",
    ),
}

_PHYSICAL_BATCH_SIZE = 32
"""In place of the host's default of 8, which would cut the large batches of private runs into many slow chunks."""

_AUTOCAST = {"no": None, "bf16": torch.bfloat16}
"""Mixed precisions of accelerate that private steps have."""

_HIDDEN = ("callback_handler", "accelerator")
"""Attributes of the trainer that lead to loggers."""

_NOT_MEASURED = ("loss", "train_loss", "total_flos", "train_samples_per_second")
"""What the host logs of training: 0 here, since the loss of training examples is private and is not computed."""


@public
class PrivateHFTrainer(Trainer):
    """``transformers.Trainer`` whose training steps are private: (ε, δ) as ``plan`` says.

    ``max_steps``, unless given, is the plan's number of steps; an epoch is as many as take each example once on average.
    ``per_device_train_batch_size`` only says how many examples go through the model at once. Its default of 8, which is slow,
    counts as not set: 32 go through then. Without a method, and without an optimizer in ``optimizers``, method and plan are
    those of ``methods.default``, at a constant rate unless ``lr_scheduler_type`` is given; the host's schedule multiplies the
    rate of others. The training loss is private: it is neither computed nor logged, and is None in what :meth:`train` returns.
    ``grad_norm`` is that of the privatized gradient. Under ``torchrun`` all processes train one model, and rank 0 keeps the
    ledger. ``args.bf16`` and ``args.gradient_checkpointing`` work as ever; norms, sums and noise are float32.

    Arguments:
        plan: a :class:`~dp_microadam.PrivacyPlan` for as many examples as ``train_dataset`` has, or for their ``users``.
        method: a method of ``dp_microadam.methods`` in place of an optimizer in ``optimizers``, whose scheduler may be given.
        per_example_loss: ``f(model, batch)`` returns one loss per example; by default the cross-entropy of classification
            models, and :func:`causal_language_loss` serves for language models.
        run_dir: of the ledger and the privacy statement; ``privacy`` in ``args.output_dir`` by default.
        options: those of :class:`PrivateSteps`, such as ``users`` or ``privacy``, and those of ``transformers.Trainer``.
            ``prepare`` and ``augment`` are applied to training batches only. ``performance`` goes before
            ``per_device_train_batch_size``.

    Settings that would break the guarantee, or would not be used, are refused.

    Formal guarantees: those of :class:`~dp_microadam.PrivateStep`; the host's loop sees step numbers in place of batches.
    Examples are collated one at a time, so that padding or masking cannot depend on others. Checkpoints hold no random states,
    and only those of the ledger's own run are resumed. Callbacks must not be given training data.
    """

    @explicit(*STEP_OPTIONS, *list(inspect.signature(Trainer).parameters)[2:])
    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        plan: PrivacyPlan,
        method: Method | None = None,
        per_example_loss: PerExample | None = None,
        run_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        step_options = {name: options.pop(name) for name in STEP_OPTIONS if name in options}
        chosen = method or options.get("optimizers", (None, None))[0] or options.get("optimizer_cls_and_kwargs")
        unset = type(args)(output_dir=args.output_dir, report_to="none", use_cpu=args.use_cpu)
        _refuse_settings(args, unset, plan, has_method=chosen is None or method is not None)
        _refuse_options(step_options, options, method)
        physical = args.per_device_train_batch_size
        physical = _PHYSICAL_BATCH_SIZE if physical == unset.per_device_train_batch_size else physical
        usual = PerformanceSettings(physical_batch_size=physical, num_workers=args.dataloader_num_workers)
        step_options["performance"] = step_options.get("performance") or usual
        if chosen is None:
            method, plan = default(model, plan)
        args = copy.copy(args)
        if chosen is None and args.lr_scheduler_type == unset.lr_scheduler_type:
            args.lr_scheduler_type = SchedulerType.CONSTANT
        args.max_grad_norm = 0.0  # noise is not clipped
        args.ignore_data_skip = True  # a resumed run draws afresh
        # Meant for the training loss, it multiplies a classifier's loss in evaluation by the number of processes.
        args.average_tokens_across_devices = False
        if args.max_steps < 0:
            args.max_steps = min(plan.steps, step_options.get("max_steps") or plan.steps)
        self._method = method
        if method is not None:
            options["optimizers"] = (method.optimizer, options.get("optimizers", (None, None))[1])
        super().__init__(model, args, **options)
        self._refuse_environment()
        if self.train_dataset is None:
            raise InputError("train_dataset is not given; a private run needs it from the beginning")
        self._per_example_loss = per_example_loss or classification_loss
        self._resumed_from: dict[str, Any] | None = None
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        self.private_steps = PrivateSteps(
            plan,
            _CollatedAlone(self.train_dataset, collate),
            run_dir=Path(str(args.output_dir), RUN_INSIDE) if run_dir is None else run_dir,
            **step_options,
        )

    def create_accelerator_and_postprocess(self) -> None:
        """As the host does, but models are not wrapped for several processes: private steps sum up gradients themselves."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:
        """Train until the plan, or ``max_steps``, is done. ε stands in the metrics it returns."""
        self._resumed_from = None
        if trial is not None:
            raise InputError("trial is given; a search looks at the data again with every trial, account for each as a run")
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise InputError(f"output_dir is {self.args.output_dir!r}, which has no checkpoint; train without resuming")
        resume_from_checkpoint = resume_from_checkpoint or None
        if resume_from_checkpoint is not None:
            state = Path(str(resume_from_checkpoint), STATE_NAME)
            if not state.is_file():
                raise PrivacyError(
                    f"{state.parent} has no {STATE_NAME}, so no private run wrote it and what it has spent is unknown; resume "
                    "from a checkpoint of this run, or begin a new run"
                )
            self._resumed_from = load_plain(state, state)
        try:
            result = super().train(resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval)
            metrics = {
                **_public(result.metrics),
                "epsilon": self.private_steps.epsilon(),
                "delta": self.private_steps.plan.delta,
            }
            return TrainOutput(result.global_step, cast(float, None), metrics)
        finally:
            self.private_steps.close()
            self.is_in_train = False

    def get_train_dataloader(self) -> Any:
        """Step numbers: batches are drawn inside a step, unseen by the host. Within :meth:`train`, it begins the run."""
        if self.is_in_train and not self.private_steps.begun:
            model: nn.Module = self.model  # type: ignore[assignment]
            model.train()
            optimizer = self.create_optimizer()
            if isinstance(optimizer, AcceleratedOptimizer):  # of a run before
                optimizer = optimizer.optimizer
            self.private_steps.begin(
                model,
                IsolatedLoss(self._per_example_loss, partial(self._host, optimizer), _HIDDEN),
                Method(optimizer) if self._method is None else self._method,
                self._resumed_from,
                autocast=_AUTOCAST[self.accelerator.mixed_precision],
            )
            self._tell_what_was_lost()
        return _StepNumbers(self.private_steps)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Leave the privatized gradient of the next step in the parameters. What it returns, the host's loss, is 0."""
        if model is not self.model:
            raise PrivacyError(f"the model was wrapped in a {type(model).__name__}; train it on one device, as it is")
        model.train()
        self.private_steps.take()
        if not self.private_steps.remaining:
            self.control.should_training_stop = True
            last = self.state.global_step + 1
            if last < self.state.max_steps:  # steps were lost: the host expects its last step later
                self.control.should_evaluate |= self.args.eval_strategy == "steps" and last >= self.args.eval_delay
                self.control.should_save |= self.args.save_strategy == "steps"
        return torch.zeros((), device=self.args.device)

    def _host(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What of the host must not change while a loss looks at examples."""
        return {"trainer": self, "trainer.state": self.state, "trainer.control": self.control, "optimizer": optimizer}

    def _tell_what_was_lost(self) -> None:
        step = self.private_steps.step
        assert step is not None, "it has begun"
        if self._resumed_from is None or not step.ranks.main:
            return
        lost = step.position - int(self._resumed_from["steps_spent"])
        account = step.account
        end, wanted = account.updates + account.remaining, self.args.max_steps
        said = f"; {lost} steps after it were lost and stay spent" if lost else ""
        said += f", so that training ends after {end} updates instead of {wanted}" if end < wanted else ""
        if said:
            tell(f"resumed at step {account.updates}{said}")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """What the host would log, without figures of training examples and with ε; nothing from within the loss."""
        if self.private_steps.looking:
            raise PrivacyError(f"{sorted(logs)} were logged from training examples, and are private; log in evaluation")
        spent = {"epsilon": self.private_steps.epsilon()} if "loss" in logs else {}
        self._count_epochs()
        super().log({**_public(logs), **spent}, start_time)

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """As the host does, on data that is not trained on: every evaluation and prediction begins here."""
        if reads_examples(dataloader, self.train_dataset):
            raise InputError("evaluation data shares examples with train_dataset; its metrics would be private, hold it out")
        return super().evaluation_loop(dataloader, *arguments, **options)

    def hyperparameter_search(self, *arguments: Any, **options: Any) -> Any:
        """Refused: every trial looks at the training data again."""
        raise InputError(
            "hyperparameter_search is not accounted for; train each trial as a run, dp-microadam budget adds them up"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights as the host saves them, with the privacy statement beside them."""
        if self.private_steps.step is not None:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            self.private_steps.write_privacy(folder)
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        state = self.private_steps.state()  # in all processes
        self._count_epochs()
        if self.args.should_save:
            folder = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / STATE_NAME)
        super()._save_checkpoint(model, trial)

    def _count_epochs(self) -> None:
        """Epochs by steps: the host counts those of a resumed run from the beginning of the epoch."""
        if self.is_in_train:
            self.state.epoch = self.state.global_step / len(self.private_steps)

    def _save_rng_state(self, output_dir: str) -> None:
        """No random states in checkpoints: Datasets and collators draw from them."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """There is none."""

    def _refuse_environment(self) -> None:
        if self.args.n_gpu > 1 or self.is_model_parallel:
            raise InputError(
                "this process uses several devices, between which the host would divide each batch; start one process for each "
                "device with torchrun, or set CUDA_VISIBLE_DEVICES to one"
            )
        kind = self.accelerator.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise InputError(
                f"accelerate's distributed_type is {kind!r}, which reduces gradients in its own way; start processes with "
                "torchrun, without FSDP or DeepSpeed"
            )
        if self.accelerator.mixed_precision not in _AUTOCAST:
            why = _WHY_NOT["fp16"] if self.accelerator.mixed_precision == "fp16" else "private steps do not have it; use bf16"
            raise InputError(f"accelerate's mixed_precision is {self.accelerator.mixed_precision!r}: {why}")
        if type(self).compute_loss is not Trainer.compute_loss:
            raise InputError("compute_loss is overridden, and is a mean over a batch; give per_example_loss instead")
        if getattr(self.data_collator, "seed", None) is not None:
            raise InputError("data_collator has a seed, so what it draws is predictable; make it without one")
        if type(self.data_collator).__name__ == "DataCollatorWithFlattening":  # a row of several has no gradient of each
            raise InputError("data_collator packs examples into one row, which would be clipped as one; pad each to a constant")


def classification_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of each example, for models that give logits of classes and batches with one label per example."""
    labels = batch["labels"]
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    if labels.dim() != 1 or labels.is_floating_point() or logits.dim() != 2:
        raise InputError(
            f"labels have shape {tuple(labels.shape)} and logits {tuple(logits.shape)}, which is no classification; give "
            "per_example_loss, for language models causal_language_loss"
        )
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def causal_language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token within each example; labels of −100 do not count, nor do those of other examples."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)


class _StepNumbers:
    """What the host takes for its data loader."""

    def __init__(self, steps: PrivateSteps) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"step": step} for step in self._steps)


def _public(logs: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if name not in _NOT_MEASURED}


class _CollatedAlone(Dataset[dict[str, Tensor]]):
    """Each example as the collator makes it by itself: a batch is then a stack of what does not depend on other examples."""

    def __init__(self, data: Any, collate: Any) -> None:
        self.data = data
        self.collate = collate
        self._shapes: dict[str, torch.Size] = {}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = dict(self.collate([self.data[index]]))
        example = {name: value[0] for name, value in batch.items() if isinstance(value, Tensor) and len(value) == 1}
        if example.keys() != batch.keys():
            raise UnreadableExample(
                "data_collator gives something else than tensors with one row per example; it must give those alone"
            )
        shapes = {name: value.shape for name, value in example.items()}
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise UnreadableExample(
                "train_dataset has examples of different lengths, and padding to the longest of a batch would make an example "
                "depend on others; pad all to one length, as padding='max_length' does"
            )
        return example


def _refuse_settings(args: TrainingArguments, unset: TrainingArguments, plan: PrivacyPlan, *, has_method: bool) -> None:
    """Raise InputError for a setting that would break the guarantee, or would not be used; ``unset`` has none."""
    if not isinstance(plan, PrivacyPlan):
        raise InputError(f"plan is a {type(plan).__name__}; it must be a PrivacyPlan, as PrivacyPlan.solve gives")
    for field in fields(args):
        value, usual = getattr(args, field.name), getattr(unset, field.name)
        why = _WHY_NOT.get(field.name, f"a private run does not use it; leave it at {usual!r}")
        if has_method:
            why = _NOT_OF_METHODS.get(field.name, why)
        if value != usual and (field.name not in _HONOURED or (has_method and field.name in _NOT_OF_METHODS)):
            raise InputError(f"TrainingArguments.{field.name} is {value!r}: {why}")
    if args.max_steps > plan.steps:
        raise InputError(f"TrainingArguments.max_steps is {args.max_steps}; the plan allows at most {plan.steps} steps")


def _refuse_options(step_options: Mapping[str, Any], host: dict[str, Any], method: Method | None) -> None:
    """Raise InputError for options of the trainer that contradict each other, or a private run."""
    for name, why in {
        "model_init": "give the model itself, a private run trains one",
        "compute_loss_func": "it is a mean over a batch; give per_example_loss instead",
    }.items():
        if host.get(name) is not None:
            raise InputError(f"{name} is given: {why}")
    performance = step_options.get("performance")
    if performance is not None and "collate_fn" in performance.loader_options:
        raise InputError("loader_options has a collate_fn; give data_collator, which is called with one example at a time")
    optimizer = host.get("optimizers", (None, None))[0]
    if isinstance(optimizer, Method):
        raise InputError(f"optimizers has a {type(optimizer).__name__}, which is a method as a whole; give it as method")
    if method is not None and (optimizer is not None or host.get("optimizer_cls_and_kwargs") is not None):
        raise InputError("both a method and an optimizer are given; a method has its own optimizer, so give one of the two")
