"""The JSON report as a self-contained HTML page.

It has no scripts or fonts and loads nothing, follows the system's light or dark mode, and is
readable on a phone. Names come from models and users' files: all of them are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from toolkit.report import text

_Report = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #60656c; --line: #d9dce1; --back: #fff;
  --card: #f6f7f9; --good: #18794e; --warn: #9a5b00; --bad: #c62a2f; --bar: #5b7fd6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --dim: #9ba1a8; --line: #363b42;
  --back: #15181b; --card: #1f2327; --good: #4cc38a; --warn: #f1a10d; --bad: #ff7b72;
  --bar: #7f9ff0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 64rem; color: var(--ink);
  background: var(--back); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; }
.dim { color: var(--dim); }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem;
  margin: 1.2rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .7rem .9rem; }
.card b { display: block; font-size: 1.25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
td b { white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.words { min-width: 16rem; }
td.bar { width: 40%; min-width: 8rem; }
.bar i { display: block; height: .5rem; border-radius: .25rem; background: var(--bar);
  margin: .25rem 0; }
.bar i.before { background: var(--line); }
ul { margin: .5rem 0; padding-left: 1.2rem; }
li { overflow-wrap: anywhere; }
"""


_Opsets = tuple[int | None, int | None]


def page(report: _Report, opsets: _Opsets = (None, None)) -> str:
    """Render a report, as `--json` writes it; `opsets` are those before and after."""
    before, after = report["input"], report["output"]
    title = str(before["path"] or "a model")
    parts = [
        f"<h1>{_safe(title)}</h1>",
        f'<p class="dim">{_safe(_subtitle(report))}</p>',
        _verdict(report),
        _cards(report, opsets) if after is not None else "",
        _passes(report["passes"]),
        _operators(before["ops"], after["ops"]) if after is not None else "",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_safe(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body>\n</html>\n"
    )


def _subtitle(report: _Report) -> str:
    after = report["output"]
    where = "nothing was written" if after is None else f"written to {after['path']}"
    return f"{where}, in {text.duration(report['seconds'])}"


def _verdict(report: _Report) -> str:
    """Render the proof, coloured by its strength."""
    proof = str(report["proof"])
    if report["output"] is None:
        style, word = "bad", ""
    elif proof == "not validated" or "structure only" in proof:
        style, word = "warn", ""
    else:
        style, word = "good", "Proven: "
    return f'<p class="{style}"><b>{word}{_safe(proof)}</b></p>'


def _cards(report: _Report, opsets: _Opsets) -> str:
    before, after = report["input"], report["output"]
    cards = [
        ("nodes", f"{after['nodes']:,}", _was(before["nodes"], after["nodes"], "{:,}".format)),
        ("size", text.size(after["bytes"]), _was(before["bytes"], after["bytes"], text.size)),
    ]
    speed = report.get("speed", {})
    if "times" in speed:
        sure = f"between {speed['low']:.2f}x and {speed['high']:.2f}x, one thread"
        cards.append(("speed", f"{speed['times']:.2f}x", sure))
    if opsets[0] != opsets[1]:
        cards.append(("opset", str(opsets[1]), f"was {opsets[0]}"))
    needs = report.get("loads_on")
    if needs:
        oldest = needs["onnxruntime"]
        cards.append(
            (
                "onnxruntime",
                f"{oldest} or newer" if oldest else "none",
                f"opset {needs['opset']}, IR {needs['ir_version']}",
            )
        )
    made = (
        f'<div class="card"><span class="dim">{_safe(name)}</span><b>{_safe(value)}</b>'
        f'<span class="dim">{_safe(note)}</span></div>'
        for name, value, note in cards
    )
    return f'<div class="cards">{"".join(made)}</div>'


def _was(before: int, after: int, shown: Any) -> str:
    return f"was {shown(before)} {text.change(before, after)}"


# Passes ------------------------------------------------------------------------------------------


_PASS_COLUMNS = ("", "", "number", "number", "number", "words")


def _passes(rows: Sequence[_Report]) -> str:
    active = [row for row in rows if _is_active(row)]
    names = {row["name"] for row in active}
    unchanged = dict.fromkeys(row["name"] for row in rows if row["name"] not in names)
    parts = ["<h2>Passes</h2>"]
    if active:
        heads = ("pass", "status", "rewrites", "error", "time", "which")
        parts.append(_table(heads, map(_pass_cells, active), _PASS_COLUMNS))
    items = [_note(row, note) for row in active for note in row["notes"]]
    if items:
        parts.append(f"<ul>{''.join(items)}</ul>")
    if unchanged:
        parts.append(f'<p class="dim">unchanged: {_safe(", ".join(unchanged))}</p>')
    return "\n".join(parts)


def _note(row: _Report, note: str) -> str:
    style = "bad" if row["status"] == "reverted" else ""
    return f'<li><b>{_safe(row["name"])}</b>: <span class="{style}">{_safe(note)}</span></li>'


def _is_active(row: _Report) -> bool:
    """Return whether a pass changed or reported something."""
    return row["status"] in ("applied", "reverted") or (
        row["status"] == "unchanged" and bool(row["reason"])
    )


def _pass_cells(row: _Report) -> list[str]:
    style = {"applied": "good", "reverted": "bad"}.get(row["status"], "dim")
    return [
        f"<b>{_safe(row['name'])}</b>",
        f'<span class="{style}">{_safe(row["status"])}</span>',
        f"{row['rewrites']:,}" if row["rewrites"] else "",
        _safe(text.error(row["error"])),
        _safe(text.duration(row["seconds"])),
        _safe(text.top(row["rules"], most=8)),
    ]


# Operators ---------------------------------------------------------------------------------------


def _operators(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Render operator counts before and after, the largest changes first."""
    names = sorted(
        {**before, **after},
        key=lambda name: (-abs(after.get(name, 0) - before.get(name, 0)), -after.get(name, 0)),
    )
    most = max([1, *before.values(), *after.values()])
    rows = (
        [
            _safe(name),
            f"{before.get(name, 0):,}",
            f"{after.get(name, 0):,}",
            _bar("before", before.get(name, 0) / most) + _bar("after", after.get(name, 0) / most),
        ]
        for name in names
    )
    heads = ("operator", "before", "after", "")
    return "<h2>Operators</h2>\n" + _table(heads, rows, ("", "number", "number", "bar"))


def _bar(kind: str, share: float) -> str:
    return f'<i class="{kind}" style="width: {100 * share:.1f}%"></i>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str]) -> str:
    """Render a scrollable table of HTML cells; `kinds` are the style classes of its columns."""
    tags = [f' class="{kind}"' if kind else "" for kind in kinds]

    def cells(tag: str, row: Sequence[str]) -> str:
        made = (f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(tags, row, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    head = cells("th", [_safe(name) for name in heads])
    body = "\n".join(cells("td", row) for row in rows)
    return (
        f'<div class="scroll"><table>\n<thead>{head}</thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _safe(words: str) -> str:
    return escape(words, quote=True)
