"""Weights that somebody sent: no code of theirs is run, and no message says how to run it."""

import builtins
import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from tiny_text_models import LENGTH, save_bert

from dp_microadam import InputError
from dp_microadam.workbench import models
from dp_microadam.workbench.models.hugging_face import text_classifier, text_encoder


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture
def bert(tmp_path):
    return Path(save_bert(tmp_path / "bert"))


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Payload(folder / "executed")}, folder / "pytorch_model.bin")


def with_code(folder):
    (folder / "theirs.py").write_text(f"import os\nos.mkdir({str(folder / 'executed')!r})\n")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        classes = dict.fromkeys(("AutoConfig", "AutoModelForSequenceClassification", "AutoModel"), "theirs.Theirs")
        content |= {"auto_map": {**classes, "AutoTokenizer": ["theirs.Theirs", "theirs.Theirs"]}, "model_type": "theirs"}
        (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("change", [pickled, with_code])
def test_a_text_model_that_somebody_sent_runs_no_code_and_asks_nobody(bert, change, monkeypatch):
    change(bert)
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    with pytest.raises(InputError, match="perhaps code, which is never run"):
        text_classifier(2, pretrained=str(bert))
    if change is with_code:
        with pytest.raises(InputError, match="perhaps code, which is never run"):
            text_encoder(str(bert), LENGTH)
    assert not (bert / "executed").exists()


def test_a_vision_transformer_that_somebody_sent_runs_no_code(tmp_path):
    sizes = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 32}
    transformers.ViTForImageClassification(transformers.ViTConfig(**sizes)).save_pretrained(tmp_path / "vit")
    pickled(tmp_path / "vit")
    with pytest.raises(InputError, match="perhaps code, which is never run"):
        models.build("vit-tiny", 3, (3, 32, 32), pretrained=str(tmp_path / "vit"))
    assert not (tmp_path / "vit" / "executed").exists()


def test_a_file_that_may_hold_code_is_not_opened(tmp_path):
    torch.save({"cls_token": Payload(tmp_path / "executed")}, tmp_path / "weights.pth")
    with pytest.raises(InputError, match=r"it must be a \.safetensors file"):
        models.build("vit-tiny", 3, (3, 32, 32), pretrained=str(tmp_path / "weights.pth"))
    assert not (tmp_path / "executed").exists()
