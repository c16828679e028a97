"""The report page's HTML: style, templates of Jinja, and the script that shows values under the cursor."""

STYLE = """\
:root { color-scheme: light dark; --text: #1b1e23; --page: #ffffff; --line: #e3e5e8; --code: #f5f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e6ea; --page: #16181c; --line: #33373d; --code: #1f2227; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 1.5rem auto; padding: 0 1rem;
  color: var(--text); background: var(--page); }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: 1rem 0; }
td { padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
td + td { padding-right: 0; text-align: right; overflow-wrap: break-word; font-variant-numeric: tabular-nums; }
p { overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; min-width: 0; position: relative; }
figcaption { font-weight: 600; margin: .5rem 0 .2rem; }
svg { display: block; width: 100%; height: auto; }
.folder { overflow-wrap: anywhere; opacity: .75; margin-top: -.5rem; }
.band { display: flex; height: 2.2rem; border-radius: .3rem; overflow: hidden; }
.band span { min-width: 1px; }
.parts { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; margin: .5rem 0 1rem; }
.key { display: inline-block; width: .7em; height: .7em; border-radius: .15em; margin-right: .35em; }
.values { position: absolute; z-index: 1; pointer-events: none; padding: .3rem .6rem; font-size: .8rem;
  white-space: nowrap; background: var(--page); border: 1px solid var(--line); border-radius: .3rem;
  box-shadow: 0 .1rem .4rem #0003; }
.cursor { position: absolute; top: 2rem; bottom: 2.5rem; width: 1px; pointer-events: none; background: currentColor;
  opacity: .4; }
svg text { font-family: system-ui, sans-serif !important; }
summary { cursor: pointer; padding: .3rem 0; }
pre { background: var(--code); padding: 1rem; overflow-x: auto; font-size: .85rem; }"""

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
{{ style | safe }}
</style>
</head>
<body>
<h1>{{ title }}</h1>
"""

BODY = """\
{% macro table(rows) %}
<table>
{% for name, text in rows %}
<tr><td>{{ name }}</td><td>{{ text }}</td></tr>
{% endfor %}
</table>
{% endmacro %}
<p class="folder">{{ folder }}</p>
{{ table(rows) }}
{% if band %}
<p>{{ band_of }}:</p>
<div class="band">
{% for part in band %}
<span style="flex: {{ part.percent }}; background: {{ part.color }}" title="{{ part.label }}"></span>
{% endfor %}
</div>
<ul class="parts">
{% for part in band %}
<li><span class="key" style="background: {{ part.color }}"></span>{{ part.label }} {{ "%.2f" % part.seconds }} s,
{{ "%.0f" % part.percent }} %</li>
{% endfor %}
</ul>
{% endif %}
{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{% if section.note %}
<p>{{ section.note }}</p>
{% endif %}
{% if section.rows %}
{{ table(section.rows) }}
{% endif %}
{% if section.figures %}
<div class="figures">
{% for name, element in section.figures %}
<figure role="group" aria-label="{{ name }}"><figcaption>{{ name }}</figcaption>{{ element | safe }}</figure>
{% endfor %}
</div>
{% endif %}
</section>
{% endfor %}
{% for name, text in details if text %}
{% if loop.first %}
<h2>{{ records | default("Records") }}</h2>
{% endif %}
<details><summary>{{ name }}</summary><pre>{{ text }}</pre></details>
{% endfor %}
<script>
{{ script | safe }}
</script>
"""

SCRIPT = """\
for (const svg of document.querySelectorAll("svg[data-values]")) {
  const {x: unit, span, limits, lines} = JSON.parse(svg.dataset.values);
  const [note, cursor] = ["values", "cursor"].map(name => Object.assign(document.createElement("div"),
    {className: name, hidden: true}));
  svg.parentElement.append(cursor, note);
  const nearest = (places, x) => places.reduce((best, place, i) =>
    Math.abs(place - x) < Math.abs(places[best] - x) ? i : best, 0);
  const called = (line, i) => line.names ? line.names[i] : `${line.x[i]}`;
  const hide = () => { note.hidden = cursor.hidden = true; };
  const show = event => {
    const box = svg.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    if (!lines.length || share < span[0] || share > span[1]) return hide();
    const x = limits[0] + (share - span[0]) / (span[1] - span[0]) * (limits[1] - limits[0]);
    const found = lines.map(line => nearest(line.x, x));
    const first = nearest(lines.map((line, k) => line.x[found[k]]), x), place = lines[first].x[found[first]];
    const name = called(lines[first], found[first]);
    note.replaceChildren(Object.assign(document.createElement("b"),
      {textContent: unit === "seconds" ? `${name.replace(",", " s,")}` : `${unit} ${name}`}));
    lines.forEach((line, k) => {
      const row = document.createElement("div"), key = document.createElement("span"), own = called(line, found[k]);
      key.className = "key"; key.style.background = line.color;
      const value = line.y[found[k]] ?? "not finite", where = own === name ? "" : ` (${unit} ${own})`;
      row.append(key, `${line.label}: ${value}${line.unit}${where}`);
      note.append(row);
    });
    note.hidden = cursor.hidden = false;
    const at = (span[0] + (place - limits[0]) / (limits[1] - limits[0]) * (span[1] - span[0])) * box.width;
    cursor.style.left = `${at}px`;
    note.style.left = `${Math.max(0, at > box.width / 2 ? at - note.offsetWidth - 10 : at + 10)}px`;
    note.style.top = "3rem";
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}"""
