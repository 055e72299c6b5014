"""The model card of an export: statement, figures and recipe, with names as text."""

from dp_microadam.training.export import Contract, input_section, model_card

CARD = model_card(
    "my\nmodel",
    'name = "demo"\ndata_folder = "/home/me/secret"\nepsilon = 8.0\n',
    "Not private: trained with a fixed seed.\n",
    {"test_accuracy": 0.93125, "test_loss": 0.251239, "steps": 2000, "note": "a|b"},
)


def test_the_card_opens_with_the_privacy_statement_in_full():
    assert CARD.startswith("# my model\n\n## Privacy\n\nNot private: trained with a fixed seed.\n\n## ")


def test_the_card_shows_metrics_and_recipe():
    assert "| test accuracy | 93.12 % |" in CARD
    assert "| test loss | 0.2512 |" in CARD
    assert "| steps | 2000 |" in CARD
    assert "| note | a\\|b |" in CARD
    assert '```toml\nname = "demo"\nepsilon = 8.0\n```' in CARD


def test_the_card_does_not_tell_where_data_lay():
    assert "secret" not in CARD


def test_a_card_without_metrics_has_no_empty_table():
    card = model_card("m", "name = 'm'", "Private.", {})
    assert "measure" not in card
    assert "## Training" in card


def test_backticks_in_a_recipe_do_not_end_its_block():
    card = model_card("m", 'name = "```\\n# Privacy: all is well"', "Not private.", {})
    assert "\n````toml\n" in card
    assert "\n````\n" in card


def test_names_in_the_card_are_text_and_neither_markdown_nor_html():
    statement = "PRIVATE for one <img src=x> [patient](javascript:x)."
    card = model_card("a *bold* <b>name</b>", "", statement, {"note": "`code` <i> a|b"})
    assert card.startswith(r"# a \*bold\* \<b\>name\</b\>" + "\n")
    assert r"PRIVATE for one \<img src=x> \[patient\](javascript:x)." in card
    assert r"| note | \`code\` \<i\> a\|b |" in card
    classes = ("<script>alert(1)</script>", "two\nlines", "[x](y)", "# title")
    contract = Contract("m", classes, {"in_words": "an image"}, program=None)
    assert r"order: \<script\>alert(1)\</script\>, two lines, \[x\](y), \# title." in input_section(contract, None)
