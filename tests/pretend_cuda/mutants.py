"""Mutants of the project in which one tensor is left on the wrong device, and whether the battery notices.

Each ``device=`` argument, and each ``.to(…)`` that moves a tensor, is dropped in turn. Those that nothing can notice are listed
in ``EQUIVALENT``, with the reason. From tests/: ``python -m pretend_cuda.mutants [PART …]``, for those with such a part in
their name.
"""

from __future__ import annotations

import ast
import copy
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pretend_cuda.start import SOURCES, Nursery, Outcome

PACKAGE = SOURCES / "dp_microadam"

_NETWORKS = ("clipping", "linear with bias", "embedding", "attention", "self-check")
_CHECKS = ("transforms", "constant draws", "check: no pixels", "check: by public constants", "check: dropout of pixels")
RELEVANT: dict[str, tuple[tuple[str, ...], ...]] = {
    "apps/audit/own_run.py": (("transforms", "canaries"),),
    "apps/audit": (("clipping", "linear with bias", "scaled gradients"),),
    "apps/experiments": (("training", "strategies measured"),),
    "apps/recipes": (("training", "recipe"),),
    "apps/recipes/language.py": (("training", "continued text"),),
    "clipping/batchnorm.py": (("clipping", "batch normalization replaced"),),
    "clipping/embedding.py": (("clipping", "embedding", "tied weights"),),
    "clipping/embedding_bag.py": (("clipping", "embedding bag", "bags by offsets"),),
    "clipping/engine.py": (("clipping", "no gradients", "scaled gradients", "row masks"),),
    "clipping/factors.py": (("clipping", "scaled gradients", "row masks"),),
    "clipping/folding.py": (("clipping", "views, drop", "views, keep", "views, ghost"),),
    "clipping/joint.py": (("clipping", "tied weights", "layer used three times", "scaled gradients"),),
    "clipping/operations.py": (
        ("clipping", "parameters without a layer", "repeated rows, waits", "transformer without dropout"),
    ),
    "clipping/norms_triton.py": (("kernels", "norms"),),
    "clipping/outer_product.py": (("clipping", "linear on sequences, ghost", "views, keep", "norm form, drop"),),
    "clipping/special_values.py": (_NETWORKS, _CHECKS),
    "clipping/transform_check.py": (_CHECKS,),
    "clipping/weight_standardized.py": (("clipping", "weight-standardized convolution", "norm form, ghost"),),
    "clipping/settling.py": (("clipping", "state that changes"),),
    "clipping/gradient_check.py": (("clipping", "users"), _NETWORKS),
    "clipping/passes.py": (("clipping", "users"),),
    "clipping/model_state.py": (("clipping", "state that changes", "linear with bias"),),
    "clipping": (_NETWORKS,),
    "data": (
        ("transforms", "boxes", "preparation", "resized centre"),
        ("transforms", *(f"augmentation: {name}" for name in ("views", "crop alone", "resized crop"))),
        ("transforms", "augmentation: flip alone", "augmentation: nothing", "augmentation: to a size"),
    ),
    "integrations/hugging_face.py": (("integrations", "Hugging Face"),),
    "methods": (("training", "method: public"),),
    "models": (("transforms", "stochastic depth"),),
    "optimizers": (
        ("optimizers", "stochastic, float32", "analytical view, float32", "plain, bfloat16", "accessors", "sharded"),
        ("optimizers", "AdamBC, float32", "TensorAdam, float32", "gradients that are not finite", "odd layouts"),
    ),
    "optimizers/analytical_view.py": (("optimizers", "analytical view, float32"),),
    "optimizers/micro_adam_checks.py": (("optimizers", "gradients that are not finite"),),
    "optimizers/micro_adam_triton": (("kernels",),),
    "optimizers/micro_adam_views.py": (("optimizers", "accessors"),),
    "optimizers/shards.py": (("optimizers", "sharded"),),
    "privacy/sampling.py": (("privacy", "sampling"), ("data", "equal steps")),
    "privacy": (("privacy",), ("noise",)),
    "privacy/correlated_noise.py": (("privacy", "correlated noise", "correlated noise, kept in main memory"),),
    "training/data_digest.py": (("privacy", "digests"),),
    "training/diagnostics.py": (("optimizers", "diagnostics"),),
    "training/distributed.py": (("privacy", "checksums", "ranks"),),
    "training/evaluation.py": (("clipping", "class weights"),),
    "training/gradients.py": (("clipping", "users without privacy"),),
    "training/prefetch.py": (("training", "copies ahead"), ("data",)),
    "training": (("training", "tensors", "views"), ("data", "equal steps")),
}
"""The groups and cases that may notice a mutant of a file; the longest beginning of its path counts."""

