"""jobs/report.py: what the page says, that data cannot become markup, and what it looks like in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from jobs.report import main
from pipeline.collect import collect
from pipeline.current import point_first
from pipeline.reporting import charts
from pipeline.reporting.charts import Axis, Frame, Point, Series
from pipeline.reporting.facts import PromptFacts, gather
from pipeline.reporting.frontier import from_files, from_runs
from pipeline.reporting.prefixes import blocks, sharing
from pipeline.runs import write_run
from tests.browser import rendered, screenshot
from tests.made_store import Made
from tests.stored import Kept, tokens_of
from tests.test_runs import record

HOSTILE = "<img src=x onerror=alert(1)>\"'&"
RATE = (
    '{"settings": {"predictor": "int8", "loop": "closed", "model": "m", "cache_dtype": "bf16", "tokens": 100}, '
    '"bits_per_scalar": 4.0, "decode_tokens_per_s": 50.0}'
)


@pytest.fixture(scope="module")
def page(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page of a store with a generation, two runs, a broken run record, a benchmark, and hostile names everywhere."""
    folder = tmp_path_factory.mktemp("report")
    kept = Kept(tiny_model, folder / "store", kind="int8")
    shared = tokens_of(1, 64)
    kept.put({f"p{n}": shared + tokens_of(10 + n, 20 + 9 * n) for n in range(5)} | {HOSTILE: tokens_of(55, 200)})
    point_first(kept.store, "tiny", "bf16", (kept.job.target, kept.job.profile))
    write_run(kept.store, record(started="2026-11-01T10:00:00+00:00", ended="2026-11-01T10:02:00+00:00", model=HOSTILE))
    write_run(kept.store, record(verification_failures=2, outcome="failed"))
    kept.store.put_new("runs/20261130T000000Z-broken.json", b"{")
    (folder / "rate.json").write_text(RATE + "\n")
    out = folder / "report.html"
    given = ["--store", kept.store.uri, "--out", str(out), "--benchmark", str(folder / "rate.json")]
    assert main(given) == 0
    yield out


