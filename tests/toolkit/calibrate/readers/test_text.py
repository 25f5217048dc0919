"""Text files through a tokenizer."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.checks import model
from tests.toolkit.calibrate.readers.reading import (
    read,
    refused,
)
from toolkit.calibrate.readers import ReaderOptions, reader_for
from toolkit.calibrate.readers.text import TextOptions
from toolkit.errors import UsageError

TOKENS = """g (int64[N,T] input_ids, int64[N,T] attention_mask) => (int64[N,T] y)
{ y = Add(input_ids, attention_mask) }"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "a": 2, "cat": 3, "sat": 4}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return TextOptions(tokenizer=str(folder))


def test_text_in_every_format(tmp_path, tokenizer):
    lines, rows, records = (tmp_path / f"a{ending}" for ending in (".txt", ".csv", ".jsonl"))
    texts = ["a cat sat", "a dog"]
    lines.write_text("\n\n".join(texts))
    rows.write_text("label,text\n" + "\n".join(f"1,{text}" for text in texts))
    records.write_text("\n".join(json.dumps({"n": 1, "sentence": text}) for text in texts))
    marked = tmp_path / "marked.csv"
    marked.write_text("text,label\na cat sat,1\na dog,2\n", encoding="utf-8-sig")
    for path in (lines, rows, records, marked):
        feeds = read(path, TOKENS, text=tokenizer)
        assert [feed["input_ids"].tolist() for feed in feeds] == [[[2, 3, 4]], [[2, 0]]]


def test_text_of_fixed_length_and_batch(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a cat sat a cat\na\nsat\n")
    reader = reader_for(
        tmp_path / "a.txt",
        model(TOKENS.replace("N,T", "2,4")),
        ReaderOptions(text=tokenizer),
    )
    feeds = list(reader)
    assert [feed["input_ids"].tolist() for feed in feeds] == [[[2, 3, 4, 2], [2, 1, 1, 1]]]
    assert feeds[0]["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert "the last 1 texts do not fill a batch of 2" in reader.notes


def test_pairs_of_texts(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_text("one,other\na,cat sat\n")
    options = TextOptions(tokenizer.tokenizer, ("one", "other"))
    assert read(tmp_path / "a.csv", TOKENS, text=options)[0]["input_ids"].tolist() == [[2, 3, 4]]


def test_columns_by_number_have_no_header(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_text("1,a cat\n\n2,sat\n")
    options = TextOptions(tokenizer.tokenizer, ("1",))
    feeds = read(tmp_path / "a.csv", TOKENS, text=options)
    assert [feed["input_ids"].tolist() for feed in feeds] == [[[2, 3]], [[4]]]


def test_the_usual_column_comes_first_and_a_sole_one_needs_no_name(tmp_path, tokenizer):
    usual, sole = tmp_path / "usual.jsonl", tmp_path / "sole.jsonl"
    usual.write_text('{"title": "sat", "review": "sat", "text": "a cat"}\n\n')
    sole.write_text('{"body": "a cat"}')
    for path in (usual, sole):
        [feed] = read(path, TOKENS, text=tokenizer)
        assert feed["input_ids"].tolist() == [[2, 3]]


def test_texts_are_cut_to_the_length_asked_for(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a cat sat a cat")
    options = TextOptions(tokenizer.tokenizer, max_length=2)
    assert read(tmp_path / "a.txt", TOKENS, text=options)[0]["input_ids"].tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ("a", "b", "c")}, "3 columns were named; a text has one or two"),
        ({"max_length": 0}, "max_length is 0; it must be 1 or more"),
    ],
)
def test_options_that_are_not_possible(options, message):
    with pytest.raises(UsageError, match=message):
        TextOptions(**options)


def test_a_batch_needs_a_padding_token(tmp_path, tokenizer):
    """Decoders pad with their end token; a tokenizer with neither cannot make a batch."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer.tokenizer, folder)
    (tmp_path / "a.txt").write_text("a cat sat\na\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["pad_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    batch, options = TOKENS.replace("N,T", "2,T"), TextOptions(str(folder))
    assert len(read(tmp_path / "a.txt", TOKENS, text=options)) == 2
    assert "has no padding token" in refused(tmp_path / "a.txt", batch, text=options)
    settings["eos_token"] = "sat"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    [feed] = read(tmp_path / "a.txt", batch, text=options)
    assert feed["input_ids"].tolist() == [[2, 3, 4], [2, 4, 4]]


def test_a_folder_without_a_vocabulary(tmp_path):
    """Of a config.json alone, transformers makes a tokenizer that knows no word."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "vocab_size": 100}')
    (tmp_path / "a.txt").write_text("a cat sat")
    said = refused(tmp_path / "a.txt", TOKENS, text=TextOptions(str(tmp_path)))
    assert "has an empty tokenizer vocabulary" in said


def test_a_tokenizer_of_another_language(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(["eine Katze hat dort sehr lange gesessen"] * 9 + ["a cat sat"]))
    assert "knows none of the words" in refused(path, TOKENS, text=tokenizer)
    path.write_text("\n".join(["a cat sat", "eine Katze"] * 20))
    assert len(read(path, TOKENS, text=tokenizer)) == 40


def test_text_that_does_not_fit(tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    path.write_text("one,other\na,b\n")
    assert "name the folder of the model's tokenizer (--tokenizer)" in refused(path, TOKENS)
    assert "is not a local folder" in refused(
        path, TOKENS, text=TextOptions(str(tmp_path / "nothing"))
    )
    assert "is not a tokenizer" in refused(path, TOKENS, text=TextOptions(str(tmp_path)))
    assert "has the columns one, other: name" in refused(path, TOKENS, text=tokenizer)
    absent = TextOptions(tokenizer.tokenizer, ("two",))
    assert "no text in 'two'; its columns are one, other" in refused(path, TOKENS, text=absent)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{no json')
    assert "line 2 is not JSON" in refused(tmp_path / "a.jsonl", TOKENS, text=tokenizer)
    (tmp_path / "a.jsonl").write_text('["a"]')
    assert "a line that is not a JSON object" in refused(
        tmp_path / "a.jsonl", TOKENS, text=tokenizer
    )
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    assert "cannot be read: UnicodeDecodeError" in refused(
        tmp_path / "a.txt", TOKENS, text=tokenizer
    )
    (tmp_path / "a.txt").write_text("\n")
    assert "are empty" in refused(tmp_path / "a.txt", TOKENS, text=tokenizer)
