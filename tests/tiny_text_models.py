"""Folders of tiny models with tokenizers, as ``save_pretrained`` writes them: a BERT and a Llama with random weights."""

from pathlib import Path

import torch

WORDS = ["win", "cash", "now", "call", "free", "prize", "hello", "mum", "see", "you", "at", "home", "tonight", "love", "lunch"]
LENGTH = 12


def _tokenizer(folder: Path, template: str, special: dict[str, str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*dict.fromkeys(special.values()), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = [(token, vocabulary[token]) for token in special.values()]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def save_bert(folder: Path) -> str:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    _tokenizer(folder, "[CLS] $A [SEP]", special)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=4 + len(WORDS), max_position_embeddings=LENGTH, initializer_range=0.3, **sizes)
    BertModel(config).save_pretrained(folder)
    return str(folder)


def save_llama(folder: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    _tokenizer(folder, "<s> $A", {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"})
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = LlamaConfig(
        vocab_size=3 + len(WORDS), max_position_embeddings=48, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def messages(count: int) -> list[tuple[str, str]]:
    """Texts and labels: spam has words of the first half of ``WORDS``."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        kind = number % 2
        drawn = torch.randint(0, 7, (3 + number % 9,), generator=generator).tolist()
        found.append((" ".join(WORDS[word + 7 * (1 - kind)] for word in drawn), ("ham", "spam")[kind]))
    return found


def write_messages(folder: Path, train: int = 120, test: int = 40) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    rows = messages(train + test)
    for name, part in (("train", rows[:train]), ("test", rows[train:])):
        lines = ["text,label,sender", *(f"{text},{label},{name}{n % 30}" for n, (text, label) in enumerate(part))]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)