class Elements(HTMLParser):
    """Names and attributes of all elements, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_what_the_store_holds(page: Path) -> None:
    found = Elements(page.read_text("utf-8"))
    text = " ".join(found.text.split())
    assert "int8 closed, bf16" in text and ("span", {"class": "badge good"}) in found.elements and "current" in text
    assert "verification failures in 2 runs" in text
    # five prompts share two of their chunks
    assert "6 prompts need 25 chunks; 17 are stored, so sharing saves 32 %" in text
    assert "The most shared one is in 5 prompts" in text
    assert re.search(r"Beside the promise: [+-]\d\.\d{3} bits a scalar", text)
    assert "broken.json cannot be read" in text and "not valid JSON" in text
    titles = re.findall(r"layer (\d), ([KV]) (\d): (\d+\.\d\d) bits", text.replace(" ,", ","))
    assert len(titles) == 3 * 2 * 2  # layers, K and V, heads
    assert "frontier" not in text and "int8 closed" in text


def test_it_needs_nothing_else_and_data_stay_text(page: Path) -> None:
    found = Elements(page.read_text("utf-8"))
    names = {name for name, _ in found.elements}
    assert not names & {"script", "img", "link", "iframe", "object", "embed", "base", "form", "a", "use", "image"}
    for _, attributes in found.elements:
        assert not {"src", "href", "xlink:href", "action"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
        assert "url(" not in (attributes.get("style") or "")
    style = page.read_text("utf-8").partition("<style>")[2].partition("</style>")[0]
    assert "@import" not in style and "url(" not in style and "prefers-color-scheme: dark" in style
    assert HOSTILE in found.text  # the prompt's id, in a title


@pytest.mark.slow
def test_in_a_browser_it_is_drawn_in_light_and_dark(page: Path, tmp_path: Path) -> None:
    """What a browser makes of it: no error page, all cards there, pictures that are not blank and differ in their paper."""
    from PIL import Image

    document = Elements(rendered(page, tmp_path))
    headings = " ".join(document.text.split())
    for title in (
        "Bytes by model and generation",
        "Bits a scalar, by layer and head",
        "Health of the profile",
        "Shared prefixes",
    ):
        assert title in headings
    assert len([name for name, _ in document.elements if name == "svg"]) >= 7
    papers = []
    for dark in (False, True):
        with Image.open(screenshot(page, tmp_path, dark=dark)) as picture:
            pixels = np.asarray(picture.convert("RGB")).astype(int)
        assert pixels.shape[1] == 1180
        paper = pixels[2, 2]
        drawn = (np.abs(pixels - paper).max(2) > 40).mean(1)  # share of each row that is not paper
        assert (drawn[: len(drawn) // 2] > 0.01).mean() > 0.25, "most of the upper half is blank"
        colours = {tuple(c) for c in (pixels[::4, ::4].reshape(-1, 3) // 24)}
        assert len(colours) > 25  # charts, not only text
        papers.append(int(paper.sum()))
    assert papers[0] > 600 > 150 > papers[1]


def test_a_compacted_index_counts_no_chunk_twice(made: Made, tmp_path: Path) -> None:
    """Parts that were merged lie beside the merged one for a while."""

    def chunks() -> list[tuple[int, int]]:
        return [(gen.chunks, gen.sums["tokens"]) for gen in gather(made.store, print).generations]

    before = chunks()
    assert collect(made.store, 7 * 24 * 3600.0, print, compact=True).merged == 2
    assert chunks() == before == [(7, 184)]
    assert main(["--store", made.store.uri, "--out", str(tmp_path / "r.html")]) == 0


# ---------------------------------------------------------------- usage
def test_an_empty_store_has_a_page_too(tmp_path: Path) -> None:
    from pipeline.store import Store

    Store.open(str(tmp_path / "store"))
    assert main(["--store", str(tmp_path / "store"), "--out", str(tmp_path / "r.html")]) == 0
    assert "holds no chunks yet" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--out", "{0}/nowhere/r.html"], "does not exist; make it first"),
        (["--out", "{0}/r.html", "--benchmark", "{0}/missing.json"], "cannot be read"),
        (["--out", "{0}/r.html", "--benchmark", "{0}/bad.json"], "holds no result of jobs/benchmark.py"),
    ],
)
def test_bad_requests_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    (tmp_path / "bad.json").write_text('{"settings": 3}')
    assert main(["--store", str(tmp_path), *(text.format(tmp_path) for text in more)]) == 2
    errors = capsys.readouterr().err
    assert said in errors and "Traceback" not in errors and not (tmp_path / "r.html").exists()


def test_a_folder_that_may_not_be_written_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda *_, **__: False)  # root may write anywhere
    assert main(["--store", str(tmp_path / "none"), "--out", str(tmp_path / "r.html")]) == 2
    assert "may not be written to" in capsys.readouterr().err


# ---------------------------------------------------------------- the ladder, prefixes, charts
def test_rungs_from_benchmarks_and_runs(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        RATE
        + '\n{"settings": {"predictor": "fp8", "loop": "open", "model": "m", "cache_dtype": "bf16", "tokens": 100}, '
        '"decode_seconds": 0.5, "raw_bytes": 400, "stored_bytes": 100}\n'
    )
    rate, restore = from_files([str(tmp_path / "a.json")])
    assert (rate.name, rate.bits, rate.seconds) == ("int8 closed", 4.0, 20.0)
    assert (restore.name, restore.bits, restore.seconds) == ("fp8 open", 4.0, 5.0)
    times = {"started": "2026-11-01T10:00:00+00:00", "ended": "2026-11-01T10:00:30+00:00"}
    runs = [record(**times, chunks_new=n, chunks_reused=1, tokens=400, scalars=80, bytes=30 + n) for n in (1, 3)]
    (job,) = from_runs([*runs, record(**times, outcome="failed", chunks_new=9)])
    assert job.bits == 8 * 33 / 80 and job.seconds == pytest.approx(100.0)  # the other reused as much as it made


def prompt(name: str, chain: str) -> PromptFacts:
    return PromptFacts(name, 100 * len(chain), tuple(chain[: n + 1].encode() for n in range(len(chain))), 10, 5)


def test_prompts_that_share_a_prefix_share_a_block() -> None:
    prompts = [prompt("a", "xyz"), prompt("b", "xyw"), prompt("c", "xy"), prompt("d", "q")]
    found = sharing(prompts)
    assert (found.prompts, found.occurrences, found.distinct, found.most) == (4, 9, 5, 3) and found.saved == 4 / 9
    drawn = {(b.width, b.top, b.depth) for b in blocks(sorted(prompts, key=lambda p: p.keys))}
    assert drawn == {(3, 0, 2), (1, 2, 1), (1, 0, 1)}
    area = sum(b.width * b.depth for b in blocks(sorted(prompts, key=lambda p: p.keys)))
    assert area == found.occurrences


def test_axes_have_round_ticks_within_their_range() -> None:
    assert Axis("x", 0.0, 1.0).ticks(5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert Axis("x", 0.9, 1100, log=True).ticks() == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert Axis("x", 1.0, 100.0, log=True).at(10) == pytest.approx(0.5)
    assert Axis.over("y", [3.0], zero=True).low == 0 and Axis.over("y", [], zero=True).high > 0
    frame = Frame(Axis("x", 0, 1), Axis("y", 0, 1))
    drawn = charts.plot(frame, [Series("<s>", [Point(0, 0), Point(1, 1)], "line", "bad")], 'a "label"')
    assert "<title>&lt;s&gt;</title>" in drawn and 'aria-label="a &#34;label&#34;"' in drawn
    assert charts.size(1_234_567) == "1.23 MB" and charts.number(0.00001) == "1e-5"
