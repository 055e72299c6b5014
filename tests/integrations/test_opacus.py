"""MicroAdam inside the real Opacus, and Opacus' books in ours."""

import json

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from torch.utils.data import DataLoader, TensorDataset

from dp_microadam import InputError, MicroAdam, PrivacyError
from dp_microadam.accounting.costs import epsilon
from dp_microadam.integrations.opacus import ledger_from_opacus, spent_in_opacus, use_system_entropy
from dp_microadam.noise.randomness import Randomness
from dp_microadam.workbench.command_line.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus recommends its secure mode and warns of hooks


@pytest.fixture
def trained(make_network, train):
    """Trains two epochs in Opacus; ``before`` is called with its objects first, other arguments go to ``make_private``."""

    def train_with(accountant="rdp", before=None, generator=None, **options):
        model = make_network()
        engine = PrivacyEngine(accountant=accountant)
        options = {"noise_multiplier": 1.0, "max_grad_norm": 0.7, **options}
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=MicroAdam(model.parameters(), fused=False),
            data_loader=DataLoader(TensorDataset(*train), batch_size=24, generator=generator),
            **options,
        )
        if before is not None:
            before(engine, optimizer, loader)
        for _ in range(2):
            for inputs, labels in loader:
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        return engine, optimizer, loader

    return train_with


def test_micro_adam_trains_inside_make_private_and_its_steps_are_in_our_ledger(trained, tmp_path):
    engine, optimizer, loader = trained()
    assert isinstance(optimizer.original_optimizer, MicroAdam)
    record = ledger_from_opacus(engine, optimizer, loader, delta=1e-3, run_dir=tmp_path / "run")
    assert record.steps == 10
    assert record.epsilon(accountant="rdp") == pytest.approx(engine.get_epsilon(1e-3), rel=2e-3)  # Opacus tries fewer orders
    report = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert report["clipping"]["sensitivity"] == 0.7
    assert report["epsilon"] == record.epsilon()


def test_both_of_our_accountants_agree_with_those_of_opacus(trained):
    rdp = RDPAccountant()
    rdp.history = [(1.1, 0.01, 900), (0.9, 0.02, 300)]
    spent = spent_in_opacus(rdp)
    assert epsilon(spent, 1e-5, "rdp") == pytest.approx(rdp.get_epsilon(1e-5), rel=2e-3)
    engine, _, _ = trained(accountant="prv")
    ours = epsilon(spent_in_opacus(engine.accountant), 1e-3, "pld")
    assert ours == pytest.approx(engine.get_epsilon(1e-3), rel=0.02)  # PRV answers to within 0.01


def test_rates_that_do_not_divide_the_data_are_kept_exactly(trained, train, tmp_path):
    engine, optimizer, loader = trained()
    loader.dataset.tensors = tuple(tensor[:119] for tensor in train)  # 119 examples in 5 batches: no whole number each
    record = ledger_from_opacus(engine, optimizer, loader, delta=1e-3, run_dir=tmp_path / "run")
    assert [part.sample_rate for part in record.spent] == [0.2]
    assert record.plan.sample_rate >= 0.2


def test_the_budget_command_adds_such_a_run_to_others(trained, tmp_path, capsys):
    for run in ("one", "other"):
        ledger_from_opacus(*trained(), delta=1e-3, run_dir=tmp_path / run)
    assert main(["budget", str(tmp_path / "one"), str(tmp_path / "other"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps_done"] == 20


@pytest.mark.parametrize(
    "entry",
    [(0.0, 0.1, 5), (1.0, 0.0, 5), (1.0, 1.5, 5), (1.0, 0.1, 0), (1.0, 0.1), ("laplace", 0.1, 5), (1.0, 0.1, 2.5)],
    ids=str,
)
def test_histories_of_other_mechanisms_are_refused(entry):
    with pytest.raises(InputError, match="no Gaussian step on a Poisson sample"):
        spent_in_opacus([entry])


ADAPTIVE = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0, "min_clipbound": 0.1}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"poisson_sampling": False}, "poisson_sampling=True"),
        ({"clipping": "adaptive", "unclipped_num_std": 1.2, **ADAPTIVE}, "adaptive"),
    ],
    ids=["shuffled batches", "an adaptive norm"],
)
def test_other_mechanisms_are_refused(trained, tmp_path, options, sentence):
    with pytest.raises(PrivacyError, match=sentence):
        ledger_from_opacus(*trained(**options), delta=1e-3, run_dir=tmp_path / "run")


def test_samples_that_were_added_up_are_refused(trained, tmp_path):
    engine, optimizer, loader = trained()
    engine.accountant.step(noise_multiplier=1.0, sample_rate=2 * loader.sample_rate)  # what Opacus records for two in one step
    with pytest.raises(PrivacyError, match="step after every batch"):
        ledger_from_opacus(engine, optimizer, loader, delta=1e-3, run_dir=tmp_path / "run")


