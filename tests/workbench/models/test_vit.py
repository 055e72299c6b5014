"""Vision transformers have the published sizes, take any resolution, and keep what their pretrained weights compute."""

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from dp_microadam import InputError
from dp_microadam.workbench import models
from dp_microadam.workbench.models import TransformerSize
from dp_microadam.workbench.models.vit import resized_positions

pytest.importorskip("transformers")

SMALL = TransformerSize(width=16, layers=2, heads=2)
REAL = os.environ.get("DP_MICROADAM_VIT_TINY")
needs_real_weights = pytest.mark.skipif(not REAL, reason="DP_MICROADAM_VIT_TINY names no vit_tiny_patch16_224.safetensors")


@pytest.fixture
def small_file(tmp_path, timm_checkpoint):
    path = tmp_path / "small.safetensors"
    save_file(timm_checkpoint(), path)
    return str(path)


def transformer_parameters(width: int, layers: int, tokens: int, classes: int) -> int:
    """Per layer four width×width projections, an MLP of 4·width, their biases and two LayerNorms."""
    layer = 4 * width * width + 4 * width + 2 * 4 * width * width + 5 * width + 2 * 2 * width
    return layers * layer + (3 * 16 * 16 + 1) * width + width + tokens * width + 2 * width + (width + 1) * classes


@pytest.mark.parametrize(("size", "published"), [("tiny", 5_717_416), ("small", 22_050_664), ("base", 86_567_656)])
def test_deit_has_the_published_number_of_parameters(size, published):
    # Touvron et al. (2021), table 1: 5M, 22M and 86M; exactly so many without distillation and with 1000 classes.
    with torch.device("meta"):
        model = models.deit(size)
    found = sum(p.numel() for p in model.parameters())
    assert found == published
    width, layers, heads = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)}[size]
    assert found == transformer_parameters(width, layers, 197, 1000)
    config = model.backbone.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (width, layers, heads)


def test_vit_large_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = models.vit("large")
    # Dosovitskiy et al. (2021), table 1: 307M, with a hidden layer of 1024 in the head that fine-tuned models lack.
    assert sum(p.numel() for p in model.parameters()) == transformer_parameters(1024, 24, 197, 1000) == 304_326_632


