"""Count what makes a tree easy or hard to find one's way in.

Prints, for the product packages: files, lines and loose files of each package; import cycles of
files and of sub-packages; public type names that stand in more than one module.

    python -m benchmarks.count_tree           # tables for people, of the current folder
    python -m benchmarks.count_tree --json    # the same as JSON
    python -m benchmarks.count_tree --fail    # exit status 1 if there is a cycle
    python -m benchmarks.count_tree --reach gateway.answering.jobs.jobs  # and what its import loads

Names are those within `outrider`. A *loose file* lies directly in a top package, beside its
folders. A *cycle of files* is a set of modules each of which imports, directly or not, all others
of the set (a strongly connected component); imports inside functions and under TYPE_CHECKING count,
as import-linter counts them. For a *cycle of sub-packages* every module counts as its folder:
`gateway.upstream.call` is `gateway.upstream`; a loose file stands for itself. *Public types* are
classes and aliases (`Event = A | B`) at the top of a module whose names do not begin with an
underscore.
"""

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import grimp

PRODUCT = ("gateway", "router", "draft", "verifier", "engine", "kernels")
REPOSITORY = (*PRODUCT, "benchmarks", "tests")
ENTRY_FILES = frozenset({"__init__.py", "__main__.py", "cli.py"})

Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class PackageSize:
    """The size of one package."""

    name: str
    """Dotted name."""
    num_files: int
    """Python files, those of sub-packages included."""
    num_lines: int
    """Their lines."""
    num_loose: int | None
    """Files directly in the package that are no entry file; None without sub-packages."""


@dataclass(frozen=True, kw_only=True)
class TreeCounts:
    """All counts of one state of the tree."""

    packages: tuple[PackageSize, ...]
    """Sizes, top packages first, then their folders."""
    file_cycles: tuple[tuple[str, ...], ...]
    """Cycles of modules, the largest first."""
    package_cycles: tuple[tuple[str, ...], ...]
    """Cycles of sub-packages, the largest first."""
    num_package_imports: int
    """Ordered pairs of sub-packages of one package: one imports the other."""
    homonyms: Mapping[str, tuple[str, ...]]
    """Public types of the product that several modules define, with these modules."""
    num_homonyms_everywhere: int
    """Such names in the product, the benchmarks and the tests together."""
    num_reached: Mapping[str, int]
    """Modules of the same top package that importing a module loads, by module."""


def count_tree(
    root: Path, packages: Iterable[str] = PRODUCT, reach: Iterable[str] = ()
) -> TreeCounts:
    """Count the packages under `root`, which must be the `outrider` that is imported."""
    packages = [name for name in packages if (root / name / "__init__.py").exists()]
    imports = read_imports(packages)
    squashed = squash(imports, depth=2)
    return TreeCounts(
        packages=tuple(size for name in packages for size in _sizes(root, name)),
        file_cycles=find_cycles(imports),
        package_cycles=find_cycles(squashed),
        num_package_imports=sum(len(imported) for imported in squashed.values()),
        homonyms=find_homonyms(root, packages),
        num_homonyms_everywhere=len(find_homonyms(root, REPOSITORY)),
        num_reached={module: count_reached(imports, module) for module in reach},
    )


def read_imports(packages: Iterable[str]) -> Graph:
    """Return the direct imports between modules of `packages`, by importer."""
    graph = grimp.build_graph(*(f"outrider.{name}" for name in packages))
    return {
        _short(module): frozenset(map(_short, graph.find_modules_directly_imported_by(module)))
        for module in sorted(graph.modules)
    }


def _short(module: str) -> str:
    return module.removeprefix("outrider.")


def squash(imports: Graph, depth: int) -> Graph:
    """Cut every name to `depth` parts; keep imports within one top package, drop self-imports."""
    squashed: defaultdict[str, set[str]] = defaultdict(set)
    for importer, imported in imports.items():
        source = _cut(importer, depth)
        squashed[source] |= {
            target
            for target in (_cut(name, depth) for name in imported)
            if target != source and _cut(target, 1) == _cut(source, 1)
        }
    return {name: frozenset(targets) for name, targets in squashed.items()}