def test_an_empty_history_and_wrong_objects_are_refused(trained, tmp_path):
    engine, optimizer, loader = trained()
    with pytest.raises(InputError, match=r"must be an opacus.PrivacyEngine"):
        ledger_from_opacus(None, optimizer, loader, delta=1e-3, run_dir=tmp_path / "run")
    with pytest.raises(InputError, match="that make_private returned"):
        ledger_from_opacus(engine, optimizer.original_optimizer, loader, delta=1e-3, run_dir=tmp_path / "run")
    engine.accountant.history = []
    with pytest.raises(InputError, match="train first"):
        ledger_from_opacus(engine, optimizer, loader, delta=1e-3, run_dir=tmp_path / "run")


@pytest.mark.parametrize("seeded", [True, False])
def test_opacus_on_torch_s_own_generator_is_stamped_not_private_as_our_seeded_runs_are(trained, tmp_path, seeded):
    """Its whole stream follows from 32 bits, set or not."""
    if seeded:
        torch.manual_seed(0)
    record = ledger_from_opacus(*trained(), delta=1e-3, run_dir=tmp_path / "run")
    assert record.settings.private is False
    assert record.settings.randomness.endswith(": not private")
    assert Randomness.seeded(0).description.endswith(": not private")
    words = (tmp_path / "run" / "privacy.txt").read_text()
    assert words.startswith("NOT PRIVATE. Sampling and noise were predictable (torch's global generator")
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["private"] is False


def test_torch_s_cpu_generator_keeps_32_bits_of_its_seed():
    """Why a seed that the system chose does not make it private; should torch change that, the words above are wrong."""
    first, second = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7 + 2**32)
    assert torch.equal(torch.rand(100, generator=first), torch.rand(100, generator=second))


@pytest.mark.parametrize("handed", ["noise_generator", "generator"])
def test_noise_or_samples_from_a_generator_of_unknown_seed_are_stamped_not_private(trained, tmp_path, handed):
    objects = trained(**{handed: torch.Generator().manual_seed(1)})
    record = ledger_from_opacus(*objects, delta=1e-3, run_dir=tmp_path / "run")
    assert record.settings.private is False
    assert "handed to Opacus" in record.settings.randomness


def test_noise_and_samples_from_the_system_s_entropy_are_private_whatever_was_seeded(trained, tmp_path):
    torch.manual_seed(0)
    engine, optimizer, loader = trained(before=lambda *objects: (use_system_entropy(*objects), torch.manual_seed(0)))
    record = ledger_from_opacus(engine, optimizer, loader, delta=1e-3, run_dir=tmp_path / "run")
    assert record.settings.private is True
    assert record.settings.randomness.startswith("operating system's entropy")
    assert (tmp_path / "run" / "privacy.txt").read_text().startswith("PRIVATE. ")


def test_two_runs_under_one_seed_draw_other_noise_and_other_samples(trained):
    """Without the system's entropy they are the same to the bit, which is what the stamp says."""

    def drawn(before):
        torch.manual_seed(0)
        _, optimizer, loader = trained(before=lambda *objects: (before(*objects), torch.manual_seed(0)))
        weights = torch.cat([p.detach().flatten() for group in optimizer.param_groups for p in group["params"]])
        return weights, next(iter(loader.batch_sampler))

    (weights, batch), (same_weights, same_batch) = drawn(lambda *_: None), drawn(lambda *_: None)
    assert torch.equal(weights, same_weights)
    assert batch == same_batch
    (weights, batch), (other_weights, other_batch) = drawn(use_system_entropy), drawn(use_system_entropy)
    assert not torch.equal(weights, other_weights)
    assert batch != other_batch  # 120 examples at rate 0.2: alike with probability 0.68^120, below 1e-20


SPOILS = {
    "seeded": lambda optimizer, loader: optimizer.generator.manual_seed(3),
    "exchanged": lambda optimizer, loader: setattr(optimizer, "generator", None),
    "sampler seeded": lambda optimizer, loader: loader.batch_sampler.generator.manual_seed(3),
    "sampler exchanged": lambda optimizer, loader: setattr(loader.batch_sampler, "generator", torch.Generator()),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_generator_seeded_or_exchanged_after_the_entropy_is_stamped_not_private(trained, tmp_path, spoil):
    before = lambda engine, optimizer, loader: (use_system_entropy(engine, optimizer, loader), spoil(optimizer, loader))  # noqa: E731
    record = ledger_from_opacus(*trained(before=before), delta=1e-3, run_dir=tmp_path / "run")
    assert record.settings.private is False
    assert "use_system_entropy" in record.settings.randomness


def test_entropy_after_the_first_step_is_refused(trained):
    with pytest.raises(PrivacyError, match="right after make_private"):
        use_system_entropy(*trained())


def test_only_secure_generators_count_as_secure_mode(trained, tmp_path):
    """The engine's word alone does not: noise and samples must come from its generator."""
    engine, optimizer, loader = trained()
    engine.secure_mode, engine.secure_rng = True, torch.Generator()
    record = ledger_from_opacus(engine, optimizer, loader, delta=1e-3, run_dir=tmp_path / "one")
    assert record.settings.private is False
    optimizer.generator = loader.batch_sampler.generator = engine.secure_rng  # as make_private sets them
    record = ledger_from_opacus(engine, optimizer, loader, delta=1e-3, run_dir=tmp_path / "other")
    assert record.settings.private is True
