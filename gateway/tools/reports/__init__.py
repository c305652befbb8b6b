"""Reports for people: one page, one style, charts as SVG in it or as a picture beside it."""
