"""Every block of code in the documentation is tested somewhere, and every link leads somewhere."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.documents import (
    PAGES,
    ROOT,
    VERBS,
    WRITTEN,
    Block,
    apply_patch,
    find_blocks,
    read_page,
    shows,
    without_blocks,
)

CHINESE = "README.zh-CN.md"
BLOCKS = [block for page in WRITTEN for block in find_blocks(read_page(page), page)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_it_is_said_how_a_block_is_tested(block: Block) -> None:
    assert block.verb in VERBS, "put a comment before it, see tests/documents.py"
    assert is_complete(block), f"{block.verb} {block.argument}"


def is_complete(block: Block) -> bool:
    """Tell whether what is said of a block is enough to test it."""
    if block.verb == "by":
        return bool(block.argument) and all(map(is_test, block.argument.split()))
    if block.verb == "not":
        return block.argument.startswith("run, because ") and block.language != "python"
    if block.verb == "run":
        return set(block.argument.split()) <= {"fails", "slow"}
    if block.verb == "prints":
        return block.argument in ("", "mixed")
    return bool(block.argument)


def is_test(name: str) -> bool:
    file, _, function = name.partition("::")
    path = ROOT / file
    return path.is_file() and f"\ndef {function}(" in path.read_text()


@pytest.mark.parametrize("page", WRITTEN)
def test_no_code_is_shown_in_another_way(page: str) -> None:
    # By an indentation, which nothing here looks into.
    prose = without_blocks(read_page(page)).splitlines()
    pairs = itertools.pairwise(prose)
    assert [line for before, line in pairs if not before.strip() and line.startswith("    ")] == []


@pytest.mark.parametrize("page", WRITTEN)
def test_what_is_printed_follows_a_command(page: str) -> None:
    # Otherwise there is nothing to compare it with, and any text would do.
    blocks = find_blocks(read_page(page), page)
    verbs = ["", *(block.verb for block in blocks)]
    pairs = zip(verbs, blocks, strict=False)
    assert [b.place for verb, b in pairs if b.verb == "prints" and verb != "run"] == []


# ------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("page", [*PAGES, CHINESE, "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_blocks(read_page(page)))
    inside = [link for link in links if "://" not in link]
    assert [link for link in inside if not leads_somewhere(page, link)] == []


def leads_somewhere(page: str, link: str) -> bool:
    file, _, anchor = link.partition("#")
    path = (ROOT / page).parent / file if file else ROOT / page
    return path.exists() and (not anchor or anchor in anchors(path))


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", without_blocks(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---------------------------------------------------------------------------------- the translation


def test_the_chinese_readme_shows_the_same() -> None:
    english, chinese = read_page("README.md"), read_page(CHINESE)
    assert levels(chinese) == levels(english)
    assert code(chinese) == code(english)
    assert number_of_rows(chinese) == number_of_rows(english)


def levels(text: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", without_blocks(text), re.MULTILINE)]


def code(text: str) -> list[tuple[str, str]]:
    return [(block.language, block.text) for block in find_blocks(text)]


def number_of_rows(text: str) -> int:
    return len(re.findall(r"^\|", without_blocks(text), re.MULTILINE))


# --------------------------------------------------------------------------- what finds all of this

PAGE = """
<!-- test: file a.py -->
```python
one = 1
```
- A list:
  ```
  echo
  ```

```diff
 x
```
"""


def test_blocks_are_found() -> None:
    assert find_blocks(PAGE, "p") == [
        Block("p", 3, "python", "one = 1\n", "file", "a.py"),
        Block("p", 7, "", "echo\n", "", ""),
        Block("p", 11, "diff", " x\n", "", ""),
    ]
    prose = [line for line in without_blocks(PAGE).splitlines() if line.strip()]
    assert prose == ["<!-- test: file a.py -->", "- A list:"]


def test_patches_are_applied() -> None:
    text = "a\nb\nc\nd\n"
    assert apply_patch(text, "@@ first\n a\n-b\n+B\n@@ last\n-d\n") == "a\nB\nc\n"
    with pytest.raises(AssertionError, match="not once in the file"):
        apply_patch(text, "-x\n")
    with pytest.raises(AssertionError, match="not once in the file"):
        apply_patch("a\na\n", "-a\n")


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("loss 0.5", "loss 12.25\n", True),
        ("loss 0.5", "loss 0.5\nmore", False),
        ("...\nend 1%", "begin\nmiddle\n  end 99.5%", True),
        ("begin\n...", "other", False),
        ("a.b", "axb", False),
    ],
)
def test_what_was_printed_is_compared(expected: str, printed: str, same: bool) -> None:
    assert shows(expected, printed) == same


def test_lines_of_ranks_may_be_mixed() -> None:
    assert shows("b 1\na 2\nb 3", "a 4\nb 5\nb 6\n", mixed=True)
    assert not shows("b\na", "a\nb")
    assert not shows("a\na\nb", "a\nb\nb", mixed=True)
