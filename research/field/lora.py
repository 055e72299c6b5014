"""LoRA adapters of PEFT in a GPT-2: is each adapter's gradient clipped and summed as autograd gives it?"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from research.field.ghost import LARGEST_ERROR, agreement
from research.field.report import FAST_DP, OPACUS, OURS, Finding, Row


class Classifier(nn.Module):
    """A GPT-2 of two layers with adapters in its attention, and a frozen head on the mean of its positions."""

    def __init__(self) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2Model

        super().__init__()
        config = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=8, vocab_size=50, resid_pdrop=0, attn_pdrop=0)
        config.embd_pdrop = 0
        adapted = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        self.backbone = get_peft_model(GPT2Model(config), adapted)
        self.head = nn.Linear(16, 3).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.backbone(input_ids=tokens).last_hidden_state.mean(1))


def check(library: str) -> Finding:
    torch.manual_seed(0)
    return agreement(library, {"GPT-2": (Classifier(), torch.randint(50, (6, 8)))}, 0.05)


ROW = Row(
    "LoRA",
    f"Adapters of PEFT 0.21 in a GPT-2 get the clipped sum of their gradients, to {LARGEST_ERROR:g}.",
    "pytorch/opacus issue 820, of Opacus 1.5.4 with PEFT 0.18",
    {name: partial(check, name) for name in (OPACUS, FAST_DP, OURS)},
)

if __name__ == "__main__":
    ROW.show()
