"""`dc.open`, `dc.verify`, `dc.reshard`, `dc.delete`: without ranks or torch."""
