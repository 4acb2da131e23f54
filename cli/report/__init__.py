"""`bridge report`: one HTML page out of what training runs leave behind.

`record`, `lines` and `events` read a run directory, whatever state it is in; `samples` picks completions, `cards` are
what is shown of them; `curves` smooths, thins and scales numbers; `catalogue` says what is drawn, `charts` makes it of
runs, `drawing` makes SVG of that; `results` is what a run came to, `choices` what it was given; `page` puts all of it
into the files of `template/`, and `command` writes it.

May import: the standard library, `bridge`'s plain modules and jinja2; no torch, so that a report takes seconds.
"""
