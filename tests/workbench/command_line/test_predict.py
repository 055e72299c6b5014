"""From a folder of images to a deployed model: what is exported gives what evaluation gave, example by example."""

import json
import re
import zipfile

import numpy as np
import pytest
import torch
from flat import flat
from PIL import Image

from dp_microadam import InputError, Method, MicroAdam, PrivacyPlan, PrivateTrainer
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.command_line.programs import load_program
from dp_microadam.workbench.command_line.running import open_run
from dp_microadam.workbench.data import Preparation
from dp_microadam.workbench.data.raw import RawImages

CLASSES = ("bright", "dark", "striped")


def picture(label: int, number: int) -> Image.Image:
    random = np.random.default_rng([label, number])
    pixels = random.integers(0, 90, (20 + number % 7, 26 - number % 5, 3)).astype(np.uint8)
    if label == 0:
        pixels += 150
    if label == 2:
        pixels[::4] += 150
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run with averaged weights on images of different sizes and kinds, and its export."""
    root = tmp_path_factory.mktemp("predict")
    for label, name in enumerate(CLASSES):
        for part, count in (("train", 12), ("val", 6)):
            folder = root / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = picture(label, number + 100 * (part == "val"))
                exif = Image.Exif()
                exif[0x0112] = 6
                if number % 3 == 1:
                    image = Image.fromarray(np.array(image.convert("L")).astype(np.uint16) * 257)
                    image.save(folder / f"{number}.png")
                else:
                    image.save(folder / f"{number}.jpg", **({"exif": exif} if number % 3 else {}))
    recipe = root / "photos.toml"
    recipe.write_text(
        f'data = "image-folder"\ndata_folder = "{root / "photos"}"\nimage_size = 16\nmodel = "small-cnn"\nepsilon = 50.0\n'
        "steps = 4\nbatch_size = 16\nlearning_rate = 0.02\nema_decay = 0.5\nvalidation_fraction = 0\n"
        "[data_options]\nmean = [0.5, 0.4, 0.3]\nstd = [0.2, 0.3, 0.4]\n[model_options]\nwidth = 4\n"
    )
    assert main(["train", str(recipe), "--quiet", "--run-dir", str(root / "run")]) == 0
    assert main(["export", str(root / "run"), "--output", str(root / "model")]) == 0
    return root


def predicted(capsys, *arguments) -> list[dict]:
    capsys.readouterr()
    assert main(["predict", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_exported_program_gives_the_probabilities_of_evaluation_for_every_example(exported):
    experiment = open_run(exported / "run")
    experiment.trainer.peek()
    model, prepare, test = experiment.best_model().eval(), Preparation(experiment.data), experiment.data.test
    program = load_program(exported / "model" / "model.pt2")
    for index in range(len(test)):
        ((_, raw),) = experiment.data.raw.read(test.path(index))
        assert raw.dtype == torch.uint8
        with torch.no_grad():
            wanted = model(prepare((test[index][0][None], None))[0]).softmax(1)
        torch.testing.assert_close(program(raw), wanted, rtol=0, atol=1e-6)


def test_preprocessing_and_class_names_are_data_beside_the_weights_and_in_the_card(exported):
    contract = json.loads((exported / "model" / "export.json").read_text())
    assert contract["classes"] == list(CLASSES)
    assert (contract["input"]["size"], contract["input"]["crop"]) == ([16, 16], 18)
    assert (contract["normalization"]["mean"], contract["normalization"]["std"]) == ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    assert (contract["program"], contract["weights"]) == ("model.pt2", "model_ema.safetensors")
    card = (exported / "model" / "README.md").read_text()
    for told in ("bright, dark, striped", "shorter side to 18 pixels", "centre of 16×16", "mean = [0.5, 0.4, 0.3]"):
        assert told in card


def test_the_card_s_own_code_runs_the_program_without_this_library(exported, capsys, monkeypatch):
    code, _ = re.findall(r"```python\n(.*?)```", (exported / "model" / "README.md").read_text(), flags=re.DOTALL)
    assert "dp_microadam" not in code
    photo = exported / "photos" / "val" / "bright" / "2.jpg"
    (line,) = predicted(capsys, exported / "model", photo)
    monkeypatch.chdir(exported / "model")
    exec(code.replace("photo.jpg", str(photo)), {})
    name, probability = capsys.readouterr().out.split()
    assert name == line["class"]
    assert float(probability) == pytest.approx(line["probability"], abs=1e-6)


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_predicted(exported, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"no image")
    good = exported / "photos" / "val" / "dark" / "1.png"
    assert main(["predict", str(exported / "model"), str(tmp_path / "broken.png"), str(good)]) == 2
    captured = capsys.readouterr()
    assert "broken.png cannot be decoded as an image" in captured.err
    assert re.fullmatch(rf"{good}\t(bright|dark|striped)\t[01]\.\d{{4}}\n", captured.out)


@pytest.mark.parametrize(("place", "told"), [("", ""), ("photos", ""), ("nowhere", "which does not exist")])
def test_a_folder_that_is_no_model_is_one_sentence(exported, capsys, place, told):
    assert main(["predict", str(exported / place), "x.png"]) == 2
    said = capsys.readouterr().err
    assert (told in said, said.count("\n")) == (True, 1)


def own_trainer(folder, **options) -> PrivateTrainer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 2), torch.nn.Dropout(0.5))
    plan = PrivacyPlan(40, 10, 1.0, 3, 1e-3)
    method = Method(MicroAdam(model.parameters()), average=options.pop("average", 0.0))
    return PrivateTrainer(model, method, plan, class_loss, run_dir=folder, **flat(show_progress=False, **options))


def test_a_run_from_python_is_exported_with_its_model_and_predicts_from_files(tmp_path, capsys):
    trainer = own_trainer(tmp_path / "run", average=0.5)
    trainer.fit((torch.rand(40, 3, 8, 8), torch.randint(0, 2, (40,))))
    raw = RawImages.of_any_size(8)
    trainer.export(tmp_path / "model", raw, prepare=lambda images: images / 255, classes=("cat", "dog"))
    picture(0, 3).save(tmp_path / "photo.png")
    (line,) = predicted(capsys, tmp_path / "model", tmp_path / "photo.png")
    ((_, image),) = raw.read(tmp_path / "photo.png")
    with trainer.average.in_place_of(trainer.model), torch.no_grad():
        wanted = trainer.model.eval()(raw.module()(image) / 255).softmax(1)[0]
    assert list(line["probabilities"].values()) == pytest.approx(wanted.tolist(), abs=1e-6)
    assert "differentially private" in (tmp_path / "model" / "README.md").read_text()


def test_a_run_from_python_takes_tensors_as_its_model_does(tmp_path, capsys):
    trainer = own_trainer(tmp_path / "run")
    trainer.fit((torch.rand(40, 3, 8, 8), torch.randint(0, 2, (40,))))
    inputs = torch.rand(5, 3, 8, 8)
    trainer.export(tmp_path / "model", inputs[:1])
    np.save(tmp_path / "inputs.npy", inputs.numpy())
    lines = predicted(capsys, tmp_path / "model", tmp_path / "inputs.npy")
    with torch.no_grad():
        wanted = trainer.model.eval()(inputs)
    assert [line["outputs"] for line in lines] == [pytest.approx(row, abs=1e-5) for row in wanted.tolist()]
    assert main(["export", str(tmp_path / "run")]) == 0
    assert "trainer.export(folder, example) writes one" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "run" / "export").iterdir()}
    assert names == {"README.md", "model.safetensors", "privacy.json", "privacy.txt"}


def test_an_exported_folder_holds_nothing_of_the_example_it_was_traced_with(tmp_path):
    trainer = own_trainer(tmp_path / "run")
    inputs = torch.rand(40, 3, 8, 8)
    trainer.fit((inputs, torch.randint(0, 2, (40,))))
    trainer.export(tmp_path / "model", inputs[:2])
    assert torch.export.load(tmp_path / "model" / "model.pt2").example_inputs is None
    row = inputs[0, 0, 0].numpy().tobytes()
    with zipfile.ZipFile(tmp_path / "model" / "model.pt2") as program:
        assert not [name for name in program.namelist() if row in program.read(name)]
    assert not [path for path in (tmp_path / "model").iterdir() if row in path.read_bytes()]


def test_a_model_that_cannot_be_traced_is_refused_and_nothing_is_left(tmp_path):
    class Branching(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) if inputs.sum() > 0 else super().forward(-inputs)

    trainer = own_trainer(tmp_path / "run")
    trainer.model = Branching(2, 2)
    with pytest.raises(InputError, match=r"cannot be traced by torch\.export"):
        trainer.export(tmp_path / "model", torch.ones(2, 2))
    assert not list(tmp_path.glob("model*"))


def test_rows_of_a_csv_file_are_predicted_by_the_names_of_their_columns(tmp_path, capsys):
    random = np.random.default_rng(0)
    rows = [(a, b, "ill" if a > b else "well") for a, b in random.random((60, 2)).round(3)]
    (tmp_path / "all.csv").write_text("age,dose,outcome\n" + "".join(f"{a},{b},{label}\n" for a, b, label in rows))
    (tmp_path / "mine.toml").write_text(
        f'data = "table"\ndata_folder = "{tmp_path / "all.csv"}"\nmodel = "mlp"\nepsilon = 50.0\nsteps = 3\nbatch_size = 16\n'
        '[data_options]\nlabel = "outcome"\nclasses = ["well", "ill"]\nmean = [0.5, 0.5]\nstd = [0.3, 0.3]\n'
    )
    assert main(["train", str(tmp_path / "mine.toml"), "--quiet", "--run-dir", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "model")]) == 0
    (tmp_path / "new.csv").write_text("patient,dose,age\nx,0.1,0.9\ny,0.8,0.2\n")
    lines = predicted(capsys, tmp_path / "model", tmp_path / "new.csv")
    program = load_program(tmp_path / "model" / "model.pt2")
    wanted = program(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    assert [list(line["probabilities"].values()) for line in lines] == [pytest.approx(row, abs=1e-6) for row in wanted.tolist()]
    assert [line["file"] for line in lines] == [f"{tmp_path / 'new.csv'} row 1", f"{tmp_path / 'new.csv'} row 2"]
    (tmp_path / "new.csv").write_text("patient,age\nx,0.9\n")
    assert main(["predict", str(tmp_path / "model"), str(tmp_path / "new.csv")]) == 2
    assert "has no column 'dose'" in capsys.readouterr().err
