"""`dist-ckpt report`: one HTML file about a checkpoint or a run, without torch.

`facts.py` and `sizes.py` collect the facts as plain JSON, which `dist-ckpt report --json` prints.
`write_report.py` renders the page from templates; `charts.js` draws the charts with plotly.js,
which is part of the page.
"""
