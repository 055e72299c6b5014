"""No option is swallowed: what a public callable does not know is refused, with what was probably meant."""

import dataclasses
import importlib
import inspect
import pickle

import pytest
import torch

import dp_microadam
from dp_microadam import (
    InputError,
    PerformanceSettings,
    PrivacyPlan,
    PrivacySettings,
    PrivateStep,
    PrivateTrainer,
    RecordSettings,
    methods,
)
from dp_microadam.methods.table import METHODS
from dp_microadam.sampling.poisson import PoissonSampler
from dp_microadam.workbench import models
from dp_microadam.workbench.models.registry import BUILDERS

SETTINGS = {"privacy": PrivacySettings, "performance": PerformanceSettings, "record": RecordSettings}

IN_MODULES = {
    "integrations.hugging_face": ("PrivateHFTrainer",),
    "integrations.lightning": ("PrivateSteps", "PrivateDDPStrategy"),
    "integrations.opacus": ("use_system_entropy", "spent_in_opacus", "ledger_from_opacus"),
    "optimizers.adam_bc": ("AdamBC",),
    "optimizers.tensor_adam": ("TensorAdam",),
    "sampling.poisson": ("PoissonSampler",),
    "training.frozen_features": ("FrozenFeatures",),
    "training.search": ("PrivateSearch",),
}
"""What users import from a module of its own."""


def public_callables():
    """Every public class, function, constructor and method of the library, by the name that users call it."""
    found = {}
    homes = [(dp_microadam, dp_microadam.__all__), (methods, methods.__all__), (models, models.__all__)]
    homes += [(importlib.import_module(f"dp_microadam.{name}"), members) for name, members in IN_MODULES.items()]
    for home, members in homes:
        for member in members:
            value = getattr(home, member)
            if inspect.isfunction(value):
                found[member] = value
            elif inspect.isclass(value) and not issubclass(value, BaseException):
                if not (inspect.isabstract(value) or getattr(value, "_is_protocol", False)):
                    found[member] = value
                for name, method in inspect.getmembers(value, callable):
                    if not name.startswith("_") and inspect.isroutine(method) and _is_ours(method):
                        found[f"{member}.{name}"] = method
    return found


def _is_ours(method):
    return (getattr(inspect.unwrap(getattr(method, "__func__", method)), "__module__", None) or "").startswith("dp_microadam")


PASSED_ON = ("PoissonSampler.load", "build")
"""To torch's DataLoader and the model's builder, against which options are checked below. Adapters pass on to their host."""

CALLABLES = public_callables()


def keywords_of(function):
    """Names of its keyword arguments, and whether it takes others too."""
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return [name for name in known if name != "self"], any(each.kind is each.VAR_KEYWORD for each in parameters)


def misspelt(name, known):
    """Names that somebody may type instead of this one."""
    half = len(name) // 2
    begin, one, two, end = name[: half - 1], name[half - 1 : half], name[half], name[half + 1 :]
    typed = {name + name[-1], begin + one + one + two + end, begin + two + one + end}
    return sorted(each for each in typed if each not in known)


def test_all_public_callables_are_driven():
    assert len(CALLABLES) > 150
    assert {"PrivateTrainer", "PrivateTrainer.fit", "PrivacyPlan.solve", "PrivateSteps", "dp_sgd", "build"} <= CALLABLES.keys()


@pytest.mark.parametrize("called", sorted(CALLABLES))
def test_a_misspelt_keyword_is_refused_with_the_nearest_name(called):
    function = CALLABLES[called]
    known, further = keywords_of(function)
    if further and (called in PASSED_ON or called.startswith("PrivateHFTrainer.")):
        pytest.skip("refused where it arrives")
    assert not further, "an option that it does not know would be swallowed; name them, or say in explicit what they are"
    for name in known:
        for typed in misspelt(name, known):
            with pytest.raises(
                TypeError if inspect.isclass(function) and issubclass(function, tuple) else InputError
            ) as refusal:
                function(**{typed: None})
            assert typed in str(refusal.value)
            if refusal.type is InputError and len(name) > 3:
                assert f"did you mean {name}?" in str(refusal.value)


