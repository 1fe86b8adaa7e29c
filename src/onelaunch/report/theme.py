"""Type and layout, for the page and for each figure in a file of its own. The colours are those of `onelaunch.colours`."""

from __future__ import annotations

from onelaunch.colours import SERIES, colour_rules

DASHES = ("", "7 3", "2 3")  # by the turn of a look

FIGURE = (
    "svg.chart{font:12.5px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
    ".chart text{fill:var(--text)}.chart .soft{fill:var(--soft)}.chart .mid{text-anchor:middle}.chart .end{text-anchor:end}"
    ".chart .grid{stroke:var(--line);stroke-width:1}.chart .axis{stroke:var(--soft);stroke-width:1}"
    ".chart .frame{fill:none;stroke:var(--line)}.chart .rest{fill:var(--line);opacity:.55}"
    ".chart .bar{fill:var(--other)}.chart .ours{fill:var(--s0)}.chart .floor{fill:none;stroke:var(--soft);stroke-dasharray:4 3}"
    ".chart .whisker{stroke:var(--text);stroke-width:1.5;fill:none}.chart .strong{font-weight:600}"
    ".chart .dot{font-size:11.5px;paint-order:stroke;stroke:var(--panel);stroke-width:3px}"
    + "".join(
        f".chart .l{i}{{stroke:var(--s{i});stroke-width:2;fill:none;stroke-linejoin:round}}"
        + f".chart .m{i}{{fill:var(--s{i})}}.chart .b{i}{{fill:var(--s{i});opacity:.18}}"
        for i in range(SERIES)
    )
    + "".join(f".chart .d{turn}{{stroke-dasharray:{dashes}}}" for turn, dashes in enumerate(DASHES) if dashes)
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
.result{margin:.4rem 0 .2rem;max-width:none}
.result strong{font-size:clamp(2.8rem,9vw,4.6rem);line-height:1.05;font-weight:700;letter-spacing:-.02em;margin-right:.5rem}
.result strong{color:var(--s0);font-variant-numeric:tabular-nums}
.result span{font-size:1.15rem;color:var(--soft)}
dl.beside{display:flex;flex-wrap:wrap;gap:.5rem 2rem;margin:.5rem 0 1rem}
dl.beside dt{font-size:.85rem}
dl.beside dd{font-size:1.1rem;font-weight:600;font-variant-numeric:tabular-nums}
.about{margin:1.2rem 0;border-top:1px solid var(--line);padding-top:.6rem}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(6.2rem,1fr));gap:.8rem}
.gallery{padding:0;margin:.6rem 0;list-style:none}
.gallery li{font-size:.9rem;overflow-wrap:anywhere}
.gallery img{display:block;width:5.5rem;height:5.5rem;object-fit:contain;image-rendering:pixelated;background:#000}
.gallery img{border-radius:6px;margin-bottom:.25rem}
.gallery span{color:var(--soft)}
.code{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:0 1.1rem}
.code div{min-width:0}
pre{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:.7rem .9rem;overflow-x:auto;margin:.3rem 0}
pre code{overflow-wrap:normal}
th button{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer;text-align:inherit}
th button::after{content:" ↕";opacity:.6}
th[aria-sort=descending] button::after{content:" ↓";opacity:1}
th[aria-sort=ascending] button::after{content:" ↑";opacity:1}
section>h3{font-size:1.05rem;margin:1.4rem 0 .2rem}
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
figure,tr,pre,.gallery li{break-inside:avoid}
th button::after{content:none}
.gallery img,.chart rect,.chart circle{print-color-adjust:exact;-webkit-print-color-adjust:exact}
pre{white-space:pre-wrap}
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
