"""The pattern language.

    op.Erf(x)                   the result of an Erf of the standard domain
    op("com.microsoft").Gelu(x) an operator of another domain
    op.any("Relu", "Clip")(x)   one of several operators
    op.Split(x, ...)[1]         the second result; a final `...` allows further operands
    op.Clip(x, None, 6)         None is an omitted operand, a number a constant by value
    op.Reshape(x, [0, -1])      a list is a constant vector by value
    op.Concat(a, b, axis=-1)    attributes by value (including the schema's default), by predicate,
                                or bound: axis=var("axis")
    a + b, a * b, a - b, a / b, -a, a ** b
                                Add, Mul, Sub, Div, Neg, Pow; commutative operators in either order
    product(a, b, 0.5)          factors in any order and association, see below
    total(a, -b, 1)             terms of a sum in any order
    var("x")                    any value; the same name twice is the same value
    const("w")                  a constant; number("s") a scalar constant, bound as a float
    a | b                       either; `a | None` is an optional operand
    maybe_cast(a)               `a`, or a Cast of it; optional(op.Reshape, a) of any operator
    a.when(f)  a.named("n")  a.shared()

A pattern object that occurs twice in a pattern matches one node: after `d = x - m`, all `d` in
`d / op.Sqrt(op.ReduceMean(d * d))` are the same Sub.

A number matches a constant of one element with an equal value, up to the rounding of its element
type. The constant must not raise the rank of the result: its shape is [], or at most [1] if ranks
are unknown. If [] and [1] differ, as for the index of a Gather, write `[0]` for the vector or
`const("i", rank=0)` for the scalar.

A product is flattened through Mul, Div, Reciprocal and Neg if the value between two of them has one
use. Its scalar constants are multiplied and compared with the product of the pattern's numbers (1
without any), or bound by `number("s")`. `1 / p` among the factors is a divisor, `-p` among the
terms of a total a subtrahend. Integer division does not match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Union

from toolkit.ir import node as nd

if TYPE_CHECKING:
    from toolkit.ir.graph import Array, Graph

Predicate = Callable[["Graph", str], bool]
"""A condition on the graph and the name of the matched value."""

_Method = Callable[["Pattern", "Operand"], "Pattern"]

Some = int | Sequence[int] | None
"""One number, several alternatives, or None for any."""


def _binary(op_type: str) -> tuple[_Method, _Method]:
    """Return the methods of a binary operator for a pattern on the left and on the right."""

    def on_left(self: Pattern, other: Operand) -> Pattern:
        return _node(op_type, self, other)

    def on_right(self: Pattern, other: Operand) -> Pattern:
        return _node(op_type, other, self)

    return on_left, on_right


class Pattern:
    """A pattern of a value. Built by the functions and operators of this module."""

    __slots__ = ()
    __array_ufunc__ = None  # a numpy number on the left defers to the pattern

    def when(self, predicate: Predicate, why: str = "") -> Pattern:
        """Match only if `predicate(graph, value)` holds; `why` names it in near misses."""
        return When(self, predicate, why or name_of(predicate))

    def named(self, name: str) -> Pattern:
        """Bind the producer of this value, a NodeProto."""
        return Named(self, name)

    def shared(self) -> Pattern:
        """Allow users of this value outside the match; its node is then kept."""
        return Shared(self)

    def __or__(self, other: Operand) -> Pattern:
        return Either((*_options(self), *_options(lift(other))))

    def __ror__(self, other: Operand) -> Pattern:
        return Either((*_options(lift(other)), *_options(self)))

    def __neg__(self) -> Pattern:
        return _node("Neg", self)

    __add__, __radd__ = _binary("Add")
    __sub__, __rsub__ = _binary("Sub")
    __mul__, __rmul__ = _binary("Mul")
    __truediv__, __rtruediv__ = _binary("Div")
    __pow__, __rpow__ = _binary("Pow")


Operand = Union[Pattern, float, Sequence[float], None]  # noqa: UP007  (Pattern defines `|` itself)


@dataclass(frozen=True, slots=True, eq=False)
class Var(Pattern):
    """Any value; without a `name` it is not bound."""

    name: str
    ranks: tuple[int, ...]
    dtypes: tuple[int, ...]
    where: Predicate | None


@dataclass(frozen=True, slots=True, eq=False)
class Const(Var):
    """Any constant: initializer or Constant node."""


@dataclass(frozen=True, slots=True, eq=False)
class Number(Pattern):
    """A constant of one element, by value."""

    value: float


@dataclass(frozen=True, slots=True, eq=False)
class Scalar(Pattern):
    """A constant of one element, bound as a float."""

    name: str
    where: Callable[[float], bool] | None


@dataclass(frozen=True, slots=True, eq=False)
class Vector(Pattern):
    """A constant of rank 1, by contents."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Absent(Pattern):
    """An omitted optional operand."""


@dataclass(frozen=True, slots=True, eq=False)
class Node(Pattern):
    """The first result of an operator; `more` allows operands beyond those listed."""

    op_types: tuple[str, ...]
    domain: str
    inputs: tuple[Pattern, ...]
    attrs: tuple[tuple[str, Any], ...]
    more: bool

    def __getitem__(self, index: int) -> Pattern:
        return Output(self, index)


