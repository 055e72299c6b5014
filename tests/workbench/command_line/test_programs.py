"""Programs that somebody sent: nothing in them is run but aten's operators, on tensors."""

import contextlib
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.export.pt2_archive import PT2ArchiveWriter

from dp_microadam import InputError
from dp_microadam.training.export import CONTRACT, Contract
from dp_microadam.training.program import DeployedModel, RawTensor, save_program
from dp_microadam.workbench import models
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.command_line.programs import load_program
from dp_microadam.workbench.data.raw import RawImages

GRAPH, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def pickled(marker):
    buffer = io.BytesIO()
    torch.save({"model.weight": Payload(marker)}, buffer)
    return buffer.getvalue()


def code(marker):
    return f"__import__('pathlib').Path({str(marker)!r}).touch()"


def first_weight(config):
    return next(iter(config["config"].values()))


def node(target, *arguments, output="planted"):
    inputs = [{"name": name, "arg": {kind: value}, "kind": 1} for name, kind, value in arguments]
    return {"target": target, "inputs": inputs, "outputs": [{"as_tensor": {"name": output}}], "metadata": {}, "name": output}


def plant_node(files, planted):
    graph = files[GRAPH]["graph_module"]["graph"]
    graph["tensor_values"][planted["name"]] = graph["tensor_values"]["inputs"]
    graph["nodes"].insert(0, planted)


def pickled_weight(files, marker):
    entry = first_weight(files[WEIGHTS])
    entry["use_pickle"] = True
    files[f"data/weights/{entry['path_name']}"] = pickled(marker)


def weights_of_torch_2_8(files, marker):
    files["data/weights/model.pt"] = pickled(marker)


def sample_inputs(files, marker):
    files["data/sample_inputs/model.pt"] = pickled(marker)


def opaque_constant(files, marker):
    files[CONSTANTS]["config"]["planted"] = {
        "path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None,
    }  # fmt: skip
    files["data/constants/opaque_obj_0"] = pickle.dumps(Payload(marker))


def expression(files, marker):
    files[GRAPH]["graph_module"]["graph"]["tensor_values"]["inputs"]["sizes"][0]["as_expr"]["expr_str"] = code(marker)


def saving_operator(files, marker):
    inputs = ("item", "as_tensor", {"name": "inputs"}), ("filename", "as_string", str(marker))
    plant_node(files, node("torch.ops.aten.save.default", *inputs))


def mapping_operator(files, marker):
    inputs = ("filename", "as_string", str(marker)), ("shared", "as_bool", True), ("size", "as_int", 8)
    plant_node(files, node("torch.ops.aten.from_file.default", *inputs))


ATTACKS = [
    pickled_weight,
    weights_of_torch_2_8,
    sample_inputs,
    opaque_constant,
    expression,
    saving_operator,
    mapping_operator,
]


