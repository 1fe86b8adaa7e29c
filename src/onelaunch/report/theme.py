"""Colours and type, for the page and for each figure in a file of its own.

Series differ in colour, in dashes and in marker. Words have a contrast of at least 4.5 against their background, shapes of at
least 3.
"""

from __future__ import annotations

LIGHT = {
    "ground": "#ffffff", "panel": "#f6f7f9", "text": "#1b1f24", "soft": "#57606a", "line": "#d0d7de", "link": "#0a58ca",
    "shade": "#1b1f2459",
    "s0": "#0b57d0", "s1": "#b3450a", "s2": "#176f3c", "s3": "#7a2aa8", "s4": "#b0215c", "s5": "#0d6b7d", "s6": "#5c5650",
    "other": "#7b8794", "good": "#176f3c", "bad": "#b42318",
}  # fmt: skip
DARK = {
    "ground": "#0f1318", "panel": "#181d24", "text": "#e6eaf0", "soft": "#a3adba", "line": "#38414d", "link": "#8ab8ff",
    "shade": "#e6eaf059",
    "s0": "#7db1ff", "s1": "#ffa361", "s2": "#6fd694", "s3": "#cf9bff", "s4": "#ff8fb8", "s5": "#5fd4e6", "s6": "#bdb5aa",
    "other": "#8793a1", "good": "#6fd694", "bad": "#ff8a80",
}  # fmt: skip
SERIES = 7
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 5", "1 4", "12 4")


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def colour_rules(where: str) -> str:
    """CSS variables of the selector `where` for the colours: light or dark as the reader's system is, light in print."""
    return (
        f"{where}{{{_variables(LIGHT)}color-scheme:light dark}}"
        f"@media (prefers-color-scheme:dark){{{where}{{{_variables(DARK)}}}}}"
        f"@media print{{{where}{{{_variables(LIGHT)}}}}}"
    )


FIGURE = (
    "svg.chart{font:12.5px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
    ".chart text{fill:var(--text)}.chart .soft{fill:var(--soft)}.chart .mid{text-anchor:middle}.chart .end{text-anchor:end}"
    ".chart .grid{stroke:var(--line);stroke-width:1}.chart .axis{stroke:var(--soft);stroke-width:1}"
    ".chart .bar{fill:var(--other)}.chart .ours{fill:var(--s0)}.chart .floor{fill:none;stroke:var(--soft);stroke-dasharray:4 3}"
    ".chart .whisker{stroke:var(--text);stroke-width:1.5;fill:none}.chart .strong{font-weight:600}"
    ".chart .dot{font-size:11.5px;paint-order:stroke;stroke:var(--panel);stroke-width:3px}"
    + "".join(
        f".chart .l{i}{{stroke:var(--s{i});stroke-width:2;fill:none;stroke-linejoin:round}}"
        + (f".chart .d{i}{{stroke-dasharray:{DASHES[i]}}}" if DASHES[i] else "")
        + f".chart .m{i}{{fill:var(--s{i})}}.chart .b{i}{{fill:var(--s{i});opacity:.18}}"
        for i in range(SERIES)
    )
)

PAGE = """
*{box-sizing:border-box}
html{scroll-padding-top:1rem;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--text)}
body{font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
main,header,footer{max-width:76rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:1.5rem}
h1{font-size:1.7rem;line-height:1.2;margin:.2rem 0 .5rem}
h2{font-size:1.3rem;margin:2.4rem 0 .4rem}
h3{font-size:1rem;margin:0 0 .3rem;overflow-wrap:anywhere}
p{margin:.5rem 0;max-width:46rem}
a{color:var(--link)}
nav ul{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;padding:0;margin:.8rem 0;list-style:none}
.skip{position:absolute;left:-99rem}
.skip:focus{left:1rem;top:.5rem;background:var(--ground);padding:.4rem .8rem;z-index:2}
:focus-visible{outline:3px solid var(--link);outline-offset:2px;border-radius:2px}
code{font:.86em ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace;overflow-wrap:anywhere}
.note{color:var(--soft)}
.good{color:var(--good);font-weight:600}
.bad{color:var(--bad);font-weight:600}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:.7rem 0}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,21.5rem),1fr));gap:1.1rem}
.figures{margin:1rem 0;align-items:start}
figure{margin:0;padding:.9rem 1rem;background:var(--panel);border:1px solid var(--line);border-radius:10px;min-width:0}
figure svg{display:block;width:100%;max-width:24rem;height:auto;margin:.2rem 0 .4rem}
.keys{margin:.3rem 0;padding-left:2rem;columns:11rem;overflow-wrap:anywhere}
figcaption{font-size:.9rem;color:var(--soft)}
figcaption p{margin:.2rem 0}
details{font-size:.9rem;margin-top:.3rem}
summary{cursor:pointer;color:var(--link);width:max-content;max-width:100%}
.scroll{--under:var(--ground);overflow-x:auto;margin:.8rem 0;background:
linear-gradient(to left,var(--under) 40%,transparent) right/3rem 100% no-repeat local,
linear-gradient(to left,var(--shade),transparent) right/.9rem 100% no-repeat scroll}
figure .scroll{--under:var(--panel)}
table{border-collapse:separate;border-spacing:0;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding-bottom:.3rem;max-width:calc(100vw - 4rem)}
th,td{text-align:right;padding:.28rem .75rem;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}
th:first-child{position:sticky;left:0;background:var(--under)}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom;white-space:normal}
tbody th{font-weight:400}
tr.ours th,tr.ours td{font-weight:600}
footer{color:var(--soft);font-size:.9rem;padding-top:2rem;padding-bottom:2rem}
@media (max-width:30rem){
body{font-size:15px}
main,header,footer{padding-left:.6rem;padding-right:.6rem}
figure{padding:.6rem}
tbody th{white-space:normal;min-width:7rem;max-width:9rem;overflow-wrap:anywhere}
}
@media print{
body{font-size:10.5pt}
nav,.skip,details:not([open]){display:none}
figure,tr{break-inside:avoid}
h2,h3{break-after:avoid}
.scroll{overflow:visible;break-inside:avoid;background:none}
table{font-size:8.5pt}
th,td{padding:.15rem .4rem;white-space:normal}
.figures{grid-template-columns:1fr 1fr}
}
"""


def page_style() -> str:
    return colour_rules(":root") + FIGURE + PAGE


def figure_style() -> str:
    """For a figure in a file of its own. It has no background, so that it suits the page that shows it."""
    return colour_rules("svg.chart") + FIGURE
