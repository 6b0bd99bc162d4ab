"""Write one report of all results: a row for each claim, and the headline that README shows.

It reads the newest result of each benchmark in results/, and measures nothing.

    python benchmarks/report.py
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from estimates import times_faster

HERE = Path(__file__).parent
RESULTS = HERE / "results"
READMES = (HERE.parent / "README.md", HERE.parent / "README.zh-CN.md")
BEGIN, END = "<!-- headline -->", "<!-- /headline -->"
TITLES = {
    "launch": "Starting ranks",
    "failure": "Failures",
    "step": "Training steps",
    "step-close": "Training steps of the CNN, measured longer",
    "loader": "Data",
    "checkpoint": "Checkpoints",
    "split": "Splitting a model",
    "control": "The side channel with hundreds of ranks",
    "testing": "Tests",
}
"""Benchmarks in the order of the report; a result is in NAME-DATE.json."""
SCRIPTS = {"step-close": "step"}
VERDICTS = {True: "holds", False: "does not hold", None: "undecided"}
_FILE = re.compile(r"(?P<name>[a-z-]+)-(?P<date>\d{4}-\d{2}-\d{2})\.json")


@dataclass(frozen=True)
class Result:
    """The newest result of one benchmark."""

    name: str
    file: str
    date: str
    content: Mapping[str, Any]

    @property
    def script(self) -> str:
        """Name of what measured it."""
        return f"{SCRIPTS.get(self.name, self.name)}.py"


@dataclass(frozen=True)
class Claim:
    """A row of the report."""

    promise: str
    measured: str
    verdict: str
    script: str
    file: str


@dataclass(frozen=True)
class Headline:
    """A row of the table in README."""

    what: str
    chinese: str
    own: str
    other: str
    ratio: float
    script: str


# ------------------------------------------------------------------------------------- reading


def newest(names: Iterable[str]) -> dict[str, str]:
    """Choose the newest file of each benchmark, by the dates in their names."""
    chosen: dict[str, str] = {}
    for name in sorted(names):  # dates sort as texts do
        match = _FILE.fullmatch(name)
        if match is not None and match["name"] in TITLES:
            chosen[match["name"]] = name
    return chosen


def read_results(folder: Path) -> dict[str, Result]:
    """Read the newest result of each benchmark, in the order of the report."""
    files = newest(path.name for path in folder.iterdir())
    found = {}
    for name in TITLES:
        if name in files:
            content = json.loads((folder / files[name]).read_text())
            date = str(content["machine"]["date"])[:10]
            found[name] = Result(name, files[name], date, content)
    return found


def claims_of(result: Result, results: Mapping[str, Result]) -> list[Claim]:
    """Turn the targets of a result into rows; what a longer run has decided is not listed twice."""
    closer = results.get("step-close") if result.name == "step" else None
    decided = set() if closer is None else _decided(closer)
    return [
        Claim(
            target["promise"].rstrip(":"),
            target["measured"],
            VERDICTS[target["holds"]]
            if target["promise"] not in decided or target["holds"] is not None
            else "see the longer run",
            result.script,
            result.file,
        )
        for target in result.content["targets"]
        if target["measured"] != "-"
    ]


def _decided(closer: Result) -> set[str]:
    return {each["promise"] for each in closer.content["targets"] if each["holds"] is True}


# --------------------------------------------------------------------------------- the headline


def headlines(results: Mapping[str, Result]) -> list[Headline]:
    """Choose what a reader wants to know first; what was not measured is left out."""
    makers = {
        "launch": _launch,
        "failure": _failure,
        "testing": _testing,
        "loader": _loader,
        "checkpoint": _checkpoint,
        "step": _step,
    }
    return [row for name, make in makers.items() if name in results for row in make(results)]


def _launch(results: Mapping[str, Result]) -> list[Headline]:
    warm = results["launch"].content["warm"]
    own, spawn, run = (
        _median(warm[name], "returned") for name in ("ddpkit auto", "mp.spawn", "torchrun")
    )
    what = "start two ranks, return an all-reduce"
    chinese = "启动两个 rank 并返回一次 all-reduce"
    return [
        _row(f"{what} (`mp.spawn`)", f"{chinese}（对比 `mp.spawn`）", own, spawn, "launch.py"),
        _row(f"{what} (`torchrun`)", f"{chinese}（对比 `torchrun`）", own, run, "launch.py"),
    ]


def _failure(results: Mapping[str, Result]) -> list[Headline]:
    raised = results["failure"].content["raise"]
    own, spawn = (_median(raised[name], "seconds") for name in ("ddpkit auto", "mp.spawn"))
    what = "a rank raises: until the caller has the exception (`mp.spawn`)"
    chinese = "某个 rank 抛出异常，到调用者拿到它（对比 `mp.spawn`）"
    return [_row(what, chinese, own, spawn, "failure.py")]


def _testing(results: Mapping[str, Result]) -> list[Headline]:
    samples = results["testing"].content["samples"]
    mark = next((taken for name, taken in samples.items() if "mark" in name), None)
    spawn = next((taken for name, taken in samples.items() if "mp.spawn" in name), None)
    if not mark or not spawn:
        return []
    what = "20 tests with two ranks (`mp.spawn` in each)"
    chinese = "20 个双 rank 测试（对比每个测试调用 `mp.spawn`）"
    return [_row(what, chinese, _median(mark, "tests"), _median(spawn, "tests"), "testing.py")]


def _loader(results: Mapping[str, Result]) -> list[Headline]:
    length = 50_000_000
    taken = {
        each["contestant"]: each["samples"]
        for each in results["loader"].content["first"]
        if each["setting"]["length"] == length
    }
    own, other = (_median(taken[name], "seconds") for name in ("ddpkit", "torch"))
    what = "first indices of a shuffled epoch, 5e7 samples (`DistributedSampler`)"
    chinese = "打乱后的 epoch 的首批索引，5e7 个样本（对比 `DistributedSampler`）"
    return [_row(what, chinese, own, other, "loader.py")]


def _checkpoint(results: Mapping[str, Result]) -> list[Headline]:
    samples = results["checkpoint"].content["samples"]
    saved = _median(samples["save: torch.save + fsync"], "seconds")
    stalls = _median(samples["background: ddpkit"], "seconds")
    own, other = (_median(samples[f"load: {name}"], "seconds") for name in ("ddpkit", "torch.load"))
    return [
        _row(
            "a save of 1 GB holds up the loop (`torch.save` and fsync)",
            "保存 1 GB 时训练循环的停顿（对比 `torch.save` 加 fsync）",
            *(stalls, saved, "checkpoint.py"),
        ),
        _row(
            "load 1 GB on two ranks (`torch.load` on each)",
            "在两个 rank 上加载 1 GB（对比各自 `torch.load`）",
            *(own, other, "checkpoint.py"),
        ),
    ]


def _step(results: Mapping[str, Result]) -> list[Headline]:
    close = results.get("step-close", results["step"])
    rows = []
    for contestant, result, label, chinese in (
        ("by hand, tuned threads", close, "DDP by hand, tuned threads", "手写 DDP，已调线程数"),
        ("by hand, mp.spawn", results["step"], "defaults of `mp.spawn`", "`mp.spawn` 默认设置"),
    ):
        taken = result.content["seconds_per_step"]["cnn"]
        own, other = (_middle(taken[name]) for name in ("ddpkit", contestant))
        row = _row(
            f"a training step of a CNN ({label})",
            f"CNN 的一个训练步（对比{chinese}）",
            *(own, other, "step.py"),
        )
        ratio = times_faster(taken["ddpkit"], taken[contestant]).value  # by rounds, as in the table
        rows.append(replace(row, ratio=ratio))
    return rows


def _row(what: str, chinese: str, own: float, other: float, script: str) -> Headline:
    return Headline(what, chinese, show_time(own), show_time(other), other / own, script)


def _median(samples: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(float(sample[key]) for sample in samples)


def _middle(starts: Sequence[Sequence[float]]) -> float:
    return statistics.median(seconds for rounds in starts for seconds in rounds)


def show_time(seconds: float) -> str:
    """Write a time with three digits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = 1000 * seconds
    return f"{milliseconds:.1f} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"


