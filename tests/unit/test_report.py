from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from documented_metrics import documented, without_match

from nemo_offload_rl.errors import DataError
from nemo_offload_rl.report import Metrics, read_metrics, write_report
from nemo_offload_rl.report.__main__ import main
from nemo_offload_rl.report.figures import SECTIONS, Layers, Lines, phase_layers, residency_layers
from nemo_offload_rl.report.page import band, residency_rows, summary
from nemo_offload_rl.utils.cli import ending_process


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


def write_metrics(folder: Path, *records: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def titles_of(page: Path) -> list[str]:
    return re.findall(r"<figcaption>([^<]+)</figcaption>", page.read_text())


def test_the_page_is_one_file_with_everything_inside(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run <1>")
    (run / "config.yaml").write_text("a: <b>\n")
    (run / "samples").mkdir()
    for step in (2, 10):
        (run / "samples" / f"step_{step}.txt").write_text(f"right <{step}>\n")
    page = write_report(run)
    assert page == run / "report" / "index.html"
    assert [path.name for path in page.parent.iterdir()] == ["index.html"]
    html = page.read_text()
    assert "http" not in html and "url(" not in html.replace("url(#", "")
    assert html.count("<script>") == html.count("<script") == 1
    assert all(link.startswith(("#", "data:")) for link in re.findall(r'(?:src|href)="([^"]*)"', html))
    assert "a: &lt;b&gt;" in html
    assert "step 10\nright &lt;10&gt;" in html and "&lt;2&gt;" not in html
    assert "<h1>run &lt;1&gt;</h1>" in html  # its records do not name model, data and date


def test_the_title_is_model_data_and_date(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run / "run.json").write_text('{"started": "2026-11-27T10:00:00+00:00"}')
    (run / "config.yaml").write_text(
        "policy: {model_name: Qwen/Qwen2.5-1.5B}\ndata: {train: {dataset_name: ResponseDataset, path: a/sums.jsonl}}\n"
    )
    assert "<title>Qwen2.5-1.5B on sums.jsonl, 2026-11-27</title>" in write_report(run).read_text()
    (run / "config.yaml").write_text("data: {train: {datasets: [{dataset_name: a/b}, {dataset_name: c}]}}\n")
    assert "<title>b, c, 2026-11-27</title>" in write_report(run).read_text()
    (run / "config.yaml").write_text("policy: [")
    assert f"<title>{run.name}</title>" in write_report(run).read_text()


def values_of(page: Path) -> dict[str, dict]:
    """What the script of the page reads of each figure, by title."""
    found = re.findall(r"<figcaption>([^<]+)</figcaption><svg[^>]* data-values=\"([^\"]+)\"", page.read_text())
    return {title: json.loads(unescape(text)) for title, text in found}


def test_figures_carry_the_values_that_they_draw(tmp_path: Path) -> None:
    reward = {"train/reward_mean": 0.5, "train/accuracy": 0.25}
    figures = values_of(write_report(write_metrics(tmp_path, {"step": 1, **reward}, {"step": 2, **reward, "a": None})))
    assert figures.keys() == {"Reward", "Accuracy"}
    [line] = figures["Accuracy"]["lines"]
    assert (line["label"], line["x"], line["y"], line["unit"]) == ("training", [1, 2], [25, 25], "%")
    left, right = figures["Accuracy"]["span"]
    assert 0 < left < right < 1 and figures["Accuracy"]["limits"] == [0.5, 2.5]
    long = values_of(write_report(write_run(tmp_path / "long", num_steps=1000)))["KL to the reference policy"]
    assert len(long["lines"][0]["x"]) == 100 and long["lines"][0]["names"][0] == "1 to 10"


def test_the_band_is_an_average_step_without_the_first(tmp_path: Path) -> None:
    run = write_metrics(
        tmp_path,
        {"step": 1, "timing/a_s": 9.0, "timing/total_s": 9.0},
        {"step": 2, "timing/a_s": 1.0, "timing/b_s": 2.0, "timing/total_s": 4.0},
        {"step": 3, "timing/a_s": 3.0, "timing/b_s": 2.0, "timing/total_s": 6.0},
    )
    parts = [(part.label, part.seconds, part.percent) for part in band(read_metrics(run))]
    assert parts == [("a", 2.0, 40.0), ("b", 2.0, 40.0), ("other", 1.0, 20.0)]
    page = write_report(run).read_text()
    assert "on average after the first" in page and page.count('class="key" style') == 3


def test_text_of_figures_has_the_color_of_the_page_and_ids_are_its_own(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path)).read_text()
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(figures) == len(titles_of(tmp_path / "report" / "index.html")) > 3
    clips = []
    for figure in figures:
        assert "fill: currentColor" in figure
        assert not re.findall(r"<text[^>]*fill: #", figure)
        found = set(re.findall(r'id="([^"]+)"', figure))
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', figure)) <= found
        clips += re.findall(r'<clipPath id="([^"]+)"', figure)
    assert len(clips) == len(set(clips))


METRICS_OF_FIGURES = [
    (figure.title, name)
    for figures in SECTIONS.values()
    for figure in figures
    if isinstance(figure, Lines)
    for name in figure.lines
]


def test_one_metric_is_enough_for_its_figure_and_makes_no_other(tmp_path: Path) -> None:
    figures = [figure for of_section in SECTIONS.values() for figure in of_section]

    def left_in(metrics: Metrics) -> list[str]:
        found = [
            figure.measured(metrics) if isinstance(figure, Lines) else figure.layers(metrics) for figure in figures
        ]
        return [figure.title for figure, what in zip(figures, found, strict=True) if what]

    for title, name in METRICS_OF_FIGURES:
        assert left_in(read_metrics(write_metrics(tmp_path / name, {"step": 1, name: 0.5}))) == [title], name
    # The loss of SFT is left out where there is a reward.
    every = write_metrics(tmp_path / "every", {"step": 1, **{name: 0.5 for _, name in METRICS_OF_FIGURES}})
    assert titles_of(write_report(every)) == left_in(read_metrics(every))
    assert {title for title, _ in METRICS_OF_FIGURES} - set(left_in(read_metrics(every))) == {"Loss"}


def test_metrics_of_figures_are_documented() -> None:
    assert not without_match({name for _, name in METRICS_OF_FIGURES}, documented())


def test_titles_are_unique() -> None:
    titles = [figure.title for figures in SECTIONS.values() for figure in figures]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("name", ["train/unknown", "memory/peak_gib", "timing/total_s", "residency/exposed_s"])
def test_metrics_without_a_figure_draw_none(tmp_path: Path, name: str) -> None:
    assert titles_of(write_report(write_metrics(tmp_path, {"step": 1, name: 0.5}))) == []


def test_a_metric_that_is_never_finite_has_no_figure_but_a_line_of_text(tmp_path: Path) -> None:
    run = write_metrics(tmp_path, *({"step": step, "train/entropy": None, "train/kl": 0.1} for step in range(1, 8)))
    assert titles_of(write_report(run)) == ["KL to the reference policy"]
    assert dict(summary(read_metrics(run)))["train/entropy is not finite"] == "step 1, 2, 3, 4, 5 and 2 more"


def test_steps_whose_value_is_not_finite_are_marked(tmp_path: Path) -> None:
    finite = write_metrics(tmp_path / "a", *({"step": step, "train/grad_norm": 1.0} for step in (1, 2, 3)))
    broken = write_metrics(
        tmp_path / "b", *({"step": step, "train/grad_norm": None if step == 2 else 1.0} for step in (1, 2, 3))
    )
    assert ">not finite<" not in write_report(finite).read_text()
    assert ">not finite<" in write_report(broken).read_text()


def test_only_lines_that_were_measured_are_in_the_legend(tmp_path: Path) -> None:
    html = write_report(write_metrics(tmp_path, {"step": 5, "validation/accuracy": 0.5})).read_text()
    assert ">held out<" in html and ">training<" not in html


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("train/token_mult_prob_error", 1.00000006, "1.0010"),
        ("train/truncation_rate", 0.5, "0%"),
        ("train/grad_norm", 70.0, "0"),
    ],
)
def test_axes_show_the_value_that_is_compared_with(tmp_path: Path, name: str, value: float, label: str) -> None:
    html = write_report(write_metrics(tmp_path, *({"step": step, name: value} for step in (1, 2)))).read_text()
    assert f">{label}<" in html


