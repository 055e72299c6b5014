"""One of several processes of a Hugging Face run; ``test_hugging_face.py`` starts them and looks at what they leave behind.

    LOCAL_RANK=… RANK=… WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python hugging_face_worker.py FOLDER

Also run by a process alone, for comparison: ``train(folder)``.
"""

import os
import sys
from pathlib import Path

import torch
from flat import flat
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, PretrainedConfig, PreTrainedModel, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from dp_microadam import PrivacyPlan, methods
from dp_microadam.integrations.hugging_face import PrivateHFTrainer

LENGTH, WORDS, COUNT = 6, 20, 60
PLAN = PrivacyPlan(dataset_size=COUNT, batch_size=20, noise_multiplier=0.7, steps=8, delta=1e-3)


def sentences(count, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(2, WORDS, (count, LENGTH), generator=generator)
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": (words[:, 0] > WORDS // 2).long()}


def rows(columns):
    return [{name: value[i] for name, value in columns.items()} for i in range(len(columns["labels"]))]


def bert(seed=1, **options):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **{**sizes, **options}))


class WordsConfig(PretrainedConfig):
    model_type = "words"

    def __init__(self, dropout=0.1, **options):
        self.dropout = dropout
        super().__init__(**options)


class Words(PreTrainedModel):
    """Classifies a sentence by the mean of its words: a model of the host's kind that takes little time to check."""

    config_class = WordsConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(WORDS, 32)
        self.hidden, self.norm = nn.Linear(32, 8), nn.LayerNorm(8)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(8, 2)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.norm(torch.tanh(self.hidden(self.words(input_ids).mean(1))))
        logits = self.classifier(self.dropout(hidden))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def words(seed=1, **options):
    torch.manual_seed(seed)
    return Words(WordsConfig(**options))


def without_dropout(seed=1):
    """In double precision, and without what processes draw differently."""
    return words(seed, dropout=0.0).double()


def sparta(model):
    return methods.sparta(model, lr=0.1, keep=0.5, first_phase=0.25, scoring_epochs=1.0)


def trainer_of(folder, model, **arguments):
    """Trains by SPARTA: head and biases, then scores, then the chosen rows."""
    settings = {
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
    }
    args = TrainingArguments(str(folder), per_device_train_batch_size=7, **{**settings, **arguments})
    data = {"train_dataset": rows(sentences(COUNT, 0)), "eval_dataset": rows(sentences(32, 1))}
    return PrivateHFTrainer(model, args, plan=PLAN, method=sparta(model), **flat(seed=4, **data))


def train(folder, seed=1):
    """Train to the end: the weights, and the loss of held-out examples."""
    trainer = trainer_of(folder, without_dropout(seed))
    trainer.train()
    return {"weights": trainer.model.state_dict(), "loss": trainer.evaluate()["eval_loss"]}


def train_in_parts(folder):
    """The same, stopped while rows are scored and resumed by a model that knows nothing: the weights."""
    trainer_of(folder, without_dropout(), max_steps=4, save_strategy="steps", save_steps=4).train()
    trainer = trainer_of(folder, without_dropout(seed=9))
    trainer.train(resume_from_checkpoint=True)
    return trainer.model.state_dict()


def main(folder):
    rank = int(os.environ["LOCAL_RANK"])
    checks = {
        "trained": lambda: train(folder / "trained", seed=1 + rank),  # all take the weights of rank 0
        "parts": lambda: train_in_parts(folder / "parts"),
    }
    for name, check in checks.items():
        torch.save(check(), folder / f"{name}-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
