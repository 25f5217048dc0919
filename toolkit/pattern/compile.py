"""Compile patterns into matchers, closures that examine one value.

The operators of a pattern's root are the index keys of its rule. The operators of the root's
operands reject most nodes early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolkit.ir import node as nd
from toolkit.pattern import associative, dsl, leaf_matchers, op_matchers
from toolkit.pattern.backtracking import UNBOUND, Goals, Search
from toolkit.pattern.leaf_matchers import Breadth, Heads, Matcher
from toolkit.pattern.op_matchers import UnorderedOperands, assign_goal, head


@dataclass(frozen=True, slots=True)
class Root:
    """A compiled pattern for nodes whose operator is among `heads`."""

    matcher: Matcher
    output: int
    heads: frozenset[str]
    below: tuple[frozenset[str], ...]
    """Sets of operators, each of which must contain a producer of one of the root's operands."""
    size: int
    """The smallest number of nodes of a match; the largest of alternatives."""


def compile_roots(pattern: dsl.Pattern) -> list[Root]:
    """Return a root per alternative; raises ValueError if one matches any value."""
    compiler = _Compiler(pattern)
    return [_root(option, compiler) for option in _alternatives(pattern)]


def names_of(pattern: dsl.Pattern) -> dict[str, str]:
    """Return every name that the pattern binds, with a description of its kind."""
    kinds: dict[str, str] = {}
    for part in _walk(pattern):
        for name, kind in _names(part):
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"'{name}' names both {kinds[name]} and {kind}")
    return kinds


# Analysis of patterns ----------------------------------------------------------------------------


def _walk(pattern: dsl.Pattern) -> Iterator[dsl.Pattern]:
    """Yield the pattern and its parts; a part that is used twice is yielded twice."""
    pending, seen = [pattern], set[int]()
    while pending:
        part = pending.pop()
        yield part
        if id(part) not in seen:
            seen.add(id(part))
            pending.extend(_parts(part))


def _parts(pattern: dsl.Pattern) -> tuple[dsl.Pattern, ...]:
    match pattern:
        case dsl.Node():
            return pattern.inputs
        case dsl.Output():
            return (pattern.node,)
        case dsl.Flat():
            scalar = () if pattern.scalar is None else (pattern.scalar,)
            return (*pattern.direct, *pattern.inverse, *scalar)
        case dsl.Either():
            return pattern.options
        case dsl.Optional() | dsl.When() | dsl.Named() | dsl.Shared():
            return (pattern.inner,)
        case _:
            return ()


def _names(pattern: dsl.Pattern) -> Iterator[tuple[str, str]]:
    match pattern:
        case dsl.Var() if pattern.name:
            yield pattern.name, "a value"
        case dsl.Scalar():
            yield pattern.name, "a number"
        case dsl.Named():
            yield pattern.name, "a node"
        case dsl.Node():
            for _, wanted in pattern.attrs:
                if isinstance(wanted, dsl.Var) and wanted.name:
                    yield wanted.name, "an attribute"
        case _:
            pass


def _alternatives(pattern: dsl.Pattern) -> Iterator[dsl.Pattern]:
    if isinstance(pattern, dsl.Either):
        for option in pattern.options:
            yield from _alternatives(option)
    else:
        yield pattern


def _size(pattern: dsl.Pattern, counted: set[int]) -> int:
    """Return the number of nodes of a match; a product counts as one, a reused pattern once."""
    if id(pattern) in counted:
        return 0
    counted.add(id(pattern))
    if isinstance(pattern, dsl.Either):
        return max(_size(option, set(counted)) for option in pattern.options)
    bare = isinstance(pattern, dsl.Flat) and associative.FlatSpec.of(pattern).may_be_bare
    own = isinstance(pattern, (dsl.Node, dsl.Flat)) and not bare
    return own + sum(_size(part, counted) for part in _parts(pattern))


def _root(pattern: dsl.Pattern, compiler: _Compiler) -> Root:
    core = pattern
    while isinstance(core, (dsl.When, dsl.Named, dsl.Shared)):
        core = core.inner
    if isinstance(core, dsl.Flat):
        compiler.forbid_bare(core)
    matcher = compiler.compile(pattern, shared=True)
    if matcher.heads is None:
        raise ValueError("the root of a pattern must be an operator, not any value")
    output = core.index if isinstance(core, dsl.Output) else 0
    return Root(matcher, output, matcher.heads, _below(core, compiler), _size(pattern, set()))


