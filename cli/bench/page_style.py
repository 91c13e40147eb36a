"""The style sheet of a benchmark's page, light or dark like the reader's system."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #e3e7ec;
  --paper: #ffffff; --panel: #f7f8fa; --blue: #3567b8; --orange: #d9822b; --green: #3c8f5a;
  --gray: #98a2af; --red: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #a3adba; --line: #333b47;
  --paper: #14181f; --panel: #1b212a; --blue: #7ba6e8; --orange: #eda45c; --green: #6fc08d;
  --gray: #6d7785; --red: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 25px; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 34px 0 10px; }
.sub, .note { color: var(--soft); margin: 4px 0 12px; }
.banner { border: 2px solid var(--red); color: var(--red); font-weight: 700; padding: 8px 14px;
  border-radius: 6px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 12px;
  margin: 18px 0; }
.tiles div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 14px; }
.tiles b { font-size: 23px; } .tiles i { font-style: normal; color: var(--soft); }
.tiles span { display: block; color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child, .facts td { text-align: left; font-weight: 500; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
thead th { color: var(--soft); font-weight: 500; }
.facts th { width: 300px; color: var(--soft); } .facts td { word-break: break-word; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr));
  gap: 14px; }
.charts.wide { grid-template-columns: 1fr; }
figure { margin: 0; background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 10px 8px; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11.5px; fill: var(--soft); }
svg .title { font-size: 12px; } svg .value { fill: var(--ink); font-size: 11px; }
svg .inside { fill: var(--paper); font-size: 12px; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.mark { stroke: var(--orange); stroke-dasharray: 4 3; }
.limit { stroke: var(--red); stroke-width: 2.5; }
rect.bar { fill: var(--blue); } rect.draft { fill: var(--orange); }
rect.verify { fill: var(--blue); } rect.host { fill: var(--gray); }
rect.prompt { fill: var(--green); }
.line { fill: none; stroke-width: 2; } .line.first { stroke: var(--blue); }
.line.second { stroke: var(--orange); stroke-dasharray: 6 3; }
.dot.first { fill: var(--blue); } .dot.second { fill: var(--orange); }
figcaption { display: flex; gap: 18px; font-size: 12.5px; color: var(--soft); padding: 4px 8px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.key.bar, .key.verify, .key.first { background: var(--blue); }
.key.draft, .key.second { background: var(--orange); }
.key.host { background: var(--gray); } .key.prompt { background: var(--green); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; font-size: 13.5px; }
dt { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
dd { margin: 0; color: var(--soft); }
section { overflow-x: auto; } .wide figure { min-width: 760px; }
@media (max-width: 700px) { dl { grid-template-columns: 1fr; } .facts th { width: 45%; } }
"""
