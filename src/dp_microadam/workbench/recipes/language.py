"""Figures of a language model that people look at: perplexity on held-out texts, and a sample of what it writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dp_microadam.training.evaluation import PerExample, document_nats, document_tokens
from dp_microadam.workbench.models.hugging_face import TextModel
from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.texts import encoder_of

_NEW_TOKENS = 40


@dataclass(frozen=True)
class LanguageFigures:
    """Perplexity on the test texts, and the continuation of the recipe's ``prompt``; None without one."""

    perplexity: float
    sample: str | None

    def as_metrics(self, when: str = "") -> dict[str, Any]:
        """For JSON files; ``when`` is appended to the names."""
        sample = {} if self.sample is None else {f"sample{when}": self.sample}
        return {f"test_perplexity{when}": self.perplexity, **sample}


def language_figures(
    recipe: Recipe, model: TextModel, means: Callable[[Mapping[str, PerExample]], Mapping[str, float]]
) -> LanguageFigures:
    """Figures of a model; ``means`` evaluates measures on the test texts.

    Perplexity is exp of the mean cross-entropy of a token, over all tokens of all texts.
    """
    found = means({"nats": document_nats, "tokens": document_tokens})
    prompt = recipe.model_options.get("prompt")
    return LanguageFigures(math.exp(found["nats"] / found["tokens"]), written(recipe, model, prompt) if prompt else None)


@torch.no_grad()
def written(recipe: Recipe, model: TextModel, prompt: str) -> str:
    """``prompt`` and the most likely tokens after it, without a repetition of three."""
    tokenizer = encoder_of(recipe).tokenizer
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        inputs = tokenizer(prompt, return_tensors="pt")["input_ids"].to(next(model.parameters()).device)
        network: Any = model.network
        found = network.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=_NEW_TOKENS,
            do_sample=False,
            no_repeat_ngram_size=3,
        )
    finally:
        for module, mode in modes.items():
            module.training = mode
    return " ".join(tokenizer.decode(found[0], skip_special_tokens=True).split())