@dataclass(frozen=True, slots=True, eq=False)
class Output(Pattern):
    """Another result of an operator."""

    node: Node
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Flat(Pattern):
    """A product or a sum: direct operands, inverse operands, and the scalar constants."""

    is_product: bool
    direct: tuple[Pattern, ...]
    inverse: tuple[Pattern, ...]
    constant: float
    scalar: Scalar | None


@dataclass(frozen=True, slots=True, eq=False)
class Either(Pattern):
    """The first of several patterns that matches."""

    options: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Optional(Pattern):
    """A pattern, or an operator whose first operand matches it."""

    wrapper: OpType
    inner: Pattern


@dataclass(frozen=True, slots=True, eq=False)
class When(Pattern):
    """A pattern with a condition."""

    inner: Pattern
    predicate: Predicate
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Named(Pattern):
    """A pattern that binds its node."""

    inner: Pattern
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Shared(Pattern):
    """A pattern whose value may have users outside the match."""

    inner: Pattern


@dataclass(frozen=True, slots=True)
class OpType:
    """One or several operators of a domain; a call with operands returns a node pattern."""

    names: tuple[str, ...]
    domain: str

    def __call__(self, *inputs: Operand | EllipsisType, **attrs: Any) -> Node:
        more = bool(inputs) and inputs[-1] is ...
        listed = inputs[:-1] if more else inputs
        if any(operand is ... for operand in listed):
            raise TypeError(f"{self.names[0]}: `...` stands for further operands, at the end only")
        patterns = tuple(
            lift(operand) for operand in listed if not isinstance(operand, EllipsisType)
        )
        return Node(self.names, self.domain, patterns, tuple(sorted(attrs.items())), more)


@dataclass(frozen=True, slots=True)
class Ops:
    """The operators of a domain, by attribute: `op.Erf`, `op("com.microsoft").FusedMatMul`."""

    domain: str = ""

    def __call__(self, domain: str) -> Ops:
        return Ops(nd.plain_domain(domain))

    def __getattr__(self, name: str) -> OpType:
        if name.startswith("_"):
            raise AttributeError(name)
        return OpType((name,), self.domain)

    def any(self, *names: str) -> OpType:
        """Return a pattern of one of these operators."""
        if not names:
            raise TypeError("op.any needs the names of operators")
        return OpType(names, self.domain)


op = Ops()


def var(
    name: str = "", *, rank: Some = None, dtype: Some = None, where: Predicate | None = None
) -> Pattern:
    """Match any value and bind it to `name`, if given.

    `rank` and `dtype` (TensorProto enum) must be known and among those given; `where` is a
    condition on the graph and the value.
    """
    return Var(name, _several(rank), _several(dtype), where)


def const(
    name: str = "",
    *,
    rank: Some = None,
    dtype: Some = None,
    where: Callable[[Array], bool] | None = None,
) -> Pattern:
    """Match a constant and bind its value name; `where` is a condition on its contents."""

    def holds(graph: Graph, value: str) -> bool:
        array = graph.const(value)
        return where is None or (array is not None and where(array))

    return Const(name, _several(rank), _several(dtype), None if where is None else holds)


def number(name: str, *, where: Callable[[float], bool] | None = None) -> Pattern:
    """Match a scalar constant and bind it to `name` as a float.

    In a product (or total) it is the product (or sum) of all scalar constants, 1 (or 0) without
    any: `product(a, number("s"))` matches `a` as well.
    """
    return Scalar(name, where)


def optional(wrapper: OpType | Sequence[OpType], inner: Operand) -> Pattern:
    """Match `inner`, or the result of one of these operators whose first operand matches it.

    Other operands and attributes of that operator are ignored.
    """
    if isinstance(wrapper, OpType):
        return Optional(wrapper, lift(inner))
    domains = {one.domain for one in wrapper}
    if len(domains) != 1:
        raise ValueError("optional() takes operators of one domain; nest it for several")
    names = tuple(name for one in wrapper for name in one.names)
    return Optional(OpType(names, domains.pop()), lift(inner))


def maybe_cast(inner: Operand) -> Pattern:
    """Match `inner`, or a Cast of it. The replacement must have the type of the result."""
    return optional(op.Cast, inner)


def lift(operand: Operand) -> Pattern:
    """Convert numbers, lists and None to patterns."""
    if isinstance(operand, Pattern):
        return operand
    if operand is None:
        return Absent()
    if isinstance(operand, (int, float, Real)):  # numpy numbers are Real, not float
        return Number(float(operand))
    if isinstance(operand, (str, bytes)) or not hasattr(operand, "__iter__"):
        raise TypeError(
            f"{operand!r} is not a pattern: use var(), const(), op.Name(...) or a number"
        )
    return Vector(tuple(float(item) for item in operand))


def _node(op_type: str, *inputs: Operand) -> Node:
    return Node((op_type,), "", tuple(map(lift, inputs)), (), False)


def _options(pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.options if isinstance(pattern, Either) else (pattern,)


def _several(some: Some) -> tuple[int, ...]:
    if some is None:
        return ()
    return (some,) if isinstance(some, int) else tuple(some)


def name_of(predicate: Callable[..., Any]) -> str:
    """Return the name of a predicate for near misses; empty for a lambda."""
    name = getattr(predicate, "__name__", "")
    return "" if name == "<lambda>" else name
