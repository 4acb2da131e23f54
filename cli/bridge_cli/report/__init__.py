"""`bridge report`: one HTML page per run, or one that compares several.

`record` reads a run directory and `samples` its completions, `charts` draws the curves, `page` fills in `template/`,
`command` writes the file. Nothing here loads torch; Bokeh and jinja2 are imported only to write a page.
"""
