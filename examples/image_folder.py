"""A private classifier of image files in folders, by a recipe. Needs Pillow, and scikit-learn for digits to write."""

import tempfile
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from dp_microadam.workbench.command_line.cli import main

folder = Path(tempfile.mkdtemp())
images, labels = load_digits(return_X_y=True)
for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
    place = folder / ("val" if number % 5 == 0 else "train") / f"digit-{label}"  # what a folder of yours looks like
    place.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels * 15.9).reshape(8, 8).astype("uint8")).save(place / f"{number}.png")

recipe = folder / "digits-in-files.toml"
recipe.write_text(f"""
data = "image-folder"
data_folder = "{folder}"
data_options = {{ mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5] }}  # public constants
image_size = 8
model = "mlp"
model_options = {{ hidden = 64 }}
epsilon = 8.0
delta = 1e-4
steps = 400
batch_size = 128
learning_rate = 3e-3
""")
# The same as: dp-microadam train digits-in-files.toml --run-dir …
raise SystemExit(main(["train", str(recipe), "--run-dir", str(folder / "run")]))
