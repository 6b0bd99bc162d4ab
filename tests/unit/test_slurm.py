"""Steps of SLURM as their variables tell them, and how SLURM writes lists."""

import itertools
import random
import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpkit.errors import ConfigError
from ddpkit.slurm import expand_node_list, expand_task_counts, read_step
from tests.unit.launchers import JOB, STEP, without

# ------------------------------------------------------------------------------------ the step


def test_a_step_with_different_numbers_of_tasks() -> None:
    step = read_step(STEP)
    assert step is not None
    assert (step.rank, step.world_size, step.local_rank, step.local_world_size) == (5, 7, 1, 2)
    assert (step.node, step.tasks_per_node) == (2, (2, 2, 2, 1))
    assert (step.nodes, step.name) == (("n07", "n08", "n09", "n10"), "12.0")
    assert set(step.variables) == {
        *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
        *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
    }


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="no SLURM"),
        pytest.param(JOB, id="a shell of salloc"),
        pytest.param(
            {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
            id="a batch script",
        ),
        *(
            pytest.param(
                {**STEP, "SLURM_STEP_ID": str(special), "SLURM_STEPID": str(special)},
                id=f"step {special:x}",
            )
            for special in range(0xFFFF_FFF0, 0x1_0000_0000)
        ),
        pytest.param(
            {
                **JOB,
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_TASKS_PER_NODE": "1",
                "SLURM_STEP_NODELIST": "n07",
                "SLURM_PTY_PORT": "34811",
            },
            id="srun --pty bash in a bigger job",
        ),
        pytest.param(
            {**JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            id="one task, without counts for each node",
        ),
        pytest.param(
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, id="a job of one task"
        ),
        pytest.param({**JOB, "SLURM_STEP_ID": "0"}, id="a step id and nothing of a step"),
    ],
)
def test_no_step_of_several_tasks(environ: dict[str, str]) -> None:
    assert read_step(environ) is None


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_every_task_finds_its_place_however_they_are_distributed(
    tasks_per_node: list[int], shuffle: random.Random
) -> None:
    nodes = [node for node, count in enumerate(tasks_per_node) for _ in range(count)]
    if len(nodes) == 1:
        return
    shuffle.shuffle(nodes)
    environ = {
        **JOB,
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": str(len(nodes)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks_per_node)),
        "SLURM_STEP_NODELIST": f"n[1-{len(tasks_per_node)}]",
    }
    places = []
    for rank, node in enumerate(nodes):
        local = {"SLURM_LOCALID": str(nodes[:rank].count(node)), "SLURM_NODEID": str(node)}
        step = read_step({**environ, **local, "SLURM_PROCID": str(rank)})
        assert step is not None
        assert (step.rank, step.world_size, step.node) == (rank, len(nodes), node)
        assert step.local_world_size == tasks_per_node[node]
        places.append((step.node, step.local_rank))
    assert sorted(places) == [
        (node, local) for node, count in enumerate(tasks_per_node) for local in range(count)
    ]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"SLURM_STEP_ID": "5"}, "12.5"),
        ({"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}, "13.0"),
        ({"SLURM_RESTART_COUNT": "2"}, "12.0+2"),
    ],
)
def test_the_name_differs_between_steps(changed: dict[str, str], name: str) -> None:
    step = read_step({**STEP, **changed})
    assert step is not None
    assert step.name == name


def test_old_names_of_job_and_step() -> None:
    step = read_step(without(STEP, "SLURM_JOB_ID", "SLURM_STEP_ID"))
    assert step is not None
    assert step.name == "12.0"


def test_a_step_smaller_than_its_job_is_what_counts() -> None:
    stale = {"SLURM_NTASKS": "16", "SLURM_TASKS_PER_NODE": "4(x4)", "SLURM_NNODES": "4"}
    step = read_step({**STEP, **stale})
    assert step is not None
    assert (step.world_size, step.local_world_size) == (7, 2)


@pytest.mark.parametrize(
    "missing",
    [
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_STEP_NUM_NODES",),
        ("SLURM_STEP_NODELIST",),
    ],
    ids=",".join,
)
def test_names_of_the_job_stand_in_if_they_fit(missing: Sequence[str]) -> None:
    step = read_step(without(STEP, *missing))
    assert step is not None
    assert (step.tasks_per_node, step.nodes) == ((2, 2, 2, 1), ("n07", "n08", "n09", "n10"))


