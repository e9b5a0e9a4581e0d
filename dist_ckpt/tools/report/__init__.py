"""What `dist-ckpt report` writes: one HTML file about a checkpoint or a run, without torch.

`checkpoint_facts.py` and `run_facts.py` find out what there is to say, as plain JSON, which
`dist-ckpt report --json` prints. `page.py` makes a page of it: the templates beside it say all of
it in words and tables, `charts.js` draws it with plotly.js, which the page holds.
"""
