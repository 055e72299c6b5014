"""Models of transformers, as they come, with random weights. ``test_lora.py`` has those with adapters of peft."""

import pytest
import torch
from torch import Tensor, nn

from dp_microadam import ClippedGradients, InputError

transformers = pytest.importorskip("transformers")

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TEXT = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
GPT2 = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS = {
    "ViT": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)),
    "ViT eager": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, attn_implementation="eager")),
    "DeiT": lambda: transformers.DeiTForImageClassification(transformers.DeiTConfig(**VISION)),
    "DeiT distilled": lambda: transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**VISION)),
    "Swin": lambda: transformers.SwinForImageClassification(transformers.SwinConfig(**SWIN, drop_path_rate=0.0, num_labels=3)),
    "BERT": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT)),
    "RoBERTa": lambda: transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**TEXT)),
    # The same layer at every depth.
    "ALBERT": lambda: transformers.AlbertForSequenceClassification(
        transformers.AlbertConfig(**TEXT, embedding_size=8, classifier_dropout_prob=0.0)
    ),
    # Tied input and output embeddings.
    "BERT masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **NO_DROPOUT)),
}


def inputs(name: str) -> Tensor | dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name.partition(" ")[0] in ("ViT", "DeiT", "Swin"):
        return torch.randn(4, 3, 16, 16, generator=generator)
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.randint(4, 20, (4, 8), generator=generator), "attention_mask": mask}


# Those that another of them differs from by little.
SIMILAR = ("ViT eager", "DeiT", "DeiT distilled", "RoBERTa", "BERT", "Swin")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SIMILAR)) for name in MODELS])
def test_models_of_transformers_agree_with_the_loop(assert_agrees, name):
    torch.manual_seed(0)
    assert_agrees(MODELS[name](), inputs(name), strategies=(None,))


@pytest.mark.parametrize("name", ["ViT", pytest.param("BERT", marks=pytest.mark.slow)])
def test_checkpointed_models_of_transformers_agree_with_the_loop(assert_agrees, name):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.gradient_checkpointing_enable()
    assert_agrees(model.train(), inputs(name), strategies=(None,))


def test_training_only_biases_and_the_head_agrees_with_the_loop(assert_agrees):
    torch.manual_seed(0)
    model = MODELS["BERT"]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("classifier"))
    assert_agrees(model, inputs("BERT"), strategies=(None,))


def test_dropout_inside_models_is_that_of_ordinary_training():
    torch.manual_seed(0)
    noisy = {**TEXT, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**noisy)).train()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).logits.sin().sum(1)

    engine = ClippedGradients(model, loss, max_grad_norm=1e6)
    engine.accumulate(inputs("BERT"))
    engine.reset()
    torch.manual_seed(1)
    engine.accumulate(inputs("BERT"))
    torch.manual_seed(1)
    loss(model, inputs("BERT")).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(engine.sums[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_parameter_that_a_model_does_not_use_is_refused_by_name():
    config = transformers.BertConfig(**TEXT)
    model = transformers.BertModel(config)  # its pooler is not part of the loss below
    engine = ClippedGradients(model, lambda m, b: m.encoder(m.embeddings(b))[0].sum((1, 2)), max_grad_norm=1.0)
    with pytest.raises(InputError, match=r"'pooler.dense.weight'.*requires_grad_"):
        engine.accumulate(torch.randint(4, 20, (4, 8)))
