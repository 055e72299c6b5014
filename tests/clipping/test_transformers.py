"""Models of transformers, as they come and with LoRA of peft: exact against one-by-one gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dp_microadam import ClippedGradients, InputError
from dp_microadam.workbench import models

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VISION = {**SMALL, "image_size": 16, "patch_size": 4}
TEXT = {**SMALL, "vocab_size": 20, "max_position_embeddings": 12}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
GPT2 = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2}
T5 = {"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}

# Grouped queries and rotary positions in Llama; in T5 relative positions shared by the layers, and an encoder whose output
# goes into every layer of the decoder; in ALBERT the same layer at every depth; tied embeddings in the masked BERT and GPT-2.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "ViT": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)),
    "ViT eager": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, attn_implementation="eager")),
    "DeiT distilled": lambda: transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**VISION)),
    "Swin": lambda: transformers.SwinForImageClassification(transformers.SwinConfig(**SWIN, drop_path_rate=0.0, num_labels=3)),
    "BERT": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT)),
    "RoBERTa": lambda: transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**TEXT)),
    "ALBERT": lambda: transformers.AlbertForSequenceClassification(
        transformers.AlbertConfig(**TEXT, embedding_size=8, classifier_dropout_prob=0.0)
    ),
    "BERT masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **NO_DROPOUT)),
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
}

# The layers that are adapted, and what trains besides. GPT-2 has Conv1D, whose weight is transposed, in attention and MLP.
ADAPTED: dict[str, tuple[list[str], list[str] | None]] = {
    "ViT": (["q_proj", "v_proj"], ["classifier"]),
    "BERT": (["query", "value"], ["classifier"]),
    "GPT-2": (["c_attn", "c_proj", "c_fc"], None),
    "Llama": (["q_proj", "v_proj", "gate_proj", "down_proj"], None),
    "T5": (["q", "v", "wi"], None),
}


def with_lora(name: str, kind: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    targets, besides = ADAPTED[name]
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=besides, fan_in_fan_out=name == "GPT-2")
    return peft.get_peft_model(MODELS[name]().to(kind), config)


def inputs(name: str) -> Tensor | dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name.partition(" ")[0] in ("ViT", "DeiT", "Swin"):
        return torch.randn(4, 3, 16, 16, generator=generator)
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 5:] = 0
    tokens = {"input_ids": torch.randint(4, 20, (4, 8), generator=generator), "attention_mask": mask}
    return {**tokens, "decoder_input_ids": torch.randint(4, 20, (4, 6), generator=generator)} if name == "T5" else tokens


# Those that another of them differs from by little, and those that are slower with adapters than they tell.
SLOW = ("ViT eager", "DeiT distilled", "RoBERTa", "BERT", "Swin", "Llama")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS if name != "T5"]
)
def test_models_of_transformers_agree_with_the_loop(assert_agrees, name):
    torch.manual_seed(0)
    assert_agrees(MODELS[name](), inputs(name), strategies=(None,))


@pytest.mark.parametrize(
    ("name", "adapted"),
    [
        ("ViT", False),
        ("BERT", True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("BERT", False), ("Llama", True))),
    ],
)
def test_checkpointed_models_of_transformers_agree_with_the_loop(assert_agrees, name, adapted):
    torch.manual_seed(0)
    model = with_lora(name) if adapted else MODELS[name]()
    model.gradient_checkpointing_enable()
    assert_agrees(model.train(), inputs(name), strategies=(None,))


def test_training_only_biases_and_the_head_agrees_with_the_loop(assert_agrees):
    torch.manual_seed(0)
    model = MODELS["BERT"]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("classifier"))
    assert_agrees(model, inputs("BERT"), strategies=(None,))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("BERT", "ViT"))) for name in ADAPTED])
def test_adapters_of_peft_agree_with_the_loop(assert_agrees, name):
    model = with_lora(name)
    assert any("lora_A" in key for key, parameter in model.named_parameters() if parameter.requires_grad)
    assert_agrees(model.train(), inputs(name), strategies=(None,))


def test_single_rows_of_a_table_are_refused_by_name():
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], trainable_token_indices={"wte": [1, 2]}, fan_in_fan_out=True)
    with pytest.raises(InputError, match=r"'.*token_adapter' trains single rows.*trainable_token_indices.*modules_to_save"):
        ClippedGradients(peft.get_peft_model(MODELS["GPT-2"](), config), sine_loss, max_grad_norm=1.0)


def test_adapters_of_this_librarys_vision_transformer_agree_with_the_loop(assert_agrees):
    torch.manual_seed(0)
    size = models.TransformerSize(width=16, layers=2, heads=2)
    model = models.vit(size, 3, resolution=16, patch_size=4, normalize_features=True, lora_rank=2)
    assert_agrees(model.train(), inputs("ViT"), strategies=(None,))


def sine_loss(model: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    return model(**tokens).logits.float().sin().flatten(1).sum(1)


@pytest.mark.parametrize("kind", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_adapters_in_float32_on_half_precision_weights_are_clipped_exactly(kind):
    """Activations are rounded to half precision as in ordinary training; gradients, norms and sums of adapters are not."""
    model = with_lora("Llama", kind)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {kind}
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    unclipped = ClippedGradients(model, sine_loss, max_grad_norm=1e6)
    norms = unclipped.accumulate(inputs("Llama"))
    sine_loss(model, inputs("Llama")).sum().backward()
    for name, total in unclipped.sums.items():
        torch.testing.assert_close(total, model.get_parameter(name).grad, rtol=1e-5, atol=1e-5 * float(norms.max()))

    bound = float(norms.min()) / 2
    engine = ClippedGradients(model, sine_loss, max_grad_norm=bound)
    for row in range(4):
        engine.reset()
        engine.accumulate({key: value[row : row + 1] for key, value in inputs("Llama").items()})
        assert torch.stack([total.norm() for total in engine.sums.values()]).norm() == pytest.approx(bound, rel=1e-5)


def test_frozen_layers_are_not_observed():
    model = with_lora("BERT").train()
    hooked: set[str] = set()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hooked.update(name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks)
        return model(**batch).logits.sin().sum(1)

    ClippedGradients(model, loss, max_grad_norm=1.0).accumulate(inputs("BERT"))
    assert hooked == {name.rpartition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