def make(kind, tmp_path, **options):
    model = torch.nn.Linear(3, 1)
    plan = PrivacyPlan(dataset_size=8, batch_size=4, noise_multiplier=1.0, steps=2, delta=1e-3)
    return kind(
        model, methods.dp_sgd(model), plan, lambda model, batch: model(batch).sum(1), run_dir=tmp_path / "run", **options
    )


@pytest.mark.parametrize("name", ["collate_fn", "pin_memory", "prefetch_factor", "worker_init_fn"])
def test_a_misspelt_option_in_a_nested_dict_is_refused_with_the_nearest_name(name):
    for typed in misspelt(name, ()):
        with pytest.raises(InputError, match=f"loader_options does not take {typed}; did you mean {name}"):
            PerformanceSettings(loader_options={typed: None})


@pytest.mark.parametrize("kind", [PrivateTrainer, PrivateStep])
def test_a_setting_that_is_passed_directly_is_answered_with_its_place(kind, tmp_path):
    for place, settings in SETTINGS.items():
        for field in dataclasses.fields(settings):
            with pytest.raises(InputError, match=f"{place}={settings.__name__}\\({field.name}="):
                make(kind, tmp_path, **{field.name: None})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_physical_batch_size": 3}, "which is Opacus'; it is performance=PerformanceSettings"),
        ({"prefetch_factor": 3}, "which torch's DataLoader refuses"),
    ],
)
def test_an_option_of_another_place_is_refused_before_the_first_step(given, sentence):
    with pytest.raises(InputError, match=sentence):
        PerformanceSettings(loader_options=given)


@pytest.mark.parametrize("given", [{"privacy": 3}, {"performance": {"physical_batch_size": 3}}])
def test_settings_of_a_wrong_type_are_refused(given, tmp_path):
    with pytest.raises(InputError, match=r"it must be a (Privacy|Performance)Settings"):
        make(PrivateStep, tmp_path, **given)


def test_loaders_and_models_of_a_name_refuse_what_they_do_not_know():
    sampler = PoissonSampler(PrivacyPlan(8, 4, 1.0, 1, 1e-3))
    with pytest.raises(InputError, match="did you mean pin_memory"):
        sampler.load(torch.zeros(8), pin_memry=True)
    for name in BUILDERS:
        for option in models.registry.options_of(name):
            for typed in misspelt(option, models.registry.options_of(name)):
                with pytest.raises(InputError, match=f"does not take {typed}; did you mean {option}"):
                    models.build(name, 10, (3, 32, 32), **{typed: None})


@pytest.mark.parametrize("name", METHODS)
def test_a_method_refuses_options_of_an_optimizer_that_it_does_not_use(name):
    with pytest.raises(InputError, match="does not take second_momment; "):
        getattr(methods, name.replace("-", "_"))(torch.nn.Linear(2, 2), second_momment="tensor")


def arguments_of_opacus():
    opacus = pytest.importorskip("opacus")
    from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    engine = opacus.PrivacyEngine
    calls = engine, engine.make_private, engine.make_private_with_epsilon, DPOptimizer, AdaClipDPOptimizer, BatchMemoryManager
    names = {name for call in calls for name in inspect.signature(call).parameters}
    return sorted(names - {"self", "kwargs"})


def test_every_argument_of_opacus_is_taken_or_answered_with_what_stands_for_it():
    arguments = arguments_of_opacus()
    assert {"secure_mode", "poisson_sampling", "max_physical_batch_size", "target_epsilon"} <= set(arguments)
    for name in arguments:
        for kind in (PrivateTrainer, PrivateStep, PrivacyPlan.solve):
            if name in keywords_of(kind)[0]:
                continue
            with pytest.raises(InputError, match=f"{kind.__qualname__} does not take {name}, which is Opacus'; ") as refusal:
                kind(**{name: None})
            assert len(str(refusal.value)) < 250


def test_public_functions_keep_their_names_for_pickle_and_doctest():
    for function in (models.build, dp_microadam.read_ledger, dp_microadam.replace_batchnorm):
        assert pickle.loads(pickle.dumps(function)) is function
        assert function.__globals__ is vars(importlib.import_module(function.__module__))
