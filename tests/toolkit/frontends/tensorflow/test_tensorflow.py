"""TensorFlow: Keras models and files, SavedModel folders, TFLite files."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import toolkit
from toolkit.errors import UsageError

tf = pytest.importorskip("tensorflow")
pytest.importorskip("tf2onnx")

pytestmark = pytest.mark.tensorflow

keras = tf.keras
layers = keras.layers


@pytest.fixture(scope="module")
def guide():
    """The model of the guides."""
    return keras.Sequential(
        [layers.Input((10,)), layers.Dense(20, activation="relu"), layers.Dense(5)]
    )


@pytest.fixture(scope="module")
def cnn():
    return keras.Sequential(
        [
            layers.Input((28, 28, 1), name="image"),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPool2D(),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.3),
            layers.Dense(5, activation="softmax"),
        ]
    )


def require_proven(exported, inputs, outputs):
    graph = exported.only
    assert exported.framework == "tensorflow"
    assert list(graph.model.graph.feeds) == inputs
    assert list(graph.model.graph.outputs) == outputs
    assert graph.proof.ok
    assert graph.proof.error <= 1e-4
    assert {1, 2, 5} <= set(graph.proof.sizes["batch"])
    return graph


def test_the_guides_model(guide):
    require_proven(toolkit.export(guide), ["input"], ["output"])


def test_a_cnn(cnn):
    graph = require_proven(toolkit.export(cnn, np.zeros((3, 28, 28, 1))), ["image"], ["output"])
    assert "Conv" in {node.op_type for node in graph.model.graph.nodes}


def test_sequences_and_two_outputs():
    tokens = layers.Input((None,), dtype="int32", name="tokens")
    hidden = layers.GRU(8, return_sequences=True)(layers.Embedding(50, 16)(tokens))
    mixed = layers.MultiHeadAttention(2, 8)(hidden, hidden)
    model = keras.Model(
        tokens,
        [layers.Dense(3, name="logits")(mixed), layers.GlobalAveragePooling1D(name="mean")(mixed)],
    )
    graph = require_proven(toolkit.export(model), ["tokens"], ["logits", "mean"])
    assert graph.dynamic == {"tokens": {0: "batch", 1: "tokens_1"}}
    assert len(graph.proof.sizes["tokens_1"]) >= 3


def test_two_inputs():
    left, right = layers.Input((4,), name="a"), layers.Input((4,), name="b")
    model = keras.Model([left, right], layers.Add(name="sum")([left, right]))
    require_proven(toolkit.export(model), ["a", "b"], ["sum"])


class Subclassed(keras.Model):
    """Says nothing of its inputs."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x, training=False):
        return self.dense(x)


def test_a_subclassed_model_needs_an_example():
    model = Subclassed()
    require_proven(toolkit.export(model, np.zeros((2, 7), np.float32)), ["input"], ["output"])
    with pytest.raises(UsageError, match="give an example"):
        toolkit.export(Subclassed())


@pytest.mark.parametrize("ending", ["keras", "h5"])
def test_keras_files(cnn, ending, tmp_path):
    path = tmp_path / f"model.{ending}"
    cnn.save(path)
    require_proven(toolkit.export(str(path)), ["image"], ["output"])


def test_saved_model_folders(guide, tmp_path):
    tf.saved_model.save(guide, str(tmp_path / "plain"))
    require_proven(toolkit.export(str(tmp_path / "plain")), ["inputs"], ["output"])
    guide.export(str(tmp_path / "keras"), verbose=False)
    require_proven(toolkit.export(str(tmp_path / "keras")), ["input"], ["output"])


def test_tflite_files(guide, cnn, tmp_path):
    guide.export(str(tmp_path / "model"), verbose=False)
    for converter, inputs in (
        (tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "model")), ["input"]),
        (tf.lite.TFLiteConverter.from_keras_model(cnn), ["image"]),
    ):
        path = tmp_path / "model.tflite"
        path.write_bytes(converter.convert())
        require_proven(toolkit.export(str(path)), inputs, ["output"])


