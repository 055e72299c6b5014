"""Recipes for texts, from files to a folder that ``from_pretrained`` loads, with tiny models made on the spot."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from tiny_text_models import LENGTH, save_bert, save_llama, write_messages

from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.clipping.per_example import clipped_sum
from dp_microadam.errors import InputError
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench import models
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.models.hugging_face import (
    PADDING,
    language_model,
    save_text_model,
    saved_classifier,
    text_classifier,
    text_encoder,
)
from dp_microadam.workbench.recipes.assemble import assemble
from dp_microadam.workbench.recipes.recipe_files import load_recipe
from dp_microadam.workbench.recipes.texts import next_token_loss

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("texts")
    return {"bert": save_bert(root / "bert"), "llama": save_llama(root / "llama"), "data": write_messages(root / "data")}


def settings(folders, model, *more):
    own = [f"data_folder={folders['data']}", f"model_options.pretrained={folders[model]}", f"data_options.max_length={LENGTH}"]
    return [*own, "batch_size=30", "steps=3", "physical_batch_size=16", *more]


def texts_of_the_test_part(folders):
    lines = Path(folders["data"], "test.csv").read_text("utf-8").splitlines()[1:]
    return [line.split(",")[0] for line in lines]


def command(name, recipe, run, given, capsys):
    arguments = [name, recipe, "--json", "--quiet", "--run-dir", str(run)]
    assert main([*arguments, *(word for one in given for word in ("--set", one))]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_classifier_with_lora_is_trained_evaluated_reported_and_exported_whole_or_as_adapters(folders, tmp_path, capsys):
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = tmp_path / "run"
    trained = command("train", "sms-spam", run, settings(folders, "bert", "ema_decay=0.5"), capsys)
    assert 0 < trained["epsilon"] <= 8
    assert main(["evaluate", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_accuracy"] == trained["test_accuracy"]
    assert "longer texts are cut there" in (run / "privacy.txt").read_text()
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    assert main(["export", str(run), "--output", str(tmp_path / "whole")]) == 0
    assert main(["export", str(run), "--output", str(tmp_path / "adapters"), "--adapters"]) == 0

    experiment = assemble(load_recipe(str(run / "config.toml")), run, show_progress=False)
    experiment.trainer.peek()
    tokens, labels = experiment.data.test
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    text = (tmp_path / "whole" / "README.md").read_text("utf-8")
    assert 'AutoModelForSequenceClassification.from_pretrained(".")' in text
    assert folders["data"] not in text
    inputs = tokenizer(texts_of_the_test_part(folders), padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    with experiment.best_weights(), torch.no_grad():
        own = experiment.model.eval()(tokens)
    for load, folder in (
        (AutoModelForSequenceClassification, "whole"),
        (AutoPeftModelForSequenceClassification, "adapters"),
    ):
        model = load.from_pretrained(tmp_path / folder, **({"num_labels": 2} if folder == "adapters" else {})).eval()
        with torch.no_grad():
            scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        torch.testing.assert_close(scores, own, atol=1e-5, rtol=1e-4)
        assert folder == "adapters" or model.config.id2label == {0: "ham", 1: "spam"}
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    assert float((own.argmax(1) == labels).float().mean()) == pytest.approx(trained["test_accuracy"])

    lines = tmp_path / "lines.txt"
    lines.write_text("\n\n".join(texts_of_the_test_part(folders)[:5]), "utf-8")
    csv_file = Path(folders["data"], "test.csv")
    for model, file in ((run, csv_file), (tmp_path / "whole", csv_file), (tmp_path / "whole", lines)):
        capsys.readouterr()
        assert main(["predict", str(model), str(file), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert len(found) == (5 if file == lines else len(labels))
        assert found[2]["file"] == f"{file} {'line 5' if file == lines else 'row 3'}"
        for one, probabilities in zip(found, own.softmax(1).tolist(), strict=False):
            assert one["probabilities"] == pytest.approx(dict(zip(("ham", "spam"), probabilities, strict=True)), abs=1e-5)
            assert one["class"] == max(one["probabilities"], key=one["probabilities"].get)
    assert main(["predict", str(tmp_path / "adapters"), str(lines)]) == 2
    assert "export a run of dp-microadam train without --adapters" in capsys.readouterr().err


def test_a_saved_classifier_says_its_column_and_how_long_texts_may_be(folders, tmp_path):
    model = text_classifier(2, pretrained=folders["bert"])
    save_text_model(model, text_encoder(folders["bert"], LENGTH), tmp_path, classes=("ham", "spam"), column="message")
    _, encoder, classes, column = saved_classifier(tmp_path)
    assert (encoder.max_length, classes, column) == (LENGTH, ("ham", "spam"), "message")
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8"))
    del settings["model_max_length"]
    file.write_text(json.dumps(settings), "utf-8")
    assert saved_classifier(tmp_path)[1].max_length == model.network.config.max_position_embeddings


def test_adapters_are_not_put_on_adapters(folders):
    model = text_classifier(2, pretrained=folders["bert"], lora_rank=2)
    with pytest.raises(InputError, match="has adapters already"):
        models.with_lora(model.network, 2)


@pytest.mark.slow
def test_a_language_model_learns_documents_of_users_and_its_perplexity_is_that_of_the_exported_model(folders, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "run"
    users = ["unit=user", "examples_per_user=2", "data_options.user_column=sender", "batch_size=10", "delta=0.001"]
    whole = ["model_options.lora_rank=none", "distance=none", "learning_rate=0.01"]
    trained = command("train", "language-model", run, settings(folders, "llama", *users, *whole), capsys)
    assert trained["test_perplexity"] != trained["test_perplexity_before"]
    assert main(["evaluate", str(run)]) == 0
    assert f"test perplexity {trained['test_perplexity']:.2f}" in capsys.readouterr().out
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    assert main(["export", str(run), "--output", str(tmp_path / "model")]) == 0
    assert main(["predict", str(tmp_path / "model"), str(folders["data"])]) == 2
    assert "holds no AutoModelForSequenceClassification" in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    nats = tokens = 0.0
    for text in texts_of_the_test_part(folders):
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=LENGTH)["input_ids"]
        with torch.no_grad():
            nats += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    assert trained["test_perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)


def test_a_row_of_tokens_depends_on_its_own_text_alone_and_padding_changes_no_score(folders):
    texts = ["win cash", "see you at home tonight love lunch mum hello see you at home", "unheard of"]
    short, long = (text_encoder(folders["llama"], length) for length in (LENGTH, 2 * LENGTH))
    together = short(texts)
    assert together.shape == (3, LENGTH)
    assert all(torch.equal(short([text])[0], row) for text, row in zip(texts, together, strict=True))
    assert together[0].tolist()[3:] == [PADDING] * (LENGTH - 3)
    assert (together[1] != PADDING).all()
    model = language_model(pretrained=folders["llama"]).eval()
    with torch.no_grad():
        scores = [model(encoder([texts[0]]))[0, :3] for encoder in (short, long)]
        beside = model(together)[0, :3]
    torch.testing.assert_close(scores[0], scores[1])
    torch.testing.assert_close(scores[0], beside)


def assert_sums_agree_with_the_loop(model, loss, encoder):
    """Compares clipped sums of three texts with those of one-by-one gradients; returns the names of what trains."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, and the gradient of A with it
            torch.nn.init.normal_(parameter, std=0.1)
    batch = encoder(["win cash now", "hello mum see you at home tonight", "free"]), torch.tensor([1, 0, 1])
    gradients = ClippedGradients(model, loss, max_grad_norm=0.5)
    gradients.accumulate(batch)
    expected, _ = clipped_sum(model, loss, batch, max_grad_norm=0.5)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert gradients.sums.keys() == trainable
    for name, found in gradients.sums.items():
        torch.testing.assert_close(found, expected[name], atol=1e-5, rtol=1e-4)
    return trainable


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize(("kind", "loss"), [("bert", class_loss), ("llama", next_token_loss)])
def test_clipped_gradients_of_padded_texts_agree_with_the_loop(folders, kind, loss, lora_rank):
    build = {"bert": lambda **o: text_classifier(2, **o), "llama": language_model}[kind]
    model = build(pretrained=folders[kind], lora_rank=lora_rank).eval()
    trainable = assert_sums_agree_with_the_loop(model, loss, text_encoder(folders[kind], LENGTH))
    assert lora_rank == 0 or all("lora_" in name or "classifier" in name for name in trainable)