def test_the_node_list_of_a_bigger_job_does_not_stand_in() -> None:
    environ = {**without(STEP, "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST": "n[01-99]"}
    step = read_step(environ)
    assert step is not None
    assert step.nodes == ()


def test_one_node_needs_no_counts() -> None:
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n07"}
    step = read_step({**without(STEP, "SLURM_STEP_TASKS_PER_NODE"), **one, "SLURM_LOCALID": "5"})
    assert step is not None
    assert (step.tasks_per_node, step.nodes) == ((7,), ("n07",))


def test_a_heterogeneous_step_is_one_step() -> None:
    # SLURM numbers the tasks and nodes of all parts in one row, and so are the counts.
    whole = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "12", "SLURM_HET_GROUP_ID": "1"}
    step = read_step({**STEP, **whole})
    assert step is not None
    assert (step.rank, step.world_size, step.name) == (5, 7, "12.0")
    # Where the list has the nodes of one part only, it is none of the step's nodes.
    step = read_step({**STEP, **whole, "SLURM_STEP_NODELIST": "n[09-10]"})
    assert step is not None
    assert step.nodes == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID=7 is no number of one of 7 tasks.*='2.x3.,1'"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID=-1 is no number"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 is no number of one of the 2 tasks of node 2"),
        ({"SLURM_NODEID": "3"}, "SLURM_LOCALID=1 is no number of one of the 1 tasks of node 3"),
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID=4 is no number of one of 4 nodes"),
        ({"SLURM_NODEID": "-1"}, "SLURM_NODEID=-1 is no number of one of 4 nodes"),
        (
            {"SLURM_STEP_NUM_TASKS": "8"},
            "by SLURM_STEP_NUM_TASKS='8' it has 8 tasks, by SLURM_STEP_TASKS_PER_NODE='2.x3.,1' 7",
        ),
        ({"SLURM_STEP_NUM_NODES": "3"}, "it has 3 nodes, by SLURM_STEP_TASKS_PER_NODE=.* 4"),
        ({"SLURM_STEP_NODELIST": "n[07-09]"}, "it has 3 nodes, by .*2.x3.,1' 4"),
    ],
)
def test_contradictions(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"contradict each other: .*{message}.*LAUNCHER=none"):
        read_step({**STEP, **changed})


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_a_partial_set_lists_what_is_set_and_what_is_missing(missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"step are incomplete: .*; missing are {missing}\."):
        read_step(without(STEP, missing))


@pytest.mark.parametrize("job", ["4(x4)", None])
def test_counts_of_the_job_that_do_not_fit_are_not_taken(job: str | None) -> None:
    environ = without(STEP, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    environ |= {"SLURM_TASKS_PER_NODE": job} if job else {}
    with pytest.raises(ConfigError, match=r"SLURM_PROCID='5'.*missing are SLURM_STEP_TASKS_PER"):
        read_step(environ)


def test_a_task_without_any_counts_is_refused_on_every_rank() -> None:
    for rank in range(2):
        environ = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank)}
        with pytest.raises(ConfigError, match="missing are SLURM_STEP_NUM_TASKS, SLURM_STEP_TASKS"):
            read_step(environ)


@pytest.mark.parametrize("text", ["", "two", "-", "1.5"])
@pytest.mark.parametrize(
    "name",
    ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"],
)
def test_what_is_not_a_whole_number_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={text!r} was given.*a whole number"):
        read_step({**STEP, name: text})