def show_ratio(ratio: float) -> str:
    """Write how many times faster, with as many digits as say something."""
    if ratio >= 100:
        return f"{float(f'{ratio:.2g}'):,.0f}x"
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2f}x"


# ---------------------------------------------------------------------------------- the writing


def write_report(results: Mapping[str, Result]) -> str:
    """Write the report."""
    lines = [
        "# Results of the benchmarks",
        "",
        "Made by `benchmarks/report.py` from the newest result of each script. How each is "
        "measured is in [benchmarks/README.md](../README.md). Absolute times are those of one "
        "machine; ratios are of one run.",
        "",
        "![how many times faster](headline.svg)",
        "",
        *table(headlines(results)),
    ]
    for result in results.values():
        lines += ["", f"## {TITLES[result.name]}", "", describe(result), ""]
        lines += ["| claim | measured | verdict | script | result |", "|---|---|---|---|---|"]
        lines += [
            f"| {each.promise} | {each.measured} | {each.verdict} "
            f"| [{each.script}](../{each.script}) | [{each.file}]({each.file}) |"
            for each in claims_of(result, results)
        ]
    return "\n".join(lines) + "\n"


def describe(result: Result) -> str:
    """Say when and where something was measured."""
    machine = result.content["machine"]
    packages = machine["packages"]
    return (
        f"{result.date}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, Python {machine['python']}, torch {packages['torch']}"
    )