def _below(pattern: dsl.Pattern, compiler: _Compiler) -> tuple[frozenset[str], ...]:
    """Return the operators of the root's operands where the pattern determines them."""
    match pattern:
        case dsl.Output():
            parts = pattern.node.inputs
        case dsl.Node():
            parts = pattern.inputs
        case dsl.Flat() if not associative.FlatSpec.of(pattern).may_be_bare:
            parts = (*pattern.direct, *pattern.inverse)
        case _:
            parts = ()
    heads = (compiler.compile(part).heads for part in parts)
    return tuple({found for found in heads if found is not None})


# Compiling ---------------------------------------------------------------------------------------


class _Compiler:
    """Compiles the parts of one pattern, each of them once."""

    def __init__(self, pattern: dsl.Pattern) -> None:
        self._uses = Counter(id(part) for part in _walk(pattern))
        self._made: dict[tuple[int, bool], Matcher] = {}
        self._never_bare: set[int] = set()

    def forbid_bare(self, root: dsl.Flat) -> None:
        """Require an operator for the product at the root: any value is 1 times itself."""
        if root.direct and self.compile(root.direct[0]).heads is None:
            self._never_bare.add(id(root))

    def compile(self, pattern: dsl.Pattern, shared: bool = False) -> Matcher:
        """Compile a part; a `shared` value, like the root's, may have users outside the match."""
        key = id(pattern), shared
        if key not in self._made:
            self._made[key] = self._compile(pattern, shared)
        return self._made[key]

    def _compile(self, pattern: dsl.Pattern, shared: bool) -> Matcher:
        match pattern:
            case dsl.Var():
                return leaf_matchers.variable(pattern)
            case dsl.Number():
                return leaf_matchers.number(pattern)
            case dsl.Scalar():
                return leaf_matchers.scalar(pattern)
            case dsl.Vector():
                return leaf_matchers.vector(pattern)
            case dsl.Absent():
                return leaf_matchers.absent()
            case dsl.Node():
                return self._operator(pattern, 0, shared)
            case dsl.Output():
                return self._operator(pattern.node, pattern.index, shared)
            case dsl.Shared():
                return self.compile(pattern.inner, shared=True)
            case _:
                made = self._composed(pattern, shared)
                return _reused(pattern, made) if self._uses[id(pattern)] > 1 else made

    def _operator(self, pattern: dsl.Node, output: int, shared: bool) -> Matcher:
        inputs = [self.compile(part) for part in pattern.inputs]
        return op_matchers.operator(pattern, output, inputs, shared, self._uses[id(pattern)] > 1)

    def _composed(self, pattern: dsl.Pattern, shared: bool) -> Matcher:
        match pattern:
            case dsl.Flat():
                direct = [self.compile(part) for part in pattern.direct]
                inverse = [self.compile(part) for part in pattern.inverse]
                spec = associative.FlatSpec.of(pattern)
                bare = None
                if spec.may_be_bare and id(pattern) in self._never_bare:
                    spec = replace(spec, may_be_bare=False)
                elif spec.may_be_bare:
                    bare = self.compile(pattern.direct[0], shared)
                return _flat(spec, direct, inverse, bare, shared)
            case dsl.Either():
                return _either([self.compile(option, shared) for option in pattern.options])
            case dsl.Optional():
                bare = self.compile(pattern.inner, shared)
                return _optional(pattern, self.compile(pattern.inner), bare, shared)
            case dsl.When():
                return _when(pattern, self.compile(pattern.inner, shared))
            case dsl.Named():
                return _named(pattern, self.compile(pattern.inner, shared))
            case _:
                raise TypeError(f"{pattern!r} is not a pattern")


