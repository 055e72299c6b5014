"""Pretrained weights are found where they are said to be, and refused in one sentence where they cannot be used."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dp_microadam import InputError
from dp_microadam.workbench import models
from dp_microadam.workbench.models import TransformerSize

transformers = pytest.importorskip("transformers")

SMALL = TransformerSize(width=16, layers=2, heads=2)


def load(source, num_classes: int = 5, **options):
    return models.vit(SMALL, num_classes, pretrained=str(source), **{"resolution": 32, "patch_size": 8, **options})


@pytest.fixture
def network():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config).eval()


@pytest.fixture
def folder(tmp_path, network):
    network.save_pretrained(tmp_path / "folder")
    return tmp_path / "folder"


def change(folder, file="model.safetensors", **changes):
    """Replace tensors of a folder, or take out those that are None."""
    tensors = load_file(folder / file) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / file, metadata={"format": "pt"})


def refusal(source, **options) -> str:
    with pytest.raises(InputError) as caught:
        load(source, **options)
    message = str(caught.value)
    assert message.startswith(f"pretrained is {str(source)!r}")
    assert "\n" not in message
    return message


def test_a_folder_gives_the_scores_of_the_model_it_holds(folder, network):
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(load(folder)(images), network(images).logits)
    assert load(folder, num_classes=3)(images).shape == (3, 3)


def test_a_folder_at_another_resolution_computes_what_transformers_interpolates(folder, network):
    images = torch.randn(3, 3, 48, 48)
    expected = network(images, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(load(folder, resolution=48)(images), expected, rtol=1e-4, atol=1e-5)


def test_tensors_of_a_folder_have_the_names_of_published_checkpoints(folder):
    # So that the tests of this file hold for what is on the hub, which earlier releases of transformers wrote.
    assert "vit.encoder.layer.0.attention.attention.query.weight" in load_file(folder / "model.safetensors")


def test_a_bare_encoder_gets_a_new_head(tmp_path, network):
    encoder = transformers.ViTModel(network.config)  # with a pooler, which is not used here
    encoder.save_pretrained(tmp_path / "encoder")
    model = load(tmp_path / "encoder", num_classes=5)
    assert torch.equal(model.backbone.layernorm.weight, encoder.layernorm.weight)
    assert model.head.bias.unique().tolist() == [0.0]


def test_half_precision_weights_become_float32(tmp_path, network):
    network.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert {p.dtype for p in load(tmp_path / "half").parameters()} == {torch.float32}


def test_a_folder_may_state_its_normalization(folder):
    assert models.normalization_of(load(folder)) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    stated = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    assert models.normalization_of(load(folder)) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    (folder / "preprocessor_config.json").write_text(json.dumps({**stated, "image_std": [0.4, 0, 0.6]}))
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
    message = refusal("not a name/at all")
    assert "'not a name/at all', which does not exist" in message or "'not a name/at all', which is neither" in message


@pytest.mark.parametrize("source", ["no/such/folder", "/no-such-file.pth", "weights.safetensors", "name"])
def test_what_does_not_exist_is_refused(source):
    assert "which does not exist; it must be a file, a folder, or a name" in refusal(source)


def test_a_folder_that_holds_no_usable_model_is_refused(tmp_path, folder, network):
    assert "without config.json" in refusal(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for changes, message in [
        ({"model_type": "swin"}, "a model of type 'swin'; it must be 'vit'"),
        ({"model_type": "deit"}, "a distilled DeiT"),
        ({"hidden_size": 32}, "whose hidden_size is 32; this vit has 16"),
        ({"num_hidden_layers": 3}, "whose num_hidden_layers is 3; this vit has 2"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | changes))
        assert message in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be loaded" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(config))
    assert "whose patch_size is 8; this vit has 16" in refusal(folder, patch_size=16)
    (folder / "model.safetensors").unlink()
    assert "cannot be loaded" in refusal(folder)


def test_a_folder_with_incomplete_or_damaged_weights_is_refused(folder):
    name = "vit.encoder.layer.1.intermediate.dense.weight"
    whole = (folder / "model.safetensors").read_bytes()
    change(folder, **{name: None})
    assert "lack the tensor vit.layers.1.mlp.fc1.weight" in refusal(folder)
    change(folder, **{name: torch.ones(3, 3)})
    assert "vit.layers.1.mlp.fc1.weight has shape (3, 3); its configuration says (64, 16)" in refusal(folder)
    change(folder, **{name: torch.full((64, 16), torch.nan)})
    assert "layers.1.mlp.fc1.weight is not finite" in refusal(folder)
    change(folder, **{name: torch.ones(64, 16), "vit.extra": torch.ones(1)})
    assert "weights hold vit.extra" in refusal(folder)
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cannot be loaded" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.1.attn.qkv.weight": None}, "lacks the tensor blocks.1.attn.qkv.weight of shape (48, 16)"),
        ({"blocks.1.attn.qkv.weight": (47, 16)}, "blocks.1.attn.qkv.weight has shape (47, 16); this model needs (48, 16)"),
        ({"blocks.2.norm1.weight": (16,)}, "which holds blocks.2.norm1.weight"),
        ({"pos_embed": None}, "lacks the tensor pos_embed"),
        ({"pos_embed": (1, 16, 16)}, "pos_embed has shape (1, 16, 16)"),
        ({"pos_embed": (17, 16)}, "pos_embed has shape (17, 16)"),
        ({"head.bias": None}, "whose classifier lacks head.bias"),
        ({"head.weight": (4, 16)}, "head.weight has shape (4, 16); this model needs (5, 16)"),
        ({"patch_embed.proj.weight": (16, 1, 8, 8)}, "patch_embed.proj.weight has shape (16, 1, 8, 8)"),
        ({"dist_token": (1, 1, 16), "head_dist.bias": (5,)}, "a distilled DeiT with two classifiers"),
        ({"vit.layernorm.bias": (16,)}, "a file of transformers; give the folder"),
        ({"norm.bias": torch.inf}, "layernorm.bias is not finite"),
    ],
)
@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_a_file_whose_tensors_do_not_fit_is_refused(tmp_path, timm_checkpoint, changes, message, ending):
    tensors = timm_checkpoint()
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = torch.full((16,), change) if isinstance(change, float) else torch.zeros(change)
    path = tmp_path / f"weights.{ending}"
    (save_file if ending == "safetensors" else torch.save)(tensors, path)
    assert message in refusal(path)


def test_a_file_of_another_size_of_transformer_is_refused(tmp_path, timm_checkpoint):
    save_file(timm_checkpoint(), tmp_path / "small.safetensors")
    with pytest.raises(InputError, match=r"cls_token has shape \(1, 1, 16\); this model needs \(1, 1, 192\)"):
        models.build("deit-tiny", 10, (3, 32, 32), pretrained=str(tmp_path / "small.safetensors"))


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_a_file_that_is_cut_short_or_something_else_is_refused(tmp_path, timm_checkpoint, ending):
    path = tmp_path / f"weights.{ending}"
    (save_file if ending == "safetensors" else torch.save)(timm_checkpoint(), path)
    whole = path.read_bytes()
    for damaged in (b"", b"not weights", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        refusal(path)


def test_nothing_in_a_pth_file_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"cls_token": Trap()}, tmp_path / "trap.pth")
    assert "perhaps code, which is never run" in refusal(tmp_path / "trap.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Trap()))
    refusal(tmp_path / "plain.pth")
    assert not (tmp_path / "executed").exists()


def test_a_pth_file_without_tensors_by_name_is_refused(tmp_path):
    for content in ([torch.zeros(1)], {}, {"epoch": 3}, {"model": {"cls_token": 1.0}}):
        torch.save(content, tmp_path / "other.pth")
        assert "does not hold tensors by name" in refusal(tmp_path / "other.pth")