EQUIVALENT = {
    "apps/recipes/language.py written: "
    "tokenizer(prompt, return_tensors='pt')['input_ids'].to(next(model.parameters()).device)": (
        "generate() of today's transformers moves a prompt to the model; older versions, which may be installed, do not"
    ),
    "clipping/gradient_check.py _norm: torch.zeros((), device=device)": "for losses without parameters, refused before",
    "optimizers/shards.py sharded_zeros: "
    "torch.zeros(*[1] * mesh.ndim, length, dtype=dtype, device=local_shard(param).device)": (
        "DTensor.from_local moves a shard to the device of its mesh; this only saves the copy"
    ),
}
"""Mutants that nothing can notice on a GPU, and why."""


@dataclass(frozen=True)
class Mutant:
    """A call that places a tensor, where it is, and what it is replaced with."""

    file: str
    place: str
    before: str
    after: str
    start: tuple[int, int]
    end: tuple[int, int]
    number: int = 1

    @property
    def name(self) -> str:
        """A name that does not change with lines above: file, function and call, and its number if there are several."""
        return f"{self.file} {self.place}: {self.before}" + (f" ({self.number})" if self.number > 1 else "")

    def applied(self, source: str) -> str:
        lines = source.encode().splitlines(keepends=True)
        (first, left), (last, right) = self.start, self.end
        changed = lines[first - 1][:left] + self.after.encode() + lines[last - 1][right:]
        return b"".join([*lines[: first - 1], changed, *lines[last:]]).decode()


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of a file, in order."""
    tree = ast.parse(path.read_text("utf-8"))
    yield from _Finder(path.relative_to(PACKAGE).as_posix()).found(tree)


def all_mutants() -> list[Mutant]:
    return [mutant for path in sorted(PACKAGE.rglob("*.py")) for mutant in mutants_of(path)]


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self._file = file
        self._place: list[str] = []
        self._found: list[Mutant] = []

    def found(self, tree: ast.AST) -> list[Mutant]:
        self.visit(tree)
        return self._found

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._place.append(node.name)
        self.generic_visit(node)
        self._place.pop()

    visit_ClassDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        changed = _moved_nowhere(node) if _is_to(node) else _without_device(node)
        if changed is not None:
            start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
            place = ".".join(self._place) or "module"
            before = ast.unparse(node)
            number = 1 + sum((one.place, one.before) == (place, before) for one in self._found)
            self._found.append(Mutant(self._file, place, before, ast.unparse(changed), start, end, number))


def _is_to(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "to" and bool(node.args or node.keywords)


def _names_device(argument: ast.keyword | ast.expr) -> bool:
    if isinstance(argument, ast.keyword):
        return argument.arg == "device"
    if isinstance(argument, ast.IfExp):
        return _names_device(argument.body)
    return (
        (isinstance(argument, ast.Name) and argument.id == "device")
        or (isinstance(argument, ast.Attribute) and argument.attr == "device")
        or (isinstance(argument, ast.Constant) and argument.value in ("cpu", "cuda"))
    )


def _without_device(node: ast.Call) -> ast.Call | None:
    """The call without ``device=``, or None if it has none."""
    if not any(map(_names_device, node.keywords)):
        return None
    changed = copy.deepcopy(node)
    changed.keywords = [keyword for keyword in changed.keywords if not _names_device(keyword)]
    return changed


def _moved_nowhere(node: ast.Call) -> ast.expr | None:
    """What ``x.to(…)`` becomes if it only converts: ``x.to(dtype)``, ``x.to(y.dtype)`` for a tensor y, or x itself."""
    changed = copy.deepcopy(node)
    changed.args = [argument for argument in changed.args if not _names_device(argument)]
    changed.keywords = [keyword for keyword in changed.keywords if not _names_device(keyword)]
    if len(changed.args) + len(changed.keywords) == len(node.args) + len(node.keywords):
        if len(node.args) != 1 or "dtype" in ast.unparse(node.args[0]) or _is_dtype(node.args[0]):
            return None
        changed.args = [ast.Attribute(changed.args[0], "dtype", ast.Load())]
        return changed
    if changed.args or any(keyword.arg == "dtype" for keyword in changed.keywords):
        return changed
    tensor = changed.func.value  # type: ignore[attr-defined]
    if any(keyword.arg == "copy" for keyword in changed.keywords):
        return ast.Call(ast.Attribute(tensor, "clone", ast.Load()), [], [])
    return tensor


def _is_dtype(argument: ast.expr) -> bool:
    if "tl." in ast.unparse(argument) or ast.unparse(argument).isupper():  # inside a kernel, where nothing has a device
        return True
    return isinstance(argument, ast.Attribute) and isinstance(argument.value, ast.Name) and argument.value.id == "torch"


def cases_for(file: str) -> tuple[tuple[str, ...], ...]:
    """The groups and cases for a file."""
    return RELEVANT[max((beginning for beginning in RELEVANT if file.startswith(beginning)), key=len)]


def failing_without_mutants(noticing: Iterable[Outcome], nursery: Nursery) -> list[Outcome]:
    """Of the cases that noticed a mutant, those that fail on the project as it is too, and so noticed nothing."""
    groups: dict[str, dict[str, None]] = {}
    for outcome in (one for one in noticing if one.group):  # else nothing was run: the process ended, or an import failed
        groups.setdefault(outcome.group, {})[outcome.case] = None
    return [outcome for group, names in groups.items() for outcome in nursery.run(SOURCES, [(group, *names)]) if outcome.error]


def outcomes_of(mutant: Mutant, nursery: Nursery) -> list[Outcome]:
    """How the relevant cases went on a copy of the project with this mutant, up to the first that failed."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        shutil.copytree(PACKAGE, sources / "dp_microadam", ignore=shutil.ignore_patterns("__pycache__"))
        changed = sources / "dp_microadam" / mutant.file
        changed.write_text(mutant.applied(changed.read_text("utf-8")), "utf-8")
        return nursery.run(sources, [(group, "-x", *names) for group, *names in cases_for(mutant.file)])


