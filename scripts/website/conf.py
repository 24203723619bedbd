"""The settings of Sphinx. All fonts, styles and scripts of the theme are files of the site."""

project = "orca-jax"
author = "The orca-jax authors"
extensions = ["myst_parser", "scripts.website.pages"]
exclude_patterns = ["measured/*.json"]
html_theme = "furo"
html_title = "orca-jax"
html_static_path = ["style"]
html_css_files = ["site.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
highlight_language = "bash"
myst_heading_anchors = 6
smartquotes = False