@pytest.mark.parametrize("resolution", [32, 96, 224])
@pytest.mark.parametrize("images", [32, 96])
def test_images_of_any_size_give_one_score_per_class(resolution, images):
    torch.manual_seed(0)
    model = models.vit("tiny", 7, resolution=resolution)
    assert model.backbone.embeddings.position_embeddings.shape[1] == (resolution // 16) ** 2 + 1
    with torch.no_grad():
        assert model(torch.randn(2, 3, images, images)).shape == (2, 7)


def test_images_are_resized_to_the_resolution_of_the_model():
    torch.manual_seed(0)
    model = models.vit(SMALL, 5, resolution=32, patch_size=8)
    x = torch.rand(2, 3, 20, 20)
    torch.testing.assert_close(model(x), model(F.interpolate(x, size=(32, 32), mode="bilinear", antialias=True)))
    flat = torch.full((1, 3, 1, 1), 0.3)
    torch.testing.assert_close(model(flat.expand(1, 3, 9, 9)), model(flat.expand(1, 3, 32, 32)))


def test_a_random_model_starts_as_stated():
    torch.manual_seed(0)
    model = models.vit("tiny", 1000, resolution=32)
    for weight in (model.head.weight, model.backbone.layers[3].mlp.fc1.weight):
        # Six standard errors of the deviation of that many draws: false alarm 2e-9.
        assert abs(float(weight.detach().std()) / 0.02 - 1) < 6 / math.sqrt(2 * weight.numel())
    assert model.head.bias.unique().tolist() == [0.0]
    assert models.normalization_of(model) is None


@pytest.mark.parametrize("ending", ["safetensors", "pth", "wrapped.pth", "half.pth"])
def test_a_file_of_timm_gives_the_scores_of_an_independent_forward_pass(tmp_path, timm_checkpoint, timm_scores, ending):
    tensors = timm_checkpoint()
    path = tmp_path / f"weights.{ending}"
    if ending == "half.pth":
        tensors = {name: value.bfloat16().float() for name, value in tensors.items()}
        torch.save({name: value.bfloat16() for name, value in tensors.items()}, path)
    elif ending == "safetensors":
        save_file(tensors, path)
    else:
        torch.save({"model": tensors, "epoch": 3} if "wrapped" in ending else tensors, path)
    model = models.vit(SMALL, 5, pretrained=str(path), resolution=32, patch_size=8)
    images = torch.randn(3, 3, 32, 32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(images), timm_scores(tensors, images, heads=2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", [1, 2, 3, 4, 6])
def test_position_embeddings_are_interpolated_over_the_grid_of_patches(small_file, timm_checkpoint, timm_scores, side):
    tensors = timm_checkpoint()
    model = models.vit(SMALL, 5, pretrained=small_file, resolution=8 * side, patch_size=8)
    # Channel by channel as little pictures of 4×4, in the order of the patches.
    pictures = torch.stack([tensors["pos_embed"][0, 1:, channel].view(1, 4, 4) for channel in range(16)])
    resized = F.interpolate(pictures, size=(side, side), mode="bicubic", align_corners=False)
    positions = torch.cat([tensors["pos_embed"][:, :1], resized.view(16, side**2).T[None]], dim=1)
    torch.testing.assert_close(model.backbone.embeddings.position_embeddings.detach(), positions)
    if side == 4:
        assert torch.equal(positions, tensors["pos_embed"])
    images = torch.randn(2, 3, 8 * side, 8 * side)
    torch.testing.assert_close(model(images), timm_scores(tensors, images, 2, positions), rtol=1e-4, atol=1e-4)


def test_interpolated_positions_stay_where_they_were_in_the_image():
    rows, columns = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
    ramp = torch.stack([rows, columns], dim=-1).view(1, 196, 2)
    found = resized_positions(torch.cat([torch.tensor([[[9.0, -9.0]]]), ramp], dim=1), 28)
    assert found[0, 0].tolist() == [9.0, -9.0]
    grid = found[0, 1:].view(28, 28, 2)
    expected = (torch.arange(28.0) + 0.5) / 2 - 0.5
    # The cubic kernel reproduces a ramp to a twentieth of a step.
    torch.testing.assert_close(grid[4:-4, 10, 0], expected[4:-4], rtol=0, atol=0.05)
    torch.testing.assert_close(grid[10, 4:-4, 1], expected[4:-4], rtol=0, atol=0.05)


def test_the_head_is_kept_for_as_many_classes_and_new_for_others(small_file, timm_checkpoint):
    tensors = timm_checkpoint()
    kept = models.vit(SMALL, 5, pretrained=small_file, resolution=32, patch_size=8)
    assert torch.equal(kept.head.weight, tensors["head.weight"])
    torch.manual_seed(0)
    replaced = models.vit(SMALL, 1000, pretrained=small_file, resolution=32, patch_size=8)
    assert replaced.head.weight.shape == (1000, 16)
    assert abs(float(replaced.head.weight.detach().std()) / 0.02 - 1) < 6 / math.sqrt(2 * 16_000)
    assert replaced.head.bias.unique().tolist() == [0.0]
    assert torch.equal(replaced.backbone.layernorm.weight, tensors["norm.weight"])


def test_a_file_without_a_classifier_gets_a_new_head(tmp_path, timm_checkpoint):
    path = tmp_path / "features.safetensors"
    save_file({name: value for name, value in timm_checkpoint().items() if not name.startswith("head")}, path)
    model = models.vit(SMALL, 5, pretrained=str(path), resolution=32, patch_size=8)
    assert model.head.bias.unique().tolist() == [0.0]


def test_only_the_head_trains_if_asked_for(small_file):
    model = models.vit(SMALL, 3, pretrained=small_file, resolution=32, patch_size=8, trainable="head")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    everything = models.vit(SMALL, 3, resolution=32, patch_size=8)
    assert all(p.requires_grad for p in everything.parameters())


def test_normalization_constants_belong_to_the_weights(small_file):
    vit = models.vit(SMALL, 5, pretrained=small_file, resolution=32, patch_size=8)
    deit = models.deit(SMALL, 5, pretrained=small_file, resolution=32, patch_size=8)
    assert models.normalization_of(vit) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert models.normalization_of(deit) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert models.normalization_of("vit-base") == models.normalization_of(vit)
    assert models.normalization_of("deit-small") == models.normalization_of(deit)
    assert models.normalization_of("nf-resnet-50") is None
    assert models.normalization_of(models.tanh_cnn()) is None
    with pytest.raises(InputError, match="model is 'vit'"):
        models.normalization_of("vit")


@needs_real_weights
def test_vit_tiny_gives_the_scores_of_an_independent_forward_pass(timm_scores):
    from safetensors.torch import load_file

    model = models.vit("tiny", pretrained=REAL).eval()
    images = torch.rand(4, 3, 224, 224) * 2 - 1
    with torch.no_grad():
        found, expected = model(images), timm_scores(load_file(REAL), images, heads=3)
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_real_weights
@pytest.mark.parametrize("resolution", [32, 96])
def test_vit_tiny_with_a_new_head_works_at_other_resolutions(timm_scores, resolution):
    from safetensors.torch import load_file

    tensors = load_file(REAL)
    model = models.vit("tiny", 10, pretrained=REAL, resolution=resolution).eval()
    side = resolution // 16
    grid = tensors["pos_embed"][:, 1:].view(1, 14, 14, 192).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False).permute(0, 2, 3, 1)
    positions = torch.cat([tensors["pos_embed"][:, :1], grid.reshape(1, -1, 192)], dim=1)
    tensors |= {"head.weight": model.head.weight, "head.bias": model.head.bias}
    images = torch.rand(2, 3, resolution, resolution) * 2 - 1
    with torch.no_grad():
        assert model(images).shape == (2, 10)
        torch.testing.assert_close(model(images), timm_scores(tensors, images, 3, positions), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "huge"}, "size is 'huge'; it must be one of 'tiny'"),
        ({"num_classes": 0}, "num_classes is 0; it must be a whole number"),
        ({"patch_size": 0}, "patch_size is 0; it must be a whole number"),
        ({"resolution": 8}, "resolution is 8; it must be a whole number at least 16"),
        ({"resolution": 100}, "resolution is 100; it must be a multiple of patch_size, which is 16"),
        ({"trainable": "tail"}, "trainable is 'tail'; it must be one of 'all', 'biases', 'head'"),
        ({"pretrained": True}, "pretrained is True; it must be a hub name, a folder or a file"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(InputError, match=message):
        models.vit(**options)


def test_transformers_is_imported_when_one_is_built_and_without_it_one_sentence_says_what_to_install():
    code = (
        "import sys\n"
        "from dp_microadam.workbench import models\n"
        "models.wide_resnet(10, 1)\n"
        "print('transformers' in sys.modules)\n"
        "sys.modules['transformers'] = None\n"
        "try: models.build('deit-tiny', 10, (3, 32, 32))\n"
        "except models.registry.InputError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    imported, sentence = done.stdout.splitlines()
    assert imported == "False"
    assert "pip install 'dp-microadam[transformers]'" in sentence


def test_adapters_leave_a_vision_transformer_as_it_was_and_train_with_the_head_alone():
    pytest.importorskip("peft")
    images = torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    plain = models.vit(SMALL, 3, resolution=32).eval()
    torch.manual_seed(0)
    adapted = models.vit(SMALL, 3, resolution=32, lora_rank=2).eval()
    torch.testing.assert_close(adapted(images), plain(images), rtol=0, atol=0)
    trained = {name: parameter.numel() for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or name.startswith("head.") for name in trained)
    # Two layers, queries and values of each, A and B of 2 × 16; 16 × 3 weights and 3 biases of the head.
    assert sum(trained.values()) == 2 * 2 * 2 * 2 * 16 + 16 * 3 + 3


def test_biases_of_a_vision_transformer_train_with_the_head_alone():
    model = models.vit(SMALL, 3, resolution=32, trainable="biases")
    trained = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(name.endswith("bias") or name.startswith("head.") for name in trained)
    # Of each layer four projections, two LayerNorms and the MLP's 4·16 + 16; the patches' and the last LayerNorm's; the head.
    assert sum(trained.values()) == 2 * (4 * 16 + 2 * 16 + 5 * 16) + 2 * 16 + 16 * 3 + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 2, "trainable": "biases"}, "trainable is 'biases' and lora_rank is 2; with LoRA leave trainable out"),
        ({"lora_rank": 2, "trainable": "head"}, "trainable is 'head' and lora_rank is 2; with LoRA leave trainable out"),
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"lora_alpha": 4.0}, r"lora_alpha is 4\.0, but lora_rank is 0, which means no adapters; give lora_rank too"),
        ({"lora_rank": 2, "lora_targets": ["nothing"]}, "lora_targets is .*nothing.*does not fit this model"),
        ({"lora_rank": 2, "lora_alpha": 0}, "lora_alpha is 0"),
    ],
)
def test_parts_that_cannot_be_trained_are_one_sentence(options, message):
    pytest.importorskip("peft")
    with pytest.raises(InputError, match=message):
        models.vit(SMALL, 3, resolution=32, **options)


