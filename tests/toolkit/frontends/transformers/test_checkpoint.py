"""Checkpoints: what is loaded, what is copied, what is said, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import tiny_checkpoints as tiny

from toolkit import Exported, export
from toolkit.errors import UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.export


def torchscript(source: Any, task: str | None = None, **more: Any) -> Exported:
    return export(source, task=task, exporter="torchscript", **more)


def refusal(source: Any, task: str | None = None, **more: Any) -> str:
    with pytest.raises(UsageError) as caught:
        torchscript(source, task, **more)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_tokenizer_and_config_go_beside_the_model(tmp_path: Path) -> None:
    tiny.build("BertModel", **tiny.TEXT).save_pretrained(tmp_path / "in")
    tokenizer = tiny.tokenizer(tmp_path / "in")
    done = torchscript(tmp_path / "in")
    (tmp_path / "out").mkdir()
    done.save(tmp_path / "out" / "model.onnx")
    assert (tmp_path / "out" / "config.json").is_file()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    from transformers import AutoTokenizer  # pyright: ignore[reportAttributeAccessIssue]

    copied = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert copied("w7 w9")["input_ids"] == tokenizer("w7 w9")["input_ids"]


def test_model_and_tokenizer_in_memory(tmp_path: Path) -> None:
    model, tokenizer = tiny.build("BertForSequenceClassification", **tiny.TEXT), tiny.tokenizer()
    done = torchscript((model, tokenizer))
    assert list(done.only.model.graph.outputs) == ["logits"]
    assert {"config.json", "tokenizer.json"} <= set(done.companions)
    session = ort.InferenceSession(done.to_bytes())
    encoded = tokenizer(["w5 w6 w7", "w8"], padding=True, return_tensors="pt")
    wanted = model(**encoded).logits.detach().numpy()
    given: Any = session.run(None, {name: value.numpy() for name, value in encoded.items()})[0]
    np.testing.assert_allclose(given, wanted, rtol=1e-4, atol=1e-5)


def test_base_model_of_one_with_a_head() -> None:
    model = tiny.build("BertForSequenceClassification", **tiny.TEXT)
    assert list(torchscript(model, "default").only.model.graph.outputs) == ["last_hidden_state"]
    assert "AutoModelForQuestionAnswering" in refusal(model, "question-answering")


def test_a_model_in_training_mode_is_exported_in_eval_mode() -> None:
    model = tiny.build("BertModel", **tiny.TEXT).train()
    done = torchscript(model, "default")
    assert any("training" in note for note in done.notes)


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (["Pooling", "Normalize"], {"pooling_mode_mean_tokens": True}, "mean-normalized"),
        (["Pooling"], {"pooling_mode_cls_token": True}, "cls"),
        (["Pooling"], {"pooling_mode_max_tokens": True}, "max"),
        (["Pooling"], {"pooling_mode": "lasttoken"}, "last"),
        (
            ["Pooling"],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "cls+mean",
        ),
    ],
)
def test_the_checkpoints_own_pooling(
    tmp_path: Path, modules: list[str], pooling: dict[str, Any], expected: str
) -> None:
    folder = tiny.sentences(tmp_path, modules, pooling)
    done = torchscript(folder)
    assert list(done.only.model.graph.outputs) == ["embeddings"]
    from transformers import AutoModel  # pyright: ignore[reportAttributeAccessIssue]

    ids = np.arange(3, 15).reshape(2, 6)
    mask = np.array([[1] * 6, [1] * 3 + [0] * 3])
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    tensors = {name: torch.tensor(value) for name, value in feed.items()}
    h = AutoModel.from_pretrained(folder)(**tensors).last_hidden_state.detach().numpy()
    mean = np.stack([h[0].mean(0), h[1, :3].mean(0)])
    wanted = {
        "mean-normalized": mean / np.linalg.norm(mean, axis=1, keepdims=True),
        "cls": h[:, 0],
        "max": np.stack([h[0].max(0), h[1, :3].max(0)]),
        "last": np.stack([h[0, 5], h[1, 2]]),
        "cls+mean": np.concatenate([h[:, 0], mean], 1),
    }[expected]
    given: Any = ort.InferenceSession(done.to_bytes()).run(["embeddings"], feed)[0]
    np.testing.assert_allclose(given, wanted, rtol=1e-4, atol=1e-5)


def test_a_dense_layer_after_pooling(tmp_path: Path) -> None:
    folder = tiny.sentences(tmp_path, ["Pooling", "Dense"], {"pooling_mode_cls_token": True})
    dense: dict[str, Any] = {"in_features": 16, "out_features": 4, "bias": True}
    dense["activation_function"] = "torch.nn.modules.activation.Tanh"
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    weights = {"linear.weight": torch.ones(4, 16), "linear.bias": torch.zeros(4)}
    torch.save(weights, folder / "2_Dense" / "pytorch_model.bin")
    graph = torchscript(folder).only.model.graph
    assert [str(d) for d in graph.shape("embeddings") or ()] == ["batch", "4"]


def test_an_unknown_module_after_pooling(tmp_path: Path) -> None:
    folder = tiny.sentences(tmp_path, ["Pooling", "Mystery"], {"pooling_mode_cls_token": True})
    assert "Mystery" in refusal(folder)


def test_names_and_axes_that_are_asked_for(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**tiny.TEXT, "type_vocab_size": 1}
    model = tiny.build("BertModel", **settings)
    done = torchscript(
        model, "default", input_names=["ids", "mask"], output_names=["states"], dynamic="*:0=rows"
    )
    graph = done.only.model.graph
    assert [str(d) for d in graph.shape("ids") or ()] == ["rows", "11"]
    assert list(graph.outputs) == ["states"]
    assert done.only.proof.sizes["rows"] == [1, 2, 5]
    assert "no such input" in refusal(model, "default", dynamic="pixels:0=batch")


# Refused -----------------------------------------------------------------------------------------


def test_a_task_that_the_architecture_does_not_have(tmp_path: Path) -> None:
    tiny.build("BertModel", **tiny.TEXT).save_pretrained(tmp_path)
    said = refusal(tmp_path, "image-classification")
    assert "'bert' has no task 'image-classification'" in said
    assert "question-answering" in said
    assert "text-generation" not in said
    assert "no task 'dreaming'" in refusal(tmp_path, "dreaming")


def test_a_head_that_was_never_trained(tmp_path: Path) -> None:
    tiny.build("BertModel", **tiny.TEXT).save_pretrained(tmp_path)
    said = refusal(tmp_path, "text-classification")
    assert "classifier.weight" in said


def test_a_missing_pooler_that_nothing_depends_on(tmp_path: Path) -> None:
    tiny.build("BertForMaskedLM", **tiny.TEXT).save_pretrained(tmp_path)
    assert torchscript(tmp_path, "default").only.proof.ok


def test_missing_folder(tmp_path: Path) -> None:
    assert "does not exist" in refusal(str(tmp_path / "nowhere"))


def test_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"name": "something else"}')
    assert "model_type" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in refusal(tmp_path)


def test_without_weights(tmp_path: Path) -> None:
    tiny.build("BertModel", **tiny.TEXT).config.save_pretrained(tmp_path)
    assert "no weights" in refusal(tmp_path, "default")


def test_broken_weights(tmp_path: Path) -> None:
    tiny.build("BertModel", **tiny.TEXT).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header")
    assert "cannot be loaded" in refusal(tmp_path, "default")


def test_unreadable_tokenizer(tmp_path: Path) -> None:
    tiny.build("BertModel", **tiny.TEXT).save_pretrained(tmp_path)
    tiny.tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    assert "tokenizer" in refusal(tmp_path, "default")


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('ran')")
    config: dict[str, Any] = {"model_type": "own", "architectures": ["Own"]}
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.Own"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = refusal(tmp_path, "default")
    assert "modeling_own.py" in said
    assert "trust-remote-code" in said


def test_a_cache_that_is_no_cache_of_keys_and_values(tmp_path: Path) -> None:
    model = tiny.build("MambaForCausalLM", vocab_size=60, hidden_size=16, num_hidden_layers=1)
    assert "text-generation" in refusal(model, "text-generation-with-past")