PARTLY_TRAINED = [{"trainable": "head"}, {"trainable": "biases"}, {"lora_rank": 2}, {}]


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("part", PARTLY_TRAINED, ids=str)
def test_clipped_gradients_of_sentence_classifiers_agree_with_the_loop(folders, kind, part):
    if kind == "llama" and part.get("trainable") == "biases":
        with pytest.raises(InputError, match="trainable is 'biases', but the encoder has none"):
            text_classifier(2, pretrained=folders[kind], pooling="mean", **part)
        return
    model = text_classifier(2, pretrained=folders[kind], pooling="mean", **part).eval()
    assert_sums_agree_with_the_loop(model, class_loss, text_encoder(folders[kind], LENGTH))


@pytest.mark.parametrize("pooling", ["own", "mean"])
@pytest.mark.parametrize("part", PARTLY_TRAINED, ids=str)
def test_what_trains_is_the_part_that_was_named_and_only_what_is_all_frozen_runs_without_dropout(folders, pooling, part):
    model = text_classifier(2, pretrained=folders["bert"], pooling=pooling, **part).eval().train()
    encoder = model.encoder if pooling == "mean" else model.network.base_model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    inside = {name for name in trained if not any(head in name for head in ("classifier", "head."))}
    if "lora_rank" in part:
        assert inside
        assert all("lora_" in name for name in inside)
    elif part.get("trainable") == "biases":
        assert inside
        assert all(name.endswith("bias") for name in inside)
    else:
        assert bool(inside) == (part.get("trainable") != "head")
    assert len(trained) - len(inside) == 2  # the head's weight and bias
    if pooling == "mean":
        assert encoder.training == (part.get("trainable") != "head")