@pytest.mark.parametrize("tasks", ["0", "-3"])
def test_a_step_has_tasks(tasks: str) -> None:
    environ = {**without(STEP, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_STEP_NUM_TASKS": tasks}
    with pytest.raises(ConfigError, match=f"SLURM_STEP_NUM_TASKS={tasks} was given"):
        read_step(environ)


# -------------------------------------------------------------------------------- task counts


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", (1,)),
        ("2(x3),1", (2, 2, 2, 1)),
        ("1,2(x2),3", (1, 2, 2, 3)),
        ("16(x1)", (16,)),
        ("1, 2", (1, 2)),
    ],
)
def test_task_counts(text: str, counts: tuple[int, ...]) -> None:
    assert expand_task_counts(text) == counts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "1,",
        "two",
        "2x3",
        "2(3)",
        "2(x)",
        "2(x3",
        "-1",
        "0",
        "1(x0)",
        "1(x999999999)",
        "1.5",
    ],
)
def test_other_forms_of_task_counts_are_refused(text: str) -> None:
    message = re.escape(f"SLURM_STEP_TASKS_PER_NODE={text!r} was given") + ".*'2.x3.,1'"
    with pytest.raises(ConfigError, match=message):
        expand_task_counts(text)


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 50)), min_size=1, max_size=20))
def test_task_counts_round_trip(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    expected = [count for count, times in groups for _ in range(times)]
    assert list(expand_task_counts(text)) == expected


# --------------------------------------------------------------------------------- node lists


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", "login"),
        ("alpha,beta", "alpha beta"),
        ("n[1,2]", "n1 n2"),
        ("n[1-3,7]", "n1 n2 n3 n7"),
        ("n[07-10]", "n07 n08 n09 n10"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[001,3]", "n001 n3"),
        ("jean-zay-ia810", "jean-zay-ia810"),
        ("a-b-[07-09,11]", "a-b-07 a-b-08 a-b-09 a-b-11"),
        ("x,y[001,003],z", "x y001 y003 z"),
        ("r[1-2]c[3-4]", "r1c3 r1c4 r2c3 r2c4"),
        ("n[1-2]-ib0", "n1-ib0 n2-ib0"),
        ("n[1-2].cluster.example", "n1.cluster.example n2.cluster.example"),
        (
            "n[1-3,7],gpu-[01-02]-[1-2],login",
            "n1 n2 n3 n7 gpu-01-1 gpu-01-2 gpu-02-1 gpu-02-2 login",
        ),
        ("[1-2]", "1 2"),
        ("n2,n1", "n2 n1"),  # as srun --distribution=arbitrary orders them
        (" n1 ", "n1"),
    ],
)
def test_node_lists(text: str, nodes: str) -> None:
    assert expand_node_list(text) == tuple(nodes.split())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a name is missing"),
        ("n1,", "a name is missing"),
        (",n1", "a name is missing"),
        ("n1,,n2", "a name is missing"),
        ("n[1-3", r"'\[' does not belong there"),
        ("n1-3]", r"'\]' does not belong there"),
        ("n[[1-3]]", r"'\[' does not belong there"),
        ("n1 n2", "' ' does not belong there"),
        ("n[]", "'' is no range"),
        ("n[1-]", "'1-' is no range"),
        ("n[3-1]", "'3-1' is no range"),
        ("n[a-b]", "'a-b' is no range"),
        ("bgl[000x733]", "'000x733' is no range"),
        ("n[1-100001]", "it has more than 100,000 names"),
        ("r[1-1000]c[1-1000]", "it has more than 100,000 names"),
        ("n[1-60000],m[1-60000]", "it has more than 100,000 names"),
        ("n[1-999999999999999999]", "it has more than 100,000 names"),
    ],
)
def test_other_forms_of_node_lists_are_refused_at_once(text: str, reason: str) -> None:
    start = time.monotonic()
    with pytest.raises(
        ConfigError, match=rf"SLURM_STEP_NODELIST=.* was given.*\({reason}"
    ) as caught:
        expand_node_list(text)
    assert repr(text) in str(caught.value)
    assert time.monotonic() - start < 5


def test_a_list_that_does_not_end_well_takes_no_time() -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError):
        expand_node_list("n" * 20_000 + "[1]" * 2_000 + "]")
    assert time.monotonic() - start < 5


NAMES = st.text("abcxyz0189-._", min_size=1, max_size=6)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    low, more, width = draw(st.integers(0, 120)), draw(st.integers(0, 12)), draw(st.integers(1, 4))
    first = f"{low:0{width}d}"
    numbers = [str(low + step).zfill(len(first)) for step in range(more + 1)]
    return (f"{first}-{low + more}" if more else first), numbers


@st.composite
def items(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw one item of a node list with the names that it stands for."""
    text, choices = draw(NAMES), []
    choices.append([text])
    for _ in range(draw(st.integers(0, 2))):
        drawn = draw(st.lists(ranges(), min_size=1, max_size=3))
        suffix = draw(st.one_of(st.just(""), NAMES))
        text += f"[{','.join(one for one, _ in drawn)}]{suffix}"
        choices += [[number for _, numbers in drawn for number in numbers], [suffix]]
    return text, ["".join(parts) for parts in itertools.product(*choices)]


@given(st.lists(items(), min_size=1, max_size=4))
def test_node_lists_stand_for_what_is_written_out(drawn: list[tuple[str, list[str]]]) -> None:
    text = ",".join(one for one, _ in drawn)
    expected = [name for _, names in drawn for name in names]
    assert list(expand_node_list(text)) == expected
