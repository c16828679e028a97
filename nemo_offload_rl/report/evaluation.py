"""The page of an evaluation: metrics, and responses to look at."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from nemo_offload_rl.report.page import render_page

_NUM_SHOWN = 20
"""Prompts whose responses are on the page, of each data set."""


def evaluation_page(
    model: str,
    data_sets: Sequence[str],
    table: Sequence[tuple[str, Sequence[str]]],
    records: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
) -> str:
    """The page as HTML, one file with everything inside.

    Args:
        model: Name or folder of the model, the title.
        data_sets: Columns of the table.
        table: Name and values of each metric.
        records: Responses as in responses.jsonl; those to the first prompts of each data set are shown.
        config: The resolved configuration.
    """
    groups: dict[int, list[Mapping[str, Any]]] = {}
    shown: dict[str, set[int]] = {}
    for record in records:
        places = shown.setdefault(record["data_set"], set())
        if record["prompt_index"] in places or len(places) < _NUM_SHOWN:
            places.add(record["prompt_index"])
            groups.setdefault(record["prompt_index"], []).append(record)
    return render_page(
        _BODY,
        title=model,
        style="th { text-align: right; padding: .2rem 0 .2rem 1.5rem; }\n"
        "pre { white-space: pre-wrap; overflow-wrap: anywhere; }",
        data_sets=data_sets,
        table=table,
        groups=[group for _, group in sorted(groups.items())],
        config=yaml.safe_dump(dict(config), sort_keys=False),
    )


_BODY = """\
<table>
<tr><td></td>{% for name in data_sets %}<th>{{ name }}</th>{% endfor %}</tr>
{% for name, values in table %}
<tr><td>{{ name }}</td>{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</table>
<h2>Responses</h2>
{% for group in groups %}
{% set num_right = group | selectattr("correct") | list | length %}
<details><summary>{{ group[0].data_set }}, prompt {{ group[0].prompt_index + 1 }}:
{{ num_right }} of {{ group | length }} right</summary>
<pre>{{ group[0].prompt }}</pre>
{% set right = group[0].reference_answer %}
{% if right %}<p>Answer: {{ right if right is string else right | join(" or ") }}</p>{% endif %}
{% for record in group %}
{% set verdict = "unscored" if record.unscored else "right" if record.correct else "wrong" %}
<p>{{ record.kind }}, {{ verdict }}{{ ", cut" if record.truncated }}</p>
<pre>{{ record.response }}</pre>
{% endfor %}
</details>
{% endfor %}
<h2>Records</h2>
<details><summary>Resolved configuration</summary><pre>{{ config }}</pre></details>
"""
