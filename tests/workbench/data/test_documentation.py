"""The page about recipes and data says what the code does."""

import re
from pathlib import Path

from dp_microadam.workbench.data.catalogue import FOLDER_VARIABLE, KNOWN_DATA, usual_folders
from dp_microadam.workbench.data.images import SIZE
from dp_microadam.workbench.data.raw import EXTENSIONS
from dp_microadam.workbench.recipes import Recipe
from dp_microadam.workbench.recipes.assemble import assemble

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text("utf-8")


def test_every_data_set_is_explained():
    table = PAGE.partition("## Known data sets")[2].partition("\n## ")[0]
    for name in KNOWN_DATA:
        assert f"`{name}`" in table


def test_the_recipe_shown_trains_on_such_a_table(tmp_path):
    shown = re.search(r"## Your own table\n\n```toml\n(.*?)```", PAGE, re.DOTALL)[1]
    table = tmp_path / "patients.csv"
    people = (
        f"{20 + n % 60},{n if n % 5 else ''},{('never', '?')[n % 2]},{('north', 'east')[n % 2]},2020-02-{1 + n % 28:02d},{n},"
        f"{('healthy', 'ill')[n % 2]}\n"
        for n in range(500)
    )
    table.write_text("age,income,smoker,region,admitted,record,outcome\n" + "".join(people))
    recipe = Recipe.from_toml(shown.replace("patients.csv", str(table)).replace("steps = 500", "steps = 2"))
    assert assemble(recipe, tmp_path / "run", show_progress=False).fit().steps_done == 2


def test_numbers_and_places_are_those_of_the_code(monkeypatch):
    assert f"`image_size` ({SIZE})" in PAGE
    for ending in {ending.removeprefix(".") for ending in EXTENSIONS} - {"jpeg", "jfif", "tif"}:
        assert ending in PAGE
    monkeypatch.setenv(FOLDER_VARIABLE, "/mine")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    first, second, third = usual_folders("cifar10")
    assert (str(first), str(third)) == ("/mine/cifar10", "/usr/share/datasets/cifar10")
    assert second == Path.home() / ".local/share/dp-microadam/cifar10"
    for place in (f"${FOLDER_VARIABLE}/NAME", "~/.local/share/dp-microadam/NAME", "/usr/share/datasets/NAME"):
        assert f"`{place}`" in PAGE
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert usual_folders("cifar10") == [second, third]
