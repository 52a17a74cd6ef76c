"""The style of HTML pages: light or dark as the reader's system is, light on paper."""

CSS = """
:root { color-scheme: light; --ink: #1c2733; --soft: #56636f; --line: #dde3e8; --paper: #ffffff;
  --back: #f4f6f8; --good: #00714f; --bad: #b34700; }
@media screen and (prefers-color-scheme: dark) { :root { color-scheme: dark; --ink: #e4e9ee;
  --soft: #a3afba; --line: #36414c; --paper: #1a2129; --back: #12171d; --good: #3fc79d;
  --bad: #ff9a5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); line-height: 1.45;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 40px; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 10px; }
h3 { font-size: .9rem; margin: 0 0 4px; color: var(--soft); font-weight: 600; }
p { margin: 0 0 10px; max-width: 78ch; }
.soft, figcaption { color: var(--soft); font-size: .88rem; }
header p { overflow-wrap: anywhere; }
section, .card { background: var(--paper); border: 1px solid var(--line); border-radius: 8px;
  padding: 16px; }
section { margin-top: 16px; }
.cards { display: grid; gap: 12px; margin-top: 14px; grid-template-columns: repeat(3, 1fr); }
.card b { display: block; font-size: 1.65rem; line-height: 1.15; }
.card p { margin: 4px 0 0; font-size: .9rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
.bar { display: flex; height: 14px; margin: 8px 0 6px; border-radius: 3px; overflow: hidden;
  background: var(--line); position: relative; }
.bar i { height: 100%; }
.bar i + i { border-left: 1px solid var(--paper); }
.bar b { position: absolute; top: 0; bottom: 0; width: 0; border-left: 3px solid var(--ink); }
.columns + .wide { margin-top: 14px; }
.columns { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 24px; }
figure { margin: 0; }
figcaption { margin: 6px 0 0; }
.picture { display: block; width: 100%; height: auto; max-width: calc(var(--width) * 1.15);
  margin: 0 auto; }
.picture * { stroke-linejoin: round; stroke-linecap: butt; }
.picture text { font-family: inherit !important; }
.wide { overflow-x: auto; }
.wide .picture { width: var(--width); max-width: none; margin: 0; }
table { border-collapse: collapse; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 0 4px 14px; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { padding-left: 0; }
.wide + p, p + ul { margin-top: 10px; }
.word { text-align: left; white-space: normal; }
.total td { font-weight: 600; border-top: 2px solid var(--soft); }
.named { display: inline-flex; align-items: baseline; margin-right: .5em; }
td .named { min-width: 7em; }
.swatch { flex: none; width: .75em; height: .75em; margin-right: .45em; border-radius: 2px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 0;
  font-size: .92rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
ul { margin: 0; padding-left: 1.2em; } li { margin: 3px 0; overflow-wrap: anywhere; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .88em;
  overflow-wrap: anywhere; }
li code { display: inline-block; max-width: 100%; }
.flags { display: block; white-space: normal; min-width: 15em; }
.flags code { display: inline-block; margin-right: .4em; white-space: nowrap; }
footer { margin-top: 16px; }
@media screen and (max-width: 800px) { .columns { grid-template-columns: minmax(0, 1fr);
  gap: 16px; }
  .cards { grid-template-columns: 1fr; } main { padding: 14px 10px 30px; }
  section, .card { padding: 12px; }
  table { font-size: .82rem; } th, td { padding-left: 9px; } th { white-space: normal; } }
@media screen and (max-width: 480px) { header dl { grid-template-columns: 1fr; gap: 0; }
  header dt { margin-top: 5px; } }
@media print { :root { --back: #ffffff; } body { font-size: 9.5pt; }
  main { max-width: none; padding: 0; } section, .card { break-inside: avoid; padding: 10px; }
  section.long { break-inside: auto; } h2, tr, figure { break-inside: avoid; }
  h2 { break-after: avoid; }
  table { font-size: .8em; } th, td { padding-left: 8px; }
  .wide { overflow: visible; } .wide .picture { width: 100%; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