def noticed_by(outcomes: list[Outcome]) -> Outcome | None:
    """The case that failed, if one did."""
    return next((outcome for outcome in outcomes if outcome.error), None)


def verdict(mutant: Mutant, outcomes: list[Outcome]) -> str:
    """Two lines: whether it was noticed and by which case, and how; or why it need not be."""
    by = noticed_by(outcomes)
    why = by.error.strip().splitlines()[-1][:150] if by and by.error else EQUIVALENT.get(mutant.name, "NOT NOTICED")
    seconds = sum(outcome.seconds for outcome in outcomes)
    return f"{'noticed by ' + by.case if by else 'survives'} in {seconds:.0f} s: {mutant.name}\n    {why}"


def main(parts: list[str]) -> None:
    chosen = [mutant for mutant in all_mutants() if not parts or any(part in mutant.name for part in parts)]
    noticing = []
    with Nursery() as nursery:
        for mutant in chosen:
            outcomes = outcomes_of(mutant, nursery)
            noticing += [by] if (by := noticed_by(outcomes)) else []
            print(verdict(mutant, outcomes), flush=True)
        for outcome in failing_without_mutants(noticing, nursery):
            print(f"FAILS WITHOUT A MUTANT: {outcome.case}\n{outcome.error}", flush=True)
    print(f"{len(chosen)} mutants, {len(noticing)} noticed")


if __name__ == "__main__":
    main(sys.argv[1:])
