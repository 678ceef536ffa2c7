// Looks of the page besides its canvas.

export const STYLES = `
:host, .ps { all: initial; display: block; height: 100%; }
.ps {
  --surface: #ffffff; --ink: #1c1c1c; --soft: #5a5a5a; --line: #d4d4d4; --band: #f4f4f4;
  --select: #0b57d0;
  color: var(--ink); background: var(--surface); display: flex; flex-direction: column;
  font: 13px/1.4 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
  overflow: hidden; position: relative; container-type: inline-size;
}
.ps.dark {
  --surface: #17191c; --ink: #e8e8e8; --soft: #a8adb3; --line: #3a3f45; --band: #1f2226;
  --select: #8ab4f8; color-scheme: dark;
}
.ps *, .ps *::before { box-sizing: border-box; }
.ps header { display: flex; flex-wrap: wrap; gap: 4px 6px; align-items: center; padding: 6px 8px;
  border-bottom: 1px solid var(--line); }
.ps h1 { font-size: 14px; font-weight: 600; margin: 0 6px 0 0; max-width: 46ch; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; unicode-bidi: isolate; }
.ps .facts { color: var(--soft); margin-right: auto; font-variant-numeric: tabular-nums; }
.ps button, .ps input, .ps select { font: inherit; color: inherit; background: var(--surface);
  border: 1px solid var(--line); border-radius: 4px; padding: 2px 7px; min-height: 25px; }
.ps button { cursor: pointer; }
.ps button[aria-pressed="true"], .ps [role="tab"][aria-selected="true"] {
  background: var(--select); color: var(--surface); border-color: var(--select); }
.ps :focus-visible { outline: 2px solid var(--select); outline-offset: 1px; }
.ps .count { color: var(--soft); }
.ps #step { width: 40%; margin: 0 8px; vertical-align: middle; }
.ps input[type="search"] { width: 11em; }
.ps input[type="range"] { padding: 0; min-height: 0; width: 100%; accent-color: var(--select); }
.ps input[type="number"] { width: 5.5em; }
.ps .main { flex: 1; display: flex; min-height: 0; }
.ps .stage { flex: 1; position: relative; min-width: 0; overflow: hidden; touch-action: none; }
.ps.embedded .stage { touch-action: pan-y; }
.ps canvas { position: absolute; inset: 0; width: 100%; height: 100%; display: block; }
.ps canvas.overlay { pointer-events: none; }
.ps aside { width: 340px; border-left: 1px solid var(--line); display: flex; flex-direction: column;
  min-height: 0; }
.ps aside[hidden] { display: none; }
.ps [role="tablist"] { display: flex; flex-wrap: wrap; gap: 2px; padding: 4px; border-bottom: 1px solid var(--line); }
.ps [role="tab"] { padding: 1px 6px; font-size: 12px; }
.ps [role="tabpanel"] { overflow: auto; padding: 8px; flex: 1; }
.ps [role="tabpanel"][hidden] { display: none; }
.ps h2 { font-size: 13px; margin: 0 0 4px; unicode-bidi: isolate; overflow-wrap: anywhere; }
.ps p { margin: 4px 0; overflow-wrap: anywhere; }
.ps .pre { white-space: pre-wrap; font: 11px ui-monospace, monospace; }
.ps .note { color: var(--soft); }
.ps dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 10px; margin: 4px 0; }
.ps dt { color: var(--soft); }
.ps dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.ps table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 12px; width: 100%; }
.ps caption { text-align: left; color: var(--soft); padding-bottom: 2px; }
.ps th, .ps td { text-align: right; padding: 1px 6px 1px 0; font-weight: normal; white-space: nowrap; }
.ps th:first-child { text-align: left; }
.ps thead th { border-bottom: 1px solid var(--line); color: var(--soft); }
.ps .link { border: 0; background: none; padding: 0 2px; min-height: 0; color: var(--select); text-decoration: underline; }
.ps .key { display: inline-block; width: 11px; height: 11px; margin-right: 5px; vertical-align: -1px;
  border: 1px solid #0003; }
.ps .keys { columns: 2; column-gap: 8px; font-size: 12px; }
.ps .keys div { break-inside: avoid; }
.ps .row { display: grid; grid-template-columns: 9.5em 1fr 4.4em; gap: 6px; align-items: center; margin: 3px 0; }
.ps .row input[type="number"] { width: 100%; padding: 1px 3px; }
.ps .tip { position: absolute; pointer-events: none; background: var(--surface); color: var(--ink);
  border: 1px solid var(--line); border-radius: 4px; padding: 3px 7px; max-width: 340px; z-index: 3;
  box-shadow: 0 1px 6px #0003; font-size: 12px; white-space: pre-line; }
.ps .tip[hidden] { display: none; }
.ps .banner { padding: 3px 8px; background: var(--band); border-bottom: 1px solid var(--line); }
.ps .banner[hidden] { display: none; }
.ps .status { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.ps kbd { font: 11px ui-monospace, monospace; border: 1px solid var(--line); border-radius: 3px; padding: 0 3px; }
.ps .tools { display: contents; }
@container (min-width: 1000px) {
  .ps header { flex-wrap: nowrap; }
  .ps header > * { flex-shrink: 0; }
  .ps header button { padding: 2px 6px; }
  .ps header input[type="search"] { flex-shrink: 90; min-width: 6.5em; }
  .ps h1, .ps header .facts { flex-shrink: 1; min-width: 0; white-space: nowrap; overflow: hidden;
    text-overflow: ellipsis; }
}
@container (max-width: 560px) {
  .ps header .facts { width: 100%; order: 1; }
  .ps h1 { flex: 1; min-width: 0; margin-right: 0; }
  .ps header input[type="search"] { width: 8em; }
  .ps .tools { display: flex; gap: 4px; width: 100%; overflow-x: auto; order: 2; font-size: 11px; }
  .ps .tools button { padding: 2px 3px; flex: 1 0 auto; }
}
@media (max-width: 720px) { .ps aside { position: absolute; right: 0; top: 0; bottom: 0;
  background: var(--surface); z-index: 2; max-width: 88%; } }
`;
