"""Vision transformers have the published sizes, take any resolution, and keep what their pretrained weights compute."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from dp_microadam import InputError
from dp_microadam.workbench import models
from dp_microadam.workbench.models import TransformerSize

transformers = pytest.importorskip("transformers")

pytest.importorskip("peft")

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


def test_images_are_resized_to_the_resolution_of_the_model():
    torch.manual_seed(0)
    model = models.vit(SMALL, 5, resolution=32, patch_size=8)
    x = torch.rand(2, 3, 20, 20)
    torch.testing.assert_close(model(x), model(F.interpolate(x, size=(32, 32), mode="bilinear", antialias=True)))
    flat = torch.full((1, 3, 1, 1), 0.3)
    torch.testing.assert_close(model(flat.expand(1, 3, 9, 9)), model(flat.expand(1, 3, 32, 32)))


@pytest.mark.parametrize("half", [False, True])
def test_a_file_of_timm_gives_the_scores_of_an_independent_forward_pass(tmp_path, timm_checkpoint, timm_scores, half):
    tensors = {name: value.bfloat16().float() for name, value in timm_checkpoint().items()}
    path = tmp_path / "weights.safetensors"
    save_file({name: value.bfloat16() if half else value for name, value in tensors.items()}, path)
    model = models.vit(SMALL, 5, pretrained=str(path), resolution=32, patch_size=8)
    images = torch.randn(3, 3, 32, 32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(images), timm_scores(tensors, images, heads=2), rtol=1e-4, atol=1e-4)
    # The head is kept for as many classes, and new for others or where there is none.
    assert torch.equal(model.head.weight, tensors["head.weight"])
    other = models.vit(SMALL, 1000, pretrained=str(path), resolution=32, patch_size=8)
    assert abs(float(other.head.weight.detach().std()) / 0.02 - 1) < 6 / math.sqrt(2 * 16_000)
    assert torch.equal(other.backbone.layernorm.weight, tensors["norm.weight"])
    save_file({name: value for name, value in tensors.items() if not name.startswith("head")}, path)
    assert load(path).head.bias.unique().tolist() == [0.0]


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


@needs_real_weights
@pytest.mark.parametrize("resolution", [32, 96, 224])
def test_vit_tiny_gives_the_scores_of_an_independent_forward_pass_at_any_resolution(timm_scores, resolution):
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 2, "trainable": "biases"}, "trainable is 'biases' and lora_rank is 2; with LoRA leave trainable out"),
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"lora_alpha": 4.0}, r"lora_alpha is 4\.0, but lora_rank is 0, which means no adapters; give lora_rank too"),
        ({"lora_rank": 2, "lora_targets": ["nothing"]}, "lora_targets is .*nothing.*does not fit this model"),
    ],
)
def test_parts_that_cannot_be_trained_are_one_sentence(options, message):
    with pytest.raises(InputError, match=message):
        models.vit(SMALL, 3, resolution=32, **options)


def test_with_lora_trains_the_head_that_a_model_has_whatever_it_is_called_or_takes():
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


PARTS = [
    # Two layers, queries and values of each, A and B of 2 × 16; 16 × 3 weights and 3 biases of the head.
    ({"lora_rank": 2}, "lora_", 2 * 2 * 2 * 2 * 16),
    # Of each layer four projections, two LayerNorms and the MLP's 4·16 + 16; the patches' and the last LayerNorm's.
    ({"trainable": "biases"}, "bias", 2 * (4 * 16 + 2 * 16 + 5 * 16) + 2 * 16),
    ({"trainable": "head"}, "none", 0),
]


@pytest.mark.parametrize(("options", "names", "count"), PARTS)
def test_what_trains_is_the_part_that_was_named_and_the_head_and_the_model_starts_as_it_was(options, names, count):
    images = torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    plain = models.vit(SMALL, 3, resolution=32).eval()
    torch.manual_seed(0)
    partly = models.vit(SMALL, 3, resolution=32, **options).eval()
    torch.testing.assert_close(partly(images), plain(images), rtol=0, atol=0)
    trained = {name: parameter.numel() for name, parameter in partly.named_parameters() if parameter.requires_grad}
    assert all(names in name or name.startswith("head.") for name in trained)
    assert sum(trained.values()) == count + 16 * 3 + 3
    assert all(parameter.requires_grad for parameter in plain.parameters())


def load(source, num_classes: int = 5, **options):
    return models.vit(SMALL, num_classes, pretrained=str(source), **{"resolution": 32, "patch_size": 8, **options})


def refusal(source, **options) -> str:
    with pytest.raises(InputError) as caught:
        load(source, **options)
    message = str(caught.value)
    assert message.startswith(f"pretrained is {str(source)!r}")
    assert "\n" not in message
    return message


@pytest.fixture
def network():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config).eval()


@pytest.fixture
def folder(tmp_path, network):
    network.save_pretrained(tmp_path / "folder")
    return tmp_path / "folder"


def test_a_folder_gives_the_scores_of_the_model_it_holds_at_any_resolution(folder, network):
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(load(folder)(images), network(images).logits)
    assert load(folder, num_classes=3)(images).shape == (3, 3)
    images = torch.randn(3, 3, 48, 48)
    expected = network(images, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(load(folder, resolution=48)(images), expected, rtol=1e-4, atol=1e-5)
    # Earlier releases wrote these names, and the hub has them, so this holds for what is there.
    assert "vit.encoder.layer.0.attention.attention.query.weight" in load_file(folder / "model.safetensors")


def test_a_bare_encoder_of_half_precision_gets_a_new_head_and_float32(tmp_path, network):
    encoder = transformers.ViTModel(network.config).to(torch.bfloat16)  # with a pooler, which is not used here
    encoder.save_pretrained(tmp_path / "encoder")
    model = load(tmp_path / "encoder", num_classes=5)
    assert torch.equal(model.backbone.layernorm.weight, encoder.layernorm.weight.float())
    assert model.head.bias.unique().tolist() == [0.0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_normalization_constants_belong_to_the_weights_and_a_folder_may_state_them(small_file, folder):
    centred, imagenet = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    deit = models.deit(SMALL, 5, pretrained=small_file, resolution=32, patch_size=8)
    assert models.normalization_of(load(small_file)) == models.normalization_of("vit-base") == centred
    assert models.normalization_of(deit) == models.normalization_of("deit-small") == imagenet
    assert models.normalization_of("nf-resnet-50") is models.normalization_of(models.tanh_cnn()) is None
    with pytest.raises(InputError, match="model is 'vit'"):
        models.normalization_of("vit")
    assert models.normalization_of(load(folder)) == centred
    stated = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    assert models.normalization_of(load(folder)) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    for wrong in ([0.4, 0, 0.6], [1], "x", None):
        (folder / "preprocessor_config.json").write_text(json.dumps({**stated, "image_std": wrong}))
        assert "image_std" in refusal(folder)


def test_a_hub_name_is_read_from_what_was_fetched_before_and_refused_in_a_sentence_without_a_network(
    tmp_path, folder, monkeypatch
):
    from huggingface_hub import constants

    snapshot = tmp_path / "hub" / "models--someone--small" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    # A port on which nobody listens stands for a network that is not there.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    torch.testing.assert_close(load("someone/small").state_dict(), load(folder).state_dict())
    message = refusal("someone/other")
    assert "'someone/other', which is neither here nor could be fetched from the Hugging Face hub" in message
    assert "refused" in message, "nothing else than the port was asked"


@pytest.mark.parametrize("source", ["no/such/folder", "/no-such-file", "weights.safetensors", "./name"])
def test_what_does_not_exist_is_refused(source):
    assert re.search("which does not exist|No such file", refusal(source))


def test_a_folder_that_holds_no_usable_model_is_refused(tmp_path, folder):
    assert "without config.json" in refusal(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for changes, message in [
        ({"model_type": "swin"}, "a model of type 'swin'; it must be 'vit'"),
        ({"model_type": "deit"}, "a model of type 'deit'; it must be 'vit'"),
        ({"hidden_size": 32}, "whose hidden_size is 32; this model has 16"),
        ({"num_attention_heads": 4}, "whose num_attention_heads is 4; this model has 2"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | changes))
        assert message in refusal(folder)
    (folder / "config.json").write_text(json.dumps(config))
    name, whole = "vit.encoder.layer.1.intermediate.dense.weight", (folder / "model.safetensors").read_bytes()
    for value, message in (
        (None, "lacks the tensor layers.1.mlp.fc1.weight"),
        (torch.ones(3, 3), "lacks the tensor layers.1.mlp.fc1.weight"),
        (torch.full((64, 16), torch.nan), "layers.1.mlp.fc1.weight is not finite"),
    ):
        tensors = {**load_file(folder / "model.safetensors"), name: value}
        tensors = {name: value for name, value in tensors.items() if value is not None}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert message in refusal(folder)
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "no model can be loaded" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.1.attn.qkv.weight": None}, "lacks the tensor layers.1.attention.q_proj.weight"),
        ({"blocks.1.attn.qkv.weight": (45, 16)}, "q_proj.weight has shape (15, 16); this model needs (16, 16)"),
        ({"pos_embed": None}, "lacks the tensor embeddings.position_embeddings"),
        ({"pos_embed": (17, 16)}, "embeddings.position_embeddings has shape (17, 16)"),
        ({"head.weight": (5, 4)}, "tensor weight has shape (5, 4); this model needs (5, 16)"),
        ({"dist_token": (1, 1, 16)}, "which holds dist_token"),
        ({"norm.bias": torch.inf}, "layernorm.bias is not finite"),
    ],
)
def test_a_file_whose_tensors_do_not_fit_is_refused(small_file, timm_checkpoint, changes, message):
    tensors = {name: value for name, value in timm_checkpoint().items() if changes.get(name, 0) is not None}
    for name, change in changes.items():
        if change is not None:
            tensors[name] = torch.full((16,), change) if isinstance(change, float) else torch.zeros(change)
    save_file(tensors, small_file)
    assert message in refusal(small_file)


def test_a_file_that_is_cut_short_or_something_else_is_refused(small_file):
    with open(small_file, "rb") as file:
        whole = file.read()
    for damaged in (b"", b"not weights", whole[: len(whole) // 2]):
        with open(small_file, "wb") as file:
            file.write(damaged)
        assert "cannot be read" in refusal(small_file)
