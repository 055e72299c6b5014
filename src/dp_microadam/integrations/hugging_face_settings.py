"""Which settings of Hugging Face's ``TrainingArguments`` a private run honours; all others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

from dp_microadam.errors import InputError
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.training.method import Method

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

WHY_NOT = {
    "fp16": "it scales losses and gradients against underflow, which is not done for gradients of single examples; use bf16",
    "gradient_accumulation_steps": "a batch that does not fit in memory is cut into chunks of per_device_train_batch_size "
    "here, and noise is added once; leave it at 1",
    "max_grad_norm": "it clips the mean gradient, and the noise with it; give max_grad_norm to the trainer itself, where it "
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

_NOT_BY_DEFAULT = {
    "learning_rate": "without a method or an optimizer it follows from the plan; leave it out, or give "
    "optimizers=(MicroAdam(model.parameters(), lr=…), None)",
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"),
        "the default method has no such setting; leave it out, or give a method, or optimizers=(optimizer, None)",
    ),
}


def defaults_of(args: TrainingArguments) -> TrainingArguments:
    """The same, as they are if nothing is set."""
    return type(args)(output_dir=args.output_dir, report_to="none", use_cpu=args.use_cpu)


def refuse_settings(args: TrainingArguments, plan: PrivacyPlan) -> None:
    """Raise InputError for a setting that would break the guarantee, or would not be used."""
    if not isinstance(plan, PrivacyPlan):
        raise InputError(f"plan is a {type(plan).__name__}; it must be a PrivacyPlan, as PrivacyPlan.solve gives")
    defaults = defaults_of(args)
    for field in fields(args):
        value, default = getattr(args, field.name), getattr(defaults, field.name)
        if field.name not in _HONOURED and value != default:
            why = WHY_NOT.get(field.name, f"a private run does not use it; leave it at {default!r}")
            raise InputError(f"TrainingArguments.{field.name} is {value!r}: {why}")
    if args.max_steps > plan.steps:
        raise InputError(f"TrainingArguments.max_steps is {args.max_steps}; the plan allows at most {plan.steps} steps")


def refuse_without_optimizer(args: TrainingArguments) -> None:
    """Raise InputError for settings that the default method does not have."""
    unset = defaults_of(args)
    for name, why in _NOT_BY_DEFAULT.items():
        if getattr(args, name) != getattr(unset, name):
            raise InputError(f"TrainingArguments.{name} is {getattr(args, name)!r}: {why}")


def refuse_options(step_options: Mapping[str, Any], host: dict[str, Any], method: Method | None) -> None:
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
