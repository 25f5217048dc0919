"""The words of the pattern language.

    op.Erf(x)                   the value that an Erf of ONNX's own domain gives
    op("com.microsoft").Gelu(x) the same of another domain
    op.any("Relu", "Clip")(x)   of one of several types
    op.Split(x, ...)[1]         its second output; a last `...` allows further inputs
    op.Clip(x, None, 6)         None is an input left out, a number a constant by value
    op.Reshape(x, [0, -1])      a list is a constant vector by value
    op.Concat(a, b, axis=-1)    attributes by value (the schema's default counts), by predicate, or
                                bound: axis=var("axis")
    a + b, a * b, a - b, a / b, -a, a ** b
                                Add, Mul, Sub, Div, Neg, Pow; commutative operators in either order
    product(a, b, 0.5)          factors in any order and association, see below
    total(a, -b, 1)             terms likewise
    var("x")                    any value; the same name twice is the same value
    const("w")                  a constant; number("s") a scalar constant, bound as a float
    a | b                       either; `a | None` an input that may be left out
    maybe_cast(a)               `a`, or a Cast of it; optional(op.Reshape, a) of any operator
    a.when(f)  a.named("n")  a.shared()

A pattern object that occurs twice in one pattern stands for one node: after `d = x - m`, all `d` in
`d / op.Sqrt(op.ReduceMean(d * d))` are the same Sub.

A number matches a constant of one element whose value is equal within what its element type can
hold. Its shape may be [], or of any rank that does not raise the rank of the result (at most [1]
where ranks are unknown). Where [] and [1] differ, as for the index of a Gather, write `[0]` for the
vector or `const("i", rank=0)` for the scalar.

A product is flattened through Mul, Div, Reciprocal and Neg as long as the value between two of them
is read once. All its scalar constants are multiplied and compared with the product of the pattern's
numbers (1 when there are none), or bound by `number("s")`. `1 / p` among the factors is a divisor,
`-p` among the terms of a total is subtracted. Division counts only where it is not of integers.
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
"""Asked with the graph and the name of the value that matched."""

Some = int | Sequence[int] | None
"""One number, several to choose from, or None for any."""


class Pattern:
    """What a value of a graph looks like. Made by the functions of this module and by operators."""

    __slots__ = ()
    __array_ufunc__ = None  # a numpy number on the left leaves the operator to the pattern

    def when(self, predicate: Predicate, why: str = "") -> Pattern:
        """Match only where `predicate(graph, value)` holds; `why` names it in near misses."""
        return When(self, predicate, why or _name_of(predicate))

    def named(self, name: str) -> Pattern:
        """Bind the node that gives this value, a NodeProto."""
        return Named(self, name)

    def shared(self) -> Pattern:
        """Match also where this value is read outside of the match; then its node stays."""
        return Shared(self)

    def __or__(self, other: Operand) -> Pattern:
        return Either((*_options(self), *_options(lift(other))))

    def __ror__(self, other: Operand) -> Pattern:
        return Either((*_options(lift(other)), *_options(self)))

    def __add__(self, other: Operand) -> Pattern:
        return _node("Add", self, other)

    def __radd__(self, other: Operand) -> Pattern:
        return _node("Add", other, self)

    def __sub__(self, other: Operand) -> Pattern:
        return _node("Sub", self, other)

    def __rsub__(self, other: Operand) -> Pattern:
        return _node("Sub", other, self)

    def __mul__(self, other: Operand) -> Pattern:
        return _node("Mul", self, other)

    def __rmul__(self, other: Operand) -> Pattern:
        return _node("Mul", other, self)

    def __truediv__(self, other: Operand) -> Pattern:
        return _node("Div", self, other)

    def __rtruediv__(self, other: Operand) -> Pattern:
        return _node("Div", other, self)

    def __pow__(self, other: Operand) -> Pattern:
        return _node("Pow", self, other)

    def __rpow__(self, other: Operand) -> Pattern:
        return _node("Pow", other, self)

    def __neg__(self) -> Pattern:
        return _node("Neg", self)


Operand = Union[Pattern, float, Sequence[float], None]  # noqa: UP007  (Pattern defines `|` itself)


@dataclass(frozen=True, slots=True, eq=False)
class Var(Pattern):
    """Any value; `name` is empty for one that is not bound."""

    name: str
    ranks: tuple[int, ...]
    dtypes: tuple[int, ...]
    where: Predicate | None


@dataclass(frozen=True, slots=True, eq=False)
class Const(Pattern):
    """Any constant: initializer or Constant node."""

    name: str
    ranks: tuple[int, ...]
    dtypes: tuple[int, ...]
    where: Callable[[Array], bool] | None


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
    """An optional input that is left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Node(Pattern):
    """The first output of an operator; `more` allows inputs beyond those listed."""

    op_types: tuple[str, ...]
    domain: str
    inputs: tuple[Pattern, ...]
    attrs: tuple[tuple[str, Any], ...]
    more: bool

    def __getitem__(self, index: int) -> Pattern:
        return Output(self, index)


