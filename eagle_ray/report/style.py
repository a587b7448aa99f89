"""Style sheet of the HTML report. It follows the light or dark mode of the system."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1e21; --soft: #666c75; --rule: #e3e5e8; --one: #1f6f8b;
        --two: #c8702a; --bad: #b3372f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e4e6e8; --soft: #9aa0a8; --rule: #2e3237; --one: #6bb8d3; --two: #e09a5c;
          --bad: #e5796f; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
       "Helvetica Neue", Arial, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 40px 20px 64px; }
h1 { font-size: 27px; line-height: 1.2; font-weight: 600; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; font-weight: 600; margin: 44px 0 6px; padding-top: 14px; border-top: 1px solid var(--rule); }
h3 { font-size: 15px; font-weight: 600; margin: 20px 0 0; }
p { margin: 0 0 12px; max-width: 72ch; }
.soft, figcaption, footer { color: var(--soft); font-size: 13.5px; }
.bad { color: var(--bad); }
dl.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(125px, 1fr)); gap: 18px; margin: 28px 0 0; }
dl.facts div { display: flex; flex-direction: column-reverse; justify-content: flex-end; }
dt { color: var(--soft); font-size: 13.5px; }
dd { margin: 0; font-size: 25px; line-height: 1.25; font-weight: 600; font-variant-numeric: tabular-nums; }
dd small { font-size: 14px; font-weight: 400; color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 12px 32px; }
figure { margin: 14px 0 0; }
figcaption { margin-top: 2px; max-width: 68ch; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 12px 0 0; }
th { font-weight: 400; color: var(--soft); font-size: 13.5px; border-bottom: 1px solid var(--rule); }
th, td { padding: 4px 0 4px 26px; text-align: right; white-space: nowrap; vertical-align: middle; }
th.left, td.left { text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
tr.sum td { border-top: 1px solid var(--rule); font-weight: 600; }
code { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.bar-cell i { display: block; height: 9px; background: var(--one); min-width: 1px; }
svg { display: block; width: 100%; height: auto; overflow: visible;
      font: 12px system-ui, -apple-system, "Segoe UI", Arial, sans-serif; }
svg.spark { width: 150px; height: 26px; }
svg.plot { max-width: 520px; }
svg.narrow { display: none; }
svg text { fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.title { fill: var(--ink); }
svg text.note { fill: var(--ink); font-size: 11.5px; }
svg path { fill: none; }
.grid { stroke: var(--rule); }
.axis { stroke: var(--soft); }
.divide, .even { stroke: var(--soft); stroke-dasharray: 3 4; }
.line { stroke-width: 1.6; stroke-linejoin: round; }
.line.one { stroke: var(--one); }
svg path.area.one { fill: var(--one); fill-opacity: .16; }
svg.spark path.area.one { fill-opacity: .55; }
.bar.one { fill: var(--one); }
.dot.one { fill: var(--one); fill-opacity: .85; }
.dot.two { fill: none; stroke: var(--two); stroke-width: 1.6; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 4px; }
.key.one { background: var(--one); }
.key.two { border: 2px solid var(--two); }
footer { margin-top: 48px; padding-top: 14px; border-top: 1px solid var(--rule); }
@media (min-width: 900px) { svg.wide { font-size: 10px; } }
@media (max-width: 700px) { svg.wide { display: none; } svg.narrow { display: block; } }
@media (max-width: 520px) { svg { font-size: 15px; } svg text.note { font-size: 14.5px; } }
@media (max-width: 600px) {
  main { padding: 28px 20px 48px; }
  dl.facts { grid-template-columns: repeat(2, 1fr); }
  table, tbody { display: block; }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  tr { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 6px 14px; padding: 10px 0;
       border-top: 1px solid var(--rule); }
  tr.sum td { border: 0; }
  td, th:first-child, td:first-child { padding: 0; }
  td, td.left { text-align: left; white-space: normal; overflow-wrap: anywhere; }
  td:first-child { grid-column: 1 / -1; font-weight: 600; }
  td.left:not(:first-child) { grid-column: span 2; }
  td[data-label]:not(:first-child)::before { content: attr(data-label); display: block; font-size: 12px;
                                              font-weight: 400; line-height: 1.3; color: var(--soft); }
}
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; } figure, table { break-inside: avoid; } }
""".strip()