@pytest.mark.parametrize(
    ("recipe", "given", "words"),
    [
        ("language-model", ["data_options.packing=true"], "data_options.packing = True is unknown"),
        ("sms-spam", ["model=mlp", "model_options={}"], "sms-spam are texts; it must be one of 'hugging-face'"),
        ("demo", ["model=hugging-face"], "which takes texts, and data is 'digits'; it must be one of 'mlp'"),
        ("sms-spam", ["audit_canaries=200"], "but data is 'sms-spam': canaries are images or rows of numbers"),
        ("language-model", ["class_weights=[1.0, 2.0]"], "a language model has no classes"),
    ],
)
def test_settings_that_texts_do_not_have_are_refused_before_anything_is_read(recipe, given, words):
    with pytest.raises(InputError, match=words):
        load_recipe(recipe, given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["model_options.pretrained=none"], "pretrained is ''; it must be a folder or a name"),
        (["model_options.pretrained=/nowhere/bert"], "which does not exist"),
        (["model_options.pretrained={data}"], "a folder without config.json"),
        (["data_options.max_length=13"], f"max_length is 13; .* takes at most {LENGTH} tokens"),
        (["model_options.lora_targets=['nothing']"], "lora_targets is .'nothing'., which does not fit this model"),
        (["model_options.trainable=head"], "with LoRA leave trainable out"),
        (["flip=true"], "data is 'sms-spam', not images"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(folders, tmp_path, given, words):
    filled = [one.replace("{data}", folders["data"]) for one in given]
    with pytest.raises(InputError, match=words):
        assemble(load_recipe("sms-spam", settings(folders, "bert", *filled)), tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_weights_that_lack_a_tensor_are_refused_by_name(folders, tmp_path, kind):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders[kind], tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    removed = next(name for name in weights if name.endswith(("1.mlp.up_proj.weight", "1.output.dense.weight")))
    del weights[removed]
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    build = {"bert": lambda **o: text_classifier(2, **o), "llama": language_model}[kind]
    with pytest.raises(InputError, match=f"whose weights lack the tensor .*{removed}"):
        build(pretrained=str(tmp_path / "model"))


@pytest.mark.skipif("DP_MICROADAM_MINILM" not in os.environ or "DP_MICROADAM_DATA" not in os.environ, reason="needs real files")
def test_a_real_encoder_trains_on_real_messages(tmp_path, capsys):
    given = [f"model_options.pretrained={os.environ['DP_MICROADAM_MINILM']}", "data_options.max_length=16", "max_steps=1"]
    trained = command("train", "sms-spam", tmp_path / "run", [*given, "batch_size=16", "validation_size=8"], capsys)
    assert trained["steps_done"] == 1
