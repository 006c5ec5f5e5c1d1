"""What of the package holds something between two calls, by its syntax. state.yaml has a line for each.

python tests/state.py   prints it
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "moa_fairseq"
# methods in which a module may set its attributes: before any pass
BUILDING = (
    "__init__",
    "__new__",
    "__post_init__",
    "__setstate__",
    "reset_parameters",
    "attach",
)
# what a module-level name may be made by, if it holds something
HOLDERS = {
    *(
        "local",
        "ContextVar",
        "Lock",
        "RLock",
        "Event",
        "Condition",
        "count",
        "defaultdict",
        "deque",
    ),
    *("Counter", "OrderedDict", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary"),
    *("WeakTensorKeyDictionary", "PerThread", "Collectors", "cache", "lru_cache"),
}
CACHES = {"cache", "lru_cache", "cached_property", "constant"}
CHANGES = {
    *(
        "append",
        "extend",
        "insert",
        "remove",
        "pop",
        "clear",
        "add",
        "discard",
        "update",
        "setdefault",
    ),
    *("popitem", "appendleft", "sort", "reverse"),
}
# what switches something in the whole process
SWITCHES = {
    *("sdpa_kernel", "enable_cudnn_sdp", "fork_rng", "set_rng_state", "set_num_threads"),
    *("set_default_dtype", "use_deterministic_algorithms"),
}
PASSES = ("layers", "integrations", "plugin")  # the rooms that take part in a pass


def last_name(node):
    """The last part of a dotted name, through a call: functools.lru_cache(maxsize=1) → lru_cache."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def targets_of(statement):
    """The targets of an assignment, tuples taken apart."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    elif isinstance(statement, ast.Delete):
        targets = statement.targets
    else:
        targets = []
    for target in targets:
        yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]


def root_of(target):
    """(name, attribute) that a write reaches: x.y[0] = … → ("x", "y"); x[0] = … → ("x", "")."""
    attribute = ""
    while isinstance(target, (ast.Subscript, ast.Attribute)):
        attribute = target.attr if isinstance(target, ast.Attribute) else attribute
        target = target.value
    return (target.id if isinstance(target, ast.Name) else ""), attribute


def names_at_module_level(tree):
    """Name → the value that a module gives it."""
    for statement in tree.body:
        for target in targets_of(statement):
            if isinstance(target, ast.Name) and getattr(statement, "value", None) is not None:
                yield target.id, statement.value


def changed_in(tree):
    """The names outside of its functions that a module's functions write into, or rebind."""
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        bound = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
        written = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield from node.names
            for target in targets_of(node):
                if isinstance(target, ast.Name):
                    bound.add(target.id)
                else:
                    written.add(root_of(target)[0])
            called = node.func if isinstance(node, ast.Call) else None
            if (
                isinstance(called, ast.Attribute)
                and called.attr in CHANGES
                and isinstance(called.value, ast.Name)
            ):
                written.add(called.value.id)
        yield from written - bound


def changed_from_outside(tree):
    """(module, name) of what a file writes into, in modules that it imports: table.forced[kernel] = …"""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        written = [target for target in targets_of(node) if isinstance(target, ast.Subscript)]
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CHANGES
        ):
            written.append(node.func.value)
        for target in written:
            name, attribute = root_of(target)
            if name in modules and attribute:
                yield name, attribute


def writes_of(kind):
    """Attributes of self or of the class that its methods write after it is built."""
    for method in kind.body:
        if not isinstance(method, ast.FunctionDef) or method.name in BUILDING:
            continue
        for node in ast.walk(method):
            for target in targets_of(node):
                name, attribute = root_of(target)
                if name in ("self", "cls") and attribute:
                    yield f"{kind.name}.{attribute}"


def found_in(tree, room):
    """The names of a file's state."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    changing = {kind.name for kind in classes if [*writes_of(kind)]}
    changed = set(changed_in(tree))
    for name, value in names_at_module_level(tree):
        made_by = last_name(value) if isinstance(value, ast.Call) else ""
        if made_by in HOLDERS | changing or name in changed:
            yield name
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if {last_name(decorator) for decorator in node.decorator_list} & CACHES:
                yield node.name
            for inner in ast.walk(node):
                called = last_name(inner) if isinstance(inner, ast.Call) else ""
                is_hook = called.startswith("register_") and called.endswith("_hook")
                if (is_hook or called == "setattr") and node.name not in BUILDING:
                    yield node.name
                if called in SWITCHES and room in PASSES:
                    yield node.name
                for target in targets_of(inner):
                    attribute = target.attr if isinstance(target, ast.Attribute) else ""
                    if attribute in ("forward", "__call__", "__class__"):
                        yield node.name
    if room in PASSES:
        for kind in classes:
            yield from writes_of(kind)


def state():
    """{"layers/constants.py:every_index", …}: all of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    trees = {
        path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8")) for path in files
    }
    outside = {pair for tree in trees.values() for pair in changed_from_outside(tree)}
    found = set()
    for place, tree in trees.items():
        own = {name for name, _ in names_at_module_level(tree) if (place.stem, name) in outside}
        found |= {f"{place}:{name}" for name in own.union(found_in(tree, place.parts[0]))}
    return found


if __name__ == "__main__":
    print(*sorted(state()), sep="\n")
