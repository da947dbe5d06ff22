"""No number that the coder sees comes out of an inexact operation: the rules of exact arithmetic, read off the source.

In the files below, nothing may be called whose last bit depends on a library, a kernel or a device: transcendental
functions, products of matrices, fused operations, division by a Python scalar (CUDA multiplies by the reciprocal),
compilers. Reductions add integers only, and say so beside them.

Two ways out, both visible in a review:
- `codec/exact.py` names in `EXACT_REDUCTIONS = ("name", …)` the functions that may multiply matrices and add
  up rows; their callers have shown the bound.
- a trailing comment `# exact: <why this cannot differ>` on the line itself; for a reduction it states the bound. On a
  `def` line it covers the function ("runs once, at calibration, and the result is stored").
Arguments of `exact.bound(…)`, which only checks, are free.
Functions imported from `codec` itself and methods of a class in the same file may have any name: `exact.softmax(x)`.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXACT_FILE = "codec/exact.py"
ALLOWED_NAME = "EXACT_REDUCTIONS"
CHECKED = (EXACT_FILE, "codec/predictor/*.py", "codec/residual.py", "codec/cells.py", "codec/entropy.py",
           "codec/loop.py", "codec/closed_loop.py", "codec/rans_torch.py", "codec/scalars_torch.py")  # fmt: skip


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names are compared in lower case, without an in-place underscore: `Tensor.exp_`, `nn.SiLU` and `F.silu` are one rule.
TRANSCENDENTAL = _words(
    "exp exp2 expm1 log log2 log10 log1p ln pow float_power rsqrt reciprocal cbrt sin cos tan sinh cosh tanh asin acos "
    "atan atan2 asinh acosh atanh arcsin arccos arctan arctan2 arcsinh arccosh arctanh sinc erf erfc erfinv gamma "
    "lgamma digamma hypot sigmoid logsigmoid silu swish gelu mish selu elu celu softplus softmax softmin log_softmax "
    "logsoftmax logsumexp logaddexp logaddexp2 xlogy logit mean nanmean std var std_mean var_mean norm normalize "
    "layer_norm layernorm rms_norm rmsnorm group_norm batch_norm average quantile cov corrcoef cosine_similarity dist "
    "cdist linspace logspace geomspace interp interpolate polar cross_entropy"
)
PRODUCTS = _words(
    "matmul mm bmm mv dot vdot inner einsum tensordot linear bilinear addmm addmv addbmm baddbmm chain_matmul matvec "
    "vecmat _int_mm _scaled_mm multi_dot scaled_dot_product_attention conv1d conv2d conv3d convolve correlate kron"
)
FUSED = _words("addcmul addcdiv lerp fma addr rsub")
REDUCTIONS = _words("sum nansum cumsum prod cumprod nanprod trace trapz trapezoid logcumsumexp")
DIVISIONS = _words("div divide true_divide")
MODULES = _words("torch numpy math cmath scipy operator")  # every mention of a forbidden name counts, not calls alone
SUBMODULES = _words("linalg special fft sparse compile jit _dynamo _inductor ao")
COMPILERS = _words("triton numba numexpr jax cython tensorrt")
SCALARS = _words("int float len")

RULES = (
    (FUSED, "is a fused operation: its rounding differs between devices"),
    (TRANSCENDENTAL, "is a library's inexact function: use codec.exact"),
    (PRODUCTS, f"multiplies matrices outside {EXACT_FILE}'s {ALLOWED_NAME}"),
    (REDUCTIONS, "is a reduction: say with `# exact: <bound>` that it adds integers only"),
)


def _plain(name: str) -> str:
    name = name.lower()
    return name.rstrip("_") if not name.startswith("__") else name


class Checker(ast.NodeVisitor):
    """Collects `line: reason` of everything forbidden in one file."""

    def __init__(self, source: str, allowed: frozenset[str] = frozenset()) -> None:
        self.allowed = allowed
        self.found: list[str] = []
        self.modules: dict[str, str] = {}  # local name -> foreign module or name it stands for
        self.own: set[str] = set()  # names imported from codec
        self.constants: set[str] = set()  # module-level names bound to a number, and loop counters
        self.scalars: list[set[str]] = [set()]  # parameters annotated int or float, a set a function
        self.methods: list[set[str]] = [set()]
        self.allowed_depth = 0
        self.exempt_depth = 0
        self.exempt: dict[int, str] = {}
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and token.string.lstrip("# ").startswith("exact:"):
                reason = token.string.split("exact:", 1)[1].strip()
                self.exempt[token.start[0]] = reason
                if not reason:
                    self.found.append(f"{token.start[0]}: an exemption without a reason")
        self.visit(ast.parse(source))

    def flag(self, line: int, text: str) -> None:
        if line not in self.exempt and not self.exempt_depth:
            self.found.append(f"{line}: {text}")

    # Names

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.split(".")[0]
            if root in COMPILERS:
                self.flag(node.lineno, f"{alias.name} contracts a*b+c")
            if root == "codec":
                self.own.add(alias.asname or root)
            else:
                self.modules[alias.asname or root] = alias.name if alias.asname else root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        root = module.split(".")[0]
        if root in COMPILERS:
            self.flag(node.lineno, f"{module} contracts a*b+c")
        for alias in node.names:
            local = alias.asname or alias.name
            if node.level or root == "codec":
                self.own.add(local)
            else:
                self.modules[local] = f"{module}.{alias.name}"
                if root in MODULES:
                    self.check_chain(node.lineno, f"{module}.{alias.name}".split("."))

    def chain(self, node: ast.AST) -> list[str] | None:
        """The dotted name of an expression with imports resolved; None when it does not begin with a name."""
        if isinstance(node, ast.Attribute):
            base = self.chain(node.value)
            return base and [*base, node.attr]
        if isinstance(node, ast.Name):
            return self.modules.get(node.id, node.id).split(".")
        return None

    def check_chain(self, line: int, parts: list[str]) -> None:
        name = ".".join(parts)
        if parts[0] in MODULES and SUBMODULES.intersection(parts[1:]):
            self.flag(line, f"{name} is not exact, or compiles")
        elif _plain(parts[-1]).startswith(("_foreach_", "_fused_")):
            self.flag(line, f"{name} is a fused operation: its rounding differs between devices")
        else:
            self.check_name(line, parts[-1], name)

    def check_name(self, line: int, name: str, shown: str) -> None:
        for names, reason in RULES:
            if _plain(name) in names and not (names in (PRODUCTS, REDUCTIONS) and self.allowed_depth):
                self.flag(line, f"{shown} {reason}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts = self.chain(node)
        if parts and parts[0] in MODULES:
            self.check_chain(node.end_lineno or node.lineno, parts)
        else:
            self.visit(node.value)

    # Calls

    def visit_Call(self, node: ast.Call) -> None:
        line, function = node.func.end_lineno or node.lineno, node.func
        parts = self.chain(function)
        if parts and parts[-1] == "bound" and parts[0] in self.own:
            return
        if any(keyword.arg == "alpha" for keyword in node.keywords):
            self.flag(line, "alpha= fuses a product into a sum")
        if isinstance(function, ast.Attribute):
            if _plain(function.attr) in DIVISIONS:
                arguments = [*node.args, *(k.value for k in node.keywords if k.arg == "other")]
                if any(self.is_scalar(argument) for argument in arguments):
                    self.flag(line, "division by or of a Python scalar")
            self.check_method(line, function)
        elif isinstance(function, ast.Name) and function.id == "getattr" and len(node.args) > 1:
            self.check_getattr(line, node)
        self.generic_visit(node)

    def check_method(self, line: int, function: ast.Attribute) -> None:
        parts = self.chain(function)
        root = parts[0] if parts else ""
        ours = root in self.own or (root == "self" and len(parts or ()) == 2 and function.attr in self.methods[-1])
        if root not in MODULES and not ours:  # mentions of foreign modules are flagged by visit_Attribute
            self.check_name(line, function.attr, f".{function.attr}()")

    def check_getattr(self, line: int, node: ast.Call) -> None:
        parts = self.chain(node.args[0])
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if isinstance(name, str):
            self.check_name(line, name, f"getattr {name}")
        elif parts and parts[0] in MODULES:
            self.flag(line, "getattr with a computed name cannot be checked")

    # Operators

    def is_scalar(self, node: ast.AST) -> bool:
        """Whether an expression is certainly a Python number."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, (int, float))
        if isinstance(node, ast.UnaryOp):
            return self.is_scalar(node.operand)
        if isinstance(node, ast.BinOp):
            return self.is_scalar(node.left) and self.is_scalar(node.right)
        if isinstance(node, ast.Name):
            return node.id.isupper() or node.id in self.constants or node.id in self.scalars[-1]
        if isinstance(node, ast.Call):
            function = node.func
            named = isinstance(function, ast.Name) and function.id in SCALARS
            method = isinstance(function, ast.Attribute) and function.attr in {"item", "numel", "bit_length"}
            return named or method or (self.chain(function) or [""])[0] == "math"
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Attribute) and node.value.attr == "shape" and self.is_scalar(node.slice)
        return isinstance(node, ast.Attribute) and node.attr.isupper()

    def check_operator(self, line: int, left: ast.AST, operator: ast.operator, right: ast.AST) -> None:
        scalars = self.is_scalar(left), self.is_scalar(right)
        if isinstance(operator, ast.MatMult) and not self.allowed_depth:
            self.flag(line, f"@ multiplies matrices outside {EXACT_FILE}'s {ALLOWED_NAME}")
        elif isinstance(operator, ast.Pow) and not all(scalars):
            self.flag(line, "** is pow: multiply, shift or use ldexp")
        elif isinstance(operator, ast.Div) and any(scalars) and not all(scalars):
            text = "by a Python scalar (CUDA multiplies by its reciprocal)" if scalars[1] else "of a Python scalar"
            self.flag(line, f"division {text}: make it a tensor")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.check_operator(node.right.lineno, node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.check_operator(node.value.lineno, node.target, node.op, node.value)
        self.generic_visit(node)

    # Scopes

    def visit_Module(self, node: ast.Module) -> None:
        for statement in node.body:
            value = getattr(statement, "value", None)
            targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and value is not None and self.is_scalar(value):
                self.constants.update(target.id for target in targets if isinstance(target, ast.Name))
        for loop in ast.walk(node):
            counts = isinstance(loop, (ast.For, ast.comprehension)) and isinstance(loop.iter, ast.Call)
            if counts and isinstance(loop.target, ast.Name) and self.chain(loop.iter.func) == ["range"]:
                self.constants.add(loop.target.id)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.methods.append({item.name for item in node.body if isinstance(item, ast.FunctionDef)})
        self.generic_visit(node)
        self.methods.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.scalars.append(
            {a.arg for a in arguments if isinstance(a.annotation, ast.Name) and a.annotation.id in {"int", "float"}}
        )
        covered = any(line in self.exempt for line in range(node.lineno, node.body[0].lineno))
        self.allowed_depth += node.name in self.allowed
        self.exempt_depth += covered
        self.generic_visit(node)
        self.exempt_depth -= covered
        self.allowed_depth -= node.name in self.allowed
        self.scalars.pop()


def declared_reductions(source: str) -> frozenset[str]:
    """The names in the module-level tuple EXACT_REDUCTIONS; each must be a function of the file."""
    tree, names = ast.parse(source), frozenset[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ALLOWED_NAME in {t.id for t in node.targets if isinstance(t, ast.Name)}:
            names = frozenset(ast.literal_eval(node.value))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert names <= functions, f"{EXACT_FILE} names {sorted(names - functions)} in {ALLOWED_NAME} but defines no such"
    return names


def test_every_rule_has_files() -> None:
    missing = [pattern for pattern in CHECKED if not list(ROOT.glob(pattern))]
    assert not missing, f"nothing matches {missing}: name the files that took their place in CHECKED"


def checked_files() -> list[Path]:
    return sorted({path for pattern in CHECKED for path in ROOT.glob(pattern)})


@pytest.mark.parametrize("path", checked_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_coder_sees_only_exact_numbers(path: Path) -> None:
    source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
    found = Checker(source, declared_reductions(source) if name == EXACT_FILE else frozenset()).found
    assert not found, "\n".join(f"{name}:{text}" for text in found)


IMPORTS = (
    "import math, operator\nimport numpy as np\nimport torch\nimport torch.nn.functional as F\n"
    "from torch import nn\nfrom codec import exact\nfrom .exact import product, silu\nHALF = 0.5\nsteps = 8\n"
)
FORBIDDEN = """
torch.addcmul(a, b, c); x.addcmul_(b, c); x.lerp(y, w); torch.addcdiv(a, b, c); torch._foreach_mul_(a, b)
torch.add(a, b, alpha=2); x.sub_(y, alpha=k)
x / 2; x / 2.0; x / -3; x / HALF; x / steps; x / exact.LIMIT; x / float(n); x / len(n); x / x.shape[-1]; x / m.item()
[x / i for i in range(4)]; x / math.sqrt(2.0)
x /= 7; x.div(2); x.div_(HALF); torch.div(x, 3); torch.true_divide(x, other=4); 1 / x; 1.0 / x
torch.exp(x); x.exp(); x.exp_(); torch.exp2(x); math.exp(x); np.exp(x); torch.special.expit(x); f = torch.exp
torch.sin(x); x.cos(); np.sin(x); math.cos(x); torch.tanh(x); map(math.log2, x); np.log1p(x); x.log(); torch.erf(x)
torch.pow(x, 2); x.pow(2); math.pow(x, 2); x ** 2; 2 ** x; x **= 2; pow(2, 3) + x.float_power(2)
x.rsqrt(); torch.rsqrt(x); x.reciprocal(); torch.hypot(a, b); torch.linspace(0, 1, 5)
x.softmax(-1); torch.softmax(x, -1); F.softmax(x, -1); nn.Softmax(-1); F.silu(x); nn.SiLU(); torch.sigmoid(x)
x.mean(); torch.mean(x, -1); x.norm(); torch.linalg.norm(x); F.layer_norm(x, s); F.rms_norm(x, s); nn.RMSNorm(4)
x.std(); x.sigmoid()
a @ b; a @= b; torch.matmul(a, b); a.matmul(b); torch.mm(a, b); torch.bmm(a, b); torch.einsum(s, a); F.linear(a, b)
np.dot(a, b); operator.matmul(a, b); torch._int_mm(a, b); torch._scaled_mm(a, b); nn.Linear(2, 3); torch.addmm(a, b, c)
F.scaled_dot_product_attention(q, k, v); functools.partial(torch.matmul, a); self.weights.mean()
torch.compile(f); torch.jit.script(f); getattr(torch, "exp"); getattr(torch, name); getattr(x, "matmul")
x.sum(); torch.sum(x); x.cumsum(-1); np.prod(x)
x.sum()  # exact:
"""
ALLOWED = """
a * b + c; a - b; a / b; x.sqrt(); torch.sqrt(x); x.floor(); torch.round(x); x.abs(); x.amax(-1); torch.where(m, a, b)
torch.ldexp(a, e); torch.frexp(a); a // 2; a >> 3; a << steps
2 ** 10 - 1; 1 / 3; [(-1.0) ** i / math.factorial(i) for i in range(4)]; HALF / 3; math.sqrt(2.0); 1 << n
exact.softmax(x); exact.silu(x); silu(x); product(a, b); exact.matmul(a, b); torch.clamp(x, 0, 1)
config.mean; state.norm
F.pad(x, (0, 1)); torch.add(a, b); torch.div(a, b); math.ldexp(1.0, 3); re.compile(p); sum(lengths); len(x) / 2
x.sum(-1)  # exact: 1,024 terms of at most 2^14 stay below 2^24
math.cos(x)  # exact: computed once when the profile is made and stored in it
exact.bound("scores", math.log2(n), 14)
"""


def _samples(text: str) -> list[str]:
    lines = [line for line in text.strip().splitlines()]
    return [part.strip() for line in lines for part in ([line] if "#" in line else line.split("; "))]


@pytest.mark.parametrize("sample", _samples(FORBIDDEN))
def test_the_checker_catches(sample: str) -> None:
    assert Checker(f"{IMPORTS}{sample}\n").found


@pytest.mark.parametrize("sample", _samples(ALLOWED))
def test_the_checker_lets_pass(sample: str) -> None:
    assert not Checker(f"{IMPORTS}{sample}\n").found


@pytest.mark.parametrize(
    "line",
    [
        "from torch import exp",
        "from torch import compile",
        "from torch.nn.functional import silu as s",
        "from torch.linalg import norm as n",
        "from math import log2",
        "from numba import njit",
        "import triton",
    ],
)
def test_forbidden_names_cannot_be_imported(line: str) -> None:
    assert Checker(line + "\n").found


def test_an_exemption_covers_its_function_only() -> None:
    source = "def f(x):  # exact: runs once\n    y = x.exp()\n    return y.mean()\n"
    assert not Checker(source).found
    assert Checker(source + "def g(x):\n    return x.exp()\n").found == ["5: .exp() " + RULES[1][1]]
    assert Checker(source.replace(": runs once", ":")).found[0] == "1: an exemption without a reason"


def test_annotated_scalars_methods_and_products() -> None:
    assert Checker("def f(x: Tensor, n: int, s: float):\n    return x / n, x / s\n").found
    assert not Checker("def f(x: Tensor, s: Tensor):\n    return x / s\n").found
    own = "class A:\n    def norm(self, x): return x\n    def f(self, x): return self.norm(x)\n"
    assert not Checker(own).found
    assert Checker(own.replace("self.norm(x)", "x.norm()")).found
    product = "EXACT_REDUCTIONS = ('product',)\ndef product(a, b):\n    return a @ b + torch.matmul(a, b)\n"
    assert declared_reductions(product) == {"product"}
    assert Checker(product).found and not Checker(product, declared_reductions(product)).found
    assert Checker(product + "def other(a, b):\n    return a @ b\n", frozenset({"product"})).found
    with pytest.raises(AssertionError):
        declared_reductions("EXACT_REDUCTIONS = ('absent',)\n")
