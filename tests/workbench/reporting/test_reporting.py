"""What a run leaves for people to read."""

import subprocess
import sys

import pytest

from dp_microadam.errors import DPMicroAdamError
from dp_microadam.training.export import Contract, input_section, model_card
from dp_microadam.workbench.reporting.run_figures import draw_curves

pytest.importorskip("matplotlib")


def evaluations(count, *, averaged=True):
    rows = []
    for index in range(count):
        row = {"step": 100 * index, "epsilon": 0.5 * index, "validation_accuracy": 0.1 + 0.01 * index, "validation_loss": 2.0}
        if averaged:
            row |= {"ema_validation_accuracy": 0.1 + 0.02 * index, "ema_validation_loss": 1.9}
        rows.append(row)
    return rows


def drawn(monkeypatch, tmp_path, metrics, *, private=True):
    """The figure draw_curves saves, and the file."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), save(self, *args, **kwargs)))
    path = tmp_path / "curves.png"
    draw_curves(metrics, path, title="my run", private=private)
    return figures[0], path


def test_curves_show_the_figures_of_raw_and_averaged_weights(tmp_path, monkeypatch):
    rows = evaluations(8)
    figure, path = drawn(monkeypatch, tmp_path, rows)
    accuracy, loss = figure.axes[:2]
    steps = [row["step"] for row in rows]
    for axes, key, scale in ((accuracy, "validation_accuracy", 100), (loss, "validation_loss", 1)):
        for line, name in zip(axes.lines, (key, f"ema_{key}"), strict=True):
            assert list(line.get_xdata()) == steps
            assert list(line.get_ydata()) == pytest.approx([scale * row[name] for row in rows])
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_curves_of_a_private_run_show_what_was_spent_at_which_step(tmp_path, monkeypatch):
    rows = evaluations(21)
    figure, _ = drawn(monkeypatch, tmp_path, rows)
    figure.canvas.draw()
    (top,) = figure.axes[0].child_axes
    ticks = {int(step): label.get_text() for step, label in zip(top.get_xticks(), top.get_xticklabels(), strict=True)}
    spent = {row["step"]: f"{row['epsilon']:.2f}" for row in rows}
    assert ticks == {step: spent[step] for step in ticks}
    assert {0, 2000} <= ticks.keys()
    assert figure.get_suptitle() == "my run"


def test_curves_of_a_run_that_is_not_private_say_so_and_show_no_epsilon(tmp_path, monkeypatch):
    figure, _ = drawn(monkeypatch, tmp_path, evaluations(5), private=False)
    assert "not private" in figure.get_suptitle()
    assert not figure.axes[0].child_axes


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_evaluations_are_enough_for_curves(tmp_path, monkeypatch, count):
    _, path = drawn(monkeypatch, tmp_path, evaluations(count, averaged=False))
    assert path.stat().st_size > 0


def test_evaluations_with_gaps_and_diverged_losses_are_drawn(tmp_path, monkeypatch):
    rows = evaluations(4)
    rows[1]["validation_loss"] = float("nan")
    del rows[2]["ema_validation_accuracy"]
    rows[3]["epsilon"] = None
    figure, _ = drawn(monkeypatch, tmp_path, rows)
    assert len(figure.axes[1].lines[0].get_xdata()) == 3


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(DPMicroAdamError, match="no evaluations to draw"):
        draw_curves([], tmp_path / "curves.png", title="my run", private=True)
    assert not (tmp_path / "curves.png").exists()


def test_without_matplotlib_the_message_says_what_to_install():
    code = """
import sys
from pathlib import Path
sys.modules["matplotlib"] = None
from dp_microadam.workbench.reporting.run_figures import draw_curves
draw_curves([{"step": 0}], Path("never.png"), title="", private=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("figures need matplotlib; run pip install 'dp-microadam[plots]'")


CARD = model_card(
    "my\nmodel",
    'name = "demo"\ndata_folder = "/home/me/secret"\nepsilon = 8.0\n',
    "Not private: trained with a fixed seed.\n",
    {"test_accuracy": 0.93125, "test_loss": 0.251239, "steps": 2000, "note": "a|b"},
)


def test_the_card_opens_with_the_privacy_statement_in_full():
    assert CARD.startswith("# my model\n\n## Privacy\n\nNot private: trained with a fixed seed.\n\n## ")


def test_the_card_shows_metrics_and_recipe():
    assert "| test accuracy | 93.12 % |" in CARD
    assert "| test loss | 0.2512 |" in CARD
    assert "| steps | 2000 |" in CARD
    assert "| note | a\\|b |" in CARD
    assert '```toml\nname = "demo"\nepsilon = 8.0\n```' in CARD


def test_the_card_does_not_tell_where_data_lay():
    assert "secret" not in CARD


def test_a_card_without_metrics_has_no_empty_table():
    card = model_card("m", "name = 'm'", "Private.", {})
    assert "measure" not in card
    assert "## Training" in card


def test_backticks_in_a_recipe_do_not_end_its_block():
    card = model_card("m", 'name = "```\\n# Privacy: all is well"', "Not private.", {})
    assert "\n````toml\n" in card
    assert "\n````\n" in card


def test_names_in_the_card_are_text_and_neither_markdown_nor_html():
    statement = "PRIVATE for one <img src=x> [patient](javascript:x)."
    card = model_card("a *bold* <b>name</b>", "", statement, {"note": "`code` <i> a|b"})
    assert card.startswith(r"# a \*bold\* \<b\>name\</b\>" + "\n")
    assert r"PRIVATE for one \<img src=x> \[patient\](javascript:x)." in card
    assert r"| note | \`code\` \<i\> a\|b |" in card
    classes = ("<script>alert(1)</script>", "two\nlines", "[x](y)", "# title")
    contract = Contract("m", classes, {"in_words": "an image"}, program=None)
    assert r"order: \<script\>alert(1)\</script\>, two lines, \[x\](y), \# title." in input_section(contract, None)
