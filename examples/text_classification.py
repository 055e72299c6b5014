"""A private text classifier in Hugging Face's Trainer: a tiny BERT on made-up reviews. Needs transformers and accelerate."""

import itertools
import random
import tempfile

from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from dp_microadam import PrivacyPlan
from dp_microadam.integrations.hugging_face import PrivateHFTrainer

PHRASES = """
the film|the plot|every scene|the music|the whole cast|this story|the ending|the camera work
was|was really|was truly|seemed|felt rather|turned out
delightful|moving|brilliant|warm|clever|gripping|charming|superb|honest|fresh|funny|wonderful
dull|clumsy|boring|cold|tedious|shallow|awful|lifeless|messy|stale|annoying|dreadful
from start to finish|as my friends said|and I will say so|to be fair|in the end|once again
"""
subjects, degrees, good, bad, rests = (line.split("|") for line in PHRASES.split("\n")[1:-1])
reviews = [
    (f"{subject} {degree} {word} {rest}", int(word in good))
    for subject, degree, word, rest in itertools.product(subjects, degrees, good + bad, rests)
]
random.Random(0).shuffle(reviews)
vocabulary = {"": 0, "[CLS]": 1} | {word: i for i, word in enumerate(sorted({w for t, _ in reviews for w in t.split()}), 2)}
LENGTH = 14  # all are padded to one length, so that an example does not depend on its neighbours in a batch


def encode(text, label):
    words = [vocabulary["[CLS]"], *(vocabulary[word] for word in text.split())]
    padding = LENGTH - len(words)
    return {"input_ids": words + [0] * padding, "attention_mask": [1] * len(words) + [0] * padding, "labels": label}


train, test = ([encode(*review) for review in part] for part in (reviews[:5000], reviews[5000:]))
sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.15,
}
model = BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=LENGTH, **sizes))
plan = PrivacyPlan.solve(dataset_size=len(train), batch_size=256, delta=1e-5, epsilon=8.0, steps=300)
trainer = PrivateHFTrainer(
    model,
    TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=256, logging_steps=50, report_to="none", disable_tqdm=True
    ),
    plan=plan,
    train_dataset=train,
    eval_dataset=test,
    compute_metrics=lambda result: {"accuracy": float((result.predictions.argmax(1) == result.label_ids).mean())},
)
spent = trainer.train().metrics
print(f"test accuracy {100 * trainer.evaluate()['eval_accuracy']:.1f} % at ε = {spent['epsilon']:.2f}, δ = {spent['delta']:g}")