@dataclass(frozen=True, slots=True, eq=False)
class Output(Pattern):
    """Another output of an operator."""

    node: Node
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Flat(Pattern):
    """A product or a sum: operands that count directly and inversely, and the scalar constants."""

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
    """A pattern, or an operator whose first input it is."""

    wrapper: OpType
    inner: Pattern


@dataclass(frozen=True, slots=True, eq=False)
class When(Pattern):
    inner: Pattern
    predicate: Predicate
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Named(Pattern):
    inner: Pattern
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Shared(Pattern):
    inner: Pattern


@dataclass(frozen=True, slots=True)
class OpType:
    """One or several operator types of a domain; called with inputs, it makes a node pattern."""

    names: tuple[str, ...]
    domain: str

    def __call__(self, *inputs: Operand | EllipsisType, **attrs: Any) -> Node:
        more = bool(inputs) and inputs[-1] is ...
        listed = inputs[:-1] if more else inputs
        if any(operand is ... for operand in listed):
            raise TypeError(f"{self.names[0]}: `...` stands for further inputs, at the end only")
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
        """Any of these operator types."""
        if not names:
            raise TypeError("op.any needs the names of operators")
        return OpType(names, self.domain)


op = Ops()


def var(
    name: str = "", *, rank: Some = None, dtype: Some = None, where: Predicate | None = None
) -> Pattern:
    """Any value, bound to `name`; one without a name is not bound.

    `rank` and `dtype` (TensorProto enum) must be known and among those given; `where` is asked with
    the graph and the value.
    """
    return Var(name, _several(rank), _several(dtype), where)


def const(
    name: str = "",
    *,
    rank: Some = None,
    dtype: Some = None,
    where: Callable[[Array], bool] | None = None,
) -> Pattern:
    """A constant, whose value name is bound to `name`; `where` is asked with its contents."""
    return Const(name, _several(rank), _several(dtype), where)


def number(name: str, *, where: Callable[[float], bool] | None = None) -> Pattern:
    """A scalar constant, bound to `name` as a float.

    In a product (or total) it is all scalar constants multiplied (or added): 1 (or 0) when there
    are none, so that `product(a, number("s"))` matches plain `a` as well.
    """
    return Scalar(name, where)


def optional(wrapper: OpType | Sequence[OpType], inner: Operand) -> Pattern:
    """`inner`, or the output of one of these operators whose first input it is.

    Further inputs and attributes of that operator are not looked at.
    """
    if isinstance(wrapper, OpType):
        return Optional(wrapper, lift(inner))
    domains = {one.domain for one in wrapper}
    if len(domains) != 1:
        raise ValueError("optional() takes operators of one domain: nest it for two")
    names = tuple(name for one in wrapper for name in one.names)
    return Optional(OpType(names, domains.pop()), lift(inner))


def maybe_cast(inner: Operand) -> Pattern:
    """`inner`, or a Cast of it. What the rule writes must have the type that came out."""
    return optional(op.Cast, inner)


def lift(operand: Operand) -> Pattern:
    """Numbers, lists and None as patterns."""
    if isinstance(operand, Pattern):
        return operand
    if operand is None:
        return Absent()
    if isinstance(operand, (int, float, Real)):  # numpy numbers are Real, but no floats
        return Number(float(operand))
    if isinstance(operand, (str, bytes)) or not hasattr(operand, "__iter__"):
        raise TypeError(f"{operand!r} is no pattern: use var(), const(), op.Name(...) or a number")
    return Vector(tuple(float(item) for item in operand))


def _node(op_type: str, *inputs: Operand) -> Node:
    return Node((op_type,), "", tuple(map(lift, inputs)), (), False)


def _options(pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.options if isinstance(pattern, Either) else (pattern,)


def _several(some: Some) -> tuple[int, ...]:
    if some is None:
        return ()
    return (some,) if isinstance(some, int) else tuple(some)


def _name_of(predicate: Callable[..., Any]) -> str:
    name = getattr(predicate, "__name__", "")
    return "" if name == "<lambda>" else name