def _flat(
    spec: associative.FlatSpec,
    direct: list[Matcher],
    inverse: list[Matcher],
    bare: Matcher | None,
    shared: bool,
) -> Matcher:
    divisors, factors = UnorderedOperands(inverse), UnorderedOperands(direct)

    def step(s: Search, value: str, rest: Goals) -> Goals:
        for cut in associative.cuts(s, value, spec):
            mark = len(s.trail)
            if associative.enter(s, value, cut, shared) and s.solve(goals(s, value, cut, rest)):
                return None
            s.undo(mark)
        return s.recording and s.fail(value, f"expected {spec.text}, found {s.describe(value)}")

    def goals(s: Search, value: str, cut: associative.Cut, rest: Goals) -> Goals:
        def compare(s: Search, value: str, rest: Goals) -> Goals:
            return rest if associative.constant_fits(s, value, spec, cut) else False

        if s.recording:  # the constant last: a near miss counts the matched operands
            rest = (compare, value, rest)
        elif not associative.constant_fits(s, value, spec, cut):
            return False
        if bare is not None and not cut.nodes:
            return (bare.step, value, rest)
        rest = assign_goal(divisors.ordered(s), cut.inverse, rest)
        return assign_goal(factors.ordered(s), cut.direct, rest)

    def accepts(s: Search, value: str) -> bool:
        node = s.producer(value)
        if node is not None and node.op_type in spec.operators:
            return node.domain in nd.STANDARD_DOMAINS
        return bare is not None and bare.accepts(s, value)

    if bare is None:
        return Matcher(step, accepts, spec.operators, Breadth.OPERATOR)
    heads = _union(spec.operators, bare.heads)
    return Matcher(step, accepts, heads, max(bare.breadth, Breadth.OPTIONAL_OPERATOR))


def _either(options: list[Matcher]) -> Matcher:
    def step(s: Search, value: str, rest: Goals) -> Goals:
        choices = options if s.recording else [o for o in options if o.accepts(s, value)]
        for option in choices[:-1]:
            mark = len(s.trail)
            if s.solve((option.step, value, rest)):
                return None
            s.undo(mark)
        return (choices[-1].step, value, rest) if choices else False

    def accepts(s: Search, value: str) -> bool:
        return any(option.accepts(s, value) for option in options)

    heads = _union(*(option.heads for option in options))
    return Matcher(step, accepts, heads, max(option.breadth for option in options))


def _optional(pattern: dsl.Optional, inner: Matcher, bare: Matcher, shared: bool) -> Matcher:
    """Try the wrapper first: `maybe_cast(x)` binds the operand of the Cast."""
    wrappers = frozenset(op_matchers.keys(pattern.wrapper))

    def through(s: Search, value: str, rest: Goals) -> Goals:
        node = s.producer(value)
        if node is None or not (shared or s.is_inner(value)):
            return False
        s.found(node, shared, counted=False)
        return (inner.step, node.input[0], rest)

    def step(s: Search, value: str, rest: Goals) -> Goals:
        if is_wrapped(s, value):
            mark = len(s.trail)
            if s.solve((through, value, rest)):
                return None
            s.undo(mark)
        return (bare.step, value, rest)

    def is_wrapped(s: Search, value: str) -> bool:
        node = s.producer(value)
        return node is not None and head(node) in wrappers and len(node.input) > 0

    def accepts(s: Search, value: str) -> bool:
        return is_wrapped(s, value) or bare.accepts(s, value)

    heads = _union(wrappers, inner.heads)
    return Matcher(step, accepts, heads, max(inner.breadth, Breadth.OPTIONAL_OPERATOR))


def _when(pattern: dsl.When, inner: Matcher) -> Matcher:
    def ask(s: Search, value: str, rest: Goals) -> Goals:
        if pattern.predicate(s.graph, value):
            return rest
        return s.recording and s.fail(value, leaf_matchers.refusal(pattern.why, value), exact=True)

    def step(s: Search, value: str, rest: Goals) -> Goals:
        return inner.step(s, value, (ask, value, rest))

    return Matcher(step, inner.accepts, inner.heads, inner.breadth)


def _named(pattern: dsl.Named, inner: Matcher) -> Matcher:
    name = pattern.name

    def step(s: Search, value: str, rest: Goals) -> Goals:
        node = s.producer(value)
        bound = s.bound.get(name, UNBOUND)
        if bound is UNBOUND:
            s.bind(name, node)
        elif bound is not node:
            return s.recording and s.fail(value, f"expected node '{name}' again")
        return inner.step(s, value, rest)

    return Matcher(step, inner.accepts, inner.heads, inner.breadth)


def _reused(pattern: dsl.Pattern, inner: Matcher) -> Matcher:
    """Match all occurrences of one pattern object to the same value."""

    def step(s: Search, value: str, rest: Goals) -> Goals:
        seen = s.bound.get(pattern)
        if seen is None:
            s.bind(pattern, value)
            return inner.step(s, value, rest)
        if seen == value:
            return rest
        return s.recording and s.fail(
            value, f"expected '{seen}' again, found {s.describe(value)}", exact=True
        )

    return Matcher(step, inner.accepts, inner.heads, inner.breadth)


def _union(*heads: Heads) -> Heads:
    known = [found for found in heads if found is not None]
    return frozenset[str]().union(*known) if len(known) == len(heads) else None
