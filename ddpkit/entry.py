"""`@distributed`: join the ranks that a launcher started, or start them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from types import FunctionType
from typing import Any, Generic, TypeVar, cast, overload

import torch
from typing_extensions import ParamSpec

from ddpkit import pending, threads
from ddpkit import store as stores
from ddpkit.agree import exchange
from ddpkit.consequence import is_likely_consequence
from ddpkit.errors import ConfigError
from ddpkit.group import (
    DEFAULT_TIMEOUT,
    accelerator_type,
    check_backend,
    check_device,
    choose_device,
    current_topology,
    get_world_size,
    group_is_open,
    has_index,
    process_group,
    to_seconds,
)
from ddpkit.launch.job import Job, Options, register
from ddpkit.topology import Topology

P = ParamSpec("P")
R = TypeVar("R")

NPROC_VARIABLE = "DDPKIT_NPROC_PER_NODE"
"""Overrides the default number of ranks, never an explicit argument."""

_CAUSE_BOUND = 2.0

_logger = logging.getLogger(__name__)


class DistributedFunction(Generic[P, R]):
    """A function that runs on every rank; what `@distributed` makes.

    Attributes:
        options: The options of its launches.
    """

    def __init__(
        self,
        function: Callable[P, R],
        options: Options,
        bound: tuple[Any, ...] = (),
        give: Callable[[], Callable[P, R]] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self.options = options
        self._bound = bound
        self._give = give or _giver(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function on all ranks.

        Returns:
            Rank 0's value where this call starts the ranks; this rank's own value where a launcher
            has started them, or where the call is made inside a rank.

        Raises:
            BaseException: What the rank raised that failed first, with a `WorkerError` as its
                cause.
            WorkerError: A rank ended in another way.
            ConfigError: The options or the launcher's variables are wrong, or an argument cannot
                be sent, or this is a daemonic process; no process has been started then.
        """
        job = self._job(args, kwargs)
        where = _decide(job.options, current_topology(), group_is_open())
        if where == "start":
            return cast(R, _start(job)[0])
        return cast(R, job() if where == "inside" else _run_under_launcher(job))

    def run_all(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run the function on all ranks and return one value for each, in the order of ranks.

        Under a launcher, or inside a rank, it is collective: every rank gets the whole list.

        Returns:
            One value for each rank.

        Raises:
            BaseException: As for a call.
        """
        job = self._job(args, kwargs)
        where = _decide(job.options, current_topology(), group_is_open())
        if where == "start":
            return cast("list[R]", _start(job))
        if where == "inside":
            return cast("list[R]", exchange(job(), name="run_all"))
        return cast("list[R]", _run_under_launcher(job, gather=True))

    def with_options(self, **options: Any) -> DistributedFunction[P, R]:
        """Return a copy with other options, which are those of `distributed`.

        Example:
            >>> @distributed
            ... def answer() -> int:
            ...     return 42
            >>> answer.with_options(nproc_per_node=1)()
            42
        """
        given = {field.name: getattr(self.options, field.name) for field in fields(Options)}
        return self._copy(make_options(**{**given, **options}), self._bound)

    def __get__(self, instance: object, owner: type | None = None) -> DistributedFunction[..., R]:
        """Bind to an instance, for a decorated method."""
        if instance is None:
            return self
        return self._copy(self.options, (instance,))

    def __reduce__(self) -> tuple[Any, ...]:
        # Its own name stands for this object, so that pickle does not find the function by it.
        is_found = _can_be_found(self.__wrapped__)
        rebuild: Callable[..., Any] = DistributedFunction if is_found else _rebuilt
        source = self.__wrapped__ if is_found else self._give
        made_anew = ("__wrapped__", "options", "_bound", "_give")
        state = {name: value for name, value in vars(self).items() if name not in made_anew}
        return rebuild, (source, self.options, self._bound), state

    def _copy(self, options: Options, bound: tuple[Any, ...]) -> DistributedFunction[P, R]:
        return DistributedFunction(self.__wrapped__, options, bound, self._give)

    def __repr__(self) -> str:
        return f"<distributed {self.__wrapped__!r}>"

    def _job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        return Job(self.__wrapped__, (*self._bound, *args), kwargs, options=self.options)


def _giver(function: Callable[P, R]) -> Callable[[], Callable[P, R]]:
    """Make what pickle finds as `module.function._give`, and cloudpickle sends as any function."""

    def give() -> Callable[P, R]:
        return function

    give.__module__ = getattr(function, "__module__", None) or give.__module__
    give.__qualname__ = f"{getattr(function, '__qualname__', '<locals>')}._give"
    return give


def _rebuilt(
    give: Callable[[], Callable[P, R]], options: Options, bound: tuple[Any, ...]
) -> DistributedFunction[P, R]:
    return DistributedFunction(give(), options, bound, give)


def _can_be_found(function: Callable[..., Any]) -> bool:
    """Tell whether pickle finds a function by its name, or needs none."""
    if not isinstance(function, FunctionType):
        return True
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


@overload
def distributed(function: Callable[P, R], /) -> DistributedFunction[P, R]: ...


@overload
def distributed(
    function: Callable[P, R],
    /,
    *,
    nproc_per_node: int | None = ...,
    backend: str | None = ...,
    device: str | torch.device | None = ...,
    timeout: float | timedelta = ...,
    start_method: str = ...,
    time_limit: float | timedelta | None = ...,
    shutdown_grace: float | timedelta = ...,
    log_dir: str | os.PathLike[str] | None = ...,
    init_group: bool = ...,
) -> DistributedFunction[P, R]: ...


@overload
def distributed(
    *,
    nproc_per_node: int | None = ...,
    backend: str | None = ...,
    device: str | torch.device | None = ...,
    timeout: float | timedelta = ...,
    start_method: str = ...,
    time_limit: float | timedelta | None = ...,
    shutdown_grace: float | timedelta = ...,
    log_dir: str | os.PathLike[str] | None = ...,
    init_group: bool = ...,
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]: ...


def distributed(function: Any = None, /, **options: Any) -> Any:
    """Run a function on several ranks when it is called.

    Inside a rank the function simply runs. Under torchrun, or with hand-set variables, the call
    opens the process group and runs the function in this process. Otherwise it starts ranks on
    this machine; with one rank the function runs in the calling process. What the program has
    changed in an imported module (`config.LR = 0.5`) holds in forked ranks alone, so pass it as an
    argument; the random state and the settings of torch hold under every start method. Ranks that
    are started end soon after the function has returned: what it registers with `atexit` need not
    run there.

    While ranks run, Ctrl-C, SIGTERM and SIGHUP stop them first (SIGTERM, `shutdown_grace`, SIGKILL;
    a second signal ends the grace) and then do what they would have done: Ctrl-C raises one
    KeyboardInterrupt, SIGTERM ends the program or runs its handler. What was ignored, as under
    nohup, stays ignored; Ctrl-Z stops the ranks, too. A signal to one rank is that rank's own.
    Once a rank has called `stop_requested()`, SIGTERM and SIGUSR1 ask all ranks to stop together:
    they have 60 seconds, which a second signal ends, and when they have followed it the call
    returns the function's value. From then on, ranks that have to be stopped for another reason get
    SIGKILL at once, because a SIGTERM would look like such a request.

    Args:
        function: What to decorate.
        **options: Keyword-only options:

            - nproc_per_node: Number of ranks. Default: `DDPKIT_NPROC_PER_NODE`, or the
              accelerators of this machine, or 1.
            - backend: As for `process_group`.
            - device: As for `process_group`.
            - timeout: Bound (seconds, or a timedelta) of the rendezvous, of collectives, and of
              waits for a rank to come to a call such as `barrier`, or to the end under a launcher.
              Default: 600.
            - start_method: `auto` (fork when that is safe, else forkserver), `fork`, `forkserver`
              or `spawn`. Default: `auto`.
            - time_limit: Seconds, or a timedelta, that the whole call may take; then the ranks are
              stopped, and a `WorkerTimeoutError` says where each was. A single rank, and a rank of
              a launcher, runs in this process: it is interrupted in Python code, and when a
              blocked call in C returns. Default: no limit.
            - shutdown_grace: Seconds, or a timedelta, between SIGTERM and SIGKILL for ranks that
              are stopped. Default: 5.
            - log_dir: Folder for a file `rank-N.log` for each rank, to which its standard output
              and error are appended; rank 0's are shown on the terminal, too. Default: no files.
            - init_group: Whether to open the process group. False starts the ranks and sets their
              variables, for a function that calls `init_process_group` itself. Default: True.

    Returns:
        The decorated function; it has `run_all` and `with_options` beside its own signature.

    Raises:
        ConfigError: An option is wrong, or the function is async, or a generator function.

    Example:
        >>> @distributed(nproc_per_node=1)
        ... def world_size() -> int:
        ...     return torch.distributed.get_world_size()
        >>> world_size()
        1
    """
    if function is None:
        return lambda decorated: distributed(decorated, **options)
    if not callable(function):
        raise ConfigError(
            f"distributed({function!r}) was given, but the first argument is the function. Write "
            "@distributed(nproc_per_node=...) for options."
        )
    if isinstance(function, DistributedFunction):
        return function.with_options(**options)
    _check_function(function)
    register(function)
    return DistributedFunction(function, make_options(**options))


def _check_function(function: Callable[..., Any]) -> None:
    """Refuse a function whose call does not run its body, which has to run within the group."""
    name = getattr(function, "__qualname__", repr(function))
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{name} is an async function, whose body would run after its ranks have ended. "
            "Decorate a plain function that calls asyncio.run() with it."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{name} is a generator function, whose body would run after its ranks have ended. Let "
            "it return a list, or decorate a plain function that goes through what it yields."
        )
    if isinstance(function, staticmethod):
        raise ConfigError(
            f"{name} is a staticmethod already. Write @staticmethod above @distributed."
        )


def make_options(**given: Any) -> Options:
    """Check options and put them into their record."""
    known = [field.name for field in fields(Options)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(
            f"distributed() has no option {', '.join(unknown)}. Its options are {', '.join(known)}."
        )
    options = Options(**given)
    _check_nproc(options.nproc_per_node)
    check_backend(options.backend)
    check_device(options.device)
    _check_start_method(options.start_method)
    _check_kinds(options)
    return replace(
        options,
        timeout=to_seconds(options.timeout) or DEFAULT_TIMEOUT,
        time_limit=to_seconds(options.time_limit, name="time_limit"),
        shutdown_grace=to_seconds(options.shutdown_grace, name="shutdown_grace", zero=True) or 0.0,
    )


def _check_nproc(nproc: object) -> None:
    if nproc is not None and (isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1):
        raise ConfigError(
            f"nproc_per_node={nproc!r} was given, but it must be a whole number of at least 1, or "
            "None."
        )


def _check_start_method(method: object) -> None:
    choices = ["auto", *multiprocessing.get_all_start_methods()]
    if method not in choices:
        raise ConfigError(
            f"start_method={method!r} was given; on this machine it must be one of "
            f"{', '.join(choices)}."
        )


def _check_kinds(options: Options) -> None:
    log_dir: object = options.log_dir
    if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
        raise ConfigError(f"log_dir={log_dir!r} was given, but it must be a path, or None.")
    init_group: object = options.init_group
    if not isinstance(init_group, bool):
        raise ConfigError(f"init_group={init_group!r} was given, but it must be True or False.")
    if options.shutdown_grace is None:
        raise ConfigError("shutdown_grace=None was given, but it must be seconds or a timedelta.")


# ------------------------------------------------------------------------------ pure decisions


def choose_nproc(explicit: int | None, variable: str | None) -> int | None:
    """Choose the number of ranks to start.

    Args:
        explicit: The `nproc_per_node` that was given, or None.
        variable: Value of `DDPKIT_NPROC_PER_NODE`, or None.

    Returns:
        The number of ranks, None when neither says anything.

    Raises:
        ConfigError: The variable is not a whole number of at least 1.
    """
    if explicit is not None:
        return explicit
    if variable is None:
        return None
    if not variable.isdecimal() or int(variable) < 1:
        raise ConfigError(
            f"{NPROC_VARIABLE}={variable!r} was given, but it must be a whole number of at least 1."
        )
    return int(variable)


def _decide(options: Options, topology: Topology, group_is_open: bool) -> str:
    """Decide where to run: `inside` this rank, under the `launcher`'s ranks, or `start` ranks."""
    if topology.source == "ddpkit" or group_is_open:
        _check_inside(options)
        return "inside"
    return "start" if topology.source == "none" else "launcher"


def _check_inside(options: Options) -> None:
    actual = get_world_size()
    if options.nproc_per_node is not None and options.nproc_per_node != actual:
        raise ConfigError(
            f"nproc_per_node={options.nproc_per_node} was given, but this call is made inside a "
            f"rank of a world of {actual}. Leave nproc_per_node out, or call it outside."
        )


# --------------------------------------------------------------------------------------- effects


def _count_devices(options: Options) -> int:
    """Count accelerators without opening their driver where torch can ask without."""
    if options.device is not None:
        device = torch.device(options.device)
        if device.type == "cpu" or has_index(device):
            return 1
    return max(1, torch.accelerator.device_count()) if accelerator_type() is not None else 1


def _start(job: Job) -> list[Any]:
    nproc = choose_nproc(job.options.nproc_per_node, os.environ.get(NPROC_VARIABLE))
    if nproc is None:
        nproc = _count_devices(job.options)
    if nproc == 1:
        return [_run_alone(job)]
    _check_devices(nproc, job.options)
    _check_may_start(job)
    # Imported when needed: a process that starts no ranks need not pay for what does.
    from ddpkit.launch.start import launch

    return launch(replace(job, nproc=nproc))


def _check_may_start(job: Job) -> None:
    process = multiprocessing.current_process()
    if process.daemon:
        raise ConfigError(
            f"{job.name}() was called in {process.name}, a daemonic process (of a multiprocessing "
            "Pool, or a data worker), which may start no others. Call it in the main process, or "
            "use concurrent.futures.ProcessPoolExecutor in place of the pool."
        )


def _check_devices(nproc: int, options: Options) -> None:
    """Refuse more ranks than devices here, before any process starts."""
    accelerator = accelerator_type()
    last = Topology(nproc - 1, nproc, nproc - 1, nproc, source="ddpkit")
    count = torch.accelerator.device_count() if accelerator is not None else 0
    choose_device(options.device, accelerator, count, last)


def _run_alone(job: Job) -> Any:
    """Run in this process, as a world of one."""
    with pending.undone_at_end(), _limited_and_logged(job, Topology(), end_after=None):
        return _call_alone(job)


@contextlib.contextmanager
def _limited_and_logged(job: Job, place: Topology, end_after: float | None) -> Iterator[None]:
    """Apply the options that a parent applies to the ranks that it starts."""
    options = job.options
    if options.time_limit is None and options.log_dir is None:
        yield
        return
    from ddpkit.launch.deadline import time_limit
    from ddpkit.launch.output import logged_here

    limit = time_limit(options.time_limit, name=job.name, rank=place.rank, end_after=end_after)
    with logged_here(options.log_dir, place.rank, place.world_size, job.name), limit:
        yield


def _call_alone(job: Job) -> Any:
    options = job.options
    if options.init_group:
        with process_group(options.backend, timeout=options.timeout, device=options.device):
            return job()
    from ddpkit.launch.worker import RankSpec, left_over, rank_environment

    listener = stores.listen()
    port = listener.getsockname()[1]
    store = stores.serve(listener, options.timeout)
    try:
        spec = RankSpec(0, 1, port, b"", torch.get_num_threads(), options)
        unset: dict[str, str | None] = dict.fromkeys(left_over(os.environ))
        with _environment({**unset, **rank_environment(spec, os.getpid())}):
            return job()
    finally:
        del store


def _run_under_launcher(job: Job, *, gather: bool = False) -> Any:
    topology = current_topology()
    if job.options.nproc_per_node not in (None, topology.local_world_size):
        _logger.info(
            "nproc_per_node=%s is ignored: %s started %d ranks on this node",
            *(job.options.nproc_per_node, topology.source, topology.local_world_size),
        )
    with (
        _recorded_for_torchrun(topology),
        pending.undone_at_end(),
        _divided_threads(topology),
        _limited_and_logged(job, topology, end_after=job.options.shutdown_grace),
    ):
        if not job.options.init_group:
            value = job()
            return _gather_values(job, value) if gather else value
        options = job.options
        with process_group(options.backend, timeout=options.timeout, device=options.device):
            value = job()
            return exchange(value, name="run_all") if gather else value


def _gather_values(job: Job, value: Any) -> list[Any]:
    if group_is_open():  # the function's own, of whatever backend
        return exchange(value, name="run_all")
    with process_group("gloo", timeout=job.options.timeout, device="cpu"):
        return exchange(value, name="run_all")


@contextlib.contextmanager
def _recorded_for_torchrun(topology: Topology) -> Iterator[None]:
    """Write an exception into torchrun's error file, so that its summary shows the cause."""
    try:
        yield
    except Exception as error:
        if topology.source == "torchrun":
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            if is_likely_consequence(error):
                # torchrun takes the earliest second for the root cause. Once the rank that caused
                # this has ended, torchrun stops this one, and its error stays out of the summary.
                time.sleep(_CAUSE_BOUND)
            get_error_handler().record_exception(error)
        raise


@contextlib.contextmanager
def _divided_threads(topology: Topology) -> Iterator[None]:
    """Give this rank its share of the cores, and put the number back afterwards."""
    before = torch.get_num_threads()
    share = threads.threads_per_rank(
        threads.usable_cores(),
        topology.local_world_size,
        threads.setting_of_user(os.environ, os.getppid()),
        threads.cores_by_launcher(os.environ, topology.source),
    )
    torch.set_num_threads(share)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for a block, and unset those that are None."""
    before = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