def sent(folder, change=None, *, name="model.pt2"):
    """A program as somebody may send it: one of ours, changed."""
    own, path = folder / "own.pt2", folder / name
    torch.manual_seed(0)
    save_program(DeployedModel(torch.nn.Linear(3, 2)), torch.rand(2, 3), own)
    with zipfile.ZipFile(own) as archive:
        files = {one.removeprefix("own/"): archive.read(one) for one in archive.namelist()}
    files = {one: json.loads(content) if one.endswith(".json") else content for one, content in files.items()}
    if change is not None:
        change(files)
    with PT2ArchiveWriter(str(path)) as archive:
        for one, content in files.items():
            if not one.startswith(".data/") and one != "byteorder":
                archive.write_bytes(one, content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_program_that_somebody_sent_runs_no_code(tmp_path, attack):
    path = sent(tmp_path, lambda files: attack(files, tmp_path / "marker"))
    with contextlib.suppress(InputError):
        load_program(path)(torch.rand(2, 3))
    assert not os.path.lexists(tmp_path / "marker")


def test_with_trust_a_program_may_be_anything(tmp_path):
    path = sent(tmp_path, lambda files: expression(files, tmp_path / "marker"))
    with pytest.raises(InputError):  # torch wants a size
        load_program(path, trust=True)
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06" + bytes(18)], ids=["empty", "text", "empty archive"])
def test_what_is_no_program_is_one_sentence(tmp_path, content):
    (tmp_path / "model.pt2").write_bytes(content)
    with pytest.raises(InputError, match="export it again"):
        load_program(tmp_path / "model.pt2")


def test_damaged_programs_are_one_sentence(tmp_path):
    whole = sent(tmp_path).read_bytes()
    for number in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[number] ^= 255
        (tmp_path / "model.pt2").write_bytes(damaged)
        with contextlib.suppress(InputError):
            load_program(tmp_path / "model.pt2")(torch.rand(2, 3))


class Many(torch.nn.Module):
    """Operators that give several results, take lists, sizes, infinity or types."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.register_buffer("scale", torch.rand(8), persistent=False)
        self.recurrent = torch.nn.LSTM(8, 8, batch_first=True)
        self.attention = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)

    def forward(self, tokens):
        states = self.attention(self.recurrent(self.embedding(tokens) * self.scale)[0])
        rows = states.reshape(tokens.shape[0], tokens.shape[1] * 8)
        first, second = rows.chunk(2, 1)
        masked = torch.where(first > 0, first, float("-inf")).clamp(min=-5).softmax(1)
        largest = torch.cat([second.topk(2).values, rows.max(1, keepdim=True)[0].double()], 1)
        return (masked.unsqueeze(2) * largest.to(torch.float32).unsqueeze(1)).flatten(1)


def resized():
    raw = RawImages.of_any_size(8)
    return torch.nn.Sequential(raw.module(), torch.nn.Flatten(), torch.nn.Tanh()), raw.example()


def image_model(name, side, **options):
    return lambda: (models.build(name, 4, (3, side, side), **options), torch.rand(2, 3, side, side))


@pytest.mark.parametrize(
    "made",
    [
        image_model("small-cnn", 16),
        pytest.param(image_model("nf-resnet-50", 32), marks=pytest.mark.slow),
        pytest.param(image_model("vit-tiny", 32), marks=pytest.mark.slow),
        pytest.param(image_model("wide-resnet", 32), marks=pytest.mark.slow),
        lambda: (Many(), torch.randint(0, 20, (3, 7))),
        resized,
    ],
    ids=["cnn", "nf-resnet", "vit", "wide-resnet", "many", "resized"],
)
def test_a_program_gives_what_torch_s_own_loader_gives(tmp_path, made):
    torch.manual_seed(0)
    model, example = made()
    save_program(DeployedModel(model.eval()), example, tmp_path / "model.pt2")
    for inputs in (example, example[:1], torch.cat([example, example.flip(0)])):
        ours, theirs = (load_program(tmp_path / "model.pt2", trust=trust)(inputs) for trust in (False, True))
        assert torch.equal(ours, theirs)


def test_a_published_program_names_no_folder_of_the_machine(tmp_path):
    content = sent(tmp_path).read_bytes()
    assert str(Path(torch.__file__).parents[1]).encode() not in content
    assert str(Path(__file__).parents[3]).encode() not in content


@pytest.mark.parametrize("elsewhere", ["../own.pt2", "/tmp/own.pt2", "other/model.pt2"])
def test_a_program_outside_of_the_export_is_refused(tmp_path, capsys, elsewhere):
    sent(tmp_path)
    contract = Contract("sent", ("a", "b"), RawTensor((3,), "float32").description(), program=elsewhere)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / CONTRACT).write_text(contract.to_json())
    assert main(["predict", str(tmp_path / "export"), "x.npy"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_predict_runs_an_export_s_code_with_trust_alone(tmp_path, capsys):
    sent(tmp_path, lambda files: mapping_operator(files, tmp_path / "marker"))
    contract = Contract("sent", ("a", "b"), RawTensor((3,), "float32").description())
    (tmp_path / CONTRACT).write_text(contract.to_json())
    np.save(tmp_path / "x.npy", np.zeros(3, np.float32))
    command = ["predict", str(tmp_path), str(tmp_path / "x.npy")]
    assert main(command) == 2
    assert "--trust" in capsys.readouterr().err
    assert not (tmp_path / "marker").exists()
    main([*command, "--trust"])
    assert (tmp_path / "marker").exists()