def test_a_run_of_sft_shows_loss_and_token_accuracy(tmp_path: Path) -> None:
    names = ("loss", "token_accuracy")
    run = write_metrics(
        tmp_path,
        {"step": 0, "validation/loss": 2.0, "validation/token_accuracy": 0.25},
        {"step": 1, **{f"train/{name}": 0.5 for name in names}, "train/training_tokens_per_s": 100.0},
        {"step": 2, **{f"train/{name}": 0.6 for name in names}, "validation/loss": 1.25, "train/grad_norm": 1.0},
    )
    assert titles_of(write_report(run)) == ["Loss", "Token accuracy", "Gradient norm", "Tokens per second"]
    rows = dict(summary(read_metrics(run)))
    assert rows["held-out loss"] == "2.000 to 1.250 (best 1.250)"
    assert rows["held-out token accuracy"] == "25.0%"
    assert rows["trained tokens per second, median"] == "100"


def test_a_run_of_dpo_shows_loss_margin_and_accuracy_of_pairs(tmp_path: Path) -> None:
    names = ("loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "rewards_margin_mean")
    run = write_metrics(tmp_path, *({"step": step, **{f"train/{name}": 0.1 for name in names}} for step in (1, 2)))
    assert titles_of(write_report(run)) == ["Loss", "Accuracy", "Reward margin", "Rewards of the pairs"]


def test_the_loss_of_a_policy_gradient_is_not_drawn(tmp_path: Path) -> None:
    run = write_metrics(tmp_path, {"step": 1, "train/loss": 0.1, "train/reward_mean": 0.5})
    assert titles_of(write_report(run)) == ["Reward"]


@pytest.mark.parametrize("moved", [0, 1 << 20])
def test_residency_is_last_and_short_where_nothing_moves(tmp_path: Path, moved: int) -> None:
    names = ("bytes_out", "bytes_in", "bytes_freed", "exposed_s", "hidden_s")
    run = write_metrics(
        tmp_path, {"step": 1, **{f"residency/{name}": moved for name in names}, "train/training_mfu": 0.4}
    )
    html = write_report(run).read_text()
    assert re.findall(r"<h2>([^<]+)</h2>", html) == ["Speed", "Residency"]
    assert ("Nothing moved" in html) == (moved == 0)
    assert ("seconds of copies" in html) == (moved > 0)
    assert titles_of(run / "report" / "index.html") == [
        "MFU of training",
        *(["Bytes moved and freed"] if moved else []),
    ]


def test_a_byte_that_was_copied_before_it_was_freed_is_drawn_once(tmp_path: Path) -> None:
    # Step 1 copies 100 of 160 freed bytes first; step 2 streams 30 bytes out without freeing anything.
    records = [
        {"step": 1, "residency/bytes_out": 100, "residency/bytes_in": 7, "residency/bytes_freed": 160},
        {"step": 2, "residency/bytes_out": 30, "residency/bytes_in": 0, "residency/bytes_freed": 0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    layers = residency_layers(read_metrics(tmp_path))
    assert layers == Layers(
        steps=[1, 2],
        unit="bytes per step",
        values={"to the host": [100, 30], "to the device": [7, 0], "freed without a copy": [60, 0]},
    )


def test_phases_are_stacked_in_their_order_and_the_rest_of_a_step_is_other(tmp_path: Path) -> None:
    run = write_metrics(
        tmp_path,
        {"step": 0, "timing/validation_s": 9.0},
        {"step": 1, "timing/a_s": 2.0, "timing/a/part_s": 1.0, "timing/b_s": None, "timing/total_s": 4.0},
        {"step": 2, "timing/a_s": 2.0, "timing/total_s": None},
        {"step": 3, "timing/a_s": 1.0, "timing/b_s": 0.0, "timing/validation_s": 5.0, "timing/total_s": 6.5},
    )
    layers = phase_layers(read_metrics(run))
    assert layers is not None
    assert layers.steps == [1, 3]
    assert list(layers.values.items()) == [
        ("a", [2.0, 1.0]), ("b", [0.0, 0.0]), ("validation", [0.0, 5.0]), ("other", [2.0, 0.5]),
    ]  # fmt: skip


def test_a_long_run_is_drawn_by_means(tmp_path: Path) -> None:
    short, long = write_run(tmp_path / "short", num_steps=400), write_run(tmp_path / "long", num_steps=4000)
    pages = [write_report(run) for run in (short, long)]
    assert titles_of(pages[0]) == titles_of(pages[1])
    assert pages[1].stat().st_size < 4 * pages[0].stat().st_size
    assert "data:image/png;base64," in pages[1].read_text()


def test_the_summary_gives_first_and_last_values(tmp_path: Path) -> None:
    rows = dict(summary(read_metrics(write_run(tmp_path))))
    assert rows["last step"] == "5"
    assert rows["held-out accuracy"] == "25.0% to 75.0% (best 75.0%)"
    assert rows["mean reward"] == "0.100 to 0.500"
    moved = dict(residency_rows(read_metrics(tmp_path)))
    assert moved == {"bytes copied": "20.00 MiB", "seconds of copies waited for": "1.25"}


def test_later_lines_of_a_step_win_and_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": 5}\n{"step": 2, "a": 3}\n{"step": 2, "a": 1, "b": null}\n{"step": 3, "a'
    )
    metrics = read_metrics(tmp_path)
    assert list(metrics.by_step) == [1, 2]
    assert metrics.series("a") == ([1, 2], [5.0, 1.0])
    assert metrics.by_step[2]["b"] != metrics.by_step[2]["b"]


def test_a_resumed_run_shows_no_step_of_the_attempt_before_its_checkpoint_was_loaded(tmp_path: Path) -> None:
    steps = [(1, 0.1), (2, 0.2), (4, 0.4), (5, 0.5), (3, 3.0), (4, 4.0)]
    metrics = read_metrics(write_metrics(tmp_path, *({"step": step, "a": value} for step, value in steps)))
    assert metrics.series("a") == ([1, 2, 3, 4], [0.1, 0.2, 3.0, 4.0])


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
        ('{"step": 1, "a": "b"}\n{"step": 2}\n', "line 1 is no metrics line"),
    ],
)
def test_a_folder_without_metrics_is_one_clear_line(tmp_path: Path, content: str | None, part: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=part) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, ending_process():
        main([str(tmp_path / "nowhere")])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_prints_the_path_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_run(tmp_path))]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report' / 'index.html'}\n"
