"""`dist-ckpt report`: one HTML file about a checkpoint or a run, without torch.

- The content, as plain JSON: `report_content.py`. The sizes of tensors and ranks:
  `report_sizes.py`.
- The page: `write_report.py` fills the templates `checkpoint.html.jinja` and `run.html.jinja`.
- The charts: `charts.js` draws them with plotly.js, which is part of the page.
- The types of the facts: `cli/report_results.py`.
"""
