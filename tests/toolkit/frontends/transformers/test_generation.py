"""Graphs with caches generate what transformers' own generate() does, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import tiny_checkpoints as tiny

from toolkit import Exported, export

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.export

STEPS = 24


def sessions(done: Exported, folder: Path) -> dict[str, ort.InferenceSession]:
    folder.mkdir()
    return {n: ort.InferenceSession(p) for n, p in done.files(folder).items() if done.save(folder)}


def run(session: Any, feed: dict[str, Any]) -> dict[str, Any]:
    names = [each.name for each in session.get_outputs()]
    taken = {each.name: feed[each.name] for each in session.get_inputs()}
    return dict(zip(names, session.run(names, taken), strict=True))


def greedy(model: Any, **inputs: Any) -> Any:
    fixed = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    return model.generate(**inputs, **fixed, eos_token_id=None, num_beams=1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LlamaForCausalLM", tiny.DECODER),
        # all tokens beyond the window have to be masked, though the cache keeps them
        ("MistralForCausalLM", {**tiny.DECODER, "sliding_window": 6}),
        (
            "GPT2LMHeadModel",
            {"vocab_size": tiny.WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0},
        ),
        ("OPTForCausalLM", {**tiny.TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16}),
    ],
)
def test_decoder_in_a_batch_padded_on_the_left(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    model = tiny.build(name, **settings)
    done = export(model, task="text-generation-with-past", exporter="torchscript")
    session = sessions(done, tmp_path / "out")["model"]
    ids = np.random.default_rng(0).integers(3, tiny.WORDS, (3, 9))
    mask = np.ones_like(ids)
    mask[1, :4] = mask[2, :7] = 0
    tensors = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    wanted = greedy(model, **tensors)[:, 9:].tolist()
    past = {
        each.name: np.zeros((3, each.shape[1], 0, each.shape[3]), np.float32)
        for each in session.get_inputs()
        if each.name.startswith("past_key_values.")
    }
    assert past
    made: list[Any] = []
    for _ in range(STEPS):
        given = run(session, {"input_ids": ids, "attention_mask": mask, **past})
        ids = given["logits"][:, -1].argmax(-1)[:, None]
        mask = np.concatenate([mask, np.ones_like(ids)], 1)
        past = {key: given[key.replace("past_key_values", "present")] for key in past}
        made.append(ids[:, 0])
    assert np.stack(made, 1).tolist() == wanted


@pytest.mark.parametrize(
    ("name", "settings"),
    [("T5ForConditionalGeneration", tiny.T5), ("BartForConditionalGeneration", tiny.SEQ2SEQ)],
)
def test_encoder_decoder(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    model = tiny.build(name, **settings)
    model.generation_config.forced_bos_token_id = None
    model.generation_config.forced_eos_token_id = None
    done = export(model, task="text2text-generation", exporter="torchscript")
    graphs = sessions(done, tmp_path / "out")
    ids = np.random.default_rng(1).integers(3, tiny.WORDS, (2, 7))
    mask = np.ones_like(ids)
    mask[1, 4:] = 0
    tensors = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    wanted = greedy(model, **tensors)[:, 1:].tolist()
    states = run(graphs["encoder"], {"input_ids": ids, "attention_mask": mask})
    source = {
        "encoder_hidden_states": states["last_hidden_state"],
        "encoder_attention_mask": mask,
    }
    tokens = np.full((2, 1), model.config.decoder_start_token_id)
    given = run(graphs["decoder"], {"input_ids": tokens, **source})
    past = {k.replace("present", "past_key_values"): v for k, v in given.items() if k != "logits"}
    made: list[Any] = []
    while True:
        tokens = given["logits"][:, -1].argmax(-1)[:, None]
        made.append(tokens[:, 0])
        if len(made) == STEPS:
            break
        given = run(graphs["decoder_with_past"], {"input_ids": tokens, **source, **past})
        past |= {
            k.replace("present", "past_key_values"): v for k, v in given.items() if k != "logits"
        }
    assert np.stack(made, 1).tolist() == wanted
