"""Features of a frozen part, computed once: a run on them is the run on examples, and nothing of them stays behind."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flat import flat
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from dp_microadam import InputError, PrivacyError, PrivacyPlan, PrivateTrainer
from dp_microadam.training.frozen_features import FeatureStore, FrozenFeatures

EXAMPLES, HEAD = 60, "head"


class Classifier(nn.Module):
    """A frozen encoder and a trained head; ``middle`` comes between them."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5)).requires_grad_(False)
        self.middle = nn.Identity() if middle is None else middle
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.middle(self.encoder(inputs)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def halved(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0] / 2, batch[1]


def examples(count: int = EXAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def trained(folder: Path, model: nn.Module, measure: Callable, train: Any, validation: Any, **options: Any) -> dict[str, float]:
    plan = PrivacyPlan.solve(dataset_size=EXAMPLES, batch_size=20, epsilon=8.0, delta=1e-4, steps=12)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.05)
    trainer = PrivateTrainer(
        model, optimizer, plan, measure, run_dir=folder, **flat(seed=3, physical_batch_size=8, show_progress=False, **options)
    )
    return trainer.fit(train, validation).metrics


@pytest.mark.parametrize("kind", ["tensors", "dataset"])
def test_a_run_on_features_is_the_run_that_computes_them_in_every_step(tmp_path, kind):
    train, validation = examples(), examples(20, seed=1)
    data = TensorDataset(*train) if kind == "dataset" else train
    slow, fast = Classifier(), Classifier()
    expected = trained(tmp_path / "slow", slow, loss, data, validation, prepare=halved)
    features = FrozenFeatures(fast, HEAD, loss, prepare=halved, folder=tmp_path / "features", physical_batch_size=16)
    own, held_out = features.of(data, validation)
    fast.encoder.register_forward_hook(lambda *_: pytest.fail("the frozen part ran again"))
    found = trained(tmp_path / "fast", fast, features.on(loss), own, held_out)
    assert found == pytest.approx(expected, rel=1e-5)
    for name, parameter in slow.named_parameters():
        torch.testing.assert_close(fast.get_parameter(name), parameter, rtol=1e-5, atol=1e-6)
    assert not torch.equal(fast.head.weight, Classifier().head.weight)


def test_features_are_functions_of_one_example_or_refused_by_name(tmp_path):
    class Mixing(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return rows - rows.mean(0)

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(5))

        def forward(self, rows: Tensor) -> Tensor:
            self.last = rows[-1].detach()
            return rows + self.last

    class Noisy(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return rows + torch.randn_like(rows)

    for middle, message in (
        (Mixing(), "mixes examples"),
        (Remembering(), "'middle.last'|mixes examples"),
        (Noisy(), "random numbers are drawn before the head 'head'"),
        (nn.Dropout(0.1), "random numbers are drawn before the head 'head', by dropout.*eval mode"),
    ):
        features = FrozenFeatures(Classifier(middle), HEAD, loss, folder=tmp_path / "features")
        for _ in range(2):  # whoever catches the refusal and goes on is refused again
            with pytest.raises(InputError, match=message):
                features.of(examples())
        assert not (tmp_path / "features").exists()
    features = FrozenFeatures(Classifier(nn.Dropout(0.1).eval()), HEAD, loss, folder=tmp_path / "features")
    assert features.of(examples())[0][0].shape == (EXAMPLES, 5)


def test_features_are_not_kept_if_the_frozen_part_began_to_mix_examples_meanwhile(tmp_path):
    class MixingLater(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return rows - rows.mean(0) if begun else rows

    begun: list[bool] = []
    tell = lambda done: begun.append(True) if done > 0.5 else None  # noqa: E731
    features = FrozenFeatures(
        Classifier(MixingLater()), HEAD, loss, folder=tmp_path / "features", physical_batch_size=16, tell=tell
    )
    with pytest.raises(InputError, match="mixes examples"):
        features.of(examples())
    assert not list((tmp_path / "features").iterdir())


def test_features_are_kept_for_their_own_model_and_data_and_computed_once(tmp_path):
    def of(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        seen = []
        handle = model.encoder.register_forward_hook(lambda module, args, output: seen.append(len(output)))
        (rows, _labels), *_ = FrozenFeatures(model, HEAD, loss, folder=tmp_path).of(data)
        handle.remove()
        return rows, seen.count(EXAMPLES)  # in batches of 64; checks on synthetic examples come besides

    model, data = Classifier(), examples()
    rows, passes = of(model, data)
    expected = model.encoder(data[0])
    torch.testing.assert_close(rows, expected)
    again, fewer = of(model, data)
    assert torch.equal(again, rows)
    assert passes > 3  # the check, the features, and the look after them
    assert fewer == 0  # features that were kept passed the check
    with torch.no_grad():
        model.head.weight.add_(1.0)  # no part of what features depend on
    assert of(model, data)[1] == fewer

    other = examples()
    other[0][17, 2] += 1e-3  # one number of one example
    torch.testing.assert_close(of(model, other)[0], model.encoder(other[0]))
    with torch.no_grad():
        model.encoder[2].bias[1] += 0.5
    torch.testing.assert_close(of(model, data)[0], model.encoder(data[0]))
    assert len(list(tmp_path.iterdir())) == 3


def test_kept_features_are_computed_again_if_the_code_of_the_model_has_changed(tmp_path):
    FrozenFeatures(Classifier(), HEAD, loss, folder=tmp_path).of(examples())
    changed = Classifier()
    changed.middle.forward = lambda rows: 2 * rows
    ((rows, _),) = FrozenFeatures(changed, HEAD, loss, folder=tmp_path).of(examples())
    torch.testing.assert_close(rows, 2 * changed.encoder(examples()[0]))


def test_features_that_were_not_written_to_their_end_are_never_used(tmp_path):
    def killed(done: float) -> None:
        if done > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FrozenFeatures(Classifier(), HEAD, loss, folder=tmp_path, physical_batch_size=16, tell=killed).of(examples())
    assert not list(tmp_path.iterdir())

    store, key = FeatureStore(tmp_path), "0" * 64
    abandoned = tmp_path / f"{key}.999999999.unfinished"
    abandoned.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    assert store.read(key) is None
    features = FrozenFeatures(Classifier(), HEAD, loss, folder=tmp_path)
    ((rows, _),) = features.of(examples())
    assert not abandoned.exists()
    torch.testing.assert_close(rows, features.model.encoder(examples()[0]))


def test_kept_features_are_readable_by_their_owner_alone_and_gone_after_clean(tmp_path):
    folder = tmp_path / "features"
    before = os.umask(0)  # the most permissive
    try:
        FrozenFeatures(Classifier(), HEAD, loss, folder=folder).of(examples(), examples(20, seed=1))
    finally:
        os.umask(before)
    entries = list(folder.iterdir())
    assert len(entries) == 2
    for entry in (folder, *entries):
        assert stat.S_IMODE(entry.stat().st_mode) == (0o700 if entry.is_dir() else 0o600), entry
    mine = folder / "notes.txt"
    mine.write_text("not ours")
    assert FeatureStore(folder).clean() > EXAMPLES * 5 * 4
    assert list(folder.iterdir()) == [mine]
    mine.unlink()
    assert FeatureStore(folder).clean() == 0
    assert not folder.exists()


def test_kept_features_of_which_any_byte_has_changed_are_computed_again(tmp_path):
    train, folder = examples(), tmp_path / "features"
    ((rows, _),) = FrozenFeatures(Classifier(), HEAD, loss, folder=folder).of(train)
    wanted = rows.clone()  # not of the file, which is mapped
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 64  # of the last example, which a comparison of the first ones does not see
    file.write_bytes(content)
    ((found, _),) = FrozenFeatures(Classifier(), HEAD, loss, folder=folder).of(train)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("change", ["link", "writable", "owner"])
def test_features_are_kept_in_a_folder_of_their_own_user_alone(tmp_path, monkeypatch, change):
    folder = tmp_path / "features"
    FrozenFeatures(Classifier(), HEAD, loss, folder=folder).of(examples())
    if change == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif change == "writable":
        folder.chmod(0o777)
    else:
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(InputError, match=r"a folder of your own \(chmod go-w\)"):
        FrozenFeatures(Classifier(), HEAD, loss, folder=folder).of(examples())
    with pytest.raises(InputError):
        FeatureStore(folder).clean()


def test_data_that_are_held_out_and_examples_that_repeat_are_refused_as_in_a_run_on_examples(tmp_path):
    data = TensorDataset(*examples())
    features = FrozenFeatures(Classifier(), HEAD, loss, folder=tmp_path)
    with pytest.raises(InputError, match="share examples"):
        features.of(Subset(data, range(40)), Subset(data, range(39, 60)))
    with pytest.raises(InputError, match="repeat"):
        features.of(Subset(data, [0, 1, 1, 2]))


def test_what_cannot_be_split_is_refused_with_a_sentence(tmp_path):
    def refused(model: nn.Module, measure: Callable, message: str, head: str = HEAD) -> None:
        with pytest.raises(InputError, match=message):
            FrozenFeatures(model, head, measure, folder=tmp_path).of(examples())

    unfrozen = Classifier()
    unfrozen.encoder.requires_grad_(True)
    refused(unfrozen, loss, "'encoder.0.weight' trains, but is not part of the head 'head'; freeze it")
    refused(Classifier(), loss, "head is 'tail'; it must be the name of a module", head="tail")
    refused(Classifier(), loss, "head is ''; it must be the name of a module", head="")

    class Scaled(Classifier):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * super().forward(inputs)

    class Twice(Classifier):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) + super().forward(-inputs)

    sentence = "per_example_loss does not give for features what it gives for examples"
    refused(Scaled(), loss, f"{sentence}.*the model must return what its head 'head' returns")
    refused(Twice(), loss, sentence)
    refused(Classifier(), lambda model, batch: loss(model, halved(batch)), sentence)
    refused(Classifier(), lambda model, batch: loss(model, batch) + batch[0][:, 0], sentence)

    class Augmented(Dataset):
        def __len__(self) -> int:
            return EXAMPLES

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.randn(6), torch.tensor(index % 3)

    with pytest.raises(InputError, match="others when they are read again"):
        FrozenFeatures(Classifier(), HEAD, loss, folder=tmp_path).of(Augmented())


def test_errors_about_training_examples_are_withheld(tmp_path):
    class Picky(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            if bool((rows > 1e3).any()) and not bool((rows == rows.round()).all()):
                raise ValueError(f"the secret is {rows.max()}")
            return rows

    inputs, labels = examples()
    model = Classifier(Picky())
    model.encoder = nn.Identity()
    model.head = nn.Linear(6, 3)
    inputs[50, 0] = 12345.5
    with pytest.raises(PrivacyError, match="ValueError") as caught:
        FrozenFeatures(model, HEAD, loss, folder=tmp_path).of((inputs, labels))
    assert "12345" not in str(caught.value)


def test_outputs_and_batches_of_transformers_are_split_too(tmp_path):
    """Batches are dicts, the output is a structure, and the mask is an input besides the tokens."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=3, **shape)
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    model.requires_grad_(False).eval()
    model.classifier.requires_grad_(True).train()

    def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        given = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return F.cross_entropy(model(**given).logits, batch["labels"], reduction="none")

    tokens = torch.randint(4, 20, (EXAMPLES, 8))
    data = {"input_ids": tokens, "attention_mask": (tokens > 5).long(), "labels": torch.arange(EXAMPLES) % 3}
    features = FrozenFeatures(model, "classifier", own_loss, folder=tmp_path)
    (rows,) = features.of(data)
    assert {key: tuple(value.shape) for key, value in rows.items()} == {
        "input_ids": (EXAMPLES, 8),
        "attention_mask": (EXAMPLES, 8),
        "labels": (EXAMPLES,),
    }
    torch.testing.assert_close(features.on(own_loss)(model, rows), own_loss(model, data))
