"""MicroAdam inside the real Opacus, and Opacus' books in ours."""

import json

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from torch.utils.data import DataLoader, TensorDataset

from dp_microadam import InputError, MicroAdam, PrivacyError
from dp_microadam.cli import main
from dp_microadam.integrations.opacus import ledger_from_opacus, spent_in_opacus
from dp_microadam.privacy.accounting import epsilon

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus recommends its secure mode and warns of hooks


@pytest.fixture
def trained(make_network, train):
    """Trains two epochs in Opacus; keyword arguments go to ``make_private``."""

    def train_with(accountant="rdp", **options):
        model = make_network()
        engine = PrivacyEngine(accountant=accountant)
        options = {"noise_multiplier": 1.0, "max_grad_norm": 0.7, **options}
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=MicroAdam(model.parameters(), fused=False),
            data_loader=DataLoader(TensorDataset(*train), batch_size=24),
            **options,
        )
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
    assert record.epsilon() == pytest.approx(engine.get_epsilon(1e-3), rel=2e-3)  # Opacus tries fewer orders
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
    "history",
    [
        [(0.0, 0.1, 5)],
        [(1.0, 0.0, 5)],
        [(1.0, 1.5, 5)],
        [(1.0, 0.1, 0)],
        [(1.0, 0.1)],
        [("laplace", 0.1, 5)],
        [(1.0, 0.1, 2.5)],
    ],
    ids=str,
)
def test_histories_of_other_mechanisms_are_refused(history):
    with pytest.raises(InputError, match="no Gaussian step on a Poisson sample"):
        spent_in_opacus(history)


def test_batches_that_were_shuffled_instead_of_sampled_are_refused(trained, tmp_path):
    with pytest.raises(PrivacyError, match="poisson_sampling=True"):
        ledger_from_opacus(*trained(poisson_sampling=False), delta=1e-3, run_dir=tmp_path / "run")


def test_an_adaptive_clipping_norm_is_refused(trained, tmp_path):
    options = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0, "min_clipbound": 0.1}
    adaptive = trained(clipping="adaptive", unclipped_num_std=1.2, **options)
    with pytest.raises(PrivacyError, match="adaptive"):
        ledger_from_opacus(*adaptive, delta=1e-3, run_dir=tmp_path / "run")


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


def test_noise_from_a_generator_of_unknown_seed_is_stamped_not_private(trained, tmp_path):
    engine, optimizer, loader = trained(noise_generator=torch.Generator().manual_seed(1))
    record = ledger_from_opacus(engine, optimizer, loader, delta=1e-3, run_dir=tmp_path / "run")
    assert record.settings.private is False
