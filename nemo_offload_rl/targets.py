"""Code from outside of the package: found, imported, checked, called, and carried to other processes.

A configuration names it `package.module.Name`, `package.module:Name` or `path/to/file.py:name`; a script may give the
object itself. All such code goes the same way:

1. `with_whole_paths` makes paths absolute while the configuration is read.
2. `UserCode.named` imports it in the driver, before Ray starts; its signature is checked against what it will be given.
3. Pickled for a process of the same host it is imported there again; `by_value` makes a copy that any host can use.
4. What it raises becomes a `UserCodeError` with the file and line of the user's code.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_offload_rl.errors import ConfigError, UserCodeError, UserError

_FILE_MARK = ".py:"
_KEYS = ("target", "processor")
_OWN_FOLDER = str(Path(__file__).parent)
_user_folders: set[str] = set()  # of files that were named as targets


@dataclass(frozen=True)
class UserCode:
    """A user's function, class or object.

    Attributes:
        key: Its place in the configuration, for messages: a dotted key such as `env.mine.target`, or an argument.
        value: The object.
        target: The text that names it; None for an object that Python code gave.
        kwargs: Additional keyword arguments for its calls.
        is_by_value: Pickled whole, for processes that cannot import it.
    """

    key: str
    value: Any
    target: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_by_value: bool = False

    @staticmethod
    def named(key: str, target: str, kwargs: Mapping[str, Any] | None = None) -> UserCode:
        """Import the object that `target` names.

        Raises:
            UserCodeError: There is none, or its import failed.
        """
        return UserCode(key, _load(key, target), target, dict(kwargs or {}))

    @property
    def label(self) -> str:
        """Key and name, for messages."""
        return f"{self.key} {self.target or getattr(self.value, '__qualname__', type(self.value).__name__)}"

    def by_value(self) -> UserCode:
        """A copy for any process of any host, pickled with the user's modules."""
        return replace(self, is_by_value=True)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.target is not None and not self.is_by_value:
            return UserCode.named, (self.key, self.target, dict(self.kwargs))
        return _from_bytes, (self.key, self._pickled, self.target, dict(self.kwargs))

    @cached_property
    def _pickled(self) -> bytes:
        import cloudpickle

        for module in _user_modules():
            cloudpickle.register_pickle_by_value(module)
        try:
            return cloudpickle.dumps(self.value)
        except Exception as error:
            raise UserCodeError(
                f"{self.label}: cannot be sent to another process ({type(error).__name__}: {error}); make what cannot "
                "be pickled inside of it, on first use"
            ) from error

    # -- signatures ----------------------------------------------------------------------------------------------------

    def check_named(
        self, given: Collection[str], *, optional: Collection[str] = (), elsewhere: Collection[str] = ()
    ) -> None:
        """Check that a function can be called with `given`, by name.

        Args:
            given: Names of arguments; it gets those that it has parameters for, and all of them with `**`.
            optional: Further names, which need a parameter of that name.
            elsewhere: Names that a function of another kind gets, for "did you mean".

        Raises:
            UserCodeError: It is no function, asks for another argument, or does not take one of its kwargs.
        """
        self._check_callable()
        asked, takes_all = self._parameters
        names = {*given, *optional, *self.kwargs}
        where = f"{self.label} ({self.place})"
        if by_place := [p.name for p in self._signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]:
            raise UserCodeError(f"{where}: parameter {by_place[0]} is positional-only, but gets its name; drop the /")
        if missing := [name for name, is_required in asked.items() if is_required and name not in names]:
            near = get_close_matches(missing[0], [*names, *elsewhere], n=1, cutoff=0.7)
            fix = (
                f"did you mean {near[0]}?"
                if near
                else f"remove it, give it a default, or set kwargs; arguments are {_listed([*given, *optional])}"
            )
            raise UserCodeError(f"{where}: unknown parameter {_listed(missing)}; {fix}")
        self._check_kwargs(asked, takes_all)

    def check_positional(self, given: Collection[str]) -> None:
        """Check that it can be called with the arguments `given`, by position, and its kwargs.

        Raises:
            UserCodeError: It cannot.
        """
        self._check_callable()
        asked, takes_all = self._parameters
        self._check_kwargs(asked, takes_all)
        try:
            self._signature.bind(*given, **self.kwargs)
        except TypeError as error:
            raise UserCodeError(
                f"{self.label} ({self.place}): it cannot be called as {self.name}({', '.join(given)}): {error}; change "
                "its parameters, or kwargs"
            ) from error

    @property
    def parameter_names(self) -> frozenset[str]:
        """The parameters that it names.

        Raises:
            UserCodeError: It has none to check.
        """
        self._check_callable()
        return frozenset(self._parameters[0])

    @property
    def name(self) -> str:
        """The name of its definition."""
        return str(getattr(self.value, "__name__", type(self.value).__name__))

    @property
    def place(self) -> str:
        """File and line of its definition."""
        value = inspect.unwrap(self.value) if callable(self.value) else self.value
        value = value if hasattr(value, "__code__") or inspect.isclass(value) else type(value)
        code = getattr(value, "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
        try:
            return f"{inspect.getsourcefile(value)}:{inspect.getsourcelines(value)[1]}"
        except (OSError, TypeError):
            return "no source"

    @property
    def is_async(self) -> bool:
        """Whether a call returns an awaitable."""
        method = inspect.getattr_static(type(self.value), "__call__", None)
        return inspect.iscoroutinefunction(self.value) or inspect.iscoroutinefunction(method)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def make(self) -> Any:
        """An instance of a class, made with `kwargs`; any other object itself.

        Raises:
            UserCodeError: Its constructor failed.
        """
        if not inspect.isclass(self.value):
            return self.value
        with self.telling():
            return self.value(**self.kwargs)

    def call(self, *arguments: Any) -> Any:
        """Call it by position.

        Raises:
            UserCodeError: It failed.
        """
        with self.telling():
            return self.value(*arguments, **self.kwargs)

    def call_named(self, given: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> Any:
        """Call it by name; arguments as in `check_named`.

        Raises:
            UserCodeError: It failed.
        """
        asked, takes_all = self._parameters
        arguments = {name: value for name, value in given.items() if takes_all or name in asked}
        arguments |= {name: value for name, value in (optional or {}).items() if name in asked}
        with self.telling():
            return self.value(**{**arguments, **self.kwargs})

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Turn errors of the block into a `UserCodeError` with the place in the user's code."""
        with _telling(self.label):
            yield

    @cached_property
    def _signature(self) -> inspect.Signature:
        try:
            return inspect.signature(self.value)
        except (TypeError, ValueError) as error:
            raise UserCodeError(f"{self.label}: it has no signature to check; write a Python function") from error

    @cached_property
    def _parameters(self) -> tuple[dict[str, bool], bool]:
        """Whether each parameter is required, by name; and whether any other argument is accepted."""
        kinds = inspect.Parameter
        parameters = self._signature.parameters.values()
        by_name = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        asked = {p.name: p.default is kinds.empty for p in parameters if p.kind in by_name}
        return asked, any(p.kind is kinds.VAR_KEYWORD for p in parameters)

    def _check_callable(self) -> None:
        if not callable(self.value):
            raise UserCodeError(f"{self.label}: it is a {type(self.value).__name__}; name a function or a class")

    def _check_kwargs(self, asked: Mapping[str, bool], takes_all: bool) -> None:
        unknown = [name for name in self.kwargs if name not in asked and not takes_all]
        if unknown:
            raise UserCodeError(
                f"{self.label} ({self.place}): kwargs has {_listed(unknown)}, but it takes {_listed(asked)}; "
                "correct kwargs"
            )


def is_target(text: str) -> bool:
    """Whether a text names code from outside, not a plain name of this package."""
    return "." in text or ":" in text


def with_whole_paths(node: Any, folder: Path, key: str = "") -> Any:
    """A configuration with absolute paths in targets that name files.

    A relative path is looked for in the working directory, as the paths of data are, and then in `folder`.

    Args:
        node: Nested dictionaries and lists.
        folder: Folder of the configuration file.
        key: Dotted key of `node`.

    Raises:
        ConfigError: There is no such file.
    """
    match node:
        case Mapping():
            inside = {name: f"{key}.{name}" if key else str(name) for name in node}
            return {
                name: value if name == "kwargs" else with_whole_paths(value, folder, inside[name])
                for name, value in node.items()
            }
        case list():
            return [with_whole_paths(value, folder, key) for value in node]
        case str() if key.rpartition(".")[2] in _KEYS and _FILE_MARK in node:
            path, _, name = node.rpartition(":")
            places = [Path(path).expanduser().absolute(), folder.absolute() / path]
            for place in places:
                if place.is_file():
                    return f"{place}:{name}"
            looked = " nor ".join(dict.fromkeys(map(str, places)))
            raise ConfigError(f"{key}: {node}: there is no file {looked}; correct the path")
        case _:
            return node


def _from_bytes(key: str, pickled: bytes, target: str | None, kwargs: Mapping[str, Any]) -> UserCode:
    return UserCode(key, _unpickled(pickled), target, kwargs, is_by_value=True)


@cache
def _unpickled(pickled: bytes) -> Any:
    """Unpickle each object once in a process, so that it keeps its state from call to call."""
    import pickle

    return pickle.loads(pickled)


# -- imports -----------------------------------------------------------------------------------------------------------


def _load(key: str, target: str) -> Any:
    label = f"{key} {target}"
    if _FILE_MARK in target:
        path, _, name = target.rpartition(":")
        module = _import_file(label, Path(path).expanduser().absolute())
    else:
        module_name, _, name = target.rpartition(":" if ":" in target else ".")
        if not module_name or not name or target.endswith(".py"):
            raise UserCodeError(f"{label}: no name of code; write package.module.name or path/to/file.py:name")
        module = _import_module(label, module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, vars(found), n=1)
            hint = f"did you mean {near[0]}?" if near else "define it there, or correct the name"
            raise UserCodeError(f"{label}: {getattr(module, '__file__', module)} has no {part}; {hint}")
        found = getattr(found, part)
    return found


def _import_module(label: str, name: str) -> ModuleType:
    _search(os.getcwd())
    try:
        with _telling(label):
            return importlib.import_module(name)
    except UserCodeError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise UserCodeError(
                f"{label}: there is no module {cause.name}, neither in {os.getcwd()} nor on Python's path; install it, "
                "or write path/to/file.py:name"
            ) from error
        raise


def _import_file(label: str, path: Path) -> ModuleType:
    """The module of a file: under its plain name if that is free, so that other files can import it too."""
    if not path.is_file():
        raise UserCodeError(f"{label}: there is no file {path}; correct the path")
    _search(str(path.parent))
    name = path.stem
    if not _is_found_by_name(path):
        name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _telling(label):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_found_by_name(path: Path) -> bool:
    if not path.stem.isidentifier():
        return False
    try:
        spec = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(path)


def _search(folder: str) -> None:
    """Let imports find modules next to the user's, after all others."""
    _user_folders.add(folder)
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()


def _user_modules() -> list[ModuleType]:
    """Imported modules in folders of targets, without those of libraries."""
    found = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is None or getattr(module, "__name__", None) != name or _is_library(path):
            continue
        if any(path.startswith(f"{folder}{os.sep}") for folder in _user_folders):
            found.append(module)
    return found


# -- messages ----------------------------------------------------------------------------------------------------------


@contextmanager
def _telling(label: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UserCodeError(f"{label}: {told(error)}") from error


def told(error: BaseException) -> str:
    """The error, and its place in the user's code."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}; correct that line"
    text = (str(error).splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if not own:
        return what
    line = f": {own[-1].line}" if own[-1].line else ""
    return f"{what}, at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}{line}"


@cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (
        *{f"{paths[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")},
        _OWN_FOLDER + os.sep,
    )


def _is_library(path: str) -> bool:
    is_frozen = path.startswith("<frozen")
    return is_frozen or "site-packages" in path or "dist-packages" in path or path.startswith(_library_folders())


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "nothing"
