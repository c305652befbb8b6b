"""Developer's and operator's commands; no module that serves requests imports them."""
