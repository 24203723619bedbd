"""The site of the documentation: `docs/` as HTML, without resources of other hosts.

__main__.py   the command line: build, serve
conf.py       the settings of Sphinx
pages.py      an extension of Sphinx: navigation, links out of `docs/`, and pictures with a dark form
"""