def table(rows: Sequence[Headline], *, chinese: bool = False) -> list[str]:
    """Write the table of README."""
    if chinese:
        head = "| 内容（对比对象） | ddpkit | 对比对象 | ddpkit 快多少倍 |"
    else:
        head = "| what (compared with) | ddpkit | the other | ddpkit is faster |"
    return [
        head,
        "|---|---|---|---|",
        *(
            f"| {row.chinese if chinese else row.what} | {row.own} | {row.other} "
            f"| {show_ratio(row.ratio)} |"
            for row in rows
        ),
    ]


def headline_text(results: Mapping[str, Result], *, chinese: bool = False) -> str:
    """Write what README has between its marks."""
    dates = sorted({result.date for result in results.values()})
    machine = results["launch"].content["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, torch "
    where += f"{machine['packages']['torch']}, Python {machine['python']}"
    when = dates[0] if len(dates) == 1 else f"{dates[0]} .. {dates[-1]}"
    report = "benchmarks/results/report.md"
    note = (
        f"两个 CPU rank；{where}；{when}。[所有结果]({report})。"
        if chinese
        else f"Two CPU ranks; {where}; {when}. [All results]({report})."
    )
    alternative = "快多少倍" if chinese else "how many times faster"
    picture = f"![{alternative}](benchmarks/results/headline.svg)"
    rows = table(headlines(results), chinese=chinese)
    return "\n".join([BEGIN, "", *rows, "", note, "", picture, "", END])


def with_headline(text: str, headline: str) -> str:
    """Put the headline between the marks of a text; one without marks stays as it is."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + headline + after if begin and end else text


def draw(rows: Sequence[Headline]) -> str:
    """Draw one bar for each row, as long as the logarithm of its ratio, as SVG."""
    left, width, height = 420, 300, 30
    most = max(math.log10(max(row.ratio, 1.0)) for row in rows) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 100} '
        f'{height * len(rows) + 20}" font-family="sans-serif" font-size="13">',
        "<style>text{fill:#444}rect{fill:#2a7fb8}"
        "@media(prefers-color-scheme:dark){text{fill:#ccc}rect{fill:#5ab0e6}}</style>",
    ]
    for number, row in enumerate(rows):
        top = 10 + height * number
        length = 2 + width * max(math.log10(row.ratio), 0.0) / most
        label = row.what.replace("`", "").replace("&", "&amp;")
        parts += [
            f'<text x="{left - 10}" y="{top + 19}" text-anchor="end">{label}</text>',
            f'<rect x="{left}" y="{top + 5}" width="{length:.1f}" height="{height - 10}"/>',
            f'<text x="{left + length + 6:.1f}" y="{top + 19}">{show_ratio(row.ratio)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Write the report, the picture, and the headlines of the READMEs."""
    results = read_results(RESULTS)
    (RESULTS / "report.md").write_text(write_report(results))
    (RESULTS / "headline.svg").write_text(draw(headlines(results)))
    for readme in READMES:
        if readme.exists():
            headline = headline_text(results, chinese="zh" in readme.name)
            readme.write_text(with_headline(readme.read_text(), headline))
    print(f"written: {RESULTS / 'report.md'}")


if __name__ == "__main__":
    main()