def test_with_lora_trains_the_head_that_a_model_has_whatever_it_is_called_or_takes():
    pytest.importorskip("peft")
    import transformers

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    pictures = {**small, "image_size": 16, "patch_size": 8}
    clip = transformers.CLIPForImageClassification(
        transformers.CLIPConfig(vision_config=pictures, text_config=small, num_labels=2)
    )
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**pictures, num_labels=2))
    for network in (clip, vit):
        adapted = models.with_lora(network, 2, targets=["q_proj"])
        trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
        assert {name for name in trained if "lora_" not in name} == {
            f"base_model.model.classifier.modules_to_save.default.{what}" for what in ("weight", "bias")
        }
        assert adapted(pixel_values=torch.randn(1, 3, 16, 16)).logits.shape == (1, 2)


def test_what_a_class_of_transformers_froze_stays_frozen():
    """RoFormer's positions are fixed; no operation of its forward pass would use a gradient."""
    import transformers

    from dp_microadam.workbench.models.trainable_part import freeze_but

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    encoder = transformers.RoFormerModel(transformers.RoFormerConfig(**sizes))
    fixed = {name for name, parameter in encoder.named_parameters() if not parameter.requires_grad}
    assert fixed
    freeze_but(encoder, "all")
    assert {name for name, parameter in encoder.named_parameters() if not parameter.requires_grad} == fixed


def test_layers_to_adapt_are_named_where_peft_has_no_default():
    pytest.importorskip("peft")
    with pytest.raises(InputError, match=r"lora_targets is empty, and peft has no default .* 'q_proj', .*'all-linear'"):
        models.with_lora(models.vit(SMALL, 3, resolution=32).backbone, 2)


def test_the_head_of_a_model_of_ones_own_trains_beside_its_adapters():
    pytest.importorskip("peft")

    class OwnModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.classifier = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
            self.config = {"model_type": "own"}

    adapted = models.with_lora(OwnModel(), 2, targets=["query"])
    assert any("classifier" in name for name, parameter in adapted.named_parameters() if parameter.requires_grad)
