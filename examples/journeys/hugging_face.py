"""Hugging Face: MiniLM with LoRA adapters on text messages, spam or not, in its own Trainer at ε = 8.

    python examples/journeys/hugging_face.py [FOLDER] [--model minilm] [--data sms-spam] [--steps 60] [--batch-size 128]

``--model`` is a folder or a name of the hub, ``--data`` a folder with ``train.csv`` and ``test.csv``, by default the one that
``dp-microadam data list`` finds. Needs transformers, accelerate and peft.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path
from typing import Any

from clock import command, print_times, timed
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from dp_microadam import PrivacyPlan
from dp_microadam.integrations.hugging_face import PrivateHFTrainer
from dp_microadam.workbench import models
from dp_microadam.workbench.data.catalogue import find


def read(path: Path, tokenizer: Any, length: int) -> list[dict[str, Any]]:
    """One dict per message, all of one length: an example must not depend on its neighbours in a batch."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    tokens = tokenizer([row["text"] for row in rows], truncation=True, padding="max_length", max_length=length)
    columns = zip(tokens["input_ids"], tokens["attention_mask"], rows, strict=True)
    return [{"input_ids": ids, "attention_mask": mask, "labels": int(row["label"] == "spam")} for ids, mask, row in columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where all of it is written (default: a temporary folder)")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--length", type=int, default=32, help="tokens of a message")
    options = parser.parse_args()
    folder: Path = options.folder or Path(tempfile.mkdtemp())
    place: Path = options.data or find("sms-spam", None)

    with timed("loading"):
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        train, test = (read(place / f"{part}.csv", tokenizer, options.length) for part in ("train", "test"))
        model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
        model = models.with_lora(model, rank=8)
        plan = PrivacyPlan.solve(
            dataset_size=len(train), batch_size=options.batch_size, delta=1e-5, epsilon=8.0, steps=options.steps
        )
        trainer = PrivateHFTrainer(
            model,
            TrainingArguments(str(folder), logging_steps=10, report_to="none", disable_tqdm=True, save_strategy="no"),
            plan=plan,
            train_dataset=train,
            eval_dataset=test,
            compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
        )
    with timed("trainer.train()"):
        spent = trainer.train().metrics
    with timed("trainer.evaluate()"):
        accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()  # the adapters, with privacy.txt beside them
    command("report", folder)
    command("budget", folder)
    ham = sum(row["labels"] == 0 for row in test) / len(test)
    print(f"\ntest accuracy {100 * accuracy:.1f} % at ε = {spent['epsilon']:.2f}, δ = {spent['delta']:g}; ", end="")
    print(f"calling everything ham: {100 * max(ham, 1 - ham):.1f} %")
    print_times()


if __name__ == "__main__":
    main()