def find_cycles(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Return the strongly connected components with two or more members, the largest first.

    Kosaraju's algorithm: finish order of a depth-first search, then a search against the arrows.
    """
    backwards: defaultdict[str, set[str]] = defaultdict(set)
    for source, targets in graph.items():
        for target in targets:
            backwards[target].add(source)
    seen: set[str] = set()
    finished: list[str] = []
    for start in graph:
        finished += _search(start, graph, seen)
    seen = set()
    components = [_search(start, backwards, seen) for start in reversed(finished)]
    cycles = [tuple(sorted(names)) for names in components if len(names) > 1]
    return tuple(sorted(cycles, key=lambda names: (-len(names), names)))


def _search(start: str, graph: Mapping[str, Iterable[str]], seen: set[str]) -> list[str]:
    """Return the nodes reached from `start` that were not in `seen`, in the order they finish."""
    if start in seen:
        return []
    seen.add(start)
    finished: list[str] = []
    stack = [(start, iter(graph.get(start, ())))]
    while stack:
        node, targets = stack[-1]
        target = next((name for name in targets if name not in seen), None)
        if target is None:
            stack.pop()
            finished.append(node)
        else:
            seen.add(target)
            stack.append((target, iter(graph.get(target, ()))))
    return finished


def count_reached(imports: Graph, module: str) -> int:
    """Count the modules of its own top package that `module` imports, directly or not."""
    if module not in imports:
        raise KeyError(f"no module {module!r}")
    reached = _search(module, imports, set())
    return sum(_cut(name, 1) == _cut(module, 1) for name in reached) - 1


def find_homonyms(root: Path, packages: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the public classes and type aliases that several modules define, by name."""
    defined: defaultdict[str, list[str]] = defaultdict(list)
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            for name in _public_types(ast.parse(path.read_text(encoding="utf-8"))):
                defined[name].append(module)
    return {name: tuple(where) for name, where in sorted(defined.items()) if len(where) > 1}


def _public_types(tree: ast.Module) -> set[str]:
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if ast.unparse(annotation).endswith("TypeAlias"):
                    names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp() | ast.Subscript()):
                if not name.isupper():
                    names.add(name)
    return {name for name in names if not name.startswith("_")}


def _sizes(root: Path, package: str) -> list[PackageSize]:
    folders = [
        path
        for path in sorted((root / package).iterdir())
        if path.is_dir() and (path / "__init__.py").exists()
    ]
    return [_size(root, root / package, has_folders=bool(folders))] + [
        _size(root, folder, has_folders=False) for folder in folders
    ]


def _size(root: Path, folder: Path, *, has_folders: bool) -> PackageSize:
    files = list(folder.rglob("*.py"))
    loose = [path for path in folder.glob("*.py") if path.name not in ENTRY_FILES]
    return PackageSize(
        name=".".join(folder.relative_to(root).parts),
        num_files=len(files),
        num_lines=sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
        num_loose=len(loose) if has_folders else None,
    )


def _cut(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def render(counts: TreeCounts) -> str:
    """Return the counts as text."""
    lines = [f"{'package':<28} {'files':>6} {'lines':>8} {'loose':>6}"]
    for size in counts.packages:
        name = size.name if "." not in size.name else f"  {size.name}"
        loose = "" if size.num_loose is None else size.num_loose
        lines.append(f"{name:<28} {size.num_files:>6} {size.num_lines:>8,} {loose:>6}".rstrip())
    lines += ["", *_render_cycles("cycles of files", counts.file_cycles)]
    lines += ["", *_render_cycles("cycles of sub-packages", counts.package_cycles)]
    lines += ["", f"imports between sub-packages of one package: {counts.num_package_imports}"]
    repeated = Counter({name: len(where) for name, where in counts.homonyms.items()})
    lines += ["", f"public type names in more than one module: {len(repeated)}"]
    lines += [f"  with benchmarks and tests: {counts.num_homonyms_everywhere}"]
    lines += [
        f"  {name} ({count}): {', '.join(counts.homonyms[name])}"
        for name, count in repeated.most_common()
    ]
    lines += [
        f"\nimporting {module} loads {count} modules of its package"
        for module, count in counts.num_reached.items()
    ]
    return "\n".join(lines)


def _render_cycles(title: str, cycles: Iterable[tuple[str, ...]]) -> list[str]:
    found = list(cycles)
    return [f"{title}: {len(found)}"] + [f"  {len(names)}: {', '.join(names)}" for names in found]


def main(arguments: list[str] | None = None) -> int:
    """Print the counts of the current folder; return 1 with --fail if there is a cycle."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--fail", action="store_true", help="exit with status 1 if there is a cycle"
    )
    parser.add_argument("--reach", nargs="*", default=(), help="modules whose imports to count")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(Path.cwd() / ".ci" / "src"))
    counts = count_tree(Path.cwd(), reach=options.reach)
    print(json.dumps(asdict(counts), indent=1) if options.json else render(counts))
    return int(options.fail and bool(counts.file_cycles or counts.package_cycles))


if __name__ == "__main__":
    sys.exit(main())
