"""`outrider models`: public models, fetched by pip."""
