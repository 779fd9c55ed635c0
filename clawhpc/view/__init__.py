"""One self-contained HTML page for a run, `python -m clawhpc.view RUN_DIR`, or for several, `python -m clawhpc.report`.

__main__.py   the command
page.py       reads the run, chooses what to embed, fills the template
assets.py     templates, style and scripts
summary.py    one row per rollout, and what they say together
curves.py     series of the run -> charts
metrics.py    Lightning's CSV logs
detail.py     one rollout: tree with decoded text, messages, verdict, tails
compared.py   what a run says beside others
compare.py    runs side by side, as charts and tables
report_page.py  fills the page of a report
templates/    page.html.j2 with its style and script

Nothing on the page is fetched from anywhere, and nothing that a harness or a model wrote is ever read as HTML or
script: texts travel as JSON with `<`, `>` and `&` escaped, the script sets them as text, and a Content-Security-Policy
allows no other script.
"""
