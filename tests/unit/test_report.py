from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from nemo_offload_rl.errors import DataError
from nemo_offload_rl.report import main, read_metrics, residency_layers, summary, write_report
from nemo_offload_rl.utils.cli import run_main


def write_run(folder: Path, num_steps: int = 5) -> Path:
    records: list[dict[str, object]] = [{"step": 0, "validation/accuracy": 0.25}]
    for step in range(1, num_steps + 1):
        records.append(
            {
                "step": step,
                "train/reward_mean": step / 10,
                "train/kl": 0.001 * step,
                "timing/generation_s": 2.0,
                "timing/training_s": 1.0,
                "timing/training/optimizer_s": 0.5,
                "timing/total_s": 4.0,
                "residency/bytes_out": 1 << 20,
                "residency/bytes_in": 3 << 20,
                "residency/exposed_s": 0.25,
            }
        )
    records[-1]["validation/accuracy"] = 0.75
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_the_page_holds_its_pictures_and_the_folder_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run <1>")
    (run / "config.yaml").write_text("a: <b>\n")
    (run / "samples").mkdir()
    for step in (2, 10):
        (run / "samples" / f"step_{step}.txt").write_text(f"right <{step}>\n")
    page = write_report(run)
    assert page == run / "report" / "index.html"
    assert {path.name for path in page.parent.iterdir()} == {
        "index.html", "accuracy.png", "reward.png", "kl.png", "phases.png", "residency.png",
    }  # fmt: skip
    html = page.read_text()
    embedded = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', html)]
    assert sorted(embedded) == sorted(path.read_bytes() for path in page.parent.glob("*.png"))
    assert "http" not in html
    assert "a: &lt;b&gt;" in html
    assert "step 10\nright &lt;10&gt;" in html and "&lt;2&gt;" not in html
    assert "run &lt;1&gt;" in html


def test_pictures_are_real_and_not_blank(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path))
    for path in page.parent.glob("*.png"):
        colors = Image.open(path).convert("RGB").getcolors(maxcolors=1 << 20)
        assert colors is not None
        assert len(colors) > 10, path.name


def test_only_what_was_measured_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/reward_mean": 0.5}\n')
    page = write_report(tmp_path)
    assert [path.name for path in page.parent.glob("*.png")] == ["reward.png"]


def test_a_run_without_rewards_shows_its_losses_and_margins(tmp_path: Path) -> None:
    records = [
        {"step": 0, "validation/loss": 2.0},
        {"step": 1, "train/loss": 1.5, "train/rewards_margin_mean": 0.1, "train/training_tokens_per_s": 100.0},
        {"step": 2, "train/loss": 1.0, "train/rewards_margin_mean": 0.3, "validation/loss": 1.25},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = write_report(tmp_path)
    assert {path.name for path in page.parent.glob("*.png")} == {"loss.png", "margin.png"}
    rows = dict(summary(read_metrics(tmp_path)))
    assert rows["held-out loss"] == "2.000 to 1.250 (best 1.250)"
    assert rows["trained tokens per second, median"] == "100"


def test_a_byte_that_was_copied_before_it_was_freed_is_drawn_once(tmp_path: Path) -> None:
    # Step 1 copies 100 of 160 freed bytes first; step 2 streams 30 bytes out without freeing anything.
    records = [
        {"step": 1, "residency/bytes_out": 100, "residency/bytes_in": 7, "residency/bytes_freed": 160},
        {"step": 2, "residency/bytes_out": 30, "residency/bytes_in": 0, "residency/bytes_freed": 0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    layers = residency_layers(read_metrics(tmp_path), [1, 2])
    assert layers == {"to the host": [100, 30], "to the device": [7, 0], "freed without a copy": [60, 0]}


def test_many_steps_are_drawn_as_areas(tmp_path: Path) -> None:
    assert (write_report(write_run(tmp_path, num_steps=201)).parent / "phases.png").is_file()


def test_the_summary_gives_first_and_last_values(tmp_path: Path) -> None:
    rows = dict(summary(read_metrics(write_run(tmp_path))))
    assert rows["steps"] == "5"
    assert rows["held-out accuracy"] == "25.0% to 75.0% (best 75.0%)"
    assert rows["mean reward"] == "0.100 to 0.500"
    assert rows["bytes moved by the residency manager"] == "20.00 MiB"
    assert rows["seconds of copies waited for"] == "1.25"


def test_later_lines_of_a_step_win_and_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "a": 1}\n{"step": 1, "a": 5}\n{"step": 2, "b": null}\n{"step": 3, "a'
    )
    metrics = read_metrics(tmp_path)
    assert list(metrics.by_step) == [1, 2]
    assert metrics.series("a") == ([1, 2], [5.0, 1.0])
    assert metrics.by_step[2]["b"] != metrics.by_step[2]["b"]


def test_a_value_that_is_not_finite_does_not_stop_the_drawing(tmp_path: Path) -> None:
    lines = ['{"step": 1, "train/kl": null, "timing/a_s": null, "timing/total_s": 1}', '{"step": 2, "train/kl": 0.1}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert write_report(tmp_path).is_file()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "has no metrics.jsonl"),
        ("", "holds no metrics"),
        ('{"step": 1}\nnonsense\n{"step": 2}\n', "line 2 is no metrics line"),
        ('{"a": 1}\n{"step": 2}\n', "line 1 is no metrics line"),
    ],
)
def test_a_folder_without_metrics_is_one_clear_line(tmp_path: Path, content: str | None, part: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=part) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: main([str(tmp_path / "nowhere")]))
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_prints_the_path_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_run(tmp_path))]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report' / 'index.html'}\n"