def test_a_tflite_file_without_its_weights(guide, tmp_path):
    """What the converter makes of this: every variable is read, and none was ever set."""
    tf.saved_model.save(guide, str(tmp_path / "model"))
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "model"))
    path = tmp_path / "model.tflite"
    path.write_bytes(converter.convert())
    with pytest.raises(UsageError, match="reads uninitialized variables"):
        toolkit.export(str(path))


def test_names_opset_and_axes_are_the_users(guide):
    exported = toolkit.export(
        guide, input_names=["x"], output_names=["y"], opset=13, dynamic="input:0=rows"
    )
    assert exported.model.opsets[""] == 13
    assert exported.only.dynamic == {"x": {0: "rows"}}
    assert list(exported.model.graph.outputs) == ["y"]


def test_every_size_fixed_on_request(guide):
    exported = toolkit.export(guide, np.zeros((3, 10)), dynamic="none")
    assert exported.model.graph.shape("input") == (3, 10)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (np.zeros((2, 3)), "has shape"),
        ((np.zeros((2, 10)), np.zeros((2, 10))), "2 values"),
        ({"y": np.zeros((2, 10))}, "inputs: input"),
    ],
)
def test_an_example_that_does_not_fit(guide, example, message):
    with pytest.raises(UsageError, match=message):
        toolkit.export(guide, example)


@pytest.mark.parametrize("name", ["model.keras", "model.tflite"])
def test_files_that_cannot_be_read(name, tmp_path):
    path = tmp_path / name
    path.write_text("no model")
    with pytest.raises(UsageError, match="cannot be read"):
        toolkit.export(Path(path))


def test_a_saved_model_without_signatures(tmp_path):
    (tmp_path / "saved_model.pb").write_text("no model")
    with pytest.raises(UsageError, match="cannot be read"):
        toolkit.export(tmp_path)


def test_a_gelu():
    """TensorFlow writes it by erfc, which tf2onnx does not know."""
    model = keras.Sequential([layers.Input((10,)), layers.Dense(20, activation="gelu")])
    graph = toolkit.export(model).only
    assert graph.proof.ok
    result = toolkit.optimize(graph.model, "fuse", target="onnx")
    assert [node.op_type for node in result.model.graph.nodes][-1] == "Gelu"


def test_sizes_that_go_together_have_one_name():
    ids = keras.Input((None,), dtype="int32", name="ids")
    mask = keras.Input((None,), dtype="float32", name="mask")
    other = keras.Input((None,), dtype="int32", name="other")
    table = layers.Embedding(10, 4)
    both = layers.concatenate([table(ids), mask[..., None]])
    longer = layers.concatenate([both[..., :4], table(other)], axis=1)
    graph = toolkit.export(keras.Model([ids, mask, other], longer)).only
    names = {name: graph.model.graph.shape(name) for name in graph.model.graph.feeds}
    assert names["ids"] == names["mask"]
    assert names["ids"] != names["other"]


def encoder(length=None):
    """Two layers of a transformer on padded texts."""
    ids = keras.Input((length,), dtype="int32", name="ids")
    padding = keras.Input((length,), dtype="int32", name="padding")
    x = layers.Embedding(100, 32)(ids)
    mask = (padding != 0)[:, None, :]
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 8)(x, x, attention_mask=mask)
        x = layers.LayerNormalization(epsilon=1e-6)(x + attended)
        wide = layers.Dense(64, activation=lambda value: keras.activations.gelu(value, True))(x)
        x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dense(32)(wide))
    return keras.Model([ids, padding], x)


@pytest.mark.parametrize("length", [None, 16])
@pytest.mark.parametrize("opset", [13, 18])
def test_a_transformer_is_fused_as_a_whole(length, opset):
    exported = toolkit.export(encoder(length), opset=opset).only.model
    result = toolkit.optimize(exported, "fuse", target="onnx")
    found = Counter(node.op_type for node in result.model.graph.nodes)
    assert (found["Attention"], found["LayerNormalization"], found["Gelu"]) == (2, 4, 2)
    assert found["MatMul"] == 8
    assert not {"Softmax", "Einsum", "Transpose", "Squeeze"} & set(found)
