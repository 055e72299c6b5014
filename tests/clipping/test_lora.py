"""LoRA of peft on models of transformers: exact against one-by-one gradients, and its frozen weights cost nothing."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from flat import flat, idle
from torch import Tensor, nn

from dp_microadam import ClippedGradients, InputError, PrivacyPlan, PrivateStep
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.workbench import models

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

BERT = {
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
VIT = {**{key: value for key, value in BERT.items() if key not in ("vocab_size", "max_position_embeddings")}, "image_size": 16}
GPT2 = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
}
T5 = {"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **NO_DROPOUT))


# The model, its adapted layers, and what trains besides.
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str], list[str] | None]] = {
    "ViT": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, patch_size=4)),
        ["q_proj", "v_proj"],
        ["classifier"],
    ),
    "BERT": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**BERT)),
        ["query", "value"],
        ["classifier"],
    ),
    # Conv1D, whose weight is transposed; attention and MLP.
    "GPT-2": (gpt2, ["c_attn", "c_proj", "c_fc"], None),
    # Grouped queries and rotary positions.
    "Llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
        ["q_proj", "v_proj", "gate_proj", "down_proj"],
        None,
    ),
    # Relative positions shared by the layers; the encoder's output goes into every layer of the decoder.
    "T5": (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)), ["q", "v", "wi"], None),
}


def with_lora(name: str, kind: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    make, targets, besides = MODELS[name]
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=besides, fan_in_fan_out=name == "GPT-2")
    return peft.get_peft_model(make().to(kind), config)


def inputs(name: str) -> Tensor | dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "ViT":
        return torch.randn(4, 3, 16, 16, generator=generator)
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 5:] = 0
    tokens = {"input_ids": torch.randint(4, 20, (4, 8), generator=generator), "attention_mask": mask}
    return {**tokens, "decoder_input_ids": torch.randint(4, 20, (4, 6), generator=generator)} if name == "T5" else tokens


@pytest.mark.parametrize(
    ("name", "checkpointed"),
    [
        ("GPT-2", False),
        ("Llama", False),
        ("T5", False),
        ("BERT", True),
        pytest.param("BERT", False, marks=pytest.mark.slow),
        pytest.param("ViT", False, marks=pytest.mark.slow),
        pytest.param("ViT", True, marks=pytest.mark.slow),
        pytest.param("Llama", True, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_peft_agree_with_the_loop(assert_agrees, name, checkpointed):
    model = with_lora(name)
    if checkpointed:
        model.gradient_checkpointing_enable()
    trainable = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    assert any("lora_A" in key for key in trainable)
    assert_agrees(model.train(), inputs(name), strategies=(None,))


def test_single_rows_of_a_table_are_refused_by_name():
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], trainable_token_indices={"wte": [1, 2]}, fan_in_fan_out=True)
    with pytest.raises(InputError, match=r"'.*token_adapter' trains single rows.*trainable_token_indices.*modules_to_save"):
        ClippedGradients(peft.get_peft_model(gpt2(), config), next_token_loss, max_grad_norm=1.0)


def test_adapters_of_this_librarys_vision_transformer_agree_with_the_loop(assert_agrees):
    torch.manual_seed(0)
    size = models.TransformerSize(width=16, layers=2, heads=2)
    model = models.vit(size, 3, resolution=16, patch_size=4, normalize_features=True, lora_rank=2)
    assert_agrees(model.train(), inputs("ViT"), strategies=(None,))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over a document's tokens, one number per document."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def test_lora_on_the_fused_layer_of_gpt2_moves_b_by_the_gradients_of_the_loop(tmp_path):
    """The reproducer of opacus#820: rank 16, alpha 32 on c_attn, batches of 4; there no lora_B ever moved."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True
    )
    model = peft.get_peft_model(gpt2(), config).train()
    tokens = torch.randint(0, 20, (4, 12))
    expected, norms = clipped_sum(model, next_token_loss, tokens, max_grad_norm=1.0)
    engine = ClippedGradients(model, next_token_loss, max_grad_norm=1.0)
    found = engine.accumulate(tokens)
    torch.testing.assert_close(found, torch.tensor(norms), rtol=1e-4, atol=0)
    for name, total in engine.sums.items():
        torch.testing.assert_close(total, expected[name], rtol=1e-4, atol=1e-7)

    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan = PrivacyPlan.solve(dataset_size=4, batch_size=2, epsilon=8.0, delta=1e-5, steps=3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    step = PrivateStep(model, idle(model), plan, next_token_loss, tokens, run_dir=tmp_path / "run", **flat(max_grad_norm=1.0))
    for gradients in step:
        for name, mean in gradients.items():
            model.get_parameter(name).grad = mean
        optimizer.step()
    step.close()
    for name, parameter in model.named_parameters():
        assert parameter.equal(before[name]) is not parameter.requires_grad, name
        assert "lora_B" not in name or parameter.ne(0).all(), name


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
