"""Charts are one file that opens anywhere."""

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from router.sim.plots import PlotError, check_plot, write_plot
from router.sim.report import summarise
from tests.router.sim.records import run

SUMMARIES = summarise([run("p2c", 1, goodput_share=0.5), run("p2c", 2, goodput_share=0.7), run("random", 1), run("random", 2)])


def test_a_page_has_a_bar_for_each_policy_and_loads_nothing(tmp_path: Path) -> None:
    """Lengths are in proportion, and each bar says its value and interval."""
    path = tmp_path / "plot.html"
    write_plot(path, SUMMARIES)
    text = path.read_text()
    assert "http" not in text
    assert "src=" not in text
    first = ElementTree.fromstring("<svg" + text.split("<svg")[1].split("</svg>")[0] + "</svg>")
    assert [bar.get("height") for bar in first.iter("rect")] == ["14", "14"]
    short, long = (float(bar.get("width") or 0) for bar in first.iter("rect"))
    assert short / long == pytest.approx(0.6, abs=0.01)
    words = [word.text for word in first.iter("text")]
    assert words[1:] == ["p2c", "60.0 ± 127.1", "random", "100.0 ± 0.0"]


def test_what_cannot_be_plotted_is_told(tmp_path: Path) -> None:
    """Before the runs, and with what to do."""
    with pytest.raises(PlotError, match=r"plot\.pdf: is neither \.html nor \.png; name the file so"):
        check_plot(tmp_path / "plot.pdf")
    with pytest.raises(PlotError, match="cannot be written"):
        write_plot(tmp_path / "none" / "plot.html", SUMMARIES)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_a_png_without_matplotlib_is_refused(tmp_path: Path) -> None:
    """The page needs nothing."""
    with pytest.raises(PlotError, match=r"plot\.png: a PNG needs matplotlib.*write .*plot\.html"):
        check_plot(tmp_path / "plot.png")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_png_is_written_where_matplotlib_is(tmp_path: Path) -> None:
    """The same charts."""
    write_plot(tmp_path / "plot.png", SUMMARIES)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
