"""A hospital: from a folder of images with several per patient to predictions, on the command line alone.

    python examples/journeys/hospital.py [FOLDER] [--data digits] [--patients 3000] [--steps 300]

Writes 16-bit PNG files ``scans/CLASS/patient0017_2.png`` of Fashion-MNIST (``dp-microadam data get fashion-mnist``; or of the
digits of the demo, which need no download), 1 to 5 of a class for each patient. ε = 8 is for a patient with all their images.
The patients of ``new/`` come to the hospital later: the exported model has never seen them.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from clock import command, print_times, timed
from PIL import Image

from dp_microadam.workbench import data

RECIPE = r"""
name = "scans"
data = "image-folder"
data_folder = "{folder}/scans"
image_size = 28
model = "small-cnn"
unit = "user"
unit_name = "patient"
examples_per_user = 4
epsilon = 8.0
delta = 1e-4
steps = {steps}
batch_size = {batch}  # expected patients per step

[data_options]
user_pattern = '(patient\d+)_\d+\.png'
mean = [0.5, 0.5, 0.5]  # public constants
std = [0.5, 0.5, 0.5]

[model_options]
width = 16
"""


def write_scans(name: str, patients: int, folder: Path) -> dict[Path, str]:
    """Write the images of ``patients`` and of 100 more in ``new/``; returns the class of each new image."""
    draw, found = random.Random(0), data.load(name, validation_fraction=0)
    images, labels = found.train
    classes = [one.replace("/", "-") for one in found.classes]
    of_class = {label: (labels == label).nonzero()[:, 0].tolist() for label in range(found.num_classes)}
    new = {}
    for patient in range(patients + 100):
        label = draw.choice([label for label, left in of_class.items() if left] or [None])
        if label is None:
            raise SystemExit(f"{name} has images for {patient} patients; ask for fewer by --patients")
        seen_later = patient >= patients
        place = folder / ("new" if seen_later else f"scans/{classes[label]}")
        place.mkdir(parents=True, exist_ok=True)
        for number in range(min(draw.randint(1, 5), len(of_class[label]))):
            file = place / f"patient{patient:05}_{number}.png"
            Image.fromarray(images[of_class[label].pop(), 0].numpy().astype("uint16") * 257).save(file)
            if seen_later:
                new[file] = classes[label]
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where all of it is written (default: a temporary folder)")
    parser.add_argument("--data", default="fashion-mnist", choices=["fashion-mnist", "digits"])
    parser.add_argument("--patients", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    folder: Path = options.folder or Path(tempfile.mkdtemp())
    with timed("writing the images"):
        new = write_scans(options.data, options.patients, folder)
    recipe, run, model = folder / "scans.toml", folder / "run", folder / "model"
    recipe.write_text(RECIPE.format(folder=folder, steps=options.steps, batch=max(options.patients // 16, 8)), encoding="utf-8")

    command("data", "check", recipe)
    command("plan", recipe)
    command("train", recipe, "--run-dir", run, "--quiet")
    command("report", run)
    command("export", run, "--output", model)
    predicted = command("predict", model, *new, show=False).splitlines()
    print("\n".join([*predicted[:3], "…"]))
    right = sum(new[Path(line.split("\t")[0])] == line.split("\t")[1] for line in predicted)
    most = max(list(new.values()).count(name) for name in new.values())
    print(f"\nright about {right} of {len(new)} images of new patients, {100 * right / len(new):.1f} %; ", end="")
    print(f"always naming their most frequent class: {100 * most / len(new):.1f} %")
    print_times()


if __name__ == "__main__":
    main()
