"""scikit-learn models on real data sets: the same answers, batch by batch."""

# Where scikit-learn is not installed, its name is that of this folder.
# pyright: reportAttributeAccessIssue=false

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toolkit
from toolkit.errors import NotProven, UsageError

sklearn = pytest.importorskip("sklearn")
pytest.importorskip("skl2onnx")

from sklearn import (  # noqa: E402
    cluster,
    datasets,
    decomposition,
    ensemble,
    linear_model,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)

pytestmark = pytest.mark.export

LABELS = ["label", "probabilities"]

CLASSIFIERS = [
    linear_model.LogisticRegression(max_iter=500),
    ensemble.RandomForestClassifier(15, random_state=0),
    ensemble.GradientBoostingClassifier(n_estimators=10),
    ensemble.HistGradientBoostingClassifier(max_iter=10),
    svm.LinearSVC(),
    svm.SVC(),
    neighbors.KNeighborsClassifier(),
    naive_bayes.GaussianNB(),
    neural_network.MLPClassifier(max_iter=50, random_state=0),
    pipeline.make_pipeline(preprocessing.StandardScaler(), ensemble.RandomForestClassifier(15)),
    pipeline.make_pipeline(
        preprocessing.StandardScaler(), decomposition.PCA(3), linear_model.LogisticRegression()
    ),
]
REGRESSORS = [
    linear_model.Ridge(),
    tree.DecisionTreeRegressor(),
    ensemble.GradientBoostingRegressor(n_estimators=10),
    ensemble.HistGradientBoostingRegressor(max_iter=10),
    neighbors.KNeighborsRegressor(),
]


def kind(model: object) -> str:
    return type(model).__name__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", CLASSIFIERS, ids=kind)
def test_classifiers(model):
    samples, labels = datasets.load_wine(return_X_y=True)
    model.fit(samples, labels)
    exported = toolkit.export(model, samples[:50])
    graph = exported.only
    assert exported.framework == "sklearn"
    assert list(graph.model.graph.outputs) == LABELS
    assert {1, 2, 5} <= set(graph.proof.sizes["batch"])
    assert graph.proof.error <= 1e-4


@pytest.mark.parametrize("model", REGRESSORS, ids=kind)
def test_regressors(model):
    samples, values = datasets.load_diabetes(return_X_y=True)
    graph = toolkit.export(model.fit(samples, values), samples[:50]).only
    assert list(graph.model.graph.outputs) == ["variable"]
    assert graph.dynamic == {"input": {0: "batch"}}


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        (cluster.KMeans(3, n_init=2), ["label", "scores"]),  # pyright: ignore[reportArgumentType]
        (decomposition.PCA(2), ["variable"]),
        (svm.OneClassSVM(), ["label", "scores"]),
    ],
    ids=lambda value: kind(value) if not isinstance(value, list) else "",
)
def test_models_without_a_target(model, outputs):
    samples, _ = datasets.load_iris(return_X_y=True)
    graph = toolkit.export(model.fit(samples), samples[:50]).only
    assert list(graph.model.graph.outputs) == outputs


def test_without_an_example_the_features_are_counted():
    samples, labels = datasets.load_iris(return_X_y=True)
    graph = toolkit.export(linear_model.LogisticRegression(max_iter=500).fit(samples, labels)).only
    assert graph.model.graph.shape("input")[1] == 4


def test_columns_of_several_types_are_inputs_of_their_own():
    pandas = pytest.importorskip("pandas")
    from sklearn.compose import ColumnTransformer

    frame = pandas.DataFrame({"age": [20.0, 30, 40, 50] * 5, "city": ["a", "b", "c", "a"] * 5})
    columns = ColumnTransformer(
        [
            ("numbers", preprocessing.StandardScaler(), ["age"]),
            ("words", preprocessing.OneHotEncoder(), ["city"]),
        ]
    )
    model = pipeline.make_pipeline(columns, linear_model.LogisticRegression())
    graph = toolkit.export(model.fit(frame, [0, 1, 1, 0] * 5), frame).only
    assert list(graph.model.graph.feeds) == ["age", "city"]
    assert graph.proof.ok


def test_names_and_opset_are_the_users():
    samples, values = datasets.load_diabetes(return_X_y=True)
    model = linear_model.Ridge().fit(samples, values)
    exported = toolkit.export(model, samples[:5], input_names=["x"], output_names=["y"], opset=15)
    assert list(exported.model.graph.feeds) == ["x"]
    assert list(exported.model.graph.outputs) == ["y"]
    assert exported.model.opsets[""] == 15


def test_64_bits_where_32_are_not_enough():
    """Two large numbers whose difference decides: it is below a 32-bit float's last place."""
    samples = np.array([[1e8], [1e8 + 4], [1e8 + 8], [1e8 + 12]] * 5)
    model = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.Ridge(1e-9))
    model.fit(samples, (samples[:, 0] - 1e8) ** 2)
    graph = toolkit.export(model, samples).only
    assert any("64 bits" in note for note in graph.notes)
    assert graph.proof.error <= 1e-4


def test_a_model_that_is_not_fitted():
    with pytest.raises(UsageError, match="not fitted"):
        toolkit.export(linear_model.Ridge(), np.zeros((2, 3)))


def test_a_model_that_no_converter_knows():
    class Own(linear_model.Ridge):
        pass

    samples, values = datasets.load_diabetes(return_X_y=True)
    with pytest.raises(UsageError, match="cannot be exported"):
        toolkit.export(Own().fit(samples, values), samples[:5])


def test_pickles_are_refused(tmp_path):
    file = tmp_path / "model.pkl"
    file.write_bytes(b"")
    with pytest.raises(UsageError, match="runs code when it is read"):
        toolkit.export(Path(file))


def test_several_targets_with_classes_of_their_own():
    from sklearn import multioutput

    data: Any = datasets.load_wine()
    rows = preprocessing.scale(data.data).astype(np.float32)
    targets = np.c_[data.target, data.target > 0]
    chain = multioutput.MultiOutputClassifier(linear_model.LogisticRegression()).fit(rows, targets)
    exported = toolkit.export(chain, rows[:4])
    assert list(exported.model.graph.outputs) == ["label", "probabilities_0", "probabilities_1"]
    forest = ensemble.RandomForestClassifier(5, random_state=0).fit(rows, targets)
    exported = toolkit.export(forest, rows[:4])
    assert list(exported.model.graph.outputs) == LABELS
    assert exported.only.proof.sizes["batch"] == [1, 2, 4, 5]


def text_model(texts):
    from sklearn.feature_extraction.text import TfidfVectorizer

    model = pipeline.make_pipeline(TfidfVectorizer(), linear_model.LogisticRegression())
    return model.fit(texts, [0, 1, 1, 0])


def test_text_also_where_the_usual_locale_is_not_installed():
    texts = np.array(["The cat sat ON the mat", "a dog ran", "cats and dogs", "the far mat"])
    exported = toolkit.export(text_model(texts), texts)
    assert list(exported.model.graph.outputs) == LABELS
    assert exported.only.proof.error <= 1e-4


def test_letters_that_the_converter_takes_for_the_end_of_a_word():
    texts = np.array(["the über mat", "a dog ran", "cats and dogs", "the far über"])
    with pytest.raises(NotProven, match="probabilities"):
        toolkit.export(text_model(texts), texts)
