"""The report of the benchmarks is what its script makes of the results, and each claim has both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import report
from report import BEGIN, END, READMES, RESULTS

ROOT = Path(__file__).parents[2]
FOUND = report.read_results(RESULTS)


def test_the_newest_result_of_each_benchmark_counts() -> None:
    names = ["step-2026-11-30.json", "step-2025-12-31.json", "step-close-2026-01-01.json", "x.json"]
    assert report.newest(names) == {
        "step": "step-2026-11-30.json",
        "step-close": "step-close-2026-01-01.json",
    }


def test_every_result_is_in_the_report() -> None:
    measured = {path.name for path in RESULTS.glob("*.json")}
    assert set(report.newest(measured).values()) == {result.file for result in FOUND.values()}
    known = {report.SCRIPTS.get(name, name) for name in report.TITLES}
    assert {name for name in known if not (ROOT / "benchmarks" / f"{name}.py").exists()} == set()


def test_the_report_is_what_the_script_makes() -> None:
    made = "run benchmarks/report.py again"
    assert (RESULTS / "report.md").read_text() == report.write_report(FOUND), made
    assert (RESULTS / "headline.svg").read_text() == report.draw(report.headlines(FOUND)), made


def test_every_claim_has_a_script_and_a_result() -> None:
    claims = [claim for result in FOUND.values() for claim in report.claims_of(result, FOUND)]
    assert len(claims) > 20
    for claim in claims:
        assert (ROOT / "benchmarks" / claim.script).is_file()
        targets = json.loads((RESULTS / claim.file).read_text())["targets"]
        assert claim.promise in {target["promise"].rstrip(":") for target in targets}
    for row in report.headlines(FOUND):
        assert (ROOT / "benchmarks" / row.script).is_file()


@pytest.mark.parametrize(
    "readme", [path for path in READMES if path.exists()], ids=lambda p: p.name
)
def test_the_headline_of_a_readme_is_that_of_the_results(readme: Path) -> None:
    text = readme.read_text()
    if BEGIN in text:
        headline = report.headline_text(FOUND, chinese="zh" in readme.name)
        assert report.with_headline(text, headline) == text, "run benchmarks/report.py again"


def test_a_headline_goes_between_the_marks() -> None:
    assert report.with_headline(f"a{BEGIN}old{END}b", f"{BEGIN}new{END}") == f"a{BEGIN}new{END}b"
    assert report.with_headline("no marks", "new") == "no marks"


@pytest.mark.parametrize(
    ("ratio", "text"), [(2363.4, "2,400x"), (56.2, "56x"), (3.689, "3.69x"), (0.999, "1.00x")]
)
def test_ratios_have_the_digits_that_say_something(ratio: float, text: str) -> None:
    assert report.show_ratio(ratio) == text
