"""What a model gives away about its training data, without privacy and with it: the picture of the README.

    python benchmarks/leak.py [--seeds 3] [--epsilon 8] [--picture FILE.png] [--out FILE]

200 images of digits get wrong labels; half of them, drawn at random, go into the training data together with 1,000 ordinary
images. A fully connected network is trained with Adam until it fits, and privately with the defaults of this library. An
attacker who has the model, and asks whether an image with its wrong label was in the training data, accuses where the loss is
low: shown is which part of those that were in is found, over the part of the others that is accused. The bound is the run's
own, from its privacy loss distribution.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from measuring import add_options, deliver
from torch import Tensor, nn

from dp_microadam import PrivacyPlan, PrivateTrainer, RecordSettings, methods
from dp_microadam.accounting.trade_off import trade_off
from dp_microadam.workbench import data
from dp_microadam.workbench.data import Preparation
from dp_microadam.workbench.reporting.figures import STYLES, add_legend, new_figure, save_png

ORDINARY, ODD = 1000, 200
RATES = np.linspace(0, 1, 201)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def found(model: nn.Module, taken: tuple[Tensor, Tensor], left_out: tuple[Tensor, Tensor]) -> np.ndarray:
    """Which part of those in the data an attacker finds, for each of ``RATES``."""
    with torch.no_grad():
        inside, outside = losses(model, taken).numpy(), losses(model, left_out).numpy()
    thresholds = np.quantile(outside, RATES)
    return np.array([(inside <= threshold).mean() for threshold in thresholds])


def attack(seed: int, epsilon: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, float]]:
    """The attacker's success against both models, the private run's bound, and both test accuracies."""
    torch.manual_seed(seed)
    digits = data.load("digits")
    prepare = Preparation(digits)
    inputs, labels = prepare(digits.train)
    order = torch.randperm(len(labels))
    ordinary, odd = order[:ORDINARY], order[ORDINARY : ORDINARY + ODD]
    odd_labels = (labels[odd] + torch.randint(1, 10, (ODD,))) % 10
    taken, left_out = (inputs[odd[: ODD // 2]], odd_labels[: ODD // 2]), (inputs[odd[ODD // 2 :]], odd_labels[ODD // 2 :])
    train = torch.cat([inputs[ordinary], taken[0]]), torch.cat([labels[ordinary], taken[1]])
    open_model, private_model = network(), network()
    optimizer = torch.optim.Adam(open_model.parameters())
    for _ in range(300):
        optimizer.zero_grad()
        losses(open_model, train).mean().backward()
        optimizer.step()
    plan = PrivacyPlan.solve(dataset_size=len(train[1]), batch_size=128, delta=1e-5, epsilon=epsilon, steps=300)
    method, plan = methods.default(private_model, plan)
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            private_model,
            method,
            plan,
            losses,
            run_dir=Path(folder) / "run",
            record=RecordSettings(show_progress=False),
        )
        trainer.fit(train)
    curve = trade_off([plan.spent_after(plan.steps)])
    bound = np.array([curve.true_positives(float(rate)) if 0 < rate < 1 else rate for rate in RATES])
    test = prepare(digits.test)
    with torch.no_grad():
        accuracies = {
            name: 100 * float((model(test[0]).argmax(1) == test[1]).float().mean())
            for name, model in (("without privacy", open_model), ("with privacy", private_model))
        }
    return found(open_model, taken, left_out), found(private_model, taken, left_out), bound, accuracies


def draw(curves: dict[str, np.ndarray], path: Path) -> None:
    """The curves, over the part of innocents that is accused."""
    figure, axes = new_figure(300, width=460)
    for style, (label, curve) in zip(STYLES, curves.items(), strict=False):
        axes.plot(100 * RATES, 100 * curve, color=style.colour, linestyle=style.line_style, linewidth=2.2, label=label)
    axes.plot([0, 100], [0, 100], color=STYLES[-1].colour, linestyle=STYLES[-1].line_style, linewidth=1.4, label="guessing")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 101)
    axes.set_xlabel("innocents accused (%)")
    axes.set_ylabel("found of those in the data (%)")
    add_legend(figure)
    save_png(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw both attacks and the bound into this file")
    add_options(parser)
    options = parser.parse_args()
    rows, results = [], []
    at = [int(np.searchsorted(RATES, rate)) for rate in (0.01, 0.1)]
    print("found of those in the data, accusing 1 % / 10 % of innocents; test accuracy", flush=True)
    for seed in range(1, options.seeds + 1):
        *curves, accuracies = attack(seed, options.epsilon)
        rows.append(curves)
        for name, curve in zip(("without privacy", "with privacy", "bound"), curves, strict=True):
            accuracy = accuracies.get(name)
            reached = [float(curve[index]) for index in at]
            results.append({"seed": seed, "model": name, "found": reached, "accuracy": accuracy})
            shown = "" if accuracy is None else f"{accuracy:6.1f} %"
            print(f"seed {seed}  {name:16} {100 * reached[0]:5.1f} % {100 * reached[1]:5.1f} % {shown}", flush=True)
    if options.picture is not None:
        means = np.mean(rows, axis=0)
        labels = ("trained without privacy", f"trained with ε = {options.epsilon:g}", f"bound of ε = {options.epsilon:g}")
        draw(dict(zip(labels, means, strict=True)), options.picture)
    deliver(options, "leak", results)


if __name__ == "__main__":
    main()
