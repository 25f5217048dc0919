"""Tokenized texts: each line of .txt, row of .csv or record of .jsonl is a sample.

The tokenizer is a local folder, as `save_pretrained` writes it; nothing is downloaded. Samples are
padded only for a model with a fixed length.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from toolkit.calibrate.readers.reader import FileSource
from toolkit.errors import UsageError, one_line, summarize
from toolkit.extras import require
from toolkit.ir.model import Model

TEXT_ENDINGS = (".txt", ".csv", ".jsonl")

_CHECKED_SAMPLES, _MIN_TOKENS, _MAX_UNKNOWN = 8, 32, 0.9
"""A tokenizer is rejected if more than _MAX_UNKNOWN of the first samples' tokens are unknown, given
_MIN_TOKENS tokens or more."""

_USUAL_COLUMNS = ("text", "sentence", "content", "question", "review")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How texts are found and tokenized."""

    tokenizer: str | None = None
    """The folder of the tokenizer."""
    columns: tuple[str, ...] = ()
    """The column or field of the text, or two for a pair; by default `text` or a similar name.

    Numbers from 0 select columns of a .csv without a header.
    """
    max_length: int = 128
    """The largest number of tokens per sample, for a model with a dynamic length."""

    def __post_init__(self) -> None:
        if len(self.columns) > 2:
            raise UsageError(f"{len(self.columns)} columns were named; a text has one or two")
        if self.max_length < 1:
            raise UsageError(f"max_length is {self.max_length}; it must be 1 or more")


class TextFile(FileSource):
    """A file of texts, one sample each."""

    def __init__(self, files: Sequence[Path], model: Model, options: TextOptions) -> None:
        path = self._path = files[0]
        self._options = options
        if options.tokenizer is None:
            raise UsageError(
                f"'{path}' holds text: name the folder of the model's tokenizer (--tokenizer)"
            )
        self._folder = Path(options.tokenizer).expanduser()
        self._tokenizer = _load_tokenizer(self._folder)
        graph = model.graph
        shapes = [shape for shape in map(graph.shape, graph.feeds) if shape and len(shape) == 2]
        batch, length = shapes[0] if shapes else (None, None)
        self._batch = batch if isinstance(batch, int) and batch > 0 else 1
        self._length = length if isinstance(length, int) and length > 0 else None
        if self._length is not None or self._batch > 1:
            self._require_padding()
        files = [path, *sorted(f for f in self._folder.iterdir() if f.is_file())]
        super().__init__(files, options.columns, options.max_length, self._batch, self._length)

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        texts = self._texts()
        index = 0
        seen: list[Any] = []
        while group := list(islice(texts, self._batch)):
            if len(group) < self._batch:
                left = f"the last {len(group)} texts do not fill a batch of {self._batch}"
                self.notes.append(left)
                return
            tokens = self._tokens(group)
            if index < _CHECKED_SAMPLES:
                seen.append(tokens.get("input_ids"))
                self._require_words(seen)
            yield f"'{self._path}', sample {index}", tokens
            index += 1

    def _tokens(self, group: list[tuple[str, ...]]) -> dict[str, Any]:
        columns: list[Any] = [list(column) for column in zip(*group, strict=True)]
        padding: Any = "max_length" if self._length is not None else self._batch > 1
        try:
            made: Any = self._tokenizer(
                *columns,
                truncation=True,
                max_length=self._length or self._options.max_length,
                padding=padding,
                return_tensors="np",
            )
        except Exception as error:  # tokenizers may raise anything
            raise UsageError(f"'{self._folder}' cannot tokenize: {summarize(error)}") from error
        return {str(name): made[name] for name in made}

    def _require_words(self, seen: list[Any]) -> None:
        """Raise UsageError if nearly all words of the first texts are unknown to the tokenizer."""
        unknown = self._tokenizer.unk_token_id
        ids = [int(token) for each in seen if each is not None for token in np.ravel(each)]
        special = set(self._tokenizer.all_special_ids) - {unknown}
        words = [token for token in ids if token not in special]
        if len(words) >= _MIN_TOKENS and words.count(unknown) > _MAX_UNKNOWN * len(words):
            raise UsageError(
                f"tokenizer '{self._folder}' knows none of the words in '{self._path}': is it the "
                "tokenizer of this model?"
            )

    def _texts(self) -> Iterator[tuple[str, ...]]:
        ending = self._path.suffix.lower()
        try:
            newline = "" if ending == ".csv" else None
            with self._path.open(encoding="utf-8-sig", newline=newline) as f:
                if ending == ".txt":
                    yield from ((line.strip(),) for line in f if line.strip())
                elif ending == ".csv":
                    columns = self._options.columns
                    numbered = columns and all(name.isdigit() for name in columns)
                    rows = csv.reader(f)
                    header = None if numbered else next(rows, list[str]())
                    for row in filter(None, rows):
                        names = map(str, range(len(row))) if header is None else header
                        yield self._pick(dict(zip(names, row, strict=False)))
                else:
                    yield from map(self._pick, self._records(f))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"'{self._path}' cannot be read: {summarize(error)}") from error

    def _records(self, lines: Iterable[str]) -> Iterator[Any]:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"'{self._path}': line {number} is not JSON") from error

    def _pick(self, row: Any) -> tuple[str, ...]:
        """Return the text of a row, or the two texts of a pair."""
        if not isinstance(row, dict):
            raise UsageError(f"'{self._path}' holds a line that is not a JSON object")
        record = cast("dict[str, Any]", row)
        columns = self._options.columns
        if not columns:
            usual = [name for name in _USUAL_COLUMNS if name in record]
            columns = (usual[0],) if usual else tuple(record)[:1] if len(record) == 1 else ()
        listed = ", ".join(map(str, record))
        if not columns:
            raise UsageError(
                f"'{self._path}' has the columns {one_line(listed, 80)}: name the column of the "
                "text, or its number without a header (--calib-option columns=0)"
            )
        absent = next((name for name in columns if not isinstance(record.get(name), str)), None)
        if absent is not None:
            raise UsageError(f"'{self._path}' has no text in '{absent}'; its columns are {listed}")
        return tuple(record[name] for name in columns)

    def _require_padding(self) -> None:
        """Ensure that there is a padding token; decoders often have only an end token."""
        if self._tokenizer.pad_token is None:
            if self._tokenizer.eos_token is None:
                raise UsageError(f"tokenizer '{self._folder}' has no padding token")
            self._tokenizer.pad_token = self._tokenizer.eos_token


def _load_tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        raise UsageError(f"tokenizer '{folder}' is not a local folder")
    transformers = require("transformers", "export", "texts need transformers")
    try:
        found: Any = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        words = set(found.get_vocab()) - set(found.all_special_tokens)
    except Exception as error:  # a folder of anything else may raise anything
        raise UsageError(f"'{folder}' is not a tokenizer: {summarize(error)}") from error
    if not words:  # transformers builds an empty tokenizer from a config.json alone
        raise UsageError(f"'{folder}' has an empty tokenizer vocabulary, or none")
    return found
