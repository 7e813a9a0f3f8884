"""JupyterLab's settings in the image; a hub's own come after these."""

from pathlib import Path

FIRST = "course/lessons/00_start_here.ipynb"

c = get_config()  # noqa: F821  (Jupyter defines it)
if (Path.cwd() / FIRST).exists():  # not where links of nbgitpuller bring the notebooks
    c.LabApp.default_url = f"/lab/tree/{FIRST}"
