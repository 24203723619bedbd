"""The arena: the scheduling core, policies and virtual time in a browser tab, without a server.

build.py      the folder `arena/` of the site: Pyodide, the modules of the simulator, policies and labs
browser.py    what runs in Pyodide: two policies on one load, the check of a policy, the cells of a lab
page/         the page, and the worker that runs Pyodide
"""
